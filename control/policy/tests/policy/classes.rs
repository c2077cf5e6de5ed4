//! Pods of one class are alike for every peer and port.

use std::cell::Cell;
use std::collections::BTreeMap;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::classes::PodClasses;
use penstock_policy::engine::Explanation;
use penstock_policy::model::*;
use proptest::test_runner::{Config, TestRunner};

use super::agreement::without_conflict;
use super::build::{Cluster, key, namespace, pod, policy, rule};
use super::naive::ClusterObjects;
use super::random::{ADDRESSES, OTHERS, destinations, history};

/// An object; and two pods like it, if it is one, at addresses that no block of the random clusters tells apart.
fn with_replicas(number: u8, object: Object) -> Vec<Object> {
    let replica = |of: &Pod, which: u8| {
        let mut pod = of.clone();
        pod.key.name += &format!("-{which}");
        let last = 60 + 2 * (number % 20) + which;
        pod.addresses = vec![[10, 0, 0, last].into(), format!("fd00::{last}").parse().unwrap()];
        Object::Pod(pod)
    };
    match &object {
        Object::Pod(pod) => vec![replica(pod, 0), replica(pod, 1), object],
        _ => vec![object],
    }
}

/// Each class of more than one pod, with the addresses of its pods.
fn alike(cluster: &Cluster) -> Vec<Vec<&Pod>> {
    let state = cluster.engine.state();
    let classes = PodClasses::of(&cluster.engine);
    let mut found: BTreeMap<usize, Vec<&Pod>> = BTreeMap::new();
    for (id, pod) in state.pods() {
        if let Some(class) = classes.get(id) {
            found.entry(class).or_default().push(pod);
        }
    }
    found.into_values().filter(|pods| pods.len() > 1).collect()
}

fn explained(cluster: &Cluster, src: std::net::IpAddr, dst: std::net::IpAddr, port: (u8, u16)) -> Explanation {
    let (protocol, dst_port) = (Protocol(port.0), port.1);
    cluster.engine.explain(&Flow { src: src.into(), dst: dst.into(), protocol, src_port: 40000, dst_port })
}

/// Compares two pods of one class by their first addresses of a family, as senders and as receivers. Each reaches, and is reached by, its
/// own node.
fn compare(cluster: &Cluster, a: &Pod, b: &Pod, is_ipv4: bool) {
    let nodes = cluster.engine.state().node_addresses(&Selector::default());
    let is_own_nodes = |peer: &std::net::IpAddr| a.node != b.node && nodes.contains(peer);
    let of = |pod: &Pod| pod.addresses.iter().find(|address| address.is_ipv4() == is_ipv4).copied();
    let (Some(a), Some(b)) = (of(a), of(b)) else { return assert_eq!(of(a), of(b)) };
    let others = ADDRESSES.iter().chain(&OTHERS).map(|text| text.parse::<std::net::IpAddr>().unwrap());
    let others = others.filter(|peer| !is_own_nodes(peer));
    let own: Vec<_> = cluster.engine.state().pods().flat_map(|(_, pod)| pod.addresses.clone()).collect();
    let peers = others.filter(|peer| peer.is_ipv4() == is_ipv4 && *peer != a && *peer != b && !own.contains(peer));
    let pods = own.iter().copied().filter(|peer| peer.is_ipv4() == is_ipv4 && *peer != a && *peer != b);
    for peer in peers.chain(pods) {
        for port in destinations().into_iter().step_by(5) {
            let allowed = |src, dst| {
                let explanation = explained(cluster, src, dst, port);
                (explanation.is_allowed(), explanation.egress.rule, explanation.ingress.rule)
            };
            let (from, to) = ((allowed(a, peer), allowed(b, peer)), (allowed(peer, a), allowed(peer, b)));
            let at = || format!("{a} and {b} with {peer} on {port:?}: {:#?}", cluster.objects.objects());
            assert!(from.0 == from.1 && to.0 == to.1, "{}", at());
        }
    }
}

#[test]
fn pods_of_one_class_have_equal_rows_and_columns() {
    let compared = Cell::new(0);
    let config = Config { cases: 100, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&history(), |(start, _)| {
        let (mut cluster, mut objects) = (Cluster::new([]), ClusterObjects::default());
        for object in start.into_iter().enumerate().flat_map(|(number, object)| with_replicas(number as u8, object)) {
            let change = without_conflict(&objects, ObjectChange::Set(object));
            objects.apply(&change);
            cluster.apply(vec![change]);
        }
        for pods in alike(&cluster) {
            for is_ipv4 in [true, false] {
                compare(&cluster, pods[0], pods[1], is_ipv4);
                compared.set(compared.get() + 1);
            }
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(compared.get() > 50, "{} pairs", compared.get());
}

#[test]
fn what_policy_distinguishes_is_of_several_classes() {
    let replica = |name: &str, labels: &str, address: &str| pod(name, labels, &[address], &["http:tcp/80"]);
    let mut port = replica("a/port", "app=web", "10.0.0.4");
    port.ports[0].number = 81;
    let pods = [
        replica("a/web-1", "app=web pod=1", "10.0.0.1"),
        replica("a/web-2", "app=web pod=2", "10.0.0.2"),
        replica("a/block", "app=web", "10.0.1.1"),
        port,
        replica("a/db", "app=db", "10.0.0.5"),
        replica("b/web", "app=web", "10.0.0.6"),
        pod("a/v6", "app=web", &["fd00::1"], &["http:tcp/80"]),
    ];
    let names = pods.clone().map(|pod| pod.key);
    let to_web = rule(&["pods app=web"], &["tcp/http"]);
    let objects = [
        namespace("a", ""),
        namespace("b", ""),
        policy("a/db", "app=db", Some(vec![to_web.clone(), rule(&["10.0.1.0/24"], &[])]), Some(vec![to_web])),
    ];
    let cluster = Cluster::new(objects.into_iter().chain(pods.map(Object::Pod)));
    let classes = PodClasses::of(&cluster.engine);
    let class = |key: &ObjectKey| classes.get(cluster.engine.state().find_pod(key).unwrap()).unwrap();
    assert_eq!(class(&key("a/web-1")), class(&key("a/web-2")), "replicas");
    let mut distinct: Vec<usize> = names.iter().map(class).collect();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), names.len() - 1, "all but the replicas differ");
}
