//! How far the selectors of a namespace's NetworkPolicies reach: for how many pods and namespaces each of them is evaluated. Memory and
//! time grow with this, and not with what is written.

use std::net::IpAddr;

use rustc_hash::FxHashMap;

use super::peer_set::{PeerSet, PeerSetId};
use super::{ClusterState, NamespaceRecord, PodOrNode};

/// The most pods and namespaces for which the peer selectors of a namespace's NetworkPolicies may be evaluated, each selector once. With
/// more, none of the policies allows anything until one of them changes: others pay for each pod that a selector matches.
pub const MOST_REACHED_FROM_NAMESPACE: usize = 1 << 22;

/// So many selectors of all pods each namespace may have, however large the cluster is.
const SELECTORS_OF_ALL: usize = 256;

/// How far the selectors of a namespace reach, as far as they are compiled.
#[derive(Default, Debug)]
pub(super) struct Reach {
    /// How many rules have each of its peer sets, and what this one reached when the first did.
    peer_sets: FxHashMap<PeerSetId, (u32, usize)>,
    sum: usize,
    is_exceeded: bool,
    /// Whether it was exceeded before since a policy changed. The first time it may be by what was in effect until then.
    was_exceeded: bool,
}

impl ClusterState {
    /// Whether the selectors of a pod's namespace were found to reach too far.
    pub fn reaches_too_far(&self, namespace: &str) -> bool {
        self.namespaces.find(namespace).is_some_and(|number| self.namespaces[number].reach.is_exceeded)
    }

    /// [`MOST_REACHED_FROM_NAMESPACE`], or more in a large cluster.
    pub fn most_reached_from_namespace(&self) -> usize {
        MOST_REACHED_FROM_NAMESPACE.max(SELECTORS_OF_ALL * self.pods.len())
    }

    /// For how many pods at most a peer set has to be evaluated: none if a rule has it.
    pub fn most_reached(&self, peer_set: &PeerSet) -> usize {
        if self.peer_sets.registry.find(peer_set).is_some() {
            return 0;
        }
        let labelled = |pods| self.index.candidates(pods).map_or(usize::MAX, |(labelled, _)| labelled);
        match peer_set {
            PeerSet::InNamespace { namespace, pods, .. } => {
                let inside = self.namespaces.find(namespace).map_or(0, |number| self.namespaces[number].pods.len());
                inside.min(labelled(pods))
            }
            PeerSet::InNamespaces { pods, .. } => self.pods.len().min(labelled(pods)),
            PeerSet::Port(port) | PeerSet::Block { port, .. } => self.index.with_port(port).count(),
            PeerSet::NamespaceUnknown => 0,
        }
    }

    /// How many peer sets the pod of an address is in, but for those of blocks.
    pub fn peer_sets_of(&self, address: &IpAddr) -> usize {
        match self.owner(address) {
            Some(PodOrNode::Pod(pod)) => self.pods[pod].peer_sets.len(),
            Some(PodOrNode::Node(_)) | None => 0,
        }
    }

    /// A rule of the namespace uses a peer set.
    pub(super) fn count_reach(&mut self, namespace: &str, peer_set: PeerSetId) {
        let Some(number) = self.namespaces.find(namespace) else { return };
        let most = self.most_reached_from_namespace();
        let NamespaceRecord { reach, pods, .. } = &mut self.namespaces[number];
        let reached = self.peer_sets.registry[peer_set].reached;
        let (rules, _) = reach.peer_sets.entry(peer_set).or_insert((0, reached));
        *rules += 1;
        if *rules == 1 {
            reach.sum += reached;
        }
        if reach.sum > most && !reach.is_exceeded {
            reach.is_exceeded = true;
            self.outdated.pods.extend(&*pods);
        }
    }

    /// A rule of the namespace uses a peer set no more.
    pub fn discount_reach(&mut self, namespace: &str, peer_set: PeerSetId) {
        let Some(number) = self.namespaces.find(namespace) else { return };
        let reach = &mut self.namespaces[number].reach;
        let Some((rules, reached)) = reach.peer_sets.get_mut(&peer_set) else { return };
        *rules -= 1;
        if *rules == 0 {
            reach.sum -= *reached;
            reach.peer_sets.remove(&peer_set);
        }
        if reach.sum == 0 && reach.is_exceeded && !reach.was_exceeded {
            self.forgive_reach(number);
            self.namespaces[number].reach.was_exceeded = true;
        }
    }

    /// A policy of the namespace has changed: its selectors are evaluated again.
    pub(super) fn forgive_reach(&mut self, namespace: u32) {
        let NamespaceRecord { reach, pods, .. } = &mut self.namespaces[namespace];
        reach.was_exceeded = false;
        if std::mem::take(&mut reach.is_exceeded) {
            self.outdated.pods.extend(&*pods);
        }
    }
}
