//! On random clusters the tables and the naive evaluator agree on every query.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::model::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::build::Cluster;
use super::naive::{ClusterObjects, Covered};
use super::random::{ADDRESSES, OTHERS, destinations, history};

/// Removes from a new pod the addresses that another running pod has: two owners of one address are not a valid state.
pub(crate) fn without_conflict(objects: &ClusterObjects, change: ObjectChange) -> ObjectChange {
    let ObjectChange::Set(Object::Pod(mut pod)) = change else { return change };
    let taken = |address: &IpAddr| {
        let mut others = objects.pods.values().filter(|other| other.key != pod.key && !other.finished);
        others.any(|other| other.addresses.contains(address))
    };
    pod.addresses = pod.addresses.iter().copied().filter(|address| !taken(address)).collect();
    ObjectChange::Set(Object::Pod(pod))
}

/// Every pair of ends of an address family; the destination ports are distributed over the pairs.
pub(crate) fn queries(deal: usize) -> impl Iterator<Item = Flow> {
    let ends: Vec<IpAddr> = ADDRESSES.iter().chain(&OTHERS).map(|end| end.parse().unwrap()).collect();
    let destinations = destinations();
    let pairs: Vec<(IpAddr, IpAddr)> = ends
        .iter()
        .flat_map(|src| ends.iter().map(move |dst| (*src, *dst)))
        .filter(|(a, b)| a.is_ipv4() == b.is_ipv4())
        .collect();
    pairs.into_iter().enumerate().flat_map(move |(place, (src, dst))| {
        let pick = |n: usize| destinations[(deal + place * 5 + n * 7) % destinations.len()];
        std::array::from_fn::<_, 8, _>(pick).map(|(protocol, dst_port)| Flow {
            src: src.into(),
            dst: dst.into(),
            protocol: Protocol(protocol),
            src_port: 40000,
            dst_port,
        })
    })
}

/// The coverage of the clusters of this runner; all verdicts agree.
fn agree(mut runner: TestRunner) -> BTreeSet<Covered> {
    let covered = RefCell::new(BTreeSet::new());
    let outcome = runner.run(&history(), |(start, _)| {
        let mut cluster = Cluster::new([]);
        let mut changes = Vec::new();
        let mut objects = ClusterObjects::default();
        for object in start {
            let change = without_conflict(&objects, ObjectChange::Set(object));
            objects.apply(&change);
            changes.push(change);
        }
        let deal = changes.len();
        cluster.apply(changes);
        for flow in queries(deal) {
            cluster.evaluate(&flow);
        }
        covered.borrow_mut().append(&mut cluster.covered);
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    covered.into_inner()
}

fn config(cases: u32) -> Config {
    Config { cases, failure_persistence: None, ..Config::default() }
}

#[test]
fn the_tables_and_the_naive_evaluator_agree_on_every_query() {
    agree(TestRunner::new(config(150)));
}

/// Uses the same clusters in every run, so that their coverage is the same.
#[test]
fn random_clusters_cover_every_kind_of_verdict() {
    let covered = agree(TestRunner::new_with_rng(config(300), TestRng::deterministic_rng(RngAlgorithm::ChaCha)));
    for reached in [
        Covered::NoPod,
        Covered::Open,
        Covered::SamePod,
        Covered::OwnNode,
        Covered::DeniedWithoutRules,
        Covered::DeniedByRules,
        Covered::Excepted,
        Covered::ByEveryPeer,
        Covered::ByPods,
        Covered::ByNamespaces,
        Covered::ByPodsInNamespaces,
        Covered::ByBlock,
        Covered::ByBlockOfPod,
        Covered::ByEveryPort,
        Covered::ByPort,
        Covered::ByRange,
        Covered::ByProtocol,
        Covered::ByNameOnIngress,
        Covered::ByNameOnEgress,
        Covered::NameLacking,
        Covered::OtherProtocolAllowed,
        Covered::OtherProtocolDenied,
        Covered::Ipv6,
        Covered::AdminAccept,
        Covered::AdminDeny,
        Covered::AdminPass,
        Covered::AdminPassThenAllowed,
        Covered::AdminPassThenDenied,
        Covered::AdminPassThenBaselineDeny,
        Covered::BaselineAccept,
        Covered::BaselineDeny,
        Covered::BaselinePass,
        Covered::BaselineHidden,
        Covered::DefaultAfterTiers,
        Covered::TieBrokenByName,
        Covered::ByNode,
        Covered::ByNetwork,
        Covered::OwnNodeDenied,
        Covered::OwnNodeIsolated,
        Covered::NotUnderstoodAccept,
        Covered::NotUnderstoodDeny,
    ] {
        assert!(covered.contains(&reached), "no query met {reached:?}");
    }
}
