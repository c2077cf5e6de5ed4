//! Connections that repeat: programs open them like those that workers have opened, with a daemon and without.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::cluster::Cluster;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::faults::traffic::Sniffer;
use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const METRICS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9464);
pub(super) const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
pub(super) const NOBODY: &str = "  ingress: []\n";
/// A pod's part of a table with 4096 entries, of which a quarter is its share: a sixteenth of that, and a quarter without a daemon.
const CREDIT: usize = 64 + 256;
const REPEATED: &str = "penstock_connection_events_total{event=\"repeated\"}";

pub(super) fn manifests(spec: &str) -> String {
    pods(3) + &policy("served", "pod-1", spec)
}

/// Three pods, of which the second admits only the first. `fail`: settings of this section.
fn fixture(fail: &str) -> Fixture {
    fixture_with(fail, |_| ())
}

/// The same, with more beside the pods.
fn fixture_with(fail: &str, prepare: impl FnOnce(&mut Cluster)) -> Fixture {
    Fixture::of(&manifests(ONLY_POD_0), |cluster, config| {
        prepare(cluster);
        config.offload = true;
        config.metrics = Some(METRICS);
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\n");
        config.sections += &format!("[fail]\non_exit = \"keep\"\n{fail}\n");
    })
}

pub(super) fn outcome(fixture: &Fixture, from: &str, to: &str, protocol: Protocol) -> ProbeOutcome {
    let once = RetryPolicy { timeout: Duration::from_millis(500), attempts: 1 };
    probe::run_one(fixture.site(from), fixture.target(to, false), protocol, once).unwrap()
}

/// The sum of a metric's samples that begin like this.
pub(crate) fn metric(fixture: &Fixture, name: &str) -> u64 {
    let deadline = Instant::now() + LIMIT;
    loop {
        // Empty if a busy machine keeps the daemon from answering.
        let page = fixture.http(METRICS, "/metrics");
        if page.trim_end().ends_with("# EOF") {
            let samples = page.lines().filter(|line| line.starts_with(name));
            return samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).sum();
        }
        assert!(Instant::now() < deadline, "no metrics: {page}");
    }
}

/// Connections that programs have opened, once the daemon has heard of at least so many.
pub(crate) fn repeated(fixture: &Fixture, least: u64) -> u64 {
    let deadline = Instant::now() + LIMIT;
    loop {
        let count = metric(fixture, REPEATED);
        if count >= least {
            return count;
        }
        assert!(Instant::now() < deadline, "{count} of {least}");
    }
}

const TCP: Protocol = Protocol::Tcp(8080);
const UDP: Protocol = Protocol::Udp(53);

#[test]
fn repeated_connections_meet_no_worker_until_policy_changes() {
    let fixture = fixture("");
    for protocol in [TCP, UDP] {
        assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
    }
    let before = repeated(&fixture, 0);
    let rules = || metric(&fixture, "penstock_connection_events_total{event=\"created\"}");
    let created = rules();
    for _ in 0..10 {
        for protocol in [TCP, UDP] {
            assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
        }
        assert_eq!(outcome(&fixture, "test/pod-2", "test/pod-1", TCP), ProbeOutcome::Silent, "no policy allows it");
    }
    let after = repeated(&fixture, before + 20);
    assert_eq!((after, rules()), (before + 20, created + 20), "all of them, and workers have opened none");
    // The answers are of the policy before.
    for round in 0..3 {
        fixture.enforce(&manifests(NOBODY));
        for protocol in [TCP, UDP] {
            let now = outcome(&fixture, "test/pod-0", "test/pod-1", protocol);
            assert_eq!(now, ProbeOutcome::Silent, "{protocol:?}, change {round}");
        }
        fixture.enforce(&manifests(ONLY_POD_0));
        for protocol in [TCP, UDP] {
            assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
        }
    }
}

/// The node's own connections are workers' to see: Kubernetes exempts its processes from policy, and not who sends with its address.
#[test]
fn connections_from_another_machine_repeat_and_the_nodes_do_not() {
    let mut outside = None;
    let mut fixture = fixture_with("", |cluster| outside = Some(cluster.node.add_outside("outside").unwrap()));
    let machine = Site::from(outside.as_ref().unwrap());
    let node = Site::from(&fixture.cluster.node);
    let admitted = format!("  ingress: [{{from: [{{ipBlock: {{cidr: {}/32}}}}]}}]\n", machine.address(false).unwrap());
    fixture.enforce(&manifests(&admitted));
    let once = RetryPolicy { timeout: Duration::from_millis(500), attempts: 1 };
    let outcome = |fixture: &Fixture, from: &Site, protocol| {
        probe::run_one(from, fixture.target("test/pod-1", false), protocol, once).unwrap()
    };
    let all_reach = |fixture: &Fixture, from: &Site, rounds| {
        for protocol in (0..rounds).flat_map(|_| [TCP, UDP]) {
            assert_eq!(outcome(fixture, from, protocol), ProbeOutcome::Reached, "{} {protocol:?}", from.name);
        }
    };
    all_reach(&fixture, &machine, 1);
    let before = repeated(&fixture, 0);
    all_reach(&fixture, &node, 5);
    all_reach(&fixture, &machine, 10);
    assert_eq!(repeated(&fixture, before + 20), before + 20, "all from the machine alone");
    let denied = outcome(&fixture, fixture.site("test/pod-0"), TCP);
    assert_eq!(denied, ProbeOutcome::Silent, "no policy allows it");
    fixture.enforce(&manifests(NOBODY));
    for protocol in [TCP, UDP] {
        assert_eq!(outcome(&fixture, &machine, protocol), ProbeOutcome::Silent, "{protocol:?} under the next policy");
    }
    fixture.enforce(&manifests(&admitted));
    all_reach(&fixture, &machine, 1);
    repeated(&fixture, before + 20);
    fixture.kill();
    all_reach(&fixture, &machine, 2);
    let unseen = probe::run_one(&machine, fixture.target("test/pod-2", false), TCP, once).unwrap();
    assert_eq!(unseen, ProbeOutcome::Silent, "without a daemon");
}

#[test]
fn without_a_daemon_connections_that_repeat_open_and_no_others() {
    for (fail, expected) in [("", ProbeOutcome::Reached), ("repeat_answers = \"0s\"", ProbeOutcome::Silent)] {
        let mut fixture = fixture(fail);
        for protocol in [TCP, UDP] {
            assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
        }
        // That programs may open connections is said within a second.
        repeated(&fixture, 0);
        fixture.kill();
        let check = |when: &str| {
            for protocol in [TCP, UDP] {
                let now = outcome(&fixture, "test/pod-0", "test/pod-1", protocol);
                assert_eq!(now, expected, "{fail}: {protocol:?} {when}");
            }
            let unseen = [("test/pod-0", "test/pod-1", Protocol::Tcp(9090)), ("test/pod-0", "test/pod-2", TCP)];
            for (from, to, protocol) in unseen.into_iter().chain([("test/pod-2", "test/pod-1", TCP)]) {
                let now = outcome(&fixture, from, to, protocol);
                assert_eq!(now, ProbeOutcome::Silent, "{fail}: {from} to {to}, {protocol:?} {when}");
            }
        };
        check("at once");
        check("and again");
        fixture.restart();
        for protocol in [TCP, UDP] {
            assert_eq!(outcome(&fixture, "test/pod-0", "test/pod-1", protocol), ProbeOutcome::Reached);
        }
        let denied = outcome(&fixture, "test/pod-2", "test/pod-1", TCP);
        assert_eq!(denied, ProbeOutcome::Silent, "the next daemon");
    }
}

/// Without a daemon nobody gives a pod more.
#[test]
fn a_flood_of_repeated_connections_ends_at_the_pods_credit() {
    let mut fixture = fixture("");
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let from = fixture.site("test/pod-0");
    let datagram = [0; 16];
    let send = |port: u16| {
        let local = SocketAddr::new(from.address(false).unwrap(), port);
        let socket = from.namespace.udp(local).unwrap();
        // An error is that of an earlier one.
        let _ = socket.send_to(&datagram, to);
    };
    // The worker leaves its answer a moment after it has sent the first datagram on.
    let opens = |port| {
        send(port);
        metric(&fixture, REPEATED) > 0
    };
    assert!((30_000..30_900).any(opens), "no program opens one like it");
    let namespace = from.namespace.clone();
    fixture.kill();
    let local = fixture.site("test/pod-0").address(false).unwrap();
    for port in 31_000..31_000 + 2 * CREDIT as u16 {
        let socket = namespace.udp(SocketAddr::new(local, port)).unwrap();
        let _ = socket.send_to(&datagram, to);
    }
    let arrived = sniffer.stop().into_keys().filter(|port| *port >= 31_000).count();
    assert!(arrived > 0 && arrived <= CREDIT, "{arrived} of {}", 2 * CREDIT);
}
