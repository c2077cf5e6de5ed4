//! Pods: their addresses, peer sets and policies.

use rustc_hash::FxHashSet;

use crate::model::{NamedPort, ObjectKey, Pod, Selector};

use super::peer_set::{NAMESPACE_UNKNOWN, PeerSet, PeerSetId, PodId};
use super::{ClusterState, PodRecord, PolicyId, is_present};

impl ClusterState {
    pub(super) fn set_pod(&mut self, pod: Pod) {
        let key = pod.key.clone();
        let number = match self.pods.find(&key) {
            Some(number) if self.pods[number].pod == pod => return,
            Some(number) => number,
            None => {
                let namespace = self.namespace(&key.namespace);
                // Empty at first, so that `replace_pod` adds everything.
                let nothing = Pod { addresses: Vec::new(), finished: true, node: None, ..pod.clone() };
                let record = PodRecord {
                    pod: nothing,
                    namespace,
                    node: None,
                    peer_sets: Vec::new(),
                    policies: Vec::new(),
                    cluster_policies: Vec::new(),
                };
                let number = self.pods.insert(key, record);
                self.namespaces[namespace].pods.insert(number);
                number
            }
        };
        self.replace_pod(number, pod);
    }

    pub(super) fn delete_pod(&mut self, key: &ObjectKey) {
        let Some(number) = self.pods.find(key) else { return };
        let before = &self.pods[number].pod;
        let nothing = Pod { addresses: Vec::new(), finished: true, node: None, ..before.clone() };
        self.replace_pod(number, nothing);
        let record = self.pods.remove(key).expect("found above");
        for policy in record.policies {
            self.policies[policy].pods.remove(&number);
        }
        for policy in record.cluster_policies {
            self.cluster_policies[policy].pods.remove(&number);
        }
        self.namespaces[record.namespace].pods.remove(&number);
        if self.namespaces[record.namespace].pods.is_empty() {
            self.forget_outliving(record.namespace);
        }
        self.forget_if_empty(&key.namespace);
    }

    fn replace_pod(&mut self, number: PodId, pod: Pod) {
        self.outdated.pods.insert(number);
        let before = std::mem::replace(&mut self.pods[number].pod, pod);
        let (was, is) = (is_present(&before), is_present(&self.pods[number].pod));
        self.move_to_node(number, &before);
        self.replace_index(number, was.then_some(&before));
        let addresses = |pod: &Pod, present: bool| if present { pod.addresses.clone() } else { Vec::new() };
        let (old, new) = (addresses(&before, was), addresses(&self.pods[number].pod, is));
        self.replace_claims(&old, &new, |claim| &mut claim.pods, number);
        self.outdated.addresses.extend(old.into_iter().chain(new));
        self.reselect(number);
        self.reselect_cluster_policies(number);
        self.reclassify(number);
    }

    /// Moves the pod to its node, and its addresses among the node's if it is in the host network.
    fn move_to_node(&mut self, number: PodId, before: &Pod) {
        let old = self.pods[number].node;
        let new = self.pods[number].pod.node.clone().map(|name| {
            let node = self.node(&name);
            self.nodes[node].pods += 1;
            node
        });
        let of_node = |pod: &Pod| if pod.host_network && !pod.finished { pod.addresses.clone() } else { Vec::new() };
        let (had, has) = (of_node(before), of_node(&self.pods[number].pod));
        if let Some(node) = new {
            self.add_node_claims(&has, node);
        }
        if let Some(node) = old {
            self.remove_node_claims(&had, node);
            self.nodes[node].pods -= 1;
            self.forget_node_if_unused(node);
        }
        self.pods[number].node = new;
    }

    fn replace_index(&mut self, number: PodId, before: Option<&Pod>) {
        let after = Some(&self.pods[number].pod).filter(|pod| is_present(pod));
        let labels = |pod: Option<&Pod>| pod.map(|pod| pod.labels.clone()).unwrap_or_default();
        if before.map(|pod| &pod.labels) != after.map(|pod| &pod.labels) {
            let (old, new) = (labels(before), labels(after));
            self.index.remove(number, &old);
            self.index.insert(number, &new);
        }
        let ports = |pod: Option<&Pod>| -> FxHashSet<NamedPort> {
            pod.map(|pod| pod.ports.iter().cloned().collect()).unwrap_or_default()
        };
        let (old, new) = (ports(before), ports(after));
        for port in new.difference(&old) {
            if self.index.insert_port(number, port) {
                self.outdated.names.insert((port.name.clone(), port.protocol));
            }
        }
        for port in old.difference(&new) {
            if self.index.remove_port(number, port) {
                self.outdated.names.insert((port.name.clone(), port.protocol));
            }
        }
    }

    /// Evaluates the policies of the pod's namespace for it.
    fn reselect(&mut self, number: PodId) {
        let record = &self.pods[number];
        let policies = self.namespaces[record.namespace].policies.iter().copied();
        let mut selecting: Vec<PolicyId> =
            policies.filter(|policy| self.policies[*policy].policy.pod_selector.matches(&record.pod.labels)).collect();
        selecting.sort_unstable_by(|a, b| self.policies[*a].policy.key.cmp(&self.policies[*b].policy.key));
        let before = std::mem::replace(&mut self.pods[number].policies, selecting);
        for policy in before {
            self.policies[policy].pods.remove(&number);
        }
        for policy in &self.pods[number].policies {
            self.policies[*policy].pods.insert(number);
        }
    }

    /// Evaluates the candidate peer sets for the pod.
    pub(super) fn reclassify(&mut self, number: PodId) {
        let peer_sets = self.evaluate(&self.pods[number]);
        let record = &mut self.pods[number];
        if record.peer_sets == peer_sets {
            return;
        }
        self.outdated.addresses.extend(&record.pod.addresses);
        let before = std::mem::replace(&mut record.peer_sets, peer_sets);
        let after = &record.peer_sets;
        let (left, joined) = (difference(&before, after), difference(after, &before));
        for peer_set in left {
            self.peer_sets.registry[peer_set].members.remove(&number);
        }
        for peer_set in joined {
            self.peer_sets.registry[peer_set].members.insert(number);
        }
    }

    fn evaluate(&self, record: &PodRecord) -> Vec<PeerSetId> {
        if !is_present(&record.pod) {
            return Vec::new();
        }
        let namespace = &self.namespaces[record.namespace];
        let selections = namespace.selections.iter().map(|selection| &self.peer_sets.selections[*selection].peer_sets);
        let candidates = [&namespace.peer_sets].into_iter().chain(selections);
        let candidates = candidates.flat_map(|peer_sets| peer_sets.candidates(&record.pod.labels));
        let mut peer_sets: Vec<PeerSetId> = candidates
            .filter(|peer_set| match &self.peer_sets.registry[*peer_set].peer_set {
                PeerSet::InNamespace { pods, port, .. } | PeerSet::InNamespaces { pods, port, .. } => {
                    is_member(&record.pod, pods, port.as_ref())
                }
                PeerSet::Port(_) | PeerSet::Block { .. } | PeerSet::NamespaceUnknown => false,
            })
            .collect();
        let ports =
            record.pod.ports.iter().filter_map(|port| self.peer_sets.registry.find(&PeerSet::Port(port.clone())));
        peer_sets.extend(ports);
        if namespace.labels.is_none() {
            peer_sets.push(NAMESPACE_UNKNOWN);
        }
        peer_sets.sort_unstable();
        peer_sets.dedup();
        peer_sets
    }

    /// The pods of namespaces that match a selector, and have the port if one is given, found among so many. Tests either the pods
    /// with a label that the selector requires or all pods of these namespaces, whichever are fewer.
    pub(super) fn found_in(
        &self,
        namespaces: &FxHashSet<u32>,
        selector: &Selector,
        port: Option<&NamedPort>,
    ) -> (Vec<PodId>, usize) {
        let inside = || namespaces.iter().flat_map(|namespace| &self.namespaces[*namespace].pods).copied();
        let all: usize = namespaces.iter().map(|namespace| self.namespaces[*namespace].pods.len()).sum();
        match self.index.candidates(selector) {
            Some((labelled, pods)) if labelled < all => {
                let inside = pods.filter(|pod| namespaces.contains(&self.pods[*pod].namespace));
                (inside.filter(|pod| is_member(&self.pods[*pod].pod, selector, port)).collect(), labelled)
            }
            _ => (inside().filter(|pod| is_member(&self.pods[*pod].pod, selector, port)).collect(), all),
        }
    }
}

/// Whether a pod matches a selector, and has the port if one is given.
fn is_member(pod: &Pod, selector: &Selector, port: Option<&NamedPort>) -> bool {
    is_present(pod) && selector.matches(&pod.labels) && port.is_none_or(|port| pod.ports.contains(port))
}

/// The elements of the first sorted list that are not in the second.
fn difference(a: &[PeerSetId], b: &[PeerSetId]) -> Vec<PeerSetId> {
    a.iter().copied().filter(|peer_set| b.binary_search(peer_set).is_err()).collect()
}
