//! Connections to a Service that the node's kernel translates: those that repeat are opened by programs, where the pod sends them and behind the
//! translation, and what they send to another machine needs no worker either.

use std::thread::sleep;
use std::time::{Duration, Instant};

use penstock_bench::probe::{ProbeOutcome, Protocol};

use crate::faults::repeated::{METRICS, metric, repeated};
use crate::fixture::{pods, policy};
use crate::services::service::{BackendPath, ServiceFixture, WEB, run, service, translate};

/// The Service leads to `pod-1`, which admits only `pod-0`, or to `pod-2`, which admits nobody.
const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
const NOBODY: &str = "  ingress: []\n";
const ROUNDS: u64 = 10;
/// With a daemon a worker's word of what may leave counts for half a second less (`ALLOWED_FOR` in xdp-redirect/src/bpf/egress.h).
const LONGER_THAN_ALLOWED: Duration = Duration::from_millis(2600);

fn manifests(of_pod_1: &str) -> String {
    pods(3) + &policy("served", "pod-1", of_pod_1) + &policy("closed", "pod-2", NOBODY)
}

fn start(backend: BackendPath) -> ServiceFixture {
    let it = ServiceFixture::with(backend, |_, config| {
        config.offload = true;
        config.metrics = Some(METRICS);
        config.sections += "[fail]\non_exit = \"keep\"\n";
    });
    it.fixture.enforce(&manifests(ONLY_POD_0));
    it
}

/// A pod opens a connection to the Service by each way: by TCP and UDP, in both families.
fn open(it: &ServiceFixture, pod: &str, expected: ProbeOutcome, when: &str) {
    for v6 in [false, true] {
        for protocol in [Protocol::Tcp(WEB), Protocol::Udp(WEB)] {
            assert_eq!(it.probe(pod, v6, protocol), expected, "{pod}, {protocol}, IPv6: {v6}, {when}");
        }
    }
}

/// Packets that workers have got: of pods, and of those that the node's stack sends for them or to them.
fn visits(it: &ServiceFixture) -> u64 {
    ["redirected", "from_stack"].map(|outcome| with_outcome(it, outcome)).iter().sum()
}

fn with_outcome(it: &ServiceFixture, outcome: &str) -> u64 {
    let of_pod = |pod: &str| {
        let labels =
            format!("interface=\"veth-{pod}\",kind=\"pod\",namespace=\"test\",pod=\"{pod}\",outcome=\"{outcome}\"");
        metric(&it.fixture, &format!("penstock_port_program_total{{{labels}}}"))
    };
    ["pod-0", "pod-1", "pod-2"].map(of_pod).iter().sum()
}

#[test]
fn repeated_connections_to_a_service_meet_no_worker() {
    // Where a pod of the node answers, the stack sends it a connection of its own.
    for (backend, entries) in [(BackendPath::Here, 2), (BackendPath::Elsewhere, 1)] {
        let it = start(backend);
        open(&it, "test/pod-0", ProbeOutcome::Reached, "at first");
        let created = || metric(&it.fixture, "penstock_connection_events_total{event=\"created\"}");
        let (before, opened, visited, began) = (repeated(&it.fixture, 0), created(), visits(&it), Instant::now());
        for _ in 0..ROUNDS {
            open(&it, "test/pod-0", ProbeOutcome::Reached, "again");
        }
        let expected = ROUNDS * 4 * entries;
        let after = repeated(&it.fixture, before + expected);
        let all = (after - before, created() - opened);
        assert_eq!(all, (expected, expected), "{backend:?}: programs have opened all of them, and workers none");
        // The probe ends a connection by a RST, which is a worker's. A SYN that comes again would be, too; and where they leave for another
        // machine a packet of each way that comes two seconds after the last one.
        let (visited, resets) = (visits(&it) - visited, ROUNDS * 2 * entries);
        let others = resets / 2 + 4 * began.elapsed().as_secs() / 2;
        assert!(visited < resets + others, "{backend:?}: {visited} packets met a worker, of which {resets} were RST");
    }
}

#[test]
fn a_worker_sees_what_leaves_for_a_service_now_and_then() {
    let it = start(BackendPath::Elsewhere);
    open(&it, "test/pod-0", ProbeOutcome::Reached, "at first");
    let before = with_outcome(&it, "from_stack");
    sleep(LONGER_THAN_ALLOWED);
    open(&it, "test/pod-0", ProbeOutcome::Reached, "later");
    let seen = with_outcome(&it, "from_stack") - before;
    assert!(seen >= 4, "the rule that allows them has a hit for {seen} of 4 ways");
}

#[test]
fn a_repeated_connection_to_a_service_follows_policy_and_rules() {
    let it = start(BackendPath::Here);
    let node = it.fixture.cluster.node.namespace();
    let lead_to = |pod: &str| {
        run(node, "nft", &["flush", "ruleset"], "");
        translate(node, it.fixture.site(pod));
    };
    for round in 0..2 {
        open(&it, "test/pod-0", ProbeOutcome::Reached, &format!("allowed, round {round}"));
        let before = repeated(&it.fixture, 0);
        open(&it, "test/pod-0", ProbeOutcome::Reached, "again");
        repeated(&it.fixture, before + 8);
        open(&it, "test/pod-2", ProbeOutcome::Silent, "which pod-1 does not admit");
        lead_to("test/pod-2");
        open(&it, "test/pod-0", ProbeOutcome::Silent, "by another backend, which admits nobody");
        lead_to("test/pod-1");
        open(&it, "test/pod-0", ProbeOutcome::Reached, "by the first backend again");
        it.fixture.enforce(&manifests(NOBODY));
        open(&it, "test/pod-0", ProbeOutcome::Silent, "after a change of policy");
        it.fixture.enforce(&manifests(ONLY_POD_0));
    }
}

#[test]
fn without_a_daemon_connections_to_a_service_repeat() {
    for backend in [BackendPath::Here, BackendPath::Elsewhere] {
        let mut it = start(backend);
        open(&it, "test/pod-0", ProbeOutcome::Reached, "with a daemon");
        // That programs may open connections is said within a second.
        repeated(&it.fixture, 0);
        it.fixture.kill();
        sleep(LONGER_THAN_ALLOWED);
        for when in ["without a daemon", "and again"] {
            open(&it, "test/pod-0", ProbeOutcome::Reached, when);
            open(&it, "test/pod-2", ProbeOutcome::Silent, when);
        }
    }
}

#[test]
fn a_stop_renews_what_policy_still_allows_to_leave_for_a_service() {
    // Allows the packet as the pod sends it, and not as it leaves.
    let [v4, v6] = [false, true].map(service);
    let only_service = format!(
        "  policyTypes: [Egress]\n  egress: [{{to: [{{ipBlock: {{cidr: {v4}/32}}}}, {{ipBlock: {{cidr: '{v6}/128'}}}}]}}]\n"
    );
    // The changes come after the pod's last packet, and the daemon stops before its next one.
    for (change, expected) in [
        (policy("unrelated", "pod-2", "  policyTypes: [Egress]\n"), ProbeOutcome::Reached),
        (policy("denied", "pod-0", &only_service), ProbeOutcome::Silent),
    ] {
        let mut it = start(BackendPath::Elsewhere);
        open(&it, "test/pod-0", ProbeOutcome::Reached, "with a daemon");
        repeated(&it.fixture, 0);
        it.fixture.enforce(&(manifests(ONLY_POD_0) + &change));
        it.fixture.stop();
        open(&it, "test/pod-0", expected, "without a daemon");
    }
}
