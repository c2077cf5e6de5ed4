//! Two nodes joined in different ways: expected against observed, every cell.

use std::collections::BTreeMap;
use std::time::Duration;

use penstock_bench::judge::Expectation;
use penstock_bench::matrix::Matrix;
use penstock_bench::probe::Flow;

use crate::fixture::{Form, SERVICES, World};

const CLUSTER: &str = include_str!("two-nodes.yaml");

/// A policy that denies all ingress of the databases.
const CLOSED: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {namespace: shop, name: db}\n\
                      spec: {podSelector: {matchLabels: {app: db}}, ingress: []}\n";

/// Checks that the matrix has allowed and denied pairs, on one node and on two, in each family and protocol.
fn assert_telling(world: &World, matrix: &Matrix) {
    let mut cells: BTreeMap<(bool, bool, String), [usize; 2]> = BTreeMap::new();
    for entry in matrix.entries() {
        let probe = &entry.probe;
        let apart = world.node_of(probe.from) != world.node_of(probe.to);
        let denied = entry.expected != Expectation::Allowed;
        let key = (apart, probe.destination.is_ipv6(), probe.protocol.to_string());
        cells.entry(key).or_default()[usize::from(denied)] += 1;
    }
    for ((apart, v6, protocol), [allowed, denied]) in cells {
        println!("on two nodes: {apart}, IPv6: {v6}, {protocol}: {allowed} allowed, {denied} denied");
        assert!(allowed > 0 && denied > 0, "{protocol}, on two nodes: {apart}, IPv6: {v6}");
    }
}

fn every_cell_is_as_expected(form: Form) {
    let world = World::start(CLUSTER, form, &SERVICES);
    let matrix = world.matrix();
    assert_telling(&world, &matrix);
    world.assert_as_expected(&matrix);
    // By which path the denied packets arrived: through the uplink, except ICMP echo, which the kernel may translate;
    // or through the kernel and the host veth.
    for node in [0, 1] {
        let statistics = world.statistics(node);
        let denied = |port: &str| {
            let line = statistics.iter().find(|line| line.contains(port));
            line.is_some_and(|line| line.contains("ingress_denied"))
        };
        assert!(
            denied("(node)") && denied("(uplink)") == form.uplink,
            "{form:?}, node {node}:\n{}",
            statistics.join("\n")
        );
    }
    a_change_is_in_force_on_both(&world);
}

/// Changes a policy: connections between nodes are revoked, and all cells match the new policy.
fn a_change_is_in_force_on_both(world: &World) {
    let ports = [("shop/db-a", 9090), ("shop/db-b", 8080)];
    let pairs = [("shop/web-a", ports[1]), ("shop/web-b", ports[0]), ("shop/web-a", ports[0])];
    let flows = pairs.map(|(from, (to, port))| {
        let target = world.target(to, false);
        Flow::open(&world.site(from).namespace, target, port, Duration::from_secs(1)).unwrap()
    });
    flows.iter().for_each(|flow| flow.wait_for(10, Duration::from_secs(5)).unwrap());
    let without = CLUSTER.split("---\n").filter(|document| !document.contains("name: db}\nspec:\n  podSelector"));
    world.publish("all.yaml", &(without.collect::<Vec<_>>().join("---\n") + "---\n" + CLOSED));
    for (flow, (from, to)) in flows.iter().zip(pairs) {
        assert!(flow.wait_until_blocked(Duration::from_secs(5)).is_some(), "{from} to {to:?} goes on");
    }
    world.assert_as_expected(&world.matrix());
}

#[test]
fn on_two_nodes_every_pair_is_judged_as_policy_says_with_uplinks() {
    every_cell_is_as_expected(Form::routed(true));
}

#[test]
fn on_two_nodes_every_pair_is_judged_as_policy_says_by_the_kernels_routes_alone() {
    every_cell_is_as_expected(Form::routed(false));
}

#[test]
fn on_two_nodes_every_pair_is_judged_as_policy_says_through_a_tunnel() {
    every_cell_is_as_expected(Form::tunnelled());
}

#[test]
fn on_two_nodes_every_pair_is_judged_as_policy_says_with_pods_on_bridges() {
    every_cell_is_as_expected(Form::bridged());
}
