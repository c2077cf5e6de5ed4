//! Packets are forwarded to the right port without loss, and no frame leaks.

use std::thread;
use std::time::Duration;

use super::net::{frame, in_namespace, ip};
use super::*;

#[test]
fn the_tail_of_a_burst_does_not_wait_for_the_next() {
    in_namespace(|| {
        let pair = Pair::wired(config(&[0]));
        let frames = pair.frames(0, 200);
        for round in 0..20 {
            pair.near.send_all(&frames);
            assert_eq!(pair.near.count(200), 200, "round {round}");
            thread::sleep(Duration::from_millis(2));
        }
    });
}

#[test]
fn a_packet_wakes_a_worker_that_went_to_sleep_after_a_burst() {
    in_namespace(|| {
        let pair = Pair::wired(config(&[0]));
        let burst = pair.frames(0, 200);
        let mut waits: Vec<_> = (0..11)
            .map(|_| {
                // Enough that the queue is no longer watched.
                pair.near.send_all(&burst);
                pair.received(burst.len());
                thread::sleep(Duration::from_millis(5));
                let start = Instant::now();
                pair.near.send_all(&burst[..1]);
                pair.received(1);
                start.elapsed()
            })
            .collect();
        waits.sort();
        // One that is not woken sleeps for a quarter of a second each time.
        assert!(waits[0] < Duration::from_millis(200), "{waits:?}");
    });
}

#[test]
fn a_million_packets_leak_no_frame() {
    const PACKETS: u64 = 1_000_000;
    in_namespace(|| {
        let pair = Pair::wired(config(&[0]));
        let frames = [pair.frames(0, 64), pair.frames(1, 64)].concat();
        let send = || {
            pair.near.send_all(&frames);
            128
        };
        // First as fast as the sender can: the rings drop some, and the account must stay balanced.
        let mut sent: u64 = (0..400).map(|_| send()).sum();
        let mut arrived = pair.near.count(u64::MAX);
        // Then no faster than they arrive.
        let mut missing = sent - arrived;
        while arrived < PACKETS {
            sent += send();
            let start = Instant::now();
            while sent - arrived > missing + 256 {
                arrived += pair.near.arrived();
                if start.elapsed() > Duration::from_millis(100) {
                    missing = sent - arrived;
                }
            }
            assert!(sent < 4 * PACKETS, "most packets arrive: {arrived} of {sent}");
        }
        arrived += pair.near.count(u64::MAX);
        let statistics = pair.dataplane.statistics();
        let kernel = statistics.port(pair.pair).unwrap().kernel;
        assert_eq!(kernel.invalid_descriptors, 0);
        let (mut lost, mut forwarded) = (kernel.packets(), 0);
        for port in pair.ports {
            let port = statistics.port(port).unwrap();
            forwarded += port.traffic.tx_packets;
            lost += port.traffic.dropped_packets();
        }
        assert_eq!(forwarded, arrived, "what was sent has arrived");
        assert_eq!(forwarded + lost, sent, "what did not is counted");
        assert_eq!(pair.account().in_flight, 0);
    });
}

#[test]
fn the_longest_packet_of_a_frame_passes() {
    in_namespace(|| {
        let largest = crate::io::largest_mtu(2048);
        let pair = Pair::wired(config(&[0]));
        for name in ["x", "xp"] {
            ip(&format!("link set dev {name} mtu {}", largest + 1000));
        }
        let sent = pair.tag(0, 0, frame(7, 14 + largest as usize));
        pair.near.send_all(std::slice::from_ref(&sent));
        let got = pair.received(1);
        assert_eq!(got[0][14..], sent[14..]);
    });
}

#[test]
fn kernel_drops_of_a_closed_port_stay_in_the_total() {
    in_namespace(|| {
        let pair = Pair::with(Config { long_packets: false, ..config(&[0]) });
        // Raised after the port was opened: such packets are longer than a frame.
        for name in ["x", "xp"] {
            ip(&format!("link set dev {name} mtu 2400"));
        }
        let frames: Vec<_> = (0..10).map(|index| frame(index, 2300)).collect();
        pair.near.send_all(&frames);
        let dropped = KernelDrops { rx_dropped: 10, ..KernelDrops::default() };
        let statistics = pair.dataplane.statistics();
        assert_eq!((statistics.port(pair.pair).unwrap().kernel, statistics.total_kernel()), (dropped, dropped));
        let Pair { dataplane, pair, attached, .. } = pair;
        drop(attached);
        dataplane.close_port(pair).unwrap();
        assert_eq!(dataplane.statistics().total_kernel(), dropped);
    });
}

#[test]
fn drops_are_counted_by_reason_on_the_ingress_port() {
    in_namespace(|| {
        let pair = Pair::with(config(&[0]));
        let [a, b] = pair.ports;
        let dropped = |reason, wanted| {
            pair.feed(&pair.frames(0, 100));
            pair.account();
            assert_eq!(pair.traffic(a).dropped(reason), wanted, "{reason}");
        };
        dropped(DropReason::NoPort, 100);
        // A port is closed while packets are forwarded to it.
        pair.wires.connect(a, b);
        pair.dataplane.close_port(b).unwrap();
        dropped(DropReason::PortGone, 100);
    });
}
