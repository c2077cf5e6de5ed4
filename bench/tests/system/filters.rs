//! Programs as filters of clsact qdiscs, as on kernels before Linux 6.6: anybody may delete one or put another before it.

use std::net::SocketAddr;
use std::process::Output;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{DaemonConfig, penstock_binary};

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(20);
/// cBPF that returns 0: TC_ACT_OK, with which no later filter runs.
const ACCEPTING: &str = "protocol all bpf da bytecode 1,6\u{a0}0\u{a0}0\u{a0}0";
/// A filter of another kind, with the same result.
const CLASSIFYING: &str = "protocol all u32 match u32 0 0 flowid 1:1";
/// As the CNI plugin `bandwidth` limits what a pod sends: it leaves by another interface.
const DIVERTING: &str = "protocol all u32 match u32 0 0 action mirred egress redirect dev sent";

fn by_filters(config: &mut DaemonConfig) {
    config.environment.push(("FORCE_CLSACT".into(), "1".into()));
}

/// `test/pod-1` takes TCP 8080 of `test/pod-0` alone, and sends nothing.
fn manifests() -> String {
    let only = "  policyTypes: [Ingress, Egress]\n  \
                ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], ports: [{port: 8080}]}]\n";
    pods(3) + &policy("only", "pod-1", only)
}

fn start(before: impl FnOnce(&Fixture, &str)) -> Fixture {
    let mut fixture = Fixture::of(&manifests(), |_, config| {
        by_filters(config);
        config.metrics = Some("127.0.0.1:9100".parse().unwrap());
    });
    fixture.stop();
    before(&fixture, &interface_of(&fixture, "test/pod-1"));
    fixture.restart();
    fixture
}

fn interface_of(fixture: &Fixture, pod: &str) -> String {
    fixture.cluster.node.pod(pod).unwrap().interface().to_owned()
}

/// Runs a program of iproute2 on the node. A no-break space is part of a word.
fn run(fixture: &Fixture, line: &str) -> Output {
    let mut words = line.split(' ').map(|word| word.replace('\u{a0}', " "));
    let mut command = fixture.cluster.node.namespace().command(words.next().unwrap());
    command.args(words).output().unwrap()
}

fn on_node(fixture: &Fixture, line: &str) -> String {
    let output = run(fixture, line);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Names of the BPF filters of a hook and kinds of others, in the order in which they run.
fn filters(fixture: &Fixture, interface: &str, hook: &str) -> Vec<String> {
    let shown = run(fixture, &format!("tc filter show dev {interface} {hook}"));
    let shown = String::from_utf8(shown.stdout).unwrap();
    let lines = shown.lines().filter(|line| line.contains(" handle 0x") || line.contains(" fh 800::"));
    let word_after = |line: &str, word: &str| {
        line.split_whitespace().skip_while(|it| *it != word).nth(1).unwrap_or_default().to_owned()
    };
    lines
        .map(|line| match line.split_whitespace().find(|word| word.starts_with("penstock_")) {
            Some(name) => name.to_owned(),
            None => {
                word_after(line, "pref") + line.split_whitespace().find(|it| ["bpf", "u32"].contains(it)).unwrap_or("")
            }
        })
        .collect()
}

#[track_caller]
fn wait_until(what: &str, fixture: &Fixture, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}\n{}", fixture.daemon.log().lines().join("\n"));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn outcome(fixture: &Fixture, from: &str, to: &str, protocol: Protocol) -> ProbeOutcome {
    let patience = RetryPolicy { timeout: Duration::from_millis(500), attempts: 2 };
    probe::run_one(fixture.site(from), fixture.target(to, false), protocol, patience).unwrap()
}

/// Policy holds on what `test/pod-1` receives, and on what it sends.
#[track_caller]
fn assert_enforced(fixture: &Fixture) {
    let cases = [
        ("test/pod-0", "test/pod-1", Protocol::Tcp(8080), ProbeOutcome::Reached),
        ("test/pod-0", "test/pod-1", Protocol::Tcp(9090), ProbeOutcome::Silent),
        ("test/pod-2", "test/pod-1", Protocol::Tcp(8080), ProbeOutcome::Silent),
        ("test/pod-1", "test/pod-2", Protocol::Udp(53), ProbeOutcome::Silent),
        ("test/pod-2", "test/pod-0", Protocol::Udp(53), ProbeOutcome::Reached),
    ];
    for (from, to, protocol, expected) in cases {
        let seen = outcome(fixture, from, to, protocol);
        assert_eq!(seen, expected, "{from} to {to}, {protocol}:\n{}", fixture.daemon.log().lines().join("\n"));
    }
}

fn restored(fixture: &Fixture) -> u64 {
    let metrics = fixture.http(SocketAddr::from(([127, 0, 0, 1], 9100)), "/metrics");
    let line = metrics.lines().find(|line| line.starts_with("penstock_filters_restored_total ")).expect("the counter");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn with_filters_the_demos_packets_match_its_policies() {
    let fixture = Fixture::demo_with(by_filters);
    fixture.assert_as_expected(&fixture.matrix());
}

#[test]
fn a_deleted_qdisc_or_filter_is_put_back_at_once() {
    let fixture = start(|_, _| {});
    let interface = interface_of(&fixture, "test/pod-1");
    let is_whole = || {
        filters(&fixture, &interface, "ingress") == ["penstock_from_pod"]
            && filters(&fixture, &interface, "egress") == ["penstock_to_pod"]
    };
    let deletions = [
        format!("tc qdisc del dev {interface} clsact"),
        format!("tc filter del dev {interface} ingress"),
        format!("tc filter del dev {interface} egress"),
        format!("tc filter replace dev {interface} egress prio 1 handle 1 {ACCEPTING}"),
    ];
    for deletion in deletions {
        wait_until("both filters", &fixture, is_whole);
        let seen = fixture.daemon.log().len();
        let before = restored(&fixture);
        on_node(&fixture, &deletion);
        let line = fixture.daemon.log().wait_for_after(seen, "it was put back", LIMIT).unwrap();
        assert!(line.contains(&interface) && line.contains("penstock_"), "{line}");
        assert_eq!(filters(&fixture, &interface, "egress").first().unwrap(), "penstock_to_pod", "{deletion}");
        assert!(restored(&fixture) > before, "{deletion}");
        assert_enforced(&fixture);
        if deletion.contains("replace") {
            on_node(&fixture, &format!("tc filter del dev {interface} egress prio 1 handle 1 bpf"));
        }
    }
}

#[test]
fn others_filters_run_behind_whenever_they_were_added() {
    let fixture = start(|fixture, interface| {
        on_node(fixture, &format!("tc qdisc add dev {interface} clsact"));
        on_node(fixture, &format!("tc filter add dev {interface} ingress prio 1 {ACCEPTING}"));
        on_node(fixture, &format!("tc filter add dev {interface} egress prio 7 {CLASSIFYING}"));
    });
    let interface = interface_of(&fixture, "test/pod-1");
    assert_eq!(filters(&fixture, &interface, "ingress"), ["penstock_from_pod", "1bpf"]);
    assert_eq!(filters(&fixture, &interface, "egress"), ["penstock_to_pod", "7u32"]);
    assert_enforced(&fixture);
    on_node(&fixture, &format!("tc filter add dev {interface} ingress prio 1 {ACCEPTING}"));
    wait_until("ours is the first again", &fixture, || {
        filters(&fixture, &interface, "ingress") == ["penstock_from_pod", "1bpf", "1bpf"]
    });
    assert_enforced(&fixture);
    assert!(fixture.status().not_enforced.is_empty(), "{:?}", fixture.status().not_enforced);
}

#[test]
fn a_filter_that_nothing_can_precede_is_reported_with_its_pod() {
    let fixture = start(|fixture, interface| {
        on_node(fixture, &format!("tc qdisc add dev {interface} clsact"));
        on_node(fixture, &format!("tc filter add dev {interface} egress prio 1 {CLASSIFYING}"));
    });
    let interface = interface_of(&fixture, "test/pod-1");
    let reported =
        || fixture.status().not_enforced.iter().any(|one| one.reason.contains("a u32 filter of somebody else"));
    wait_until("it is reported", &fixture, reported);
    let of_pod = fixture.status().not_enforced.into_iter().find(|one| one.pod.as_deref() == Some("test/pod-1"));
    assert!(of_pod.unwrap().reason.contains(&interface));
    on_node(&fixture, &format!("tc filter del dev {interface} egress prio 1"));
    wait_until("it is no longer reported", &fixture, || !reported());
    assert_enforced(&fixture);
}

#[test]
fn a_limit_on_what_a_pod_sends_is_kept_behind_the_filter() {
    let fixture = start(|fixture, interface| {
        let lines = [
            "ip link add sent type ifb".to_owned(),
            "ip link set sent up".to_owned(),
            format!("tc qdisc add dev {interface} handle ffff: ingress"),
            format!("tc filter add dev {interface} parent ffff: prio 1 {DIVERTING}"),
            "tc qdisc add dev sent root tbf rate 1gbit burst 1mb latency 100ms".to_owned(),
            format!("tc qdisc add dev {interface} root tbf rate 1gbit burst 1mb latency 100ms"),
        ];
        lines.iter().for_each(|line| drop(on_node(fixture, line)));
    });
    let interface = interface_of(&fixture, "test/pod-1");
    assert_eq!(filters(&fixture, &interface, "ingress"), ["penstock_from_pod", "2u32"]);
    let program = fixture.status().ports.into_iter().find(|port| port.interface == interface).map(|port| port.program);
    assert_eq!(program.as_deref(), Some("clsact"));
    assert_eq!(filters(&fixture, &interface, "egress"), ["penstock_to_pod"]);
    let passed = |of: &str| {
        let shown = on_node(&fixture, &format!("tc -s qdisc show dev {of} root"));
        let words: Vec<&str> = shown.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "pkt").unwrap_or_else(|| panic!("{shown}"));
        words[at - 1].parse::<u64>().unwrap()
    };
    let before = [passed("sent"), passed(&interface)];
    assert_enforced(&fixture);
    assert!(passed("sent") > before[0] && passed(&interface) > before[1], "its packets meet both limits");
}

/// The CNI plugin `bandwidth` adds an `ingress` qdisc and fails if there is a `clsact` qdisc. The runtime then deletes the pod's sandbox.
#[test]
fn a_new_pod_stays_closed_when_the_plugin_bandwidth_fails() {
    let mut fixture = start(|_, _| {});
    let seen = fixture.daemon.log().len();
    let interface =
        fixture.cluster.node.add_pod("test/new", &[[10, 244, 1, 99].into()]).unwrap().interface().to_owned();
    fixture.daemon.log().wait_for_after(seen, "closed until its pod is known", LIMIT).unwrap();
    let limited = run(&fixture, &format!("tc qdisc add dev {interface} handle ffff: ingress"));
    assert!(!limited.status.success(), "a clsact qdisc has its place");
    assert_eq!(filters(&fixture, &interface, "ingress"), ["penstock_from_pod"]);
    assert_eq!(filters(&fixture, &interface, "egress"), ["penstock_to_pod"]);
}

#[test]
fn filters_outlast_a_kill_and_are_taken_over() {
    let mut fixture = start(|_, _| {});
    let interface = interface_of(&fixture, "test/pod-1");
    fixture.kill();
    let all_silent = |fixture: &Fixture| {
        // Another port than before: the programs open what a worker has opened.
        assert_eq!(outcome(fixture, "test/pod-0", "test/pod-1", Protocol::Tcp(8080)), ProbeOutcome::Silent);
        assert_eq!(outcome(fixture, "test/pod-1", "test/pod-2", Protocol::Udp(53)), ProbeOutcome::Silent);
    };
    all_silent(&fixture);
    fixture.restart();
    assert_enforced(&fixture);
    let earlier = fixture.take_over();
    assert_enforced(&fixture);
    // The process that handed over does not put its own programs back.
    let seen = fixture.daemon.log().len();
    on_node(&fixture, &format!("tc qdisc del dev {interface} clsact"));
    fixture.daemon.log().wait_for_after(seen, "it was put back", LIMIT).unwrap();
    assert_enforced(&fixture);
    assert!(!earlier.log().lines().iter().any(|line| line.contains("it was put back")));
    drop(earlier);
    fixture.stop();
    assert_eq!(run(&fixture, "tc qdisc show").status.code(), Some(0));
    let shown = on_node(&fixture, "tc qdisc show");
    assert!(!shown.contains("clsact"), "{shown}");
}

#[test]
fn open_pods_and_cleanup_leave_no_filter() {
    let mut fixture = Fixture::of(&manifests(), |_, config| {
        by_filters(config);
        config.sections += "[fail]\nmode = \"open\"\n";
    });
    let interface = interface_of(&fixture, "test/pod-1");
    fixture.kill();
    wait_until("without a daemon its pods are open", &fixture, || {
        outcome(&fixture, "test/pod-2", "test/pod-1", Protocol::Tcp(9090)) == ProbeOutcome::Reached
    });
    fixture.restart();
    assert_enforced(&fixture);
    fixture.kill();
    assert_eq!(filters(&fixture, &interface, "egress"), ["penstock_to_pod"]);
    let mut cleanup = fixture.cluster.node.namespace().command(penstock_binary().unwrap());
    let output = cleanup.args(["cleanup", "--config"]).arg(fixture.daemon.config()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!on_node(&fixture, "tc qdisc show").contains("clsact"));
}
