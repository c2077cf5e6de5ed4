//! The objects again, for another state that shall be equal to this one.

use crate::model::{Namespace, Node, Object};

use super::{ClusterState, NamespaceRecord, PodId};

impl ClusterState {
    /// All objects that verdicts depend on, except pods: those of namespaces, nodes and policies, in no order.
    pub fn objects_without_pods(&self) -> Vec<Object> {
        let namespaces = self.namespaces.index().filter_map(|(name, record)| {
            let labels = record.labels.clone()?;
            let NamespaceRecord { default_deny_ingress, terminating, .. } = *record;
            Some(Object::Namespace(Namespace { name: name.clone(), labels, default_deny_ingress, terminating }))
        });
        let nodes = self.nodes.iter().filter_map(|(_, record)| {
            Some(Object::Node(Node {
                name: record.name.clone(),
                labels: record.labels.clone(),
                addresses: record.addresses.clone()?,
                status_addresses: record.status_addresses.clone(),
            }))
        });
        let policies = self.policies.iter().map(|(_, record)| Object::NetworkPolicy((*record.policy).clone()));
        let cluster_policies =
            self.cluster_policies.iter().map(|(_, record)| Object::ClusterNetworkPolicy((*record.policy).clone()));
        namespaces.chain(nodes).chain(policies).chain(cluster_policies).collect()
    }

    /// All Services and EndpointSlices, in no order.
    pub fn objects_of_services(&self) -> Vec<Object> {
        let services = self.services().map(|service| Object::Service((**service).clone()));
        services.chain(self.all_endpoint_slices().map(|slice| Object::EndpointSlice((**slice).clone()))).collect()
    }

    /// Up to `most` pods, from this number on, and the number to go on from; `None` after the last. A pod keeps its number:
    /// over several calls each pod that exists from the first to the last is there once.
    pub fn pods_from(&self, first: PodId, most: usize) -> (Vec<Object>, Option<PodId>) {
        let mut rest = self.pods.iter_from(first);
        let pods: Vec<Object> = rest.by_ref().take(most).map(|(_, record)| Object::Pod(record.pod.clone())).collect();
        let next = rest.next().map(|(number, _)| number);
        (pods, next)
    }
}
