//! The cluster's state: objects, indexes, and selectors evaluated on change.
//!
//! A [`State`] applies one change after another and records what each made outdated: pods whose policies may have changed,
//! addresses whose owner or classes may have. Later stages process only these. No I/O, no clock; the result does not
//! depend on the order of changes. Of two pods that claim one address, the one that [outranks](Pod::outranks) the other
//! owns it.

mod class;
mod objects;
mod pods;
mod registry;

use std::net::IpAddr;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::{Change, Labels, NetworkPolicy, Object, ObjectKey, ObjectRef, Pod, PortProtocol};

use class::{ClassIndex, ClassRecord, Classes, NamespaceSelection, PodIndex};
pub(crate) use registry::Registry;

pub use class::{Class, ClassId, NAMESPACE_UNKNOWN, PodId};

/// Number of a policy in a [`State`].
pub type PolicyId = u32;
/// Number of a node's name in a [`State`].
pub type NodeNumber = u32;

/// Everything that policy needs from a cluster.
#[derive(Default, Debug)]
pub struct State {
    namespaces: Registry<String, NamespaceRecord>,
    nodes: Registry<String, NodeRecord>,
    pods: Registry<ObjectKey, PodRecord>,
    policies: Registry<ObjectKey, PolicyRecord>,
    claims: FxHashMap<IpAddr, Claim>,
    index: PodIndex,
    classes: Classes,
    revision: u64,
    outdated: Outdated,
}

/// What changes made outdated since the last call of [`State::take_outdated`].
#[derive(Default, Debug)]
pub struct Outdated {
    /// Pods whose policies or enforcement may have changed; a number may no longer be in use.
    pub pods: FxHashSet<PodId>,
    /// Addresses whose owner, or the owner's classes, may have changed.
    pub addresses: FxHashSet<IpAddr>,
    /// Port names whose numbers changed.
    pub names: FxHashSet<(String, PortProtocol)>,
}

#[derive(Debug)]
struct NamespaceRecord {
    /// Its labels; `None` while the Namespace is unknown.
    labels: Option<Labels>,
    default_deny_ingress: bool,
    selections: Vec<u32>,
    classes: ClassIndex,
    pods: FxHashSet<PodId>,
    policies: FxHashSet<PolicyId>,
}

#[derive(Default, Debug)]
struct NodeRecord {
    name: String,
    /// Addresses of the Node; `None` while it is unknown.
    addresses: Option<Vec<IpAddr>>,
    pods: u32,
}

#[derive(Debug)]
struct PodRecord {
    pod: Pod,
    namespace: u32,
    node: Option<NodeNumber>,
    /// Sorted.
    classes: Vec<ClassId>,
    /// The policies that select it, sorted by their key.
    policies: Vec<PolicyId>,
}

/// A policy and the pods it selects.
#[derive(Debug)]
struct PolicyRecord {
    policy: std::sync::Arc<NetworkPolicy>,
    namespace: u32,
    revision: u64,
    pods: FxHashSet<PodId>,
}

/// Who claims an address. A pod takes precedence over a node, a pod over those it outranks, the last node over others.
#[derive(Default, Debug)]
struct Claim {
    pods: Vec<PodId>,
    nodes: Vec<NodeNumber>,
}

/// The owner of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressOwner {
    /// A pod.
    Pod(PodId),
    /// A node, or its pods in the host network.
    Node(NodeNumber),
}

impl State {
    /// Applies one change and records what it made outdated.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Set(Object::Namespace(namespace)) => self.set_namespace(namespace),
            Change::Set(Object::Node(node)) => self.set_node(&node.name.clone(), Some(node.addresses)),
            Change::Set(Object::Pod(pod)) => self.set_pod(pod),
            Change::Set(Object::NetworkPolicy(policy)) => self.set_policy(policy),
            Change::Delete(ObjectRef::Namespace(name)) => self.delete_namespace(&name),
            Change::Delete(ObjectRef::Node(name)) => self.set_node(&name, None),
            Change::Delete(ObjectRef::Pod(key)) => self.delete_pod(&key),
            Change::Delete(ObjectRef::NetworkPolicy(key)) => self.delete_policy(&key),
        }
    }

    /// What changed since the last call.
    pub fn take_outdated(&mut self) -> Outdated {
        std::mem::take(&mut self.outdated)
    }

    /// The number of a pod.
    pub fn find_pod(&self, key: &ObjectKey) -> Option<PodId> {
        self.pods.find(key)
    }

    /// A pod by its number.
    pub fn pod(&self, pod: PodId) -> Option<&Pod> {
        self.pods.get(pod).map(|record| &record.pod)
    }

    /// All pods.
    pub fn pods(&self) -> impl Iterator<Item = (PodId, &Pod)> {
        self.pods.iter().map(|(number, record)| (number, &record.pod))
    }

    /// Whether selectors match the pod and policy is enforced for it: it has addresses of its own and is not finished.
    pub fn is_present(&self, pod: PodId) -> bool {
        self.pods.get(pod).is_some_and(|record| is_present(&record.pod))
    }

    /// The node that runs a pod.
    pub fn node_of(&self, pod: PodId) -> Option<NodeNumber> {
        self.pods.get(pod)?.node
    }

    /// The number of a node's name.
    pub fn find_node(&self, name: &str) -> Option<NodeNumber> {
        self.nodes.find(name)
    }

    /// A node's name by its number.
    pub fn node_name(&self, node: NodeNumber) -> Option<&str> {
        self.nodes.get(node).map(|record| record.name.as_str())
    }

    /// The policies that select a pod, sorted by namespace and name, each with the revision of its last change.
    pub fn policies_of(&self, pod: PodId) -> impl Iterator<Item = (PolicyId, u64)> {
        let policies = self.pods.get(pod).map(|record| record.policies.as_slice()).unwrap_or_default();
        policies.iter().map(|policy| (*policy, self.policies[*policy].revision))
    }

    /// A policy by its number.
    pub fn policy(&self, policy: PolicyId) -> Option<&std::sync::Arc<NetworkPolicy>> {
        self.policies.get(policy).map(|record| &record.policy)
    }

    /// All policies, each with how many pods it selects.
    pub fn policies(&self) -> impl Iterator<Item = (&NetworkPolicy, usize)> {
        self.policies.iter().map(|(_, record)| (&*record.policy, record.pods.len()))
    }

    /// Whether the annotation of a pod's namespace isolates it for ingress.
    pub fn is_denied_by_default(&self, pod: PodId) -> bool {
        self.pods.get(pod).is_some_and(|record| self.namespaces[record.namespace].default_deny_ingress)
    }

    /// The labels of a namespace; `None` while its Namespace is unknown.
    pub fn namespace_labels(&self, name: &str) -> Option<&Labels> {
        self.namespaces.get(self.namespaces.find(name)?)?.labels.as_ref()
    }

    /// The owner of an address.
    pub fn owner(&self, address: &IpAddr) -> Option<AddressOwner> {
        let claim = self.claims.get(address)?;
        let outranks = |pod: &PodId, other: &PodId| self.pods[*pod].pod.outranks(&self.pods[*other].pod);
        let pod = claim.pods.iter().copied().reduce(|best, next| if outranks(&next, &best) { next } else { best });
        pod.map(AddressOwner::Pod).or(claim.nodes.last().map(|node| AddressOwner::Node(*node)))
    }

    /// Every address with an owner.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, AddressOwner)> {
        self.claims.keys().filter_map(|address| Some((*address, self.owner(address)?)))
    }

    /// The classes of a pod's address, sorted.
    pub fn classes_at(&self, pod: PodId, address: &IpAddr) -> Vec<ClassId> {
        let record = &self.pods[pod];
        let mut classes = record.classes.clone();
        let blocks = self.classes.blocks.iter();
        let holding = blocks.filter(|(_, block, port)| block.contains(address) && record.pod.ports.contains(port));
        classes.extend(holding.map(|(class, ..)| *class));
        classes.sort_unstable();
        classes
    }

    /// The numbers that pods have for this port name and protocol, ascending.
    pub fn numbers(&self, name: &str, protocol: PortProtocol) -> Vec<u16> {
        self.index.numbers(name, protocol)
    }

    /// Adds a reference to a class. If the class is new, its members' addresses become outdated.
    pub fn acquire(&mut self, class: &Class) -> ClassId {
        if let Some(number) = self.classes.registry.find(class) {
            self.classes.registry[number].references += 1;
            return number;
        }
        let record = ClassRecord { class: class.clone(), references: 1, members: FxHashSet::default() };
        let number = self.classes.registry.insert(class.clone(), record);
        let members = match class {
            Class::InNamespace { namespace, pods, port } => {
                let namespace = self.namespace(namespace);
                self.namespaces[namespace].classes.insert(number, pods);
                self.found_in(&self.namespaces[namespace].pods, pods, port.as_ref())
            }
            Class::InNamespaces { namespaces, pods, port } => {
                let selection = self.acquire_selection(namespaces);
                self.classes.selections[selection].classes.insert(number, pods);
                self.found_in_selection(selection, pods, port.as_ref())
            }
            Class::Port(port) => self.index.with_port(port).collect(),
            Class::Block { block, port } => {
                self.classes.blocks.push((number, block.clone(), port.clone()));
                self.outdate_block(block);
                Vec::new()
            }
            Class::NamespaceUnknown => unreachable!("this class always exists"),
        };
        for pod in &members {
            let record = &mut self.pods[*pod];
            let place = record.classes.partition_point(|class| *class < number);
            record.classes.insert(place, number);
            self.outdated.addresses.extend(&record.pod.addresses);
        }
        self.classes.registry[number].members.extend(members);
        number
    }

    /// Drops one reference of [`State::acquire`].
    pub fn release(&mut self, number: ClassId) {
        let record = &mut self.classes.registry[number];
        record.references -= 1;
        if record.references > 0 {
            return;
        }
        let class = record.class.clone();
        let record = self.classes.registry.remove(&class).expect("the class is known by its number");
        for pod in record.members {
            let record = &mut self.pods[pod];
            record.classes.retain(|class| *class != number);
            self.outdated.addresses.extend(&record.pod.addresses);
        }
        match &class {
            Class::InNamespace { namespace, pods, .. } => {
                let id = self.namespace(namespace);
                self.namespaces[id].classes.remove(number, pods);
                self.forget_if_empty(namespace);
            }
            Class::InNamespaces { namespaces, pods, .. } => {
                let selection = self.acquire_selection(namespaces);
                self.classes.selections[selection].classes.remove(number, pods);
                self.forget_selection_if_empty(selection);
            }
            Class::Block { block, .. } => {
                self.classes.blocks.retain(|(class, ..)| *class != number);
                self.outdate_block(block);
            }
            Class::Port(_) | Class::NamespaceUnknown => {}
        }
    }

    /// The numbers of objects and classes.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            namespaces: self.namespaces.iter().filter(|(_, record)| record.labels.is_some()).count(),
            nodes: self.nodes.iter().filter(|(_, record)| record.addresses.is_some()).count(),
            pods: self.pods.len(),
            policies: self.policies.len(),
            classes: self.classes.registry.len() - 1,
        }
    }

    /// The number of a namespace; creates its entry if needed.
    fn namespace(&mut self, name: &str) -> u32 {
        self.namespaces.find_or_insert(name, || NamespaceRecord {
            labels: None,
            default_deny_ingress: false,
            selections: Vec::new(),
            classes: ClassIndex::default(),
            pods: FxHashSet::default(),
            policies: FxHashSet::default(),
        })
    }

    fn forget_if_empty(&mut self, name: &str) {
        let Some(number) = self.namespaces.find(name) else { return };
        let record = &self.namespaces[number];
        let used = record.labels.is_some() || !record.pods.is_empty() || !record.policies.is_empty();
        if !used && record.classes.is_empty() {
            self.namespaces.remove(name);
        }
    }

    fn acquire_selection(&mut self, namespaces: &crate::model::Selector) -> u32 {
        if let Some(selection) = self.classes.selections.find(namespaces) {
            return selection;
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
        let number = self.classes.selections.insert(namespaces.clone(), selection);
        found.into_iter().for_each(|namespace| self.namespaces[namespace].selections.push(number));
        number
    }

    fn forget_selection_if_empty(&mut self, number: u32) {
        if !self.classes.selections[number].classes.is_empty() {
            return;
        }
        let selector = self.classes.selections[number].selector.clone();
        let selection = self.classes.selections.remove(&selector).expect("the selection is known by its number");
        for namespace in selection.namespaces {
            self.namespaces[namespace].selections.retain(|selection| *selection != number);
        }
    }

    fn outdate_block(&mut self, block: &crate::model::IpBlock) {
        let inside = self.claims.iter().filter(|(address, claim)| !claim.pods.is_empty() && block.contains(address));
        self.outdated.addresses.extend(inside.map(|(address, _)| *address));
    }
}

/// The numbers of objects and classes in a [`State`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Statistics {
    /// Namespaces known.
    pub namespaces: usize,
    /// Nodes known.
    pub nodes: usize,
    /// Pods.
    pub pods: usize,
    /// Policies.
    pub policies: usize,
    /// Classes that rules use.
    pub classes: usize,
}

fn is_present(pod: &Pod) -> bool {
    !pod.host_network && !pod.finished && !pod.addresses.is_empty()
}
