//! Two nodes joined in different ways: expected against observed, every cell.

use std::collections::BTreeMap;
use std::time::Duration;

use penstock_bench::expectation::Expectation;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::EchoConnection;

use crate::nodes::fixture::{Fixture, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");

/// A policy that denies all ingress of the databases.
const CLOSED: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: shop, name: db}\n\
                      spec: {podSelector: {matchLabels: {app: db}}, ingress: []}\n";

/// Checks that the matrix has allowed and denied pairs, on one node and on two, in each family and protocol.
fn assert_telling(fixture: &Fixture, matrix: &Matrix) {
    let mut cells: BTreeMap<(bool, bool, String), [usize; 2]> = BTreeMap::new();
    for entry in matrix.entries() {
        let probe = &entry.probe;
        let apart = fixture.node_of(probe.from) != fixture.node_of(probe.to);
        let denied = entry.expected != Expectation::Allowed;
        let key = (apart, probe.destination.is_ipv6(), probe.protocol.to_string());
        cells.entry(key).or_default()[usize::from(denied)] += 1;
    }
    for ((apart, v6, protocol), [allowed, denied]) in cells {
        println!("on two nodes: {apart}, IPv6: {v6}, {protocol}: {allowed} allowed, {denied} denied");
        assert!(allowed > 0 && denied > 0, "{protocol}, on two nodes: {apart}, IPv6: {v6}");
    }
}

fn every_cell_is_as_expected(wiring: Wiring) {
    let fixture = Fixture::start(CLUSTER, wiring, &SERVICES);
    let matrix = fixture.matrix();
    assert_telling(&fixture, &matrix);
    fixture.assert_as_expected(&matrix);
    for node in [0, 1] {
        let statistics = fixture.statistics(node);
        let is_denied = |line: &String| line.contains("(node)") && line.contains("ingress_denied");
        assert!(statistics.iter().any(is_denied), "{wiring:?}, node {node}:\n{}", statistics.join("\n"));
    }
    a_change_is_in_force_on_both(&fixture);
}

/// Changes a policy: connections between nodes are revoked, and all cells match the new policy.
fn a_change_is_in_force_on_both(fixture: &Fixture) {
    let ports = [("shop/db-a", 9090), ("shop/db-b", 8080)];
    let pairs = [("shop/web-a", ports[1]), ("shop/web-b", ports[0]), ("shop/web-a", ports[0])];
    let flows = pairs.map(|(from, (to, port))| {
        let target = fixture.target(to, false);
        EchoConnection::open(&fixture.site(from).namespace, target, port, Duration::from_secs(1)).unwrap()
    });
    flows.iter().for_each(|flow| flow.wait_for(10, Duration::from_secs(30)).unwrap());
    let without = CLUSTER.split("---\n").filter(|document| !document.contains("name: db}\nspec:\n  podSelector"));
    fixture.publish("all.yaml", &(without.collect::<Vec<_>>().join("---\n") + "---\n" + CLOSED));
    for (flow, (from, to)) in flows.iter().zip(pairs) {
        assert!(flow.wait_until_blocked(Duration::from_secs(30)).is_some(), "{from} to {to:?} goes on");
    }
    fixture.assert_as_expected(&fixture.matrix());
}

#[test]
fn every_pair_of_two_nodes_gets_its_verdict_kernel_routing() {
    every_cell_is_as_expected(Wiring::routed());
}

#[test]
fn every_pair_of_two_nodes_gets_its_verdict_by_tunnel() {
    every_cell_is_as_expected(Wiring::tunnelled());
}

#[test]
fn every_pair_of_two_nodes_gets_its_verdict_on_bridges() {
    every_cell_is_as_expected(Wiring::bridged());
}
