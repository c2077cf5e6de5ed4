//! Namespaces, nodes and policies.

use std::net::IpAddr;
use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::model::{Namespace, NetworkPolicy, Node, ObjectKey, Selector};

use super::peer_set::PodId;
use super::summary::{PolicySummary, selector_entries};
use super::{ClusterState, MOST_ENTRIES_IN_NAMESPACE, NodeNumber, NodeRecord, PolicyRecord};

impl ClusterState {
    pub(super) fn set_namespace(&mut self, namespace: Namespace) {
        let number = self.namespace(&namespace.name);
        let record = &mut self.namespaces[number];
        record.terminating = namespace.terminating;
        if !namespace.terminating {
            self.forget_outliving(number);
        }
        let record = &mut self.namespaces[number];
        if record.default_deny_ingress != namespace.default_deny_ingress {
            record.default_deny_ingress = namespace.default_deny_ingress;
            self.outdated.pods.extend(&record.pods);
        }
        if record.labels.as_ref() != Some(&namespace.labels) {
            record.labels = Some(namespace.labels);
            self.reselect_namespace(number);
        }
    }

    pub(super) fn delete_namespace(&mut self, name: &str) {
        let Some(number) = self.namespaces.find(name) else { return };
        let record = &mut self.namespaces[number];
        if record.default_deny_ingress {
            record.default_deny_ingress = false;
            self.outdated.pods.extend(&record.pods);
        }
        record.labels = None;
        self.reselect_namespace(number);
        self.forget_if_empty(name);
    }

    /// Evaluates the namespace selectors for a namespace, then the peer sets of its pods.
    fn reselect_namespace(&mut self, number: u32) {
        let labels = self.namespaces[number].labels.as_ref();
        let found = self
            .peer_sets
            .selections
            .iter()
            .filter(|(_, selection)| labels.is_some_and(|labels| selection.selector.matches(labels)));
        let selections: FxHashSet<u32> = found.map(|(selection, _)| selection).collect();
        let before = std::mem::replace(&mut self.namespaces[number].selections, selections.clone());
        before.into_iter().for_each(|selection| {
            self.peer_sets.selections[selection].namespaces.remove(&number);
        });
        selections.into_iter().for_each(|selection| {
            self.peer_sets.selections[selection].namespaces.insert(number);
        });
        self.reselect_namespace_policies(number);
        let pods: Vec<PodId> = self.namespaces[number].pods.iter().copied().collect();
        pods.into_iter().for_each(|pod| self.reclassify(pod));
    }

    pub(super) fn set_policy(&mut self, policy: NetworkPolicy) {
        let policy = Arc::new(policy);
        let number = match self.policies.find(&policy.key) {
            Some(number) if self.policies[number].policy == policy => return self.policies[number].outlives = false,
            Some(number) => number,
            None => {
                let namespace = self.namespace(&policy.key.namespace);
                let record = PolicyRecord {
                    policy: policy.clone(),
                    summary: PolicySummary::default(),
                    namespace,
                    revision: 0,
                    pods: FxHashSet::default(),
                    outlives: false,
                };
                let number = self.policies.insert(policy.key.clone(), record);
                self.namespaces[namespace].policies.insert(number);
                number
            }
        };
        self.revision += 1;
        let summary = PolicySummary::of(&policy);
        let others = self.namespaces[self.policies[number].namespace].entries - self.policies[number].summary.entries();
        let is_kept = others + summary.entries() <= MOST_ENTRIES_IN_NAMESPACE;
        let (policy, summary) = match is_kept {
            true => (policy, summary),
            false => (Arc::new(without_rules(&policy)), summary.without_names()),
        };
        let namespace = &self.namespaces[self.policies[number].namespace];
        let labels = |pod: &PodId| &self.pods[*pod].pod.labels;
        let selected: FxHashSet<PodId> =
            namespace.pods.iter().copied().filter(|pod| policy.pod_selector.matches(labels(pod))).collect();
        self.set_policy_summary(number, summary, is_kept);
        self.forgive_reach(self.policies[number].namespace);
        let record = &mut self.policies[number];
        (record.policy, record.revision, record.outlives) = (policy, self.revision, false);
        let before = std::mem::replace(&mut record.pods, selected.clone());
        self.reassign(number, &before, &selected);
    }

    /// All pods of a namespace with too many entries are closed, so these follow what it has. They stay closed while the rules of a
    /// policy are not kept.
    fn set_policy_summary(&mut self, number: u32, summary: PolicySummary, is_kept: bool) {
        let record = &mut self.policies[number];
        let namespace = &mut self.namespaces[record.namespace];
        let was_closed = namespace.is_over_limit();
        namespace.entries = namespace.entries + summary.entries() - record.summary.entries();
        record.summary = summary;
        if is_kept {
            namespace.unkept.remove(&number);
        } else {
            namespace.unkept.insert(number);
        }
        if was_closed || namespace.is_over_limit() {
            self.outdated.pods.extend(&namespace.pods);
        }
    }

    pub(super) fn delete_policy(&mut self, key: &ObjectKey) {
        let Some(number) = self.policies.find(key) else { return };
        let namespace = &self.namespaces[self.policies[number].namespace];
        // The namespace's deletion takes all objects in any order, and a pod may run on for its grace period.
        if namespace.terminating && !namespace.pods.is_empty() {
            self.policies[number].outlives = true;
            return;
        }
        self.remove_policy(number, key);
    }

    /// Removes the policies of a namespace that were deleted with it.
    pub(super) fn forget_outliving(&mut self, namespace: u32) {
        let policies = self.namespaces[namespace].policies.iter().copied();
        let outliving: Vec<u32> = policies.filter(|policy| self.policies[*policy].outlives).collect();
        for number in outliving {
            let key = self.policies[number].policy.key.clone();
            self.remove_policy(number, &key);
        }
    }

    fn remove_policy(&mut self, number: u32, key: &ObjectKey) {
        self.revision += 1;
        let before = std::mem::take(&mut self.policies[number].pods);
        self.reassign(number, &before, &FxHashSet::default());
        self.set_policy_summary(number, PolicySummary::default(), true);
        self.forgive_reach(self.policies[number].namespace);
        let record = self.policies.remove(key).expect("found above");
        self.namespaces[record.namespace].policies.remove(&number);
        self.forget_if_empty(&key.namespace);
    }

    /// Updates the pods that the policy selects, and those it no longer selects.
    fn reassign(&mut self, number: u32, before: &FxHashSet<PodId>, after: &FxHashSet<PodId>) {
        for pod in before.difference(after) {
            self.pods[*pod].policies.retain(|policy| *policy != number);
        }
        let policies = &self.policies;
        let key = &policies[number].policy.key;
        for pod in after.difference(before) {
            let selecting = &mut self.pods[*pod].policies;
            let place = selecting.partition_point(|policy| policies[*policy].policy.key < *key);
            selecting.insert(place, number);
        }
        self.outdated.pods.extend(before.iter().chain(after));
    }

    /// The number of a node; creates its entry if needed.
    pub(super) fn node(&mut self, name: &str) -> NodeNumber {
        self.nodes.find_or_insert(name, || NodeRecord { name: name.to_owned(), ..NodeRecord::default() })
    }

    pub(super) fn set_node(&mut self, object: Node) {
        let node = self.node(&object.name);
        let record = &mut self.nodes[node];
        let Node { labels, addresses, status_addresses, .. } = object;
        let is_changed = (&record.labels, &record.status_addresses) != (&labels, &status_addresses);
        (record.labels, record.status_addresses) = (labels, status_addresses);
        if is_changed {
            self.outdate_nodes();
        }
        self.set_node_addresses(node, Some(addresses));
    }

    pub(super) fn delete_node(&mut self, name: &str) {
        let Some(node) = self.nodes.find(name) else { return };
        let record = &mut self.nodes[node];
        (record.labels, record.status_addresses) = Default::default();
        self.outdate_nodes();
        self.set_node_addresses(node, None);
    }

    fn outdate_nodes(&mut self) {
        self.outdated.nodes = true;
        self.node_revision += 1;
    }

    fn set_node_addresses(&mut self, node: NodeNumber, addresses: Option<Vec<IpAddr>>) {
        let before = std::mem::replace(&mut self.nodes[node].addresses, addresses.clone());
        self.add_node_claims(&addresses.unwrap_or_default(), node);
        self.remove_node_claims(&before.unwrap_or_default(), node);
        self.forget_node_if_unused(node);
    }

    pub(super) fn add_node_claims(&mut self, addresses: &[IpAddr], node: NodeNumber) {
        self.replace_claims(&[], addresses, |claim| &mut claim.nodes, node);
        self.outdated.addresses.extend(addresses);
    }

    pub(super) fn remove_node_claims(&mut self, addresses: &[IpAddr], node: NodeNumber) {
        self.replace_claims(addresses, &[], |claim| &mut claim.nodes, node);
        self.outdated.addresses.extend(addresses);
    }

    pub(super) fn forget_node_if_unused(&mut self, node: NodeNumber) {
        let record = &self.nodes[node];
        if record.addresses.is_none() && record.pods == 0 {
            let name = record.name.clone();
            self.nodes.remove(&name);
        }
    }
}

/// A policy of a namespace with too many entries: it isolates as before, and allows nothing. If even its selector is long, it selects all
/// pods of the namespace.
fn without_rules(policy: &NetworkPolicy) -> NetworkPolicy {
    const LONGEST: usize = 64;
    let is_short = selector_entries(&policy.pod_selector) <= LONGEST;
    NetworkPolicy {
        key: policy.key.clone(),
        pod_selector: if is_short { policy.pod_selector.clone() } else { Selector::default() },
        ingress: policy.ingress.as_ref().map(|_| Vec::new()),
        egress: policy.egress.as_ref().map(|_| Vec::new()),
        isolates: policy.isolates,
        staging: policy.staging.clone(),
        notes: policy.notes,
    }
}
