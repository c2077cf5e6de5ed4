//! A machine outside fills what others may open to a pod, by flows that the pod answers: two datagrams of each, two seconds apart. Others
//! still reach the pod, and it opens connections of its own.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_bench::load::{Generator, UdpFlow};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::Outside;

use crate::fixture::{Fixture, pods, policy};

/// How many connections others may open to one pod: a quarter of the table.
const SHARE: u16 = 2048;
const TRIES: u32 = 100;
/// On a busy machine an answer takes long. A first packet that is dropped is sent again after a second, and again: then the counters tell.
const PATIENT: RetryPolicy = RetryPolicy { timeout: Duration::from_secs(10), attempts: 1 };
/// Longer than what makes a stream of a second datagram.
const BETWEEN: Duration = Duration::from_millis(2600);
/// Most waves until nearly all flows are entered: datagrams are lost on a busy machine.
const WAVES: usize = 200;

/// A datagram of each flow from one address, which is the machine's second.
fn flows(fixture: &Fixture, outside: &Outside) -> Vec<Vec<u8>> {
    let netlink = outside.namespace().netlink().unwrap();
    netlink.add_address(netlink.index("eth0").unwrap(), "198.51.100.66/24".parse().unwrap()).unwrap();
    let flow = |port| UdpFlow {
        source_mac: netlink.mac("eth0").unwrap(),
        gateway_mac: fixture.cluster.node.netlink().mac(outside.interface()).unwrap(),
        source: SocketAddr::new([198, 51, 100, 66].into(), port),
        destination: SocketAddr::new(fixture.site("test/pod-0").address(false).unwrap(), 53),
    };
    (0..SHARE).map(|n| flow(1024 + n).frame(60).unwrap()).collect()
}

/// Sends one datagram of each flow, no faster than they are answered.
fn wave(generator: &Generator, frames: &[Vec<u8>]) {
    for some in frames.chunks(32) {
        generator.send_frames(some).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How many connections this site opens.
fn opened(from: &Site, to: (u32, IpAddr)) -> u32 {
    let reached = |_| probe::run_one(from, to, Protocol::Tcp(8080), PATIENT).unwrap() == ProbeOutcome::Reached;
    (0..TRIES).map(|n| u32::from(reached(n))).sum()
}

/// New connections that had no room, at any port.
fn refused(fixture: &Fixture) -> u64 {
    let count = |port: &penstock_admin::types::PortStatus| {
        ["quota_exceeded", "table_full"].iter().filter_map(|cause| port.drops.get(*cause)).sum::<u64>()
    };
    fixture.status().ports.iter().map(count).sum()
}

#[test]
fn streams_from_outside_shut_nobody_out() {
    let mut outside = None;
    // Under policy: otherwise nothing would be kept back.
    let yaml =
        pods(2) + &policy("open", "pod-0", "  policyTypes: [Ingress, Egress]\n  ingress: [{}]\n  egress: [{}]\n");
    let fixture = Fixture::of(&yaml, |cluster, config| {
        outside = Some(cluster.node.add_outside("outside").unwrap());
        config.conntrack += &format!("entries = {}\n", 4 * u32::from(SHARE));
    });
    let outside = outside.unwrap();
    let frames = flows(&fixture, &outside);
    let generator = outside.namespace().run(|| Generator::open("eth0")).unwrap();
    let connections = || fixture.status().pods.into_iter().find(|pod| pod.pod == "test/pod-0").unwrap().connections;
    let is_entered = (0..WAVES).any(|_| {
        wave(&generator, &frames);
        connections() >= u32::from(SHARE) * 98 / 100
    });
    assert!(is_entered, "only {} flows are entered", connections());
    std::thread::sleep(BETWEEN);
    wave(&generator, &frames);
    let machine = Site::from(&outside);
    let [pod, other] = ["test/pod-0", "test/pod-1"].map(|name| fixture.target(name, false));
    let (before, ends) = (refused(&fixture), AtomicBool::new(false));
    let counts = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(BETWEEN);
                wave(&generator, &frames);
            }
        });
        let counts = [
            ("another machine to the pod", opened(&machine, pod)),
            ("the pod to another", opened(fixture.site("test/pod-0"), other)),
            ("another pod to the pod", opened(fixture.site("test/pod-1"), pod)),
        ];
        ends.store(true, Ordering::Relaxed);
        counts
    });
    let refused = refused(&fixture) - before;
    println!("{counts:?} of {TRIES} opened, {refused} had no room");
    for (who, opened) in counts {
        assert!(opened >= TRIES * 99 / 100, "{who} opened {opened} of {TRIES}");
    }
    assert!(refused <= u64::from(TRIES) / 100, "{refused} packets had no room");
}
