//! One pod floods: others keep what they have of the worker, their connections stay, and the counters tell.
//!
//! Flooder and other pods share a core, the worker has the other; what another pod is measured by is a stream far below its
//! share of the worker, and the share of it that arrives: its loss is the worker's unfairness and not a lack of cores.

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_admin::types::PortStatus;
use penstock_bench::load::{Generator, Sink, pin};
use penstock_bench::probe::{self, Flow, Outcome, Patience, Protocol};

use crate::fixture::{World, pods, policy};
use crate::forger::Forger;

/// Different frames of one flood.
const VARIETY: u16 = 8192;
/// Connections that one pod may have.
const QUOTA: u32 = 256;
/// How long each flood lasts, and its measurement before it.
const LENGTH: Duration = Duration::from_millis(1500);
/// Datagrams of another pod: so many every millisecond…
const PACE: u64 = 20;
/// … and at least so many, however little its sender gets of the core that it shares with the flooder, but not for ever.
const LEAST: u64 = 5_000;
const LONGEST: Duration = Duration::from_secs(60);

type Frames = Vec<Vec<u8>>;

fn syn(forger: &Forger, own: IpAddr, to: IpAddr) -> Frames {
    (0..VARIETY).map(|n| forger.tcp((own, 1024 + n), (to, 8080), |tcp| tcp.syn = true)).collect()
}

fn udp(forger: &Forger, own: IpAddr, to: IpAddr) -> Frames {
    (0..VARIETY).map(|n| forger.udp((own, 1024 + n), (to, 9), b"flood")).collect()
}

fn icmp(forger: &Forger, own: IpAddr, to: IpAddr) -> Frames {
    let echo = |n: u16| {
        let mut frame = Vec::new();
        forger.ip(own, to).icmpv4_echo_request(n, 1).write(&mut frame, b"flood").unwrap();
        frame
    };
    (0..VARIETY).map(echo).collect()
}

/// First fragments with ever new identifications, and later ones of datagrams that never began.
fn fragments(forger: &Forger, own: IpAddr, to: IpAddr) -> Frames {
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

/// Datagrams of `pod-0` to the sink, at its pace for so long; how many were sent and arrived.
fn pace(world: &World, sink: &Sink, to: SocketAddr) -> (u64, u64) {
    std::thread::scope(|scope| scope.spawn(|| pace_here(world, sink, to)).join()).unwrap()
}

fn pace_here(world: &World, sink: &Sink, to: SocketAddr) -> (u64, u64) {
    // Not behind the worker.
    pin(0).unwrap();
    let socket = world.site("test/pod-0").namespace.run(|| std::net::UdpSocket::bind(("0.0.0.0", 0))).unwrap();
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
fn a_flood_from_one_pod_takes_no_more_than_a_fifth_of_what_others_have() {
    let world = World::of(&(pods(4) + &policy("asks", "pod-0", "  ingress: []\n")), |_, config| {
        config.conntrack = format!("mapping = \"off\"\nentries = 65536\nquota = {QUOTA}\n");
        config.sections += "[workers]\ncores = [1]\n";
    });
    let address = |name: &str| world.site(name).address(false).unwrap();
    let (own, victim) = (address("test/pod-2"), address("test/pod-3"));
    let to = SocketAddr::new(address("test/pod-1"), 7000);
    let sink = Sink::open(&world.site("test/pod-1").namespace, to).unwrap();
    let flow = Flow::open(
        &world.site("test/pod-0").namespace,
        world.target("test/pod-1", false),
        8080,
        Duration::from_secs(5),
    )
    .unwrap();
    let forger = Forger::of(&world, "test/pod-2");
    let generator = world.site("test/pod-2").namespace.run(|| Generator::open("eth0")).unwrap();
    let (asked, arrived) = pace(&world, &sink, to);
    let before = arrived as f64 / asked as f64;
    println!("before: {arrived} of {asked} arrived");
    for (kind, frames, cause) in [
        ("SYN", syn(&forger, own, victim), "quota_exceeded"),
        ("UDP", udp(&forger, own, victim), "quota_exceeded"),
        ("ICMP", icmp(&forger, own, victim), "quota_exceeded"),
        ("fragment", fragments(&forger, own, victim), "fragment"),
    ] {
        let (ends, port) = (AtomicBool::new(false), world.port("test/pod-2"));
        let (flooded, (sent, arrived)) = std::thread::scope(|scope| {
            let flood = scope.spawn(|| {
                pin(0).unwrap();
                let mut sent = 0;
                while !ends.load(Ordering::Relaxed) {
                    sent += generator.send_frames(&frames).unwrap();
                }
                sent
            });
            let paced = pace(&world, &sink, to);
            let target = world.target("test/pod-1", false);
            let fresh = probe::run_one(world.site("test/pod-0"), target, Protocol::Tcp(8080), Patience::default());
            ends.store(true, Ordering::Relaxed);
            assert_eq!(fresh.unwrap(), Outcome::Reached, "a new connection of another pod during a {kind} flood");
            (flood.join().unwrap(), paced)
        });
        flow.wait_for(100, Duration::from_secs(5)).unwrap();
        let after = world.port("test/pod-2");
        let counted = drops(&after, cause) - drops(&port, cause);
        println!("{kind}: {flooded} sent, {counted} {cause}; of another pod {arrived} of {sent} arrived");
        assert!(sent >= LEAST, "{kind}: of the stream that is measured only {sent} were sent");
        let share = arrived as f64 / sent as f64;
        assert!(share >= 0.8 * before, "{kind}: {share:.2} of what was sent, {before:.2} before");
        assert!(counted > 100, "{kind}: {:?}", after.drops);
        let connections = world.status().pods.into_iter().find(|pod| pod.pod == "test/pod-2").unwrap().connections;
        assert!(connections <= QUOTA, "{kind}: {connections}");
        for name in ["test/pod-0", "test/pod-1"] {
            let port = world.port(name);
            assert_eq!(drops(&port, "quota_exceeded") + drops(&port, "table_full"), 0, "{name}: {:?}", port.drops);
        }
    }
}
