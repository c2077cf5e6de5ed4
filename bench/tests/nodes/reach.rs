//! Reachability beyond single packets between pods: pods with two addresses of a family, processes on nodes, and bulk
//! transfers over every kind of path between nodes.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use penstock_bench::load::transfer;
use penstock_bench::probe::Site;
use penstock_bench::testbed::{InterNodeLink, Offload};

use crate::nodes::fixture::{Fixture, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");

/// Pods `twice-a` on one node and `twice-b` on the other have two addresses of each family. `twice-a` may reach `web-a`
/// and `db-b`; `twice-b` may not.
fn pods_with_two_addresses() -> String {
    let pod = |node: char, number: u8| {
        let network = if node == 'a' { 1 } else { 2 };
        let addresses = [number, number + 1]
            .map(|host| format!("{{ip: 10.244.{network}.{host}}}, {{ip: \"fd00:10:244:{network}::{host}\"}}"));
        format!(
            "---\napiVersion: v1\nkind: Pod\nmetadata: {{namespace: ops, name: twice-{node}, labels: {{app: twice-{node}}}}}\n\
             spec: {{nodeName: node-{node}, containers: [{{name: main, image: example.invalid/test}}]}}\n\
             status: {{phase: Running, podIPs: [{}]}}\n",
            addresses.join(", ")
        )
    };
    let policy = |of: &str| {
        format!(
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: shop, name: {of}-from-twice}}\n\
             spec:\n  podSelector: {{matchLabels: {{app: {of}}}}}\n  ingress:\n    \
             - from: [{{namespaceSelector: {{}}, podSelector: {{matchLabels: {{app: twice-a}}}}}}]\n"
        )
    };
    [CLUSTER, &pod('a', 40), &pod('b', 50), &policy("web"), &policy("db")].concat()
}

/// Whether a datagram from this address of a site arrives at another site.
fn arrives(from: &Site, source: IpAddr, to: &Site) -> bool {
    const PORT: u16 = 7000;
    let there = SocketAddr::new(to.address(source.is_ipv6()).unwrap(), PORT);
    let receiver = to.namespace.udp(there).unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let sender = from.namespace.udp((source, 0)).unwrap();
    (0..3).any(|_| {
        sender.send_to(b"from here", there).unwrap();
        let mut bytes = [0; 64];
        receiver.recv_from(&mut bytes).is_ok_and(|(length, by)| &bytes[..length] == b"from here" && by.ip() == source)
    })
}

#[test]
fn every_address_of_a_pod_gets_its_policy_on_both_nodes() {
    let fixture = Fixture::start(&pods_with_two_addresses(), Wiring::routed(), &SERVICES);
    // As destinations.
    fixture.assert_as_expected(&fixture.matrix());
    // As sources.
    for (from, allowed) in [("ops/twice-a", true), ("ops/twice-b", false)] {
        let from = fixture.site(from);
        assert_eq!(from.addresses.len(), 4);
        for to in ["shop/web-a", "shop/web-b", "shop/db-a", "shop/db-b"] {
            for &source in &from.addresses {
                assert_eq!(arrives(from, source, fixture.site(to)), allowed, "{} ({source}) to {to}", from.name);
            }
        }
    }
}

/// From pod to pod, from a node process to a pod, and from a pod to a node process.
const TRANSFERS: [(&str, &str); 4] = [
    ("ops/lab-b", "ops/monitor-a"),
    ("node-a", "ops/lab-b"),
    ("ops/monitor-a", "node-b"),
    ("shop/web-b", "ops/monitor-a"),
];

fn bulk_arrives(wiring: Wiring, prepare: impl Fn(&Fixture)) {
    // Without policies: only the path matters here.
    let open: Vec<&str> = CLUSTER.split("---\n").filter(|document| !document.contains("NetworkPolicy")).collect();
    let fixture = Fixture::start(&open.join("---\n"), wiring, &SERVICES);
    prepare(&fixture);
    for (from, to) in TRANSFERS {
        let (from, to) = (fixture.site(from), fixture.site(to));
        for v6 in [false, true] {
            let report = transfer(&from.namespace, &to.namespace, to.address(v6).unwrap(), 10_000_000);
            assert!(report.is_ok(), "{wiring:?}, {} to {}: {report:?}\n{}", from.name, to.name, fixture.logs());
            let report = report.unwrap();
            println!(
                "{} to {} (IPv6: {v6}): {:.2} Gb/s, {} of {} segments sent again",
                from.name,
                to.name,
                report.gigabits_per_second(),
                report.retransmitted,
                report.segments
            );
            assert!(report.retransmitted_share() < 0.05, "{wiring:?}, {} to {}: {report:?}", from.name, to.name);
        }
    }
    for node in 0..fixture.daemons.len() {
        let statistics = fixture.statistics(node).join("\n");
        assert!(!statistics.contains("too_big"), "segments that nobody had cut were dropped: {wiring:?}\n{statistics}");
    }
}

#[test]
fn bulk_between_nodes_is_unchanged_with_kernel_routing() {
    bulk_arrives(Wiring::routed(), |_| {});
}

/// Packets from the wire may have been coalesced (GRO).
#[test]
fn bulk_between_nodes_is_unchanged_through_a_routed_tunnel() {
    for gro in [false, true] {
        bulk_arrives(Wiring::tunnelled(), |fixture| {
            for (_, node) in &fixture.nodes.nodes {
                node.namespace().set_offload(InterNodeLink::Routes.uplink(), Offload::Gro, gro).unwrap();
            }
        });
    }
}
