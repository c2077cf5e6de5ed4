//! Classes of pods that policy does not tell apart.
//!
//! Two pods of one class reach the same peers and are reached by the same, by the same rules: replicas of a workload, for example. Only the node
//! that each is on, which NetworkPolicies exempt, may be another one.
//! So a question about all pairs of pods need be answered for pairs of classes only.

use std::net::IpAddr;

use ipnet::IpNet;
use rustc_hash::FxHashMap;

use crate::engine::Engine;
use crate::learn::LearnSettings;
use crate::model::{Labels, NamedPort, Peer, Peers, Rule, Selector};
use crate::state::{ClusterPolicyId, ClusterState, PeerSetId, PodId, PodOrNode, PolicyId};

/// The classes of the pods that policy sees, counted from 0.
#[derive(Debug)]
pub struct PodClasses {
    by_pod: FxHashMap<PodId, usize>,
}

/// All by which policy can tell a pod from others.
#[derive(PartialEq, Eq, Hash)]
struct Likeness {
    policies: Vec<PolicyId>,
    cluster_policies: Vec<ClusterPolicyId>,
    default_deny: bool,
    ports: Vec<NamedPort>,
    addresses: Vec<AddressLikeness>,
    /// The pod, where one of its addresses counts as somebody else's.
    alone: Option<PodId>,
}

#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
struct AddressLikeness {
    is_ipv4: bool,
    peer_sets: Vec<PeerSetId>,
    /// Which of all networks in rules have it, as numbers.
    networks: Vec<u32>,
}

impl PodClasses {
    /// The classes of all pods with an address of their own.
    pub fn of(engine: &Engine) -> Self {
        let state = engine.state();
        let (networks, of_nodes) = (networks(state), state.node_addresses(&Selector::default()));
        let mut known: FxHashMap<Likeness, usize> = FxHashMap::default();
        let present = state.pods().map(|(pod, _)| pod).filter(|pod| state.is_present(*pod));
        let by_pod = present.map(|pod| {
            let next = known.len();
            (pod, *known.entry(likeness(state, pod, &networks, &of_nodes)).or_insert(next))
        });
        Self { by_pod: by_pod.collect() }
    }

    /// The class of a pod; `None` if policy does not see it.
    pub fn get(&self, pod: PodId) -> Option<usize> {
        self.by_pod.get(&pod).copied()
    }
}

/// The labels of a pod that the pods of its workload have in common.
pub fn workload_labels(labels: &Labels) -> Labels {
    let settings = LearnSettings::default();
    labels.iter().filter(|(key, _)| settings.is_stable(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

fn likeness(state: &ClusterState, pod: PodId, networks: &[IpNet], of_nodes: &[IpAddr]) -> Likeness {
    let object = state.pod(pod).expect("the state lists only pods it has");
    let mut ports = object.ports.clone();
    ports.sort_unstable();
    ports.dedup();
    let mut addresses: Vec<AddressLikeness> =
        object.addresses.iter().map(|address| address_likeness(state, pod, address, networks)).collect();
    addresses.sort_unstable();
    let is_own = |address: &IpAddr| {
        state.owner(address) == Some(PodOrNode::Pod(pod)) && of_nodes.binary_search(address).is_err()
    };
    Likeness {
        policies: state.policies_of(pod).map(|(policy, _)| policy).collect(),
        cluster_policies: state.cluster_policies_of(pod).map(|(policy, _)| policy).collect(),
        default_deny: state.is_denied_by_default(pod),
        ports,
        addresses,
        alone: (!object.addresses.iter().all(is_own)).then_some(pod),
    }
}

fn address_likeness(state: &ClusterState, pod: PodId, address: &IpAddr, networks: &[IpNet]) -> AddressLikeness {
    let holding = (0..).zip(networks).filter(|(_, network)| network.contains(address)).map(|(number, _)| number);
    AddressLikeness {
        is_ipv4: address.is_ipv4(),
        peer_sets: state.peer_sets_at(pod, address),
        networks: holding.collect(),
    }
}

/// Every network of a rule, and every exception of one.
fn networks(state: &ClusterState) -> Vec<IpNet> {
    let of_network = state.policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress).flatten());
    let of_cluster = state.cluster_policies().flat_map(|(policy, _)| policy.ingress.iter().chain(&policy.egress));
    let mut found = Vec::new();
    for Rule { peers, .. } in of_network.chain(of_cluster.map(|rule| &rule.matches)) {
        let Peers::AnyOf(peers) = peers else { continue };
        for peer in peers {
            match peer {
                Peer::IpBlock(block) => found.extend(block.except.iter().chain([&block.cidr])),
                Peer::Networks(networks) => found.extend(networks),
                // Nodes have other addresses than pods, names need answers, and the others are peer sets.
                Peer::Nodes(_) | Peer::DomainNames(_) => {}
                Peer::Pods(_) | Peer::Namespaces(_) | Peer::PodsInNamespaces { .. } => {}
            }
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}
