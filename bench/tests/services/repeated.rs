//! Connections to a Service that the node's kernel translates: those that repeat are opened by programs, on both sides of the translation.

use std::net::SocketAddr;

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{Attach, KubeProxy, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol};

use crate::faults::repeated::{METRICS, metric, repeated};
use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{BackendPath, ServiceFixture, WEB, service, translate};

const ONLY_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
const NOBODY: &str = "  ingress: []\n";
/// Connections of a pod to the Service in each round: TCP and UDP, in both families.
const ROUND: u64 = 4;

fn manifests(spec: &str) -> String {
    pods(3) + &policy("served", "pod-1", spec)
}

fn start(backend: BackendPath) -> ServiceFixture {
    ServiceFixture::with(backend, |_, config| {
        config.attach = Attach::Tcx;
        config.offload = true;
        config.metrics = Some(METRICS);
        config.sections += "[fail]\non_exit = \"keep\"\n";
    })
}

fn ways() -> impl Iterator<Item = (bool, Protocol)> {
    [false, true].into_iter().flat_map(|v6| [(v6, Protocol::Tcp(WEB)), (v6, Protocol::Udp(WEB))])
}

/// A pod opens a connection to the Service by each way.
fn round(it: &ServiceFixture, pod: &str, expected: ProbeOutcome, when: &str) {
    for (v6, protocol) in ways() {
        assert_eq!(it.probe(pod, v6, protocol), expected, "{pod}, {protocol}, IPv6: {v6}, {when}");
    }
}

/// Packets that programs have left to workers.
fn visits(it: &ServiceFixture) -> u64 {
    ["redirected", "from_stack"]
        .map(|outcome| {
            let page = it.fixture.http(METRICS, "/metrics");
            let of_outcome = |line: &&str| line.starts_with("penstock_port_program_total") && line.contains(outcome);
            page.lines().filter(of_outcome).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
        })
        .iter()
        .sum::<f64>() as u64
}

fn created(it: &ServiceFixture) -> u64 {
    metric(&it.fixture, "penstock_connection_events_total{event=\"created\"}")
}

#[test]
fn repeated_connections_to_a_service_meet_no_worker() {
    // The node's stack sends each to a pod of the node, which is a connection of its own there, or elsewhere.
    for (backend, entries) in [(BackendPath::Here, 2), (BackendPath::Elsewhere, 1)] {
        let it = start(backend);
        round(&it, "test/pod-0", ProbeOutcome::Reached, "at first");
        let (before, opened, visited) = (repeated(&it.fixture, 0), created(&it), visits(&it));
        for _ in 0..10 {
            round(&it, "test/pod-0", ProbeOutcome::Reached, "again");
        }
        let expected = 10 * ROUND * entries;
        let after = repeated(&it.fixture, before + expected);
        println!("VISITS {backend:?} {} CREATED {} REPEATED {}", visits(&it) - visited, created(&it) - opened, after - before);
        assert_eq!(
            (after - before, created(&it) - opened),
            (expected, expected),
            "{backend:?}: programs have opened all of them, and workers none"
        );
    }
}
