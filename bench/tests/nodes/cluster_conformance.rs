//! The conformance cases of ClusterNetworkPolicy as packets between pods, nodes and machines outside of the cluster: every
//! row of the suite is sent.
//!
//! Nodes have the addresses of the cases, on their loopback. A pod of the host network is its node. Most cases run on
//! three nodes that read manifests. A case in which an address passes from a finished pod to another has a cluster of
//! its own, since a testbed's pod keeps its address. Cases that manifests may not contain come from an API server.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use penstock_bench::cluster::MultiNodeCluster;
use penstock_bench::conformance::send_between;
use penstock_bench::probe::{EchoServers, Site};
use penstock_bench::testbed::api_server::{Account, ApiServer};
use penstock_bench::testbed::{Daemon, Namespace, Netlink, Node, Outside, Privileges, RouteVia};
use serde_json::{Value, json};

use crate::nodes::conformance::{documents, send, wait_until_adopted};
use crate::nodes::fixture::{Fixture, Wiring};
use crate::nodes::suite::{Case, EndKind, Participants, Suite, Tally, suite};

/// One case in so many is run by the short test.
const SHARE: usize = 8;
/// Cases that the short test runs as well: to and from nodes and outside, in both families, and SCTP.
const ALWAYS: [&str; 4] =
    ["CNPAdminTierEgressNodePeers/ipv6", "own/networks-and-pods", "own/own-node", "own/tiers-over-networkpolicy"];

/// Nodes as the testbed wires them; the cases' own addresses come on top.
fn wired_nodes(names: impl Iterator<Item = impl AsRef<str>>) -> impl Iterator<Item = Value> {
    (1..).zip(names).map(|(number, name)| {
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name.as_ref()},
            "status": {"addresses": [
                {"type": "InternalIP", "address": format!("172.18.{number}.2")},
                {"type": "InternalIP", "address": format!("fd00:172:18:{number}::2")},
            ]},
        })
    })
}

fn of_family(addresses: &[IpAddr], address: IpAddr) -> IpAddr {
    addresses.iter().copied().find(|own| own.is_ipv6() == address.is_ipv6()).expect("an address of each family")
}

/// Gives a machine behind a router another address, which is a site of its own. `own` are those by which the router
/// reaches it.
fn add_address(
    (namespace, interface): (&Namespace, &str),
    own: &[IpAddr],
    (router, link): (&Netlink, u32),
    address: IpAddr,
) -> Site {
    let inside = namespace.netlink().unwrap();
    inside.add_address(inside.index(interface).unwrap(), IpNet::from(address)).unwrap();
    router.add_route(IpNet::from(address), link, RouteVia::Gateway(of_family(own, address))).unwrap();
    Site { name: address.to_string(), namespace: namespace.clone(), addresses: vec![address] }
}

/// Adds the addresses of machines outside of the cluster.
fn add_outside(outside: &Outside, router: &Netlink, addresses: &BTreeSet<IpAddr>) -> Vec<Site> {
    let link = router.index(outside.interface()).unwrap();
    let machine = (outside.namespace(), "eth0");
    addresses.iter().map(|&address| add_address(machine, outside.addresses(), (router, link), address)).collect()
}

/// Adds the cases' addresses of nodes and of machines outside.
fn add_addresses(cluster: &MultiNodeCluster, beyond: &Outside, all: &Participants<'_>) -> Vec<Site> {
    let router = cluster.router.netlink();
    let mut sites = add_outside(beyond, router, &all.outside);
    for (number, (name, node)) in cluster.nodes.iter().enumerate() {
        let way = (router, cluster.router.link(number));
        let machine = (node.namespace(), "lo");
        let addresses = all.nodes[name.as_str()].iter();
        sites.extend(addresses.map(|&address| add_address(machine, node.addresses(), way, address)));
    }
    sites
}

/// Three nodes with all that takes part in these cases.
fn start(cases: &[&Case]) -> Fixture {
    let all = Participants::of(cases);
    let mut wiring = Wiring::routed();
    // Pods of one network are on several nodes.
    wiring.layout.prefixes = (32, 128);
    let objects = documents(wired_nodes(all.nodes.keys()).chain(all.pod_manifests()));
    Fixture::start_prepared(
        &objects,
        wiring,
        &all.services,
        |_| {},
        |cluster, beyond| add_addresses(cluster, beyond, &all),
    )
}

/// Sends all rows of cases that share a cluster.
fn run(cases: &[&Case], tally: &mut Tally) {
    let fixture = start(cases);
    let mut marks = 0;
    for case in cases {
        for (number, step) in case.steps.iter().enumerate() {
            fixture.save("all.yaml", &documents(step.state.objects()));
            wait_until_adopted(&fixture, &mut marks);
            let rows = step.rows();
            let probes: Vec<_> = rows.iter().map(|row| row.probe(&fixture.sites)).collect();
            let outcomes = send(&fixture, &probes, |at| rows[at].allowed);
            let place = format!("{} step {number}", case.id);
            rows.iter().zip(outcomes).for_each(|(row, outcome)| tally.add(&place, row, outcome));
        }
    }
}

/// Runs cases each in the cluster that it needs.
fn run_all<'a>(cases: impl Iterator<Item = &'a Case>) -> Tally {
    let mut tally = Tally::default();
    let (from_server, from_manifests): (Vec<&Case>, Vec<&Case>) = cases.partition(|case| case.may_refuse);
    let (alone, together): (Vec<&Case>, Vec<&Case>) = from_manifests.into_iter().partition(|it| it.has_finished_pod());
    run(&together, &mut tally);
    alone.into_iter().for_each(|case| run(&[case], &mut tally));
    from_server.into_iter().for_each(|case| run_from_server(case, &mut tally));
    tally
}

/// The node of all ends of the cases that need an API server.
const NODE: &str = "node-1";

/// A node that follows an API server, with all that takes part in a case.
struct FollowingNode {
    daemon: Daemon,
    sites: Vec<Site>,
    server: ApiServer,
    _servers: Vec<EchoServers>,
    _outside: Outside,
    _node: Node,
}

impl FollowingNode {
    /// With these objects on the server.
    fn start(case: &Case, objects: Vec<Value>) -> Self {
        let all = Participants::of(&[case]);
        let mut node = Node::new(NODE, &all.nodes[NODE].iter().copied().collect::<Vec<_>>()).unwrap();
        for pod in all.pods.values().filter(|pod| pod.node == NODE) {
            node.add_pod(&pod.full_name(), &pod.ips).unwrap();
        }
        node.settle().unwrap();
        let outside = node.add_outside("outside").unwrap();
        let mut sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
        sites.extend(add_outside(&outside, node.netlink(), &all.outside));
        let servers = EchoServers::start_all(&sites, &all.services).unwrap();
        let server = ApiServer::in_process(false, Some(node.namespace())).unwrap();
        let fake = server.fake().expect("it is in this process");
        fake.define_cluster_policies(true);
        fake.put(objects).unwrap();
        let toml = format!(
            "node = \"{NODE}\"\n[source]\nkubeconfig = \"{}\"\n[admin]\nsocket = \"off\"\n\
             [conntrack]\nmapping = \"off\"\n[log]\nlevel = \"debug\"\n[umem]\nmemory = \"64MiB\"\n",
            server.kubeconfig(Account::Penstock).display()
        );
        let daemon = Daemon::launch(node.namespace(), &toml, Privileges::All).unwrap();
        let it = Self { daemon, sites, server, _servers: servers, _outside: outside, _node: node };
        let served = it.daemon.log().wait_for_after(0, "ready: ", Duration::from_secs(30));
        assert!(served.is_ok(), "not ready:\n{}", it.daemon.log().lines().join("\n"));
        it
    }

    /// Replaces the ClusterNetworkPolicies on the server, and waits until the node has adopted the last of them.
    fn follow(&self, before: &[Value], now: &[Value], mark: &str) {
        let fake = self.server.fake().expect("it is in this process");
        let name = |policy: &Value| policy["metadata"]["name"].clone();
        for gone in before.iter().filter(|policy| !now.iter().any(|other| name(other) == name(policy))) {
            fake.delete_elsewhere(gone).unwrap();
        }
        let seen = self.daemon.log().len();
        // One watch brings them in order. The last one selects nothing.
        let last = json!({
            "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
            "metadata": {"name": mark},
            "spec": {"tier": "Admin", "priority": 1000, "subject": {"namespaces": {"matchLabels": {"no": "such"}}}},
        });
        fake.put(now.iter().cloned().chain([last])).unwrap();
        let adopted = self.daemon.log().wait_for_after(seen, mark, Duration::from_secs(20));
        assert!(adopted.is_ok(), "not followed:\n{}", self.daemon.log().lines().join("\n"));
    }
}

/// Sends all rows of a case whose policies manifests may not contain: they come from an API server.
fn run_from_server(case: &Case, tally: &mut Tally) {
    let is_tiered = |object: &Value| object["kind"] == "ClusterNetworkPolicy";
    let split = |step: usize| case.steps[step].state.objects().partition::<Vec<Value>, _>(is_tiered);
    let (mut policies, others) = split(0);
    let node = FollowingNode::start(case, others.clone());
    node.follow(&[], &policies, "mark-0");
    for (number, step) in case.steps.iter().enumerate() {
        let (now, rest) = split(number);
        assert_eq!(rest, others, "{}: only ClusterNetworkPolicies change", case.id);
        node.follow(&policies, &now, &format!("mark-of-step-{number}"));
        policies = now;
        let rows = step.rows();
        let probes: Vec<_> = rows.iter().map(|row| row.probe(&node.sites)).collect();
        let outcomes = send_between(&node.sites, &probes, |at| rows[at].allowed).unwrap();
        let place = format!("{} step {number}", case.id);
        rows.iter().zip(outcomes).for_each(|(row, outcome)| tally.add(&place, row, outcome));
    }
}

/// Rows of each kind were allowed, and others denied.
fn assert_telling(tally: &Tally) {
    let kinds: [(&str, [usize; 2]); 5] = [
        ("between pods", tally.count(|from, to, _| (from, to) == (EndKind::Pod, EndKind::Pod))),
        ("to nodes", tally.count(|_, to, _| to == EndKind::Node)),
        ("from nodes", tally.count(|from, _, _| from == EndKind::Node)),
        ("to or from outside", tally.count(|from, to, _| [from, to].contains(&EndKind::Outside))),
        ("SCTP", tally.count(|_, _, protocol| protocol == "SCTP")),
    ];
    assert!(kinds.iter().all(|(_, count)| count.iter().all(|&rows| rows > 0)), "{kinds:?}");
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn a_sample_of_the_cluster_policy_cases_holds_for_packets() {
    let suite = suite();
    let tally = run_all(suite.sample(SHARE, &ALWAYS));
    tally.finish();
    assert_telling(&tally);
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn cluster_policies_of_servers_alone_hold_for_packets() {
    let Suite { cases } = suite();
    let tally = run_all(cases.iter().filter(|case| case.may_refuse));
    tally.finish();
    assert!(tally.count(|_, _, _| true).iter().all(|&rows| rows > 0));
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn every_row_of_the_cluster_policy_cases_holds_for_packets() {
    let suite = suite();
    let tally = run_all(suite.cases.iter());
    tally.finish();
    assert_telling(&tally);
    assert_eq!(tally.rows(), suite.rows(), "each row is sent");
}
