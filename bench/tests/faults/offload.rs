//! Established connections that the tcx programs forward without a worker, while the daemon and the policy change.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use penstock_bench::load::transfer_for;
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::faults::traffic::{ALLOWED, DENIED, Sniffer, Stream};
use crate::fixture::{Fixture, pods, policy};

const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
const NOBODY: &str = "  ingress: []\n";
const LIMIT: Duration = Duration::from_secs(20);

/// Three pods, of which the second admits only the first. The connection table outlasts the daemon.
fn fixture() -> Fixture {
    let fixture = Fixture::of(&pods(3), |_, config| {
        config.offload = true;
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack =
            format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\nmidstream_pickup = \"0s\"\n");
        config.sections += "[fail]\non_exit = \"keep\"\n";
    });
    publish(&fixture, ONLY_POD_0);
    fixture
}

/// Saves the policy of `pod-1` and waits until it is in effect.
fn publish(fixture: &Fixture, spec: &str) {
    let before = fixture.status().published;
    fixture.save("policy.yaml", policy("served", "pod-1", spec).trim_start_matches("---\n"));
    let deadline = Instant::now() + LIMIT;
    loop {
        let status = fixture.status();
        if status.published > before && status.in_force {
            return;
        }
        assert!(Instant::now() < deadline, "{status:?}");
    }
}

fn outcome(fixture: &Fixture, from: &str) -> ProbeOutcome {
    let to = fixture.target("test/pod-1", false);
    let once = RetryPolicy { timeout: Duration::from_millis(300), attempts: 1 };
    probe::run_one(fixture.site(from), to, Protocol::Tcp(8080), once).unwrap()
}

#[test]
fn established_connections_lose_nothing_by_a_kill_or_upgrade() {
    let mut fixture = fixture();
    let (client, epoch) = (fixture.site("test/pod-0").clone(), Instant::now());
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(&client, ALLOWED, to, epoch);
    let denied = Stream::start(fixture.site("test/pod-2"), DENIED, to, epoch);
    let flows = Flows::open(&fixture);
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        fixture.daemon.signal(signal).unwrap();
        fixture.daemon.wait_until_ended(Duration::from_secs(30)).unwrap();
        flows.go_on(&format!("while no daemon runs, after {signal}"));
        assert_eq!(outcome(&fixture, "test/pod-2"), ProbeOutcome::Silent, "a new connection, while no daemon runs");
        fixture.restart();
        let line = fixture.daemon.log().wait_for_after(0, "connections found", Duration::from_secs(1)).unwrap();
        assert!(line.contains("; removed 0 of pods that are gone"), "{line}");
        flows.go_on(&format!("with the next daemon, after {signal}"));
        assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached);
        assert_eq!(outcome(&fixture, "test/pod-2"), ProbeOutcome::Silent);
    }
    flows.assert_nothing_sent_again();
    let (sent, sent_in_vain) = (stream.stop(), denied.stop());
    let arrived = sniffer.stop();
    assert_eq!(arrived[&ALLOWED].len() as u64, sent, "every datagram arrived");
    assert!(sent_in_vain > 0 && !arrived.contains_key(&DENIED), "never what policy denies");
}

/// An established TCP connection of each family.
struct Flows([EchoConnection; 2]);

impl Flows {
    fn open(fixture: &Fixture) -> Self {
        let client = &fixture.site("test/pod-0").namespace;
        let open = |v6| EchoConnection::open(client, fixture.target("test/pod-1", v6), 8080, LIMIT).unwrap();
        let flows = Self([false, true].map(open));
        flows.go_on("at first");
        flows
    }

    fn go_on(&self, when: &str) {
        for flow in &self.0 {
            flow.wait_for(100, LIMIT).unwrap_or_else(|error| panic!("{when}: {error}"));
        }
    }

    fn assert_nothing_sent_again(&self) {
        assert_eq!(self.0.each_ref().map(|flow| flow.retransmitted().unwrap()), [0, 0], "IPv4, IPv6");
    }
}

#[test]
fn established_connections_lose_nothing_by_a_takeover() {
    let mut fixture = fixture();
    // The parts that the next daemon needs stay, whatever is set for the end.
    fixture.change_config(|config| {
        config.sections = config.sections.replace("on_exit = \"keep\"", "on_exit = \"restore\"");
    });
    let (client, epoch) = (fixture.site("test/pod-0").clone(), Instant::now());
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(&client, ALLOWED, to, epoch);
    let denied = Stream::start(fixture.site("test/pod-2"), DENIED, to, epoch);
    let flows = Flows::open(&fixture);
    let opened = OpenedConnections::start(&client, fixture.target("test/pod-1", false));
    for _ in 0..2 {
        let before = fixture.take_over();
        before.log().wait_for_after(0, "handed over to another daemon", LIMIT).unwrap();
        flows.go_on("with the next daemon");
        assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached);
        assert_eq!(outcome(&fixture, "test/pod-2"), ProbeOutcome::Silent);
        assert!(fixture.status().in_force);
        let (status, log) = before.stop().unwrap();
        assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
        assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached, "the end of the old one changes nothing");
    }
    flows.go_on("after the end of the one before");
    flows.assert_nothing_sent_again();
    println!("the longest time in which no connection was opened: {:?}", opened.stop());
    let (sent, sent_in_vain) = (stream.stop(), denied.stop());
    let arrived = sniffer.stop();
    assert_eq!(arrived[&ALLOWED].len() as u64, sent, "every datagram arrived");
    assert!(sent_in_vain > 0 && !arrived.contains_key(&DENIED), "never what policy denies");
}

/// Opens connections one after another.
struct OpenedConnections {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl OpenedConnections {
    fn start(from: &Site, to: (u32, IpAddr)) -> Self {
        let (from, ends) = (from.clone(), Arc::new(AtomicBool::new(false)));
        let stops = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let at_once = RetryPolicy { timeout: Duration::from_millis(50), attempts: 1 };
            let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
            while !stops.load(Ordering::Relaxed) {
                if probe::run_one(&from, to, Protocol::Tcp(8080), at_once).unwrap() == ProbeOutcome::Reached {
                    longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
                // The pod's share of the table is some hundred connections.
                std::thread::sleep(Duration::from_millis(10));
            }
            longest
        });
        Self { ends, thread }
    }

    /// The longest time from one that was opened to the next.
    fn stop(self) -> Duration {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// It cannot have its programs ready before, since the table is made anew.
#[test]
fn a_daemon_with_a_table_of_another_size_takes_over() {
    let mut fixture = fixture();
    let capacity = fixture.status().connections.capacity;
    fixture.change_config(|config| config.conntrack = config.conntrack.replace("entries = 4096", "entries = 8192"));
    let before = fixture.take_over();
    before.log().wait_for_after(0, "handed over to another daemon", LIMIT).unwrap();
    assert!(fixture.status().connections.capacity > capacity);
    for (pod, expected) in [("test/pod-0", ProbeOutcome::Reached), ("test/pod-2", ProbeOutcome::Silent)] {
        assert_eq!(outcome(&fixture, pod), expected, "{pod}");
    }
}

#[test]
fn a_daemon_ended_before_it_knows_all_takes_nothing_over() {
    let fixture = fixture();
    let next = fixture.start_successor_without_server();
    next.log().wait_for_after(0, "another daemon runs here", LIMIT).unwrap();
    assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached, "the one that runs goes on meanwhile");
    let (status, log) = next.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
    assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached, "and afterwards");
    let log = fixture.daemon.log().lines();
    assert!(!log.iter().any(|line| line.contains("another daemon takes over")), "{log:?}");
}

#[test]
fn a_process_that_handed_over_fails_without_the_next_one() {
    let mut fixture = fixture();
    let before = fixture.take_over();
    before.log().wait_for_after(0, "handed over to another daemon", LIMIT).unwrap();
    fixture.daemon.signal(Signal::SIGKILL).unwrap();
    let (status, log) = before.wait(Duration::from_secs(60)).unwrap();
    assert_eq!(status.code(), Some(1), "{}", log.join("\n"));
    assert!(log.iter().any(|line| line.contains("the daemon that took over is gone; start penstock again")), "{log:?}");
    fixture.restart();
    assert_eq!(outcome(&fixture, "test/pod-0"), ProbeOutcome::Reached);
}

#[test]
fn no_packet_of_a_denied_established_connection_passes() {
    let fixture = fixture();
    let epoch = Instant::now();
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, epoch);
    std::thread::sleep(Duration::from_millis(100));
    let closed: Vec<(Duration, Duration)> = (0..20)
        .map(|_| {
            publish(&fixture, NOBODY);
            let begins = epoch.elapsed();
            std::thread::sleep(Duration::from_millis(20));
            let ends = epoch.elapsed();
            publish(&fixture, ONLY_POD_0);
            std::thread::sleep(Duration::from_millis(20));
            (begins, ends)
        })
        .collect();
    let sent = stream.stop();
    let arrived = &sniffer.stop()[&ALLOWED];
    for (begins, ends) in closed {
        let inside = arrived.iter().filter(|(_, at)| (begins..ends).contains(at)).count();
        assert_eq!(inside, 0, "from {begins:?} to {ends:?}");
    }
    assert!(arrived.len() as u64 > sent / 5, "{} of {sent} arrived while it was allowed", arrived.len());
}

#[test]
fn bulk_tcp_flows_while_policy_changes_a_hundred_times_a_second() {
    let fixture = fixture();
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    let ended = std::sync::atomic::AtomicBool::new(false);
    let (report, changes) = std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            let before = fixture.status().published;
            for port in 0_u16.. {
                if ended.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
                // Each time another rule beside the one that allows the transfer.
                let spec = format!("{ONLY_POD_0}  egress: [{{ports: [{{port: {}}}]}}]\n", port + 1);
                fixture.save("policy.yaml", policy("served", "pod-1", &spec).trim_start_matches("---\n"));
                std::thread::sleep(Duration::from_millis(10));
            }
            fixture.status().published - before
        });
        let length = Duration::from_secs(3);
        let report = transfer_for(&from.namespace, &to.namespace, to.address(false).unwrap(), length).unwrap();
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        (report, changing.join().unwrap())
    });
    println!("{:.2} Gb/s with {changes} changes, {report:?}", report.gigabits_per_second());
    assert!(changes > 50, "{changes} changes");
    assert!(report.retransmitted * 100 <= report.segments, "{report:?}");
}
