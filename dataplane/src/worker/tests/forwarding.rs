//! Packets are forwarded to the right port without loss, and no frame leaks.

use std::thread;
use std::time::Duration;

use super::net::{Raw, frame, in_namespace, ip, veth};
use super::*;

const PATIENCE: Duration = Duration::from_secs(2);

/// Two ports wired to each other, on separate workers if there are two.
fn two_ports(config: Config, test: impl FnOnce(&Bench, [PortId; 2], [Raw; 2]) + Send) {
    in_namespace(|| {
        veth("a");
        veth("b");
        let bench = Bench::start(config);
        let (a, _a) = bench.open("a");
        let (b, _b) = bench.open("b");
        bench.wires.connect(a, b);
        bench.wires.connect(b, a);
        test(&bench, [a, b], [Raw::open("ap"), Raw::open("bp")]);
        let account = bench.account();
        assert_eq!((account.fill, account.in_flight), (1024, 0), "both fill rings are full again: {account:?}");
    });
}

#[test]
fn packets_pass_unchanged_in_both_directions_across_two_workers() {
    two_ports(config(&[0, 1]), |bench, [a, b], [at_a, at_b]| {
        for (sender, receiver) in [(&at_a, &at_b), (&at_b, &at_a)] {
            let frames: Vec<_> = (0..300).map(|index| frame(index, 60 + index as usize * 4)).collect();
            sender.send_all(&frames);
            for sent in &frames {
                let got = receiver.receive(PATIENCE).expect("every packet arrives");
                assert_eq!((got[0], &got[1..]), (0x42, &sent[1..]), "in order, rewritten by the worker and intact");
            }
        }
        let statistics = bench.dataplane.statistics();
        for port in [a, b] {
            let traffic = statistics.port(port).unwrap().traffic;
            assert_eq!((traffic.rx_packets, traffic.tx_packets), (300, 300));
            assert_eq!((traffic.rx_bytes, traffic.tx_bytes, traffic.dropped_packets()), (197_400, 197_400, 0));
        }
        assert!(statistics.workers.iter().all(|worker| worker.handed_over == 300), "{statistics:?}");
    });
}

#[test]
fn the_tail_of_a_burst_does_not_wait_for_the_next() {
    // With one wake-up per burst, and with 32 packets per wake-up as in older kernels.
    for (cores, tx_budget) in [(&[0][..], 1024), (&[0][..], 32), (&[0, 1], 32)] {
        two_ports(Config { tx_budget, ..config(cores) }, |_, _, [at_a, at_b]| {
            for round in 0..20 {
                let frames: Vec<_> = (0..200).map(|index| frame(round * 200 + index, 60)).collect();
                at_a.send_all(&frames);
                assert_eq!(at_b.count(200), 200, "round {round}");
                thread::sleep(Duration::from_millis(2));
            }
        });
    }
}

#[test]
fn a_packet_wakes_a_worker_that_went_to_sleep_after_a_burst() {
    two_ports(config(&[0]), |_, _, [at_a, at_b]| {
        let burst: Vec<_> = (0..400).map(|index| frame(index, 60)).collect();
        let mut waits: Vec<_> = (0..11)
            .map(|round| {
                // Enough that the queues are no longer watched.
                at_a.send_all(&burst);
                for _ in &burst {
                    at_b.receive(PATIENCE).expect("every packet arrives");
                }
                thread::sleep(Duration::from_millis(5));
                let start = Instant::now();
                at_a.send_all(&[frame(round, 60)]);
                at_b.receive(PATIENCE).expect("the packet arrives");
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
    two_ports(config(&[0, 1]), |bench, [a, b], [at_a, at_b]| {
        let frames: Vec<_> = (0..128).map(|index| frame(index, 60)).collect();
        let send = || {
            at_a.send_all(&frames);
            at_b.send_all(&frames);
            256
        };
        // First as fast as the senders can: the rings drop some, and the account must stay balanced.
        let mut sent: u64 = (0..400).map(|_| send()).sum();
        let mut arrived = at_a.count(u64::MAX) + at_b.count(u64::MAX);
        // Then no faster than they arrive.
        let mut missing = sent - arrived;
        while arrived < PACKETS {
            sent += send();
            let start = Instant::now();
            while sent - arrived > missing + 512 {
                arrived += at_a.arrived() + at_b.arrived();
                if start.elapsed() > Duration::from_millis(100) {
                    missing = sent - arrived;
                }
            }
            assert!(sent < 4 * PACKETS, "most packets arrive: {arrived} of {sent}");
        }
        arrived += at_a.count(u64::MAX) + at_b.count(u64::MAX);
        let statistics = bench.dataplane.statistics();
        let (mut lost, mut forwarded) = (0, 0);
        for port in [a, b] {
            let port = statistics.port(port).unwrap();
            forwarded += port.traffic.tx_packets;
            lost += port.traffic.dropped_packets() + port.kernel.packets();
            assert_eq!(port.kernel.invalid_descriptors, 0);
        }
        assert_eq!(forwarded, arrived, "what was sent has arrived");
        assert_eq!(forwarded + lost, sent, "what did not is counted");
    });
}

#[test]
fn the_longest_packet_of_a_frame_passes_on_longer_links() {
    in_namespace(|| {
        veth("a");
        veth("b");
        let largest = crate::io::largest_mtu(2048);
        for name in ["a", "ap", "b", "bp"] {
            ip(&format!("link set dev {name} mtu {}", largest + 1000));
        }
        let bench = Bench::start(config(&[0]));
        let (a, _a) = bench.open("a");
        let (b, _b) = bench.open("b");
        bench.wires.connect(a, b);
        let (at_a, at_b) = (Raw::open("ap"), Raw::open("bp"));
        // The first is longer than a frame.
        let sent = frame(7, 14 + largest as usize);
        at_a.send_all(&[frame(6, 15 + largest as usize), sent.clone()]);
        let got = at_b.receive(PATIENCE).expect("the packet arrives");
        assert_eq!(&got[1..], &sent[1..]);
    });
}

#[test]
fn kernel_drops_of_a_closed_port_stay_in_the_total() {
    in_namespace(|| {
        veth("a");
        let bench = Bench::start(Config { long_packets: false, ..config(&[0]) });
        let (a, attached) = bench.open("a");
        // Raised after the port was opened: such packets are longer than a frame.
        for name in ["a", "ap"] {
            ip(&format!("link set dev {name} mtu 2400"));
        }
        let frames: Vec<_> = (0..10).map(|index| frame(index, 2300)).collect();
        Raw::open("ap").send_all(&frames);
        let dropped = KernelDrops { rx_dropped: 10, ..KernelDrops::default() };
        let statistics = bench.dataplane.statistics();
        assert_eq!((statistics.port(a).unwrap().kernel, statistics.total_kernel()), (dropped, dropped));
        drop(attached);
        bench.dataplane.close_port(a).unwrap();
        let statistics = bench.dataplane.statistics();
        assert_eq!((statistics.ports.len(), statistics.total_kernel()), (0, dropped));
    });
}

#[test]
fn drops_are_counted_by_reason_on_the_ingress_port() {
    in_namespace(|| {
        veth("a");
        veth("b");
        let bench = Bench::start(config(&[0]));
        let (a, _a) = bench.open("a");
        let (b, attached) = bench.open("b");
        let at_a = Raw::open("ap");
        let frames: Vec<_> = (0..100).map(|index| frame(index, 60)).collect();
        let dropped = |reason, wanted| {
            bench.feed(a, &at_a, &frames);
            bench.account();
            assert_eq!(bench.dataplane.statistics().port(a).unwrap().traffic.dropped(reason), wanted, "{reason}");
        };
        dropped(DropReason::NoPort, 100);
        // A port is closed while packets are forwarded to it.
        bench.wires.connect(a, b);
        drop(attached);
        bench.dataplane.close_port(b).unwrap();
        dropped(DropReason::PortGone, 100);
        // A port whose interface accepts nothing: its ring fills up, and then packets are dropped.
        let (b, _attached) = bench.open("b");
        bench.wires.connect(a, b);
        ip("link set dev b down");
        bench.feed(a, &at_a, &(0..1000).map(|index| frame(index, 60)).collect::<Vec<_>>());
        let account = bench.account();
        assert_eq!(account.in_flight, 512);
        let statistics = bench.dataplane.statistics();
        let traffic = statistics.port(a).unwrap().traffic;
        assert_eq!(traffic.dropped(DropReason::TxRingFull), 1000 - 512, "{:?}", traffic.drops().collect::<Vec<_>>());
        // The rest of the ring is sent when the interface accepts packets again.
        let at_b = Raw::open("bp");
        ip("link set dev b up");
        assert_eq!(at_b.count(512), 512);
        assert_eq!(bench.account().in_flight, 0);
    });
}

#[test]
fn packets_beyond_a_full_hand_off_queue_are_dropped() {
    in_namespace(|| {
        veth("a");
        veth("b");
        let bench = Bench::start(config(&[0, 1]));
        let (a, _a) = bench.open("a");
        let (b, _b) = bench.open("b");
        bench.wires.connect(a, b);
        let (at_a, at_b) = (Raw::open("ap"), Raw::open("bp"));
        // The worker that owns b dies; the other continues and hands packets off until the queue is full.
        let mut deadly = frame(0, 60);
        deadly[0] = 0xde;
        at_b.send_all(&[deadly]);
        let deadline = Instant::now() + PATIENCE;
        while bench.dataplane.failed().is_none() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(bench.dataplane.failed().map(|died| died.worker), Some(1));
        bench.feed(a, &at_a, &(0..5000).map(|index| frame(index, 60)).collect::<Vec<_>>());
        thread::sleep(Duration::from_millis(20));
        let traffic = bench.dataplane.statistics().port(a).unwrap().traffic;
        assert_eq!(traffic.dropped(DropReason::HandOffFull), 5000 - 4096, "{:?}", traffic.drops().collect::<Vec<_>>());
    });
}

#[test]
fn a_ports_queues_are_distributed_over_the_workers() {
    in_namespace(|| {
        ip("link add name a numtxqueues 2 numrxqueues 2 type veth peer name ap numtxqueues 2 numrxqueues 2");
        ip("link set dev a up");
        ip("link set dev ap up");
        veth("b");
        let bench = Bench::start(config(&[0, 1]));
        let (a, _a) = bench.open("a");
        let (b, _b) = bench.open("b");
        bench.wires.connect(a, b);
        bench.wires.connect(b, a);
        let queues =
            bench.dataplane.with_sockets(a, |sockets| sockets.iter().map(|(queue, _)| *queue).collect::<Vec<_>>());
        assert_eq!(queues.unwrap(), [0, 1]);
        let (at_a, at_b) = (Raw::open("ap"), Raw::open("bp"));
        // A sender's queue depends on the hash of the flow.
        let frames: Vec<_> = (0..200)
            .map(|index| {
                let mut frame = frame(index, 60);
                frame[34..36].copy_from_slice(&(1000 + index as u16).to_be_bytes());
                frame
            })
            .collect();
        at_a.send_all(&frames);
        assert_eq!(at_b.count(200), 200);
        at_b.send_all(&frames);
        assert_eq!(at_a.count(200), 200);
        let statistics = bench.dataplane.statistics();
        let by_worker = statistics.port(a).unwrap().by_worker.clone();
        assert_eq!(by_worker.iter().map(|worker| worker.rx_packets).sum::<u64>(), 200);
        assert!(by_worker.iter().all(|worker| worker.rx_packets > 20), "{by_worker:?}");
        assert_eq!(bench.account().fill, 3 * 512);
    });
}
