//! No frame leaks, and an idle daemon uses no CPU time.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::load::{Generator, UdpFlow, UdpSink, transfer};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::fixture::{Fixture, pod, pods, policy};

/// The frame account in the daemon's statistics.
#[derive(Debug)]
struct FrameAccount {
    total: u64,
    free: u64,
    fill: u64,
    in_flight: u64,
}

impl FrameAccount {
    /// Parses a line with `total`, `free`, `fill` and `in_flight`, each followed by its number.
    fn parse(line: &str) -> Self {
        let words: Vec<&str> = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
        let number = |name: &str| {
            let mut after = words.iter().skip_while(|word| **word != name).skip(1).filter(|word| !word.is_empty());
            after.next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no {name} in: {line}"))
        };
        Self { total: number("total"), free: number("free"), fill: number("fill"), in_flight: number("in_flight") }
    }

    fn assert_balanced(&self) {
        assert!(self.total > 0, "{self:?}");
        assert_eq!(self.free + self.fill + self.in_flight, self.total, "{self:?}");
    }
}

/// Reads it from the running daemon.
fn frames_now(fixture: &Fixture) -> FrameAccount {
    FrameAccount::parse(fixture.statistics().last().unwrap())
}

/// Ends the daemon and reads its last frame account.
fn frames_at_end(fixture: Fixture) -> FrameAccount {
    let (status, log) = fixture.daemon.stop().unwrap();
    assert!(status.success(), "{status}\n{}", log.join("\n"));
    let line = log.iter().rev().find(|line| line.contains("ended")).expect("a last line");
    FrameAccount::parse(line)
}

#[test]
fn frames_balance_after_a_million_forwarded_packets() {
    const GOAL: u64 = 1_000_000;
    let fixture = Fixture::of(&pods(2), |_, _| {});
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    let destination = SocketAddr::new(to.address(false).unwrap(), 7000);
    let sink = UdpSink::open(&to.namespace, destination).unwrap();
    let flow = UdpFlow {
        source_mac: from.namespace.netlink().unwrap().mac("eth0").unwrap(),
        gateway_mac: fixture.cluster.node.netlink().mac(fixture.cluster.node.pods()[0].interface()).unwrap(),
        source: SocketAddr::new(from.address(false).unwrap(), 40_000),
        destination,
    };
    let frame = flow.frame(64).unwrap();
    let generator = from.namespace.run(|| Generator::open("eth0")).unwrap();
    let before = frames_now(&fixture);
    before.assert_balanced();
    let start = sink.arrived().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while sink.arrived().unwrap() - start < GOAL {
        assert!(Instant::now() < deadline, "only {} packets arrived", sink.arrived().unwrap() - start);
        generator.run_for(&frame, Duration::from_millis(200)).unwrap();
    }
    std::thread::sleep(Duration::from_millis(200));
    let after = frames_now(&fixture);
    after.assert_balanced();
    assert_eq!(after.total, before.total);
    assert_eq!(after.in_flight, 0, "at rest nothing is under way: {after:?}");
    frames_at_end(fixture).assert_balanced();
}

/// Waits until the daemon has written this many lines that contain `text` since line `seen`.
fn wait_for_lines(fixture: &Fixture, seen: usize, text: &str, count: u8) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let lines = fixture.daemon.log().lines().split_off(seen);
        if lines.iter().filter(|line| line.contains(text)).count() >= usize::from(count) {
            return;
        }
        assert!(Instant::now() < deadline, "not {count} lines with \"{text}\":\n{}", lines.join("\n"));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn frames_balance_after_a_hundred_ports_opened_and_closed() {
    const ROUNDS: usize = 10;
    const PODS: u8 = 10;
    let more: Vec<(String, String, String)> = (0..PODS)
        .map(|number| {
            (format!("more-{number}"), format!("10.244.1.{}", 100 + number), format!("fd00:10:244:1::{}", 100 + number))
        })
        .collect();
    let described: String = more.iter().map(|(name, v4, v6)| pod(name, v4, v6)).collect();
    let mut fixture = Fixture::of(&pods(1), |_, _| {});
    fixture.save("more.yaml", described.trim_start_matches("---\n"));
    let before = frames_now(&fixture);
    before.assert_balanced();
    for round in 0..ROUNDS {
        let seen = fixture.daemon.log().len();
        for (name, v4, v6) in &more {
            let addresses = [v4.parse().unwrap(), v6.parse().unwrap()];
            fixture.cluster.node.add_pod(&format!("test/{name}"), &addresses).unwrap();
        }
        wait_for_lines(&fixture, seen, "attached", PODS);
        let added: Vec<Site> = fixture.cluster.node.pods().iter().skip(1).map(Site::from).collect();
        for site in &added {
            let there = fixture.target("test/pod-0", false);
            let outcome = probe::run_one(site, there, Protocol::Tcp(8080), RetryPolicy::default()).unwrap();
            assert_eq!(outcome, ProbeOutcome::Reached, "{} in round {round}", site.name);
        }
        for (name, _, _) in &more {
            fixture.cluster.node.remove_pod(&format!("test/{name}")).unwrap();
        }
        wait_for_lines(&fixture, seen, "closed", PODS);
    }
    std::thread::sleep(Duration::from_millis(100));
    let after = frames_now(&fixture);
    after.assert_balanced();
    assert_eq!(after.total, before.total);
    // A port's share depends on the free frames at the time, so there may be fewer than at the start.
    assert!(after.fill <= before.fill, "the frames of closed ports are free again: {before:?}, {after:?}");
    frames_at_end(fixture).assert_balanced();
}

#[test]
fn an_idle_daemon_uses_less_than_three_percent_of_a_core() {
    let fixture = Fixture::demo();
    fixture.assert_as_expected(&fixture.matrix());
    std::thread::sleep(Duration::from_millis(500));
    let (start, before) = (Instant::now(), fixture.daemon.processor_time().unwrap());
    std::thread::sleep(Duration::from_secs(5));
    let used = (fixture.daemon.processor_time().unwrap() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    assert!(used < 0.03, "{:.1} % of a core", used * 100.0);
}

/// Sends datagrams of these lengths, each until it has come or for some time. Returns the lengths of what came.
fn arrived(fixture: &Fixture, from: &str, to: &str, v6: bool, lengths: &[usize]) -> Vec<usize> {
    let (client, server) = (fixture.site(from), fixture.site(to));
    let (source, there) = (client.address(v6).unwrap(), server.address(v6).unwrap());
    let sink = server.namespace.udp((there, 0)).unwrap();
    let there = sink.local_addr().unwrap();
    sink.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let socket = client.namespace.udp((source, 0)).unwrap();
    let mut buffer = vec![0; 65_536];
    let mut came = Vec::new();
    for &length in lengths {
        for _ in 0..10 {
            let _ = socket.send_to(&vec![7; length], there);
            if let Ok((length, sender)) = sink.recv_from(&mut buffer) {
                assert!(buffer[..length].iter().all(|byte| *byte == 7), "{from} to {to}: {length} bytes, changed");
                came.push(length);
                // The answer is as long.
                sink.send_to(&buffer[..length], sender).unwrap();
                socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
                assert_eq!(socket.recv(&mut buffer).ok(), Some(length), "{from} to {to}: the answer");
                break;
            }
        }
    }
    came
}

#[test]
fn packets_longer_than_a_frame_pass_and_are_judged() {
    const LENGTHS: [usize; 4] = [8900, 1800, 20, 30_000];
    let only = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
    let fixture = Fixture::with_mtu(&(pods(4) + &policy("only", "pod-1", only)), 9001);
    for v6 in [false, true] {
        for (from, to, passes) in [
            ("test/pod-0", "test/pod-1", true),
            ("test/pod-2", "test/pod-1", false),
            ("test/pod-2", "test/pod-3", true),
            ("node", "test/pod-3", true),
            ("test/pod-3", "node", true),
        ] {
            let expected = if passes { &LENGTHS[..] } else { &[] };
            assert_eq!(arrived(&fixture, from, to, v6, &LENGTHS), expected, "{from} to {to}, v6 {v6}");
        }
        let (from, to) = (fixture.site("test/pod-2"), fixture.site("test/pod-3"));
        let report = transfer(&from.namespace, &to.namespace, to.address(v6).unwrap(), 10_000_000).unwrap();
        assert!(report.bytes >= 10_000_000, "{report:?}");
    }
    frames_at_end(fixture).assert_balanced();
}
