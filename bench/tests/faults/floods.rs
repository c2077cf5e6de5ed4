//! One pod floods: other pods keep their share of the worker, their connections stay, and the counters show the drops.
//!
//! Flooder and other pods share a core, the worker has the other one. The measure is the received share of a stream of
//! another pod that is far below its share of the worker: its loss is unfairness of the worker and not a lack of CPU
//! time.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_admin::types::PortStatus;
use penstock_bench::load::{Generator, UdpSink, pin};
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::Forger;

/// Different frames in one flood.
const VARIETY: u16 = 8192;
/// Connection quota of a pod.
const QUOTA: u32 = 256;
/// Duration of each flood, and of the measurement before it.
const LENGTH: Duration = Duration::from_millis(1500);
/// Datagrams of the other pod per millisecond…
const PACE: u64 = 20;
/// … and at least this many, however little CPU time its sender gets beside the flooder, within a limit.
const LEAST: u64 = 5_000;
const LONGEST: Duration = Duration::from_secs(60);

type FloodFrames = Vec<Vec<u8>>;

fn syn(forger: &Forger, own: IpAddr, to: IpAddr) -> FloodFrames {
    (0..VARIETY).map(|n| forger.tcp((own, 1024 + n), (to, 8080), |tcp| tcp.syn = true)).collect()
}

fn udp(forger: &Forger, own: IpAddr, to: IpAddr) -> FloodFrames {
    (0..VARIETY).map(|n| forger.udp((own, 1024 + n), (to, 9), b"flood")).collect()
}

fn icmp(forger: &Forger, own: IpAddr, to: IpAddr) -> FloodFrames {
    let echo = |n: u16| {
        let mut frame = Vec::new();
        forger.ip(own, to).icmpv4_echo_request(n, 1).write(&mut frame, b"flood").unwrap();
        frame
    };
    (0..VARIETY).map(echo).collect()
}

/// First fragments with changing identifications, and later fragments of unknown datagrams.
fn fragments(forger: &Forger, own: IpAddr, to: IpAddr) -> FloodFrames {
    let fragment = |n: u16| {
        let mut frame = forger.udp((own, 1024 + n), (to, 9), &[0; 24]);
        frame[18..20].copy_from_slice(&n.to_be_bytes());
        let offset: u16 = if n.is_multiple_of(2) { 0x2000 } else { 0x0100 };
        frame[20..22].copy_from_slice(&offset.to_be_bytes());
        let mut header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        header.header_checksum = header.calc_header_checksum();
        header.write(&mut &mut frame[14..34]).unwrap();
        frame
    };
    (0..VARIETY).map(fragment).collect()
}

/// Sends datagrams from `pod-0` to the sink at its pace; returns how many were sent and arrived.
fn pace(fixture: &Fixture, sink: &UdpSink, to: SocketAddr) -> (u64, u64) {
    std::thread::scope(|scope| scope.spawn(|| pace_here(fixture, sink, to)).join()).unwrap()
}

fn pace_here(fixture: &Fixture, sink: &UdpSink, to: SocketAddr) -> (u64, u64) {
    // Not on the worker's core.
    pin(0).unwrap();
    let socket = fixture.site("test/pod-0").namespace.udp(("0.0.0.0", 0)).unwrap();
    let (start, before, mut sent) = (Instant::now(), sink.arrived().unwrap(), 0);
    while start.elapsed() < LENGTH || sent < LEAST && start.elapsed() < LONGEST {
        let due = start.elapsed().as_millis() as u64 * PACE;
        while sent < due {
            sent += u64::from(socket.send_to(b"measured", to).is_ok());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(200));
    (sent, sink.arrived().unwrap() - before)
}

fn drops(port: &PortStatus, cause: &str) -> u64 {
    port.drops.get(cause).copied().unwrap_or(0)
}

#[test]
fn a_flood_costs_others_at_most_a_fifth_of_throughput() {
    // The flooded pod is under policy: otherwise nothing would be kept back.
    let policies = policy("asks", "pod-0", "  ingress: []\n") + &policy("flooded", "pod-3", "  ingress: [{}]\n");
    let fixture = Fixture::of(&(pods(4) + &policies), |_, config| {
        config.conntrack = format!("mapping = \"off\"\nentries = 65536\nquota = {QUOTA}\n");
        config.sections += "[workers]\ncores = [1]\n";
    });
    let address = |name: &str| fixture.site(name).address(false).unwrap();
    let (own, victim) = (address("test/pod-2"), address("test/pod-3"));
    let to = SocketAddr::new(address("test/pod-1"), 7000);
    let sink = UdpSink::open(&fixture.site("test/pod-1").namespace, to).unwrap();
    let flow = EchoConnection::open(
        &fixture.site("test/pod-0").namespace,
        fixture.target("test/pod-1", false),
        8080,
        Duration::from_secs(5),
    )
    .unwrap();
    let forger = Forger::of(&fixture, "test/pod-2");
    let generator = fixture.site("test/pod-2").namespace.run(|| Generator::open("eth0")).unwrap();
    let (asked, arrived) = pace(&fixture, &sink, to);
    let before = arrived as f64 / asked as f64;
    println!("before: {arrived} of {asked} arrived");
    for (kind, frames, cause) in [
        ("SYN", syn(&forger, own, victim), "quota_exceeded"),
        ("UDP", udp(&forger, own, victim), "quota_exceeded"),
        ("ICMP", icmp(&forger, own, victim), "quota_exceeded"),
        ("fragment", fragments(&forger, own, victim), "fragment"),
    ] {
        let (ends, port) = (AtomicBool::new(false), fixture.port("test/pod-2"));
        let (flooded, (sent, arrived)) = std::thread::scope(|scope| {
            let flood = scope.spawn(|| {
                pin(0).unwrap();
                let mut sent = 0;
                while !ends.load(Ordering::Relaxed) {
                    sent += generator.send_frames(&frames).unwrap();
                }
                sent
            });
            let paced = pace(&fixture, &sink, to);
            let target = fixture.target("test/pod-1", false);
            let fresh = probe::run_one(fixture.site("test/pod-0"), target, Protocol::Tcp(8080), RetryPolicy::default());
            ends.store(true, Ordering::Relaxed);
            assert_eq!(fresh.unwrap(), ProbeOutcome::Reached, "a new connection of another pod during a {kind} flood");
            (flood.join().unwrap(), paced)
        });
        flow.wait_for(100, Duration::from_secs(30)).unwrap();
        let after = fixture.port("test/pod-2");
        let counted = drops(&after, cause) - drops(&port, cause);
        println!("{kind}: {flooded} sent, {counted} {cause}; of another pod {arrived} of {sent} arrived");
        assert!(sent >= LEAST, "{kind}: of the stream that is measured only {sent} were sent");
        let share = arrived as f64 / sent as f64;
        assert!(share >= 0.8 * before, "{kind}: {share:.2} of what was sent, {before:.2} before");
        assert!(counted > 100, "{kind}: {:?}", after.drops);
        let connections = fixture.status().pods.into_iter().find(|pod| pod.pod == "test/pod-2").unwrap().connections;
        assert!(connections <= QUOTA, "{kind}: {connections}");
        for name in ["test/pod-0", "test/pod-1"] {
            let port = fixture.port(name);
            assert_eq!(drops(&port, "quota_exceeded") + drops(&port, "table_full"), 0, "{name}: {:?}", port.drops);
        }
    }
}
