//! The cluster's state: objects, indexes, and selectors evaluated on change.
//!
//! A [`ClusterState`] applies one change after another and records what each made outdated: pods whose policies may have
//! changed, addresses whose owner or peer sets may have. Later stages process only these. No I/O, no clock; the result
//! does not depend on the order of changes, but for the end of a namespace: policies that go while it is being deleted stay in effect
//! for its pods until these are gone. `owners.rs` says who of several claimants has an address.

mod cluster_policies;
mod export;
mod objects;
mod owners;
mod peer_set;
mod pods;
mod reach;
mod registry;
mod services;
mod summary;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::policy::Direction;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::{
    ClusterNetworkPolicy, IpBlock, Labels, NamedPort, NetworkPolicy, Object, ObjectChange, ObjectKey, ObjectRef, Pod,
    PortProtocol, Selector,
};

use cluster_policies::ClusterPolicyRecord;
use owners::Claim;
use peer_set::{NamespaceSelection, PeerSetIndex, PeerSetRecord, PeerSets, PodIndex};
use reach::Reach;
pub(crate) use registry::Registry;
use services::ServiceRecord;
use summary::PolicySummary;

pub use owners::{
    AddressConflict, MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE, MAX_SERVICE_ADDRESSES, PodOrNode, ServiceAddresses,
};
pub use peer_set::{NAMESPACE_UNKNOWN, PeerSet, PeerSetId, PodId};
pub use reach::MOST_REACHED_FROM_NAMESPACE;
pub use summary::{MOST_ENTRIES_IN_NAMESPACE, RulesSummary};

pub type PolicyId = u32;
/// Number of a ClusterNetworkPolicy in a [`ClusterState`].
pub type ClusterPolicyId = u32;
/// Number of a node's name in a [`ClusterState`].
pub type NodeNumber = u32;

#[derive(Default, Debug)]
pub struct ClusterState {
    namespaces: Registry<String, NamespaceRecord>,
    nodes: Registry<String, NodeRecord>,
    pods: Registry<ObjectKey, PodRecord>,
    policies: Registry<ObjectKey, PolicyRecord>,
    cluster_policies: Registry<String, ClusterPolicyRecord>,
    services: FxHashMap<ObjectKey, ServiceRecord>,
    slice_services: FxHashMap<ObjectKey, ObjectKey>,
    /// The node whose kernel and CNI plugins this process sees; `None`: no node's, or every one's.
    own_node: Option<String>,
    claims: FxHashMap<IpAddr, Claim>,
    /// The addresses with several claims.
    disputed: BTreeSet<IpAddr>,
    index: PodIndex,
    peer_sets: PeerSets,
    revision: u64,
    /// Changes with the labels and addresses of Nodes.
    node_revision: u64,
    outdated: Outdated,
    /// The addresses that Services name, with how many do.
    named_by_services: FxHashMap<IpAddr, u32>,
    /// Whether one of these, or who else claims it, has changed since the last call of
    /// [`ClusterState::take_service_addresses_changed`].
    service_addresses_changed: bool,
}

/// Parts that changes made outdated since the last call of [`ClusterState::take_outdated`].
#[derive(Default, Debug)]
pub struct Outdated {
    /// Pods whose policies or enforcement may have changed; a number may no longer be in use.
    pub pods: FxHashSet<PodId>,
    /// Addresses whose owner, or the owner's peer sets, may have changed.
    pub addresses: FxHashSet<IpAddr>,
    /// Port names whose numbers changed.
    pub names: FxHashSet<(String, PortProtocol)>,
    pub nodes: bool,
}

#[derive(Default, Debug)]
struct NamespaceRecord {
    /// Its labels; `None` while the Namespace is unknown.
    labels: Option<Labels>,
    default_deny_ingress: bool,
    terminating: bool,
    selections: FxHashSet<u32>,
    peer_sets: PeerSetIndex,
    pods: FxHashSet<PodId>,
    policies: FxHashSet<PolicyId>,
    /// How many entries its policies have.
    entries: usize,
    /// The policies whose rules are not kept, since with them the namespace had too many entries when they came.
    unkept: FxHashSet<PolicyId>,
    reach: Reach,
    /// The ClusterNetworkPolicies whose subjects may be in it.
    cluster_policies: FxHashSet<ClusterPolicyId>,
}

#[derive(Default, Debug)]
struct NodeRecord {
    name: String,
    /// Addresses of the Node; `None` while it is unknown.
    addresses: Option<Vec<IpAddr>>,
    labels: Labels,
    /// Addresses that `nodes` peers match.
    status_addresses: Vec<IpAddr>,
    pods: u32,
}

#[derive(Debug)]
struct PodRecord {
    pod: Pod,
    namespace: u32,
    node: Option<NodeNumber>,
    /// Sorted.
    peer_sets: Vec<PeerSetId>,
    /// The policies that select it, sorted by their key.
    policies: Vec<PolicyId>,
    /// The ClusterNetworkPolicies that select it, in the order of evaluation.
    cluster_policies: Vec<ClusterPolicyId>,
}

#[derive(Debug)]
struct PolicyRecord {
    policy: Arc<NetworkPolicy>,
    summary: PolicySummary,
    namespace: u32,
    revision: u64,
    pods: FxHashSet<PodId>,
    /// Whether it was deleted with its namespace, and stays for the pods that are left there.
    outlives: bool,
}

impl NamespaceRecord {
    /// Whether its NetworkPolicies have too many entries, or had so when one of them came.
    fn is_over_limit(&self) -> bool {
        self.entries > MOST_ENTRIES_IN_NAMESPACE || !self.unkept.is_empty()
    }
}

impl ClusterState {
    /// An empty state as seen from this node.
    pub fn of_node(name: &str) -> Self {
        Self { own_node: Some(name.to_owned()), ..Self::default() }
    }

    /// Applies one change and records what it made outdated.
    pub fn apply(&mut self, change: ObjectChange) {
        match change {
            ObjectChange::Set(Object::Namespace(namespace)) => self.set_namespace(namespace),
            ObjectChange::Set(Object::Node(node)) => self.set_node(node),
            ObjectChange::Set(Object::Pod(pod)) => self.set_pod(pod),
            ObjectChange::Set(Object::NetworkPolicy(policy)) => self.set_policy(policy),
            ObjectChange::Set(Object::ClusterNetworkPolicy(policy)) => self.set_cluster_policy(policy),
            ObjectChange::Set(Object::Service(service)) => self.set_service(service),
            ObjectChange::Set(Object::EndpointSlice(slice)) => self.set_endpoint_slice(slice),
            ObjectChange::Delete(ObjectRef::Namespace(name)) => self.delete_namespace(&name),
            ObjectChange::Delete(ObjectRef::Node(name)) => self.delete_node(&name),
            ObjectChange::Delete(ObjectRef::Pod(key)) => self.delete_pod(&key),
            ObjectChange::Delete(ObjectRef::NetworkPolicy(key)) => self.delete_policy(&key),
            ObjectChange::Delete(ObjectRef::ClusterNetworkPolicy(name)) => self.delete_cluster_policy(&name),
            ObjectChange::Delete(ObjectRef::Service(key)) => self.delete_service(&key),
            ObjectChange::Delete(ObjectRef::EndpointSlice(key)) => self.delete_endpoint_slice(&key),
        }
    }

    /// The changes since the last call.
    pub fn take_outdated(&mut self) -> Outdated {
        std::mem::take(&mut self.outdated)
    }

    /// The addresses among them.
    pub fn take_outdated_addresses(&mut self) -> FxHashSet<IpAddr> {
        std::mem::take(&mut self.outdated.addresses)
    }

    /// Whether pods are among them.
    pub fn has_outdated_pods(&self) -> bool {
        !self.outdated.pods.is_empty()
    }

    pub fn find_pod(&self, key: &ObjectKey) -> Option<PodId> {
        self.pods.find(key)
    }

    pub fn pod(&self, pod: PodId) -> Option<&Pod> {
        self.pods.get(pod).map(|record| &record.pod)
    }

    pub fn pods(&self) -> impl Iterator<Item = (PodId, &Pod)> {
        self.pods.iter().map(|(number, record)| (number, &record.pod))
    }

    /// Whether selectors match the pod and policy is enforced for it: it has addresses of its own and is not finished.
    pub fn is_present(&self, pod: PodId) -> bool {
        self.pods.get(pod).is_some_and(|record| is_present(&record.pod))
    }

    pub fn node_of(&self, pod: PodId) -> Option<NodeNumber> {
        self.pods.get(pod)?.node
    }

    pub fn find_node(&self, name: &str) -> Option<NodeNumber> {
        self.nodes.find(name)
    }

    pub fn node_name(&self, node: NodeNumber) -> Option<&str> {
        self.nodes.get(node).map(|record| record.name.as_str())
    }

    /// The policies that select a pod, sorted by namespace and name, each with the revision of its last change.
    pub fn policies_of(&self, pod: PodId) -> impl Iterator<Item = (PolicyId, u64)> {
        let policies = self.pods.get(pod).map(|record| record.policies.as_slice()).unwrap_or_default();
        policies.iter().map(|policy| (*policy, self.policies[*policy].revision))
    }

    pub fn policy(&self, policy: PolicyId) -> Option<&Arc<NetworkPolicy>> {
        self.policies.get(policy).map(|record| &record.policy)
    }

    pub fn find_policy(&self, key: &ObjectKey) -> Option<&Arc<NetworkPolicy>> {
        self.policies.find(key).and_then(|policy| self.policy(policy))
    }

    /// The parts of a policy's rules that tables depend on.
    pub fn policy_summary(&self, policy: PolicyId, direction: Direction) -> &RulesSummary {
        self.policies[policy].summary.direction(direction)
    }

    /// The parts of a ClusterNetworkPolicy's rules that tables depend on.
    pub fn cluster_policy_summary(&self, policy: ClusterPolicyId, direction: Direction) -> &RulesSummary {
        self.cluster_policies[policy].summary.direction(direction)
    }

    /// How many entries the NetworkPolicies of a pod's namespace have, if these are too many, or were when one of them came.
    pub fn too_many_entries(&self, pod: PodId) -> Option<usize> {
        let namespace = &self.namespaces[self.pods.get(pod)?.namespace];
        namespace.is_over_limit().then_some(namespace.entries)
    }

    /// The NetworkPolicies of a namespace whose rules are not kept.
    pub fn unkept_policies(&self, namespace: &str) -> Vec<&ObjectKey> {
        let Some(number) = self.namespaces.find(namespace) else { return Vec::new() };
        let mut keys: Vec<_> =
            self.namespaces[number].unkept.iter().map(|policy| &self.policies[*policy].policy.key).collect();
        keys.sort_unstable();
        keys
    }

    /// Changes with the labels and addresses of Nodes.
    pub fn node_revision(&self) -> u64 {
        self.node_revision
    }

    /// Changes with every change of a policy.
    pub fn policy_revision(&self) -> u64 {
        self.revision
    }

    pub(crate) fn policy_handles(&self) -> impl Iterator<Item = &Arc<NetworkPolicy>> {
        self.policies.iter().map(|(_, record)| &record.policy)
    }

    pub(crate) fn cluster_policy_handles(&self) -> impl Iterator<Item = &Arc<ClusterNetworkPolicy>> {
        self.cluster_policies.iter().map(|(_, record)| &record.policy)
    }

    /// All policies, each with how many pods it selects.
    pub fn policies(&self) -> impl Iterator<Item = (&NetworkPolicy, usize)> {
        self.policies.iter().map(|(_, record)| (&*record.policy, record.pods.len()))
    }

    /// The ClusterNetworkPolicies that select a pod, in the order of evaluation, each with the revision of its last change.
    pub fn cluster_policies_of(&self, pod: PodId) -> impl Iterator<Item = (ClusterPolicyId, u64)> {
        let policies = self.pods.get(pod).map(|record| record.cluster_policies.as_slice()).unwrap_or_default();
        policies.iter().map(|policy| (*policy, self.cluster_policies[*policy].revision))
    }

    /// A ClusterNetworkPolicy by its number.
    pub fn cluster_policy(&self, policy: ClusterPolicyId) -> Option<&Arc<ClusterNetworkPolicy>> {
        self.cluster_policies.get(policy).map(|record| &record.policy)
    }

    /// All ClusterNetworkPolicies, each with how many pods it selects.
    pub fn cluster_policies(&self) -> impl Iterator<Item = (&ClusterNetworkPolicy, usize)> {
        self.cluster_policies.iter().map(|(_, record)| (&*record.policy, record.pods.len()))
    }

    /// The addresses in the status of the Nodes that a selector matches, sorted.
    pub fn node_addresses(&self, nodes: &Selector) -> Vec<IpAddr> {
        let found = self.nodes.iter().filter(|(_, record)| nodes.matches(&record.labels));
        let mut addresses: Vec<IpAddr> =
            found.flat_map(|(_, record)| record.status_addresses.iter().copied()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }

    /// Whether the annotation of a pod's namespace isolates it for ingress.
    pub fn is_denied_by_default(&self, pod: PodId) -> bool {
        self.pods.get(pod).is_some_and(|record| self.namespaces[record.namespace].default_deny_ingress)
    }

    /// The labels of a namespace; `None` while its Namespace is unknown.
    pub fn namespace_labels(&self, name: &str) -> Option<&Labels> {
        self.namespaces.get(self.namespaces.find(name)?)?.labels.as_ref()
    }

    pub fn is_terminating(&self, name: &str) -> bool {
        self.namespaces.find(name).is_some_and(|namespace| self.namespaces[namespace].terminating)
    }

    /// The peer sets of a pod's address, sorted.
    pub fn peer_sets_at(&self, pod: PodId, address: &IpAddr) -> Vec<PeerSetId> {
        let record = &self.pods[pod];
        let mut peer_sets = record.peer_sets.clone();
        let blocks = record.pod.ports.iter().filter_map(|port| self.peer_sets.blocks.get(port)).flatten();
        peer_sets.extend(blocks.filter(|(_, block)| block.contains(address)).map(|(peer_set, _)| *peer_set));
        peer_sets.sort_unstable();
        peer_sets
    }

    /// The numbers that pods have for this port name and protocol, ascending.
    pub fn numbers(&self, name: &str, protocol: PortProtocol) -> Vec<u16> {
        self.index.numbers(name, protocol)
    }

    /// Adds a reference to a peer set, by a rule of a namespace's NetworkPolicy or of a ClusterNetworkPolicy. If the peer set is new,
    /// its members' addresses become outdated. Returns its number, and for how many pods and namespaces it had to be evaluated.
    pub fn acquire(&mut self, peer_set: &PeerSet, namespace: Option<&str>) -> (PeerSetId, usize) {
        let (number, reached) = match self.peer_sets.registry.find(peer_set) {
            Some(number) => (number, 0),
            None => self.insert_peer_set(peer_set),
        };
        self.peer_sets.registry[number].references += 1;
        if let Some(namespace) = namespace {
            self.count_reach(namespace, number);
        }
        (number, reached)
    }

    fn insert_peer_set(&mut self, peer_set: &PeerSet) -> (PeerSetId, usize) {
        let record =
            PeerSetRecord { peer_set: peer_set.clone(), references: 0, members: FxHashSet::default(), reached: 0 };
        let number = self.peer_sets.registry.insert(peer_set.clone(), record);
        let (members, reached) = match peer_set {
            PeerSet::InNamespace { namespace, pods, port } => {
                let namespace = self.namespace(namespace);
                self.namespaces[namespace].peer_sets.insert(number, pods);
                self.found_in(&FxHashSet::from_iter([namespace]), pods, port.as_ref())
            }
            PeerSet::InNamespaces { namespaces, pods, port } => {
                let (selection, evaluated) = self.acquire_selection(namespaces);
                self.peer_sets.selections[selection].peer_sets.insert(number, pods);
                let namespaces = &self.peer_sets.selections[selection].namespaces;
                let (found, reached) = self.found_in(namespaces, pods, port.as_ref());
                (found, reached + evaluated)
            }
            PeerSet::Port(port) => (self.index.with_port(port).collect(), 0),
            PeerSet::Block { block, port } => {
                self.peer_sets.blocks.entry(port.clone()).or_default().insert(number, block.clone());
                (Vec::new(), self.outdate_block(block, port))
            }
            PeerSet::NamespaceUnknown => unreachable!("this peer set always exists"),
        };
        for pod in &members {
            let record = &mut self.pods[*pod];
            let place = record.peer_sets.partition_point(|peer_set| *peer_set < number);
            record.peer_sets.insert(place, number);
            self.outdated.addresses.extend(&record.pod.addresses);
        }
        let reached = reached + members.len();
        let record = &mut self.peer_sets.registry[number];
        record.members.extend(members);
        record.reached = reached;
        (number, reached)
    }

    /// Drops one reference of [`ClusterState::acquire`], which has been [discounted](ClusterState::discount_reach). The number of a peer
    /// set without references stays in use until [`ClusterState::free_released`]. Returns how many members it had then.
    pub fn release(&mut self, number: PeerSetId) -> usize {
        let record = &mut self.peer_sets.registry[number];
        record.references -= 1;
        if record.references > 0 {
            return 0;
        }
        let peer_set = record.peer_set.clone();
        let (_, record) = self.peer_sets.registry.withdraw(&peer_set).expect("the peer set is known by its number");
        self.peer_sets.released.push(number);
        let mut members = record.members.len();
        for pod in record.members {
            let record = &mut self.pods[pod];
            if let Ok(place) = record.peer_sets.binary_search(&number) {
                record.peer_sets.remove(place);
            }
            self.outdated.addresses.extend(&record.pod.addresses);
        }
        match &peer_set {
            PeerSet::InNamespace { namespace, pods, .. } => {
                let id = self.namespace(namespace);
                self.namespaces[id].peer_sets.remove(number, pods);
                self.forget_if_empty(namespace);
            }
            PeerSet::InNamespaces { namespaces, pods, .. } => {
                let selection = self.peer_sets.selections.find(namespaces).expect("the peer set is in it");
                self.peer_sets.selections[selection].peer_sets.remove(number, pods);
                members += self.forget_selection_if_empty(selection);
            }
            PeerSet::Block { block, port } => {
                if let Some(blocks) = self.peer_sets.blocks.get_mut(port) {
                    blocks.remove(&number);
                    if blocks.is_empty() {
                        self.peer_sets.blocks.remove(port);
                    }
                }
                members += self.outdate_block(block, port);
            }
            PeerSet::Port(_) | PeerSet::NamespaceUnknown => {}
        }
        members
    }

    /// No address that has become outdated has the peer sets any more that were released.
    pub fn free_released(&mut self) {
        for number in std::mem::take(&mut self.peer_sets.released) {
            self.peer_sets.registry.free(number);
        }
    }

    /// The addresses in a peer set.
    pub fn addresses_in(&self, number: PeerSetId) -> Vec<IpAddr> {
        let record = &self.peer_sets.registry[number];
        let of_pods = record.members.iter().flat_map(|pod| self.pods[*pod].pod.addresses.iter().copied());
        match &record.peer_set {
            PeerSet::Block { block, port } => self.addresses_in_block(block, port).0,
            _ => of_pods.collect(),
        }
    }

    pub fn statistics(&self) -> StateStatistics {
        StateStatistics {
            namespaces: self.namespaces.iter().filter(|(_, record)| record.labels.is_some()).count(),
            nodes: self.nodes.iter().filter(|(_, record)| record.addresses.is_some()).count(),
            pods: self.pods.len(),
            policies: self.policies.len(),
            cluster_policies: self.cluster_policies.len(),
            services: self.services().count(),
            peer_sets: self.peer_sets.registry.len() - 1,
        }
    }

    /// The number of a namespace; creates its entry if needed.
    fn namespace(&mut self, name: &str) -> u32 {
        if let Some(number) = self.namespaces.find(name) {
            return number;
        }
        let number = self.namespaces.insert(name.to_owned(), NamespaceRecord::default());
        self.reselect_namespace_policies(number);
        number
    }

    fn forget_if_empty(&mut self, name: &str) {
        let Some(number) = self.namespaces.find(name) else { return };
        let record = &self.namespaces[number];
        let used = record.labels.is_some() || !record.pods.is_empty() || !record.policies.is_empty();
        if !used && record.peer_sets.is_empty() {
            self.namespaces.remove(name);
        }
    }

    /// The selection, and for how many namespaces it had to be evaluated.
    fn acquire_selection(&mut self, namespaces: &Selector) -> (u32, usize) {
        if let Some(selection) = self.peer_sets.selections.find(namespaces) {
            return (selection, 0);
        }
        let found = self
            .namespaces
            .iter()
            .filter(|(_, record)| record.labels.as_ref().is_some_and(|labels| namespaces.matches(labels)));
        let found: FxHashSet<u32> = found.map(|(number, _)| number).collect();
        let selection = NamespaceSelection {
            selector: namespaces.clone(),
            namespaces: found.clone(),
            ..NamespaceSelection::default()
        };
        let number = self.peer_sets.selections.insert(namespaces.clone(), selection);
        for namespace in found {
            self.namespaces[namespace].selections.insert(number);
        }
        (number, self.namespaces.len())
    }

    /// Returns how many namespaces it had then.
    fn forget_selection_if_empty(&mut self, number: u32) -> usize {
        if !self.peer_sets.selections[number].peer_sets.is_empty() {
            return 0;
        }
        let selector = self.peer_sets.selections[number].selector.clone();
        let selection = self.peer_sets.selections.remove(&selector).expect("the selection is known by its number");
        for namespace in &selection.namespaces {
            self.namespaces[*namespace].selections.remove(&number);
        }
        selection.namespaces.len()
    }

    /// Returns how many addresses were looked at.
    fn outdate_block(&mut self, block: &IpBlock, port: &NamedPort) -> usize {
        let (inside, all) = self.addresses_in_block(block, port);
        self.outdated.addresses.extend(inside);
        all
    }

    /// The addresses in a block of pods with a port, among so many of such pods.
    fn addresses_in_block(&self, block: &IpBlock, port: &NamedPort) -> (Vec<IpAddr>, usize) {
        let all: Vec<IpAddr> =
            self.index.with_port(port).flat_map(|pod| self.pods[pod].pod.addresses.iter().copied()).collect();
        (all.iter().copied().filter(|address| block.contains(address)).collect(), all.len())
    }
}

/// The numbers of objects and peer sets in a [`ClusterState`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateStatistics {
    pub namespaces: usize,
    pub nodes: usize,
    pub pods: usize,
    pub policies: usize,
    pub cluster_policies: usize,
    pub services: usize,
    pub peer_sets: usize,
}

fn is_present(pod: &Pod) -> bool {
    !pod.host_network && !pod.finished && !pod.addresses.is_empty()
}
