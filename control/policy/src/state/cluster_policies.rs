//! ClusterNetworkPolicies: the pods they select, in every namespace.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::model::{ClusterNetworkPolicy, Selector};

use super::peer_set::PodId;
use super::summary::PolicySummary;
use super::{ClusterPolicyId, ClusterState, NamespaceRecord};

/// A ClusterNetworkPolicy and the pods it selects.
#[derive(Debug)]
pub(super) struct ClusterPolicyRecord {
    pub(super) policy: Arc<ClusterNetworkPolicy>,
    pub(super) summary: PolicySummary,
    pub(super) revision: u64,
    pub(super) pods: FxHashSet<PodId>,
}

impl NamespaceRecord {
    /// Whether a subject's namespace selector matches it. One that asks for nothing also matches a namespace whose labels
    /// are not known yet.
    fn is_selected(&self, namespaces: &Selector) -> bool {
        namespaces.requirements.is_empty() || self.labels.as_ref().is_some_and(|labels| namespaces.matches(labels))
    }
}

impl ClusterState {
    pub(super) fn set_cluster_policy(&mut self, policy: ClusterNetworkPolicy) {
        let policy = Arc::new(policy);
        let number = match self.cluster_policies.find(&policy.name) {
            Some(number) if self.cluster_policies[number].policy == policy => return,
            Some(number) => {
                // Its place among the policies of a pod may be another now.
                self.unassign_cluster_policy(number);
                number
            }
            None => {
                let record = ClusterPolicyRecord {
                    policy: policy.clone(),
                    summary: PolicySummary::default(),
                    revision: 0,
                    pods: FxHashSet::default(),
                };
                self.cluster_policies.insert(policy.name.clone(), record)
            }
        };
        self.revision += 1;
        let record = &mut self.cluster_policies[number];
        record.summary = PolicySummary::of_cluster(&policy);
        (record.policy, record.revision) = (policy, self.revision);
        self.assign_cluster_policy(number);
    }

    pub(super) fn delete_cluster_policy(&mut self, name: &str) {
        let Some(number) = self.cluster_policies.find(name) else { return };
        self.revision += 1;
        self.unassign_cluster_policy(number);
        self.cluster_policies.remove(name);
    }

    fn assign_cluster_policy(&mut self, number: ClusterPolicyId) {
        let policy = self.cluster_policies[number].policy.clone();
        for namespace in self.namespaces.iter_mut().filter(|record| record.is_selected(&policy.subject.namespaces)) {
            namespace.cluster_policies.insert(number);
            for pod in namespace.pods.iter().filter(|pod| policy.subject.pods.matches(&self.pods[**pod].pod.labels)) {
                self.cluster_policies[number].pods.insert(*pod);
                self.outdated.pods.insert(*pod);
            }
        }
        let pods: Vec<PodId> = self.cluster_policies[number].pods.iter().copied().collect();
        for pod in pods {
            let policies = &self.cluster_policies;
            let selecting = &mut self.pods[pod].cluster_policies;
            let place = selecting.partition_point(|other| policies[*other].policy.order() < policy.order());
            selecting.insert(place, number);
        }
    }

    fn unassign_cluster_policy(&mut self, number: ClusterPolicyId) {
        for namespace in self.namespaces.iter_mut() {
            namespace.cluster_policies.remove(&number);
        }
        for pod in std::mem::take(&mut self.cluster_policies[number].pods) {
            self.pods[pod].cluster_policies.retain(|policy| *policy != number);
            self.outdated.pods.insert(pod);
        }
    }

    /// Finds the ClusterNetworkPolicies whose subjects may be in a namespace, then those of each of its pods.
    pub(super) fn reselect_namespace_policies(&mut self, namespace: u32) {
        let record = &self.namespaces[namespace];
        let selecting =
            self.cluster_policies.iter().filter(|(_, policy)| record.is_selected(&policy.policy.subject.namespaces));
        let selecting: FxHashSet<ClusterPolicyId> = selecting.map(|(number, _)| number).collect();
        if record.cluster_policies == selecting {
            return;
        }
        let pods: Vec<PodId> = record.pods.iter().copied().collect();
        self.namespaces[namespace].cluster_policies = selecting;
        for pod in pods {
            self.reselect_cluster_policies(pod);
            self.outdated.pods.insert(pod);
        }
    }

    /// Evaluates the ClusterNetworkPolicies of the pod's namespace for it.
    pub(super) fn reselect_cluster_policies(&mut self, number: PodId) {
        let record = &self.pods[number];
        let policies = &self.cluster_policies;
        let candidates = self.namespaces[record.namespace].cluster_policies.iter().copied();
        let mut selecting: Vec<ClusterPolicyId> =
            candidates.filter(|policy| policies[*policy].policy.subject.pods.matches(&record.pod.labels)).collect();
        selecting.sort_unstable_by(|a, b| policies[*a].policy.order().cmp(&policies[*b].policy.order()));
        let before = std::mem::replace(&mut self.pods[number].cluster_policies, selecting);
        for policy in before {
            self.cluster_policies[policy].pods.remove(&number);
        }
        for policy in &self.pods[number].cluster_policies {
            self.cluster_policies[*policy].pods.insert(number);
        }
    }
}
