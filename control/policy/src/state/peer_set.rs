//! Peer sets of pods: each distinct selector of the rules once, with its members updated on every change.

use ipnet::IpNet;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::{IpBlock, LabelOperator, Labels, NamedPort, PortProtocol, Selector};

use super::registry::Registry;

/// Number of a pod in a [`ClusterState`](super::ClusterState).
pub type PodId = u32;
/// Number of a peer set in a [`ClusterState`](super::ClusterState); reused once no rule references it.
pub type PeerSetId = u32;

/// The peer set of pods whose Namespace is not known yet. A rule for all pods of all namespaces matches every pod but these:
/// its selector must match the namespace's labels, which are unknown.
pub const NAMESPACE_UNKNOWN: PeerSetId = 0;

/// The marks that the pods (or addresses) of a peer set have in common.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum PeerSet {
    InNamespace {
        namespace: String,
        pods: Selector,
        /// A port that they must have.
        port: Option<NamedPort>,
    },
    /// Pods that match a selector, in namespaces that match another.
    InNamespaces {
        namespaces: Selector,
        pods: Selector,
        /// A port that they must have.
        port: Option<NamedPort>,
    },
    Port(NamedPort),
    /// Addresses in a block, of pods with a named port.
    Block {
        block: IpBlock,
        port: NamedPort,
    },
    /// See [`NAMESPACE_UNKNOWN`].
    NamespaceUnknown,
}

#[derive(Debug)]
pub(super) struct PeerSetRecord {
    pub(super) peer_set: PeerSet,
    /// The number of rules that use it.
    pub(super) references: u32,
    /// Its pods; empty for a [`PeerSet::Block`], whose members are addresses.
    pub(super) members: FxHashSet<PodId>,
    /// For how many pods and namespaces it was evaluated.
    pub(super) reached: usize,
}

/// Peer sets indexed by a label that their members must have, so that a pod is tested only against candidates.
#[derive(Default, Debug)]
pub(super) struct PeerSetIndex {
    /// By key and value of a label that all members have.
    anchored: FxHashMap<String, FxHashMap<String, FxHashSet<PeerSetId>>>,
    /// Peer sets whose selector requires no specific label.
    others: FxHashSet<PeerSetId>,
}

impl PeerSetIndex {
    pub(super) fn insert(&mut self, peer_set: PeerSetId, pods: &Selector) {
        match anchor(pods) {
            None => {
                self.others.insert(peer_set);
            }
            Some((key, values)) => {
                let by_value = self.anchored.entry(key.to_owned()).or_default();
                for value in values {
                    by_value.entry(value.clone()).or_default().insert(peer_set);
                }
            }
        }
    }

    pub(super) fn remove(&mut self, peer_set: PeerSetId, pods: &Selector) {
        let Some((key, values)) = anchor(pods) else {
            self.others.remove(&peer_set);
            return;
        };
        let Some(by_value) = self.anchored.get_mut(key) else { return };
        for value in values {
            if let Some(peer_sets) = by_value.get_mut(value) {
                peer_sets.remove(&peer_set);
                if peer_sets.is_empty() {
                    by_value.remove(value);
                }
            }
        }
        if by_value.is_empty() {
            self.anchored.remove(key);
        }
    }

    /// The peer sets that may contain a pod with these labels.
    pub(super) fn candidates<'a>(&'a self, labels: &'a Labels) -> impl Iterator<Item = PeerSetId> + 'a {
        let anchored = labels.iter().filter_map(|(key, value)| self.anchored.get(key)?.get(value));
        anchored.flatten().chain(&self.others).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.anchored.is_empty() && self.others.is_empty()
    }
}

/// The `In` requirement with the fewest values: what it does not match, the selector does not match.
fn anchor(selector: &Selector) -> Option<(&str, &[String])> {
    let certain = selector.requirements.iter().filter_map(|requirement| match &requirement.operator {
        LabelOperator::In(values) => Some((requirement.key.as_str(), values.as_slice())),
        LabelOperator::NotIn(_) | LabelOperator::Exists | LabelOperator::DoesNotExist => None,
    });
    certain.min_by_key(|(_, values)| values.len())
}

/// The namespaces that a selector matches, and the peer sets of pods in them.
#[derive(Default, Debug)]
pub(super) struct NamespaceSelection {
    pub(super) selector: Selector,
    pub(super) namespaces: FxHashSet<u32>,
    pub(super) peer_sets: PeerSetIndex,
}

/// Pods by label and by named port.
#[derive(Default, Debug)]
pub(super) struct PodIndex {
    labels: Nested<String>,
    ports: Nested<(PortProtocol, u16)>,
}

impl PodIndex {
    pub(super) fn insert(&mut self, pod: PodId, labels: &Labels) {
        for (key, value) in labels {
            let by_value = match self.labels.get_mut(key) {
                Some(by_value) => by_value,
                None => self.labels.entry(key.clone()).or_default(),
            };
            match by_value.get_mut(value) {
                Some(pods) => pods.insert(pod),
                None => by_value.entry(value.clone()).or_default().insert(pod),
            };
        }
    }

    pub(super) fn remove(&mut self, pod: PodId, labels: &Labels) {
        for (key, value) in labels {
            remove(&mut self.labels, key, value, pod);
        }
    }

    /// Returns whether the pod is the first with this number for the name and protocol.
    pub(super) fn insert_port(&mut self, pod: PodId, port: &NamedPort) -> bool {
        let by_number = match self.ports.get_mut(&port.name) {
            Some(by_number) => by_number,
            None => self.ports.entry(port.name.clone()).or_default(),
        };
        let pods = by_number.entry((port.protocol, port.number)).or_default();
        pods.insert(pod);
        pods.len() == 1
    }

    /// Returns whether the pod was the last with this number for the name and protocol.
    pub(super) fn remove_port(&mut self, pod: PodId, port: &NamedPort) -> bool {
        remove(&mut self.ports, &port.name, &(port.protocol, port.number), pod)
    }

    /// A superset of the pods that a selector matches, with its size; `None` if it requires no specific label.
    pub(super) fn candidates<'a>(
        &'a self,
        selector: &'a Selector,
    ) -> Option<(usize, impl Iterator<Item = PodId> + 'a)> {
        let (key, values) = anchor(selector)?;
        let by_value = self.labels.get(key);
        let sets = move || by_value.into_iter().flat_map(move |sets| values.iter().filter_map(|value| sets.get(value)));
        Some((sets().map(FxHashSet::len).sum(), sets().flatten().copied()))
    }

    pub(super) fn with_port(&self, port: &NamedPort) -> impl Iterator<Item = PodId> {
        let pods = self.ports.get(&port.name).and_then(|by_number| by_number.get(&(port.protocol, port.number)));
        pods.into_iter().flatten().copied()
    }

    /// The numbers that pods have for this name and protocol, ascending.
    pub(super) fn numbers(&self, name: &str, protocol: PortProtocol) -> Vec<u16> {
        let numbers = self.ports.get(name).into_iter().flat_map(FxHashMap::keys);
        let mut numbers: Vec<u16> = numbers.filter(|(of, _)| *of == protocol).map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        numbers
    }
}

type Nested<V> = FxHashMap<String, FxHashMap<V, FxHashSet<PodId>>>;

/// Returns whether no pod is left under key and value.
fn remove<V: Eq + std::hash::Hash>(index: &mut Nested<V>, key: &str, value: &V, pod: PodId) -> bool {
    let Some(by_value) = index.get_mut(key) else { return true };
    let Some(pods) = by_value.get_mut(value) else { return true };
    pods.remove(&pod);
    let last = pods.is_empty();
    if last {
        by_value.remove(value);
    }
    if by_value.is_empty() {
        index.remove(key);
    }
    last
}

#[derive(Debug)]
pub(super) struct PeerSets {
    pub(super) registry: Registry<PeerSet, PeerSetRecord>,
    pub(super) selections: Registry<Selector, NamespaceSelection>,
    /// The peer sets of addresses, by the port.
    pub(super) blocks: FxHashMap<NamedPort, FxHashMap<PeerSetId, IpBlock>>,
    /// Without references, but with a number that is still in use.
    pub(super) released: Vec<PeerSetId>,
}

impl Default for PeerSets {
    fn default() -> Self {
        let mut registry = Registry::default();
        let unknown = PeerSet::NamespaceUnknown;
        let record =
            PeerSetRecord { peer_set: unknown.clone(), references: 1, members: FxHashSet::default(), reached: 0 };
        let number = registry.insert(unknown, record);
        assert_eq!(number, NAMESPACE_UNKNOWN);
        Self { registry, selections: Registry::default(), blocks: FxHashMap::default(), released: Vec::new() }
    }
}

impl IpBlock {
    /// Whether an address is in the block and in none of its excepts.
    pub fn contains(&self, address: &std::net::IpAddr) -> bool {
        self.cidr.contains(address) && !self.except.iter().any(|except: &IpNet| except.contains(address))
    }
}
