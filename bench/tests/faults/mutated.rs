//! A pod sends random frames and mutated valid frames.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use etherparse::Icmpv4Type;
use penstock_admin::types::{FrameCounts, PortStatus};
use penstock_bench::load::Generator;
use penstock_bench::probe::EchoConnection;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::{Forger, kernel_lost};

/// Bytes of the longest frame on a link with an MTU of 1,500.
const LONGEST: usize = 1514;
/// Frames generated for each round and sent at once.
const ROUND: usize = 4096;

/// Valid frames of all kinds that a pod sends, to reachable and to unreachable destinations.
fn good_frames(fixture: &Fixture, forger: &Forger) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for v6 in [false, true] {
        let address = |name: &str| fixture.site(name).address(v6).unwrap();
        let own = address("test/pod-2");
        for to in ["test/pod-0", "test/pod-1", "node"].map(address) {
            frames.push(forger.udp((own, 1000), (to, 53), b"a question"));
            frames.push(forger.tcp((own, 1001), (to, 8080), |tcp| tcp.syn = true));
            frames.push(forger.tcp((own, 1001), (to, 8080), |tcp| tcp.ack = true));
            let mut echo = Vec::new();
            let ip = forger.ip(own, to);
            match own {
                IpAddr::V4(_) => ip.icmpv4_echo_request(1, 1).write(&mut echo, b"echo").unwrap(),
                IpAddr::V6(_) => ip.icmpv6_echo_request(1, 1).write(&mut echo, b"echo").unwrap(),
            }
            frames.push(echo);
            if own.is_ipv4() {
                let mut error = Vec::new();
                let unreachable = etherparse::icmpv4::DestUnreachableHeader::Port;
                let kind = Icmpv4Type::DestinationUnreachable(unreachable);
                let quoted = forger.udp((to, 53), (own, 1000), b"a question");
                forger.ip(own, to).icmpv4(kind).write(&mut error, &quoted[14..]).unwrap();
                frames.push(error);
            }
            // The kernel rejects frames beyond the link's MTU; this one is just below.
            frames.push(forger.udp((own, 1002), (to, 9), &[0; 1400]));
        }
    }
    frames
}

/// One of them, unchanged or mutated; or random bytes.
fn mutated(good: &[Vec<u8>], random: &mut SmallRng) -> Vec<u8> {
    let mut frame = good[random.random_range(0..good.len())].clone();
    match random.random_range(0..8) {
        0 => frame = (0..random.random_range(14..200)).map(|_| random.random()).collect(),
        1 => frame.truncate(random.random_range(14..=frame.len())),
        2 => frame.extend((0..random.random_range(0..64)).map(|_| random.random::<u8>())),
        3 => {
            let other = &good[random.random_range(0..good.len())];
            let at = random.random_range(14..=frame.len().min(other.len()));
            frame.truncate(at);
            frame.extend(&other[at..]);
        }
        4 | 5 => {
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(12..frame.len());
                frame[at] = *[0, 1, 0x7f, 0x80, 0xff, random.random()].get(random.random_range(0..6)).unwrap();
            }
        }
        6 => {
            // Behind the IPv4 header and its checksum, so that the packet gets further.
            let at = random.random_range(34..frame.len());
            frame[at] = random.random();
        }
        _ => {}
    }
    // The pod's own link accepts no longer frames.
    frame.truncate(LONGEST);
    frame
}

/// Counters of the packets received on a port.
struct PortCounters {
    seen: u64,
    received: u64,
    dropped: u64,
}

fn port_counters(port: &PortStatus) -> PortCounters {
    PortCounters {
        // Frames that the pod sends.
        seen: port.outcomes.iter().filter(|(outcome, _)| *outcome != "from_stack").map(|(_, count)| count).sum(),
        received: port.total.rx_packets,
        dropped: port.drops.values().sum(),
    }
}

/// What the programs redirect is received from the pair, or counted as dropped in it. Packets still move: the
/// counters, which are read one after the other, agree at some moment.
fn assert_pair_adds_up(fixture: &Fixture) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let (redirected, accounted) = pair_counters(fixture);
        if redirected == accounted {
            return;
        }
        assert!(Instant::now() < deadline, "{redirected} redirected, {accounted} received or dropped with a reason");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Packets that the programs redirected into the pair, and those that were received from it or dropped in it.
fn pair_counters(fixture: &Fixture) -> (u64, u64) {
    let status = fixture.status();
    let of = |port: &PortStatus| ["redirected", "from_stack"].map(|outcome| port.outcomes[outcome]).iter().sum::<u64>();
    let redirected = status.ports.iter().filter(|port| port.kind == "pod").map(of).sum();
    let pair = status.ports.iter().find(|port| port.kind == "pair").unwrap();
    let netlink = fixture.cluster.node.netlink();
    let pairs = netlink.interface_names().unwrap().into_iter().filter(|name| name.starts_with("penstock-w"));
    let in_the_link: u64 = pairs.map(|name| netlink.tx_dropped(&name).unwrap()).sum();
    (redirected, pair.total.rx_packets + kernel_lost(pair) + in_the_link)
}

#[test]
fn random_frames_are_all_counted_and_do_no_harm() {
    send_mutated(200_000);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn ten_million_random_mutated_and_truncated_frames_do_no_harm() {
    send_mutated(10_000_000);
}

fn send_mutated(frames: u64) {
    let seed = rand::random();
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let yaml = pods(3) + &policy("closed", "pod-1", "  ingress: [{ports: [{port: 53, protocol: UDP}]}]\n");
    let fixture = Fixture::of(&yaml, |_, config| config.offload = false);
    let flow = EchoConnection::open(
        &fixture.site("test/pod-0").namespace,
        fixture.target("node", false),
        8080,
        Duration::from_secs(5),
    )
    .unwrap();
    let forger = Forger::of(&fixture, "test/pod-2");
    let good = good_frames(&fixture, &forger);
    let generator = fixture.site("test/pod-2").namespace.run(|| Generator::open("eth0")).unwrap();
    let before = port_counters(&fixture.port("test/pod-2"));
    let mut sent = 0;
    while sent < frames {
        let round: Vec<Vec<u8>> = (0..ROUND).map(|_| mutated(&good, &mut random)).collect();
        sent += generator.send_frames(&round).unwrap() as u64;
    }
    flow.wait_for(100, Duration::from_secs(30)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    // A frame may move while they are counted, since the other flow goes on.
    let is_balanced = |frames: &FrameCounts| frames.in_flight == 0 && frames.free + frames.fill == frames.total;
    while !is_balanced(&fixture.status().frames) {
        assert!(Instant::now() < deadline, "a frame is stuck: {:?}", fixture.status().frames);
        std::thread::sleep(Duration::from_millis(10));
    }
    let (status, port) = (fixture.status(), fixture.port("test/pod-2"));
    let after = port_counters(&port);
    let seen = after.seen - before.seen;
    println!("{sent} sent, {seen} seen; {:?}; {:?}; {:?}", port.outcomes, port.drops, port.kernel_drops);
    assert!(seen >= sent, "{sent} generated, {seen} seen by the program");
    // `share_used` also counts packets from the node's stack; the pair's counters bound the rest.
    assert_pair_adds_up(&fixture);
    assert!(after.dropped > before.dropped && after.dropped <= after.received, "{:?}", port.drops);
    for cause in ["spoofed_source", "truncated", "malformed", "ingress_denied", "header_checksum"] {
        assert!(port.drops.get(cause).copied().unwrap_or(0) > 0, "no {cause} among {:?}", port.drops);
    }
    let others = status.ports.iter().map(|port| port.total.tx_packets).sum::<u64>();
    assert!(others >= after.received - after.dropped, "what was not dropped was sent");
    let lines = fixture.daemon.log().lines();
    assert!(!lines.iter().any(|line| line.contains("panicked")), "{}", lines.join("\n"));
    drop(flow);
    let (ended, log) = fixture.daemon.stop().unwrap();
    assert!(ended.success(), "{ended}\n{}", log.join("\n"));
}
