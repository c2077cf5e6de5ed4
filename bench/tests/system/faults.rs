//! Things go wrong, and nothing passes unjudged that should not.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, Outcome, Patience, Protocol, Site};

use crate::fixture::{World, pod, pods, policy};

/// Numbered datagrams from one site to another, one a millisecond, each with the time at which it was sent.
struct Stream {
    ends: Arc<AtomicBool>,
    sender: JoinHandle<u64>,
}

impl Stream {
    /// The sender's port tells one stream from another.
    fn start(from: &Site, port: u16, to: SocketAddr, epoch: Instant) -> Self {
        let local = SocketAddr::new(from.address(to.is_ipv6()).unwrap(), port);
        let socket = from.namespace.run(|| UdpSocket::bind(local)).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let sender = std::thread::spawn(move || {
            let mut count = 0u64;
            while !ended.load(Ordering::Relaxed) {
                let now = epoch.elapsed().as_nanos() as u64;
                let datagram = [count.to_be_bytes(), now.to_be_bytes()].concat();
                // A refusal that came back for an earlier one is no reason to stop.
                count += u64::from(socket.send_to(&datagram, to).is_ok());
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        });
        Self { ends, sender }
    }

    /// How many were sent.
    fn stop(self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.sender.join().unwrap()
    }
}

/// What arrives of all streams to one socket: by the sender's port, the numbers and times of sending.
struct Sniffer {
    ends: Arc<AtomicBool>,
    receiver: JoinHandle<BTreeMap<u16, Vec<(u64, Duration)>>>,
}

impl Sniffer {
    fn start(at: &Site, address: SocketAddr) -> Self {
        let socket = at.namespace.run(|| UdpSocket::bind(address)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let receiver = std::thread::spawn(move || {
            let mut arrived = BTreeMap::<u16, Vec<_>>::new();
            let mut datagram = [0; 16];
            while !ended.load(Ordering::Relaxed) {
                let Ok((16, from)) = socket.recv_from(&mut datagram) else { continue };
                let number = u64::from_be_bytes(datagram[..8].try_into().unwrap());
                let sent = Duration::from_nanos(u64::from_be_bytes(datagram[8..].try_into().unwrap()));
                arrived.entry(from.port()).or_default().push((number, sent));
            }
            arrived
        });
        Self { ends, receiver }
    }

    fn stop(self) -> BTreeMap<u16, Vec<(u64, Duration)>> {
        // What was sent last is still on its way.
        std::thread::sleep(Duration::from_millis(200));
        self.ends.store(true, Ordering::Relaxed);
        self.receiver.join().unwrap()
    }
}

const ALLOWED: u16 = 40_001;
const DENIED: u16 = 40_002;
const NODE: u16 = 40_003;

#[test]
fn between_a_kill_and_the_next_start_not_one_packet_reaches_a_pod() {
    let only_pod_0 = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
    let mut world = World::of(&(pods(3) + &policy("only", "pod-1", only_pod_0)), |_, _| {});
    let epoch = Instant::now();
    let mut quickest = Duration::MAX;
    for v6 in [false, true, false] {
        let to = SocketAddr::new(world.site("test/pod-1").address(v6).unwrap(), 7000);
        let sniffer = Sniffer::start(world.site("test/pod-1"), to);
        let streams = [("test/pod-0", ALLOWED), ("test/pod-2", DENIED), ("node", NODE)];
        let streams = streams.map(|(from, port)| Stream::start(world.site(from), port, to, epoch));
        std::thread::sleep(Duration::from_millis(300));
        world.kill();
        let dead = epoch.elapsed();
        std::thread::sleep(Duration::from_millis(500));
        let starts = epoch.elapsed();
        world.restart();
        std::thread::sleep(Duration::from_millis(300));
        let sent = streams.map(Stream::stop);
        let arrived = sniffer.stop();
        assert!(sent.iter().all(|&count| count > 300), "the streams ran: {sent:?}");
        assert_eq!(arrived.get(&DENIED), None, "never what policy denies");
        for port in [ALLOWED, NODE] {
            let times = || arrived[&port].iter().map(|&(_, sent)| sent);
            assert!(times().any(|sent| sent < dead), "before");
            assert_eq!(times().filter(|&sent| sent > dead && sent < starts).count(), 0, "nobody judges: none passes");
            let first = times().filter(|&sent| sent > starts).min().expect("after");
            println!("in force {:?} after the start (v6: {v6})", first - starts);
            quickest = quickest.min(first - starts);
        }
    }
    // What else the machine does can only add to it.
    assert!(quickest < Duration::from_secs(1), "in force after {quickest:?} at best");
}

#[test]
fn a_pod_that_is_made_anew_under_an_address_inherits_no_verdict() {
    remake_pods(20);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn a_pod_that_is_made_anew_a_thousand_times_leaves_nothing() {
    remake_pods(1000);
}

/// One pod comes and goes under the same address, allowed and denied by turns, while another keeps sending to it.
fn remake_pods(times: u32) {
    let only_a = "  ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]\n";
    let mut world = World::of(&(pods(2) + &policy("only", "pod-1", only_a)), |_, _| {});
    let epoch = Instant::now();
    let (v4, v6) = ("10.244.1.77", "fd00:10:244:1::77");
    let to_it = SocketAddr::new(v4.parse().unwrap(), 7000);
    let traffic = Stream::start(world.site("test/pod-0"), ALLOWED, to_it, epoch);
    let descriptors = |world: &World| std::fs::read_dir(format!("/proc/{}/fd", world.daemon.id())).unwrap().count();
    let mut before = None;
    for turn in 0..times {
        let label = if turn % 2 == 0 { "a" } else { "b" };
        let seen = world.daemon.log().len();
        world.save("turning.yaml", &pod("turning", v4, v6).replace("app: turning", &format!("app: {label}")));
        world.daemon.log().wait_for_after(seen, "published: Pod test/turning", Duration::from_secs(5)).unwrap();
        let addresses = [v4.parse().unwrap(), v6.parse().unwrap()];
        world.cluster.node.add_pod("test/turning", &addresses).unwrap();
        world.cluster.node.settle().unwrap();
        world.daemon.log().wait_for_after(seen, "attached", Duration::from_secs(5)).unwrap();
        let attached = world.daemon.log().len();
        world.daemon.log().wait_for_after(attached.saturating_sub(1), "published", Duration::from_secs(5)).unwrap();
        let it = Site::from(world.cluster.node.pod("test/turning").unwrap());
        let patience = Patience { timeout: Duration::from_millis(100), attempts: if label == "a" { 20 } else { 2 } };
        let outcome = probe::run_one(&it, world.target("test/pod-1", turn % 4 < 2), Protocol::Tcp(8080), patience);
        let expected = if label == "a" { Outcome::Reached } else { Outcome::Silent };
        assert_eq!(outcome.unwrap(), expected, "turn {turn}");
        world.cluster.node.remove_pod("test/turning").unwrap();
        world.daemon.log().wait_for_after(attached, "closed", Duration::from_secs(5)).unwrap();
        if turn == 3 {
            before = Some(descriptors(&world));
        }
    }
    assert!(traffic.stop() > 0);
    // Some are open for a moment only.
    let before = before.expect("counted once");
    let deadline = Instant::now() + Duration::from_secs(5);
    while descriptors(&world) > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let after = descriptors(&world);
    assert!(after <= before, "descriptors are leaked: {before} after four turns, {after} after {times}");
    let account = world.statistics().pop().unwrap();
    assert!(account.ends_with(": balanced"), "{account}");
}

#[test]
fn a_storm_of_policy_changes_loses_no_allowed_packet_and_passes_no_denied_one() {
    storm(Duration::from_secs(2), Duration::from_millis(10));
}

#[test]
#[ignore = "takes ten seconds of a machine that is quiet; make test-long runs it"]
fn a_thousand_policy_changes_in_ten_seconds_lose_no_allowed_packet() {
    storm(Duration::from_secs(10), Duration::from_millis(10));
}

fn storm(length: Duration, every: Duration) {
    let only_pod_0 = |port: u16| {
        format!(
            "  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: pod-0}}}}}}], \
             ports: [{{port: 7000, protocol: UDP}}, {{port: {port}, protocol: UDP}}]}}]\n"
        )
    };
    let world = World::of(&pods(3), |_, _| {});
    world.save("policy.yaml", &policy("only", "pod-1", &only_pod_0(1)));
    world.daemon.log().wait_for_after(0, "published: NetworkPolicy test/only", Duration::from_secs(5)).unwrap();
    let epoch = Instant::now();
    let to = SocketAddr::new(world.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(world.site("test/pod-1"), to);
    let streams = [("test/pod-0", ALLOWED), ("test/pod-2", DENIED)];
    let streams = streams.map(|(from, port)| Stream::start(world.site(from), port, to, epoch));
    let seen = world.daemon.log().len();
    let mut changes = 0u16;
    while epoch.elapsed() < length {
        changes += 1;
        world.save("policy.yaml", &policy("only", "pod-1", &only_pod_0(changes)));
        std::thread::sleep((every * u32::from(changes)).saturating_sub(epoch.elapsed()));
    }
    let sent = streams.map(Stream::stop);
    let arrived = sniffer.stop();
    let lines = world.daemon.log().lines();
    let published = lines[seen..].iter().filter(|line| line.contains("published")).count();
    println!("{changes} changes saved, {published} snapshots published, {} packets sent", sent[0]);
    assert!(published > usize::from(changes) / 10, "the storm arrived: {published} of {changes}");
    assert_eq!(arrived.get(&DENIED), None);
    let numbers: Vec<u64> = arrived[&ALLOWED].iter().map(|&(number, _)| number).collect();
    assert_eq!(numbers, (0..sent[0]).collect::<Vec<_>>(), "all, once and in order");
}
