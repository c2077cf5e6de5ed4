//! Who has an address.
//!
//! Objects of several writers may name one address, and not all of them are to be believed alike. A tenant chooses `externalIPs`; a
//! node's kubelet writes the status of its Node and Pods; only the API server gives out cluster IPs, and what this node has on its
//! interfaces is known from the kernel. So the owner is the first of:
//!
//! 1. this node
//! 2. a pod of this node
//! 3. a pod of another node
//! 4. another node
//! 5. a Service, by a cluster IP
//! 6. a Service, by an external address
//!
//! An object of a lower rank takes nothing away: neither the labels that rules match at the address, nor the way to a cluster IP. A
//! cluster IP stays a Service's next to a claim of rank 3 or 4: rules match the claimant's labels, and what is sent there is still
//! evaluated for the end that answers. Without a node of its own (the commands for a whole cluster) all pods and nodes are this node's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::model::{ObjectKey, Service};

use super::{ClusterState, NodeNumber, PodId};

/// Up to this many addresses of Services count: the map of the programs keeps a quarter of its entries for changes.
pub const MAX_SERVICE_ADDRESSES: usize = 49_152;
/// Up to this many external addresses of a namespace's Services count.
pub const MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE: usize = 2048;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PodOrNode {
    Pod(PodId),
    /// A node, or its pods in the host network.
    Node(NodeNumber),
}

/// The claims of pods and nodes to an address.
#[derive(Default, Debug)]
pub(super) struct Claim {
    pub(super) pods: Vec<PodId>,
    pub(super) nodes: Vec<NodeNumber>,
}

/// An address that objects of other nodes name, and a pod of this node keeps.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct AddressConflict {
    pub address: IpAddr,
    pub owner: ObjectKey,
    /// A Pod or Node of another node.
    pub claimant: String,
}

impl std::fmt::Display for AddressConflict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, owner, claimant } = self;
        write!(
            f,
            "pod {owner} of this node keeps {address}, which {claimant} has in its status too: correct that object, and look at \
             who wrote it"
        )
    }
}

/// The addresses of Services at which egress policy is for the end that answers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceAddresses {
    pub addresses: BTreeSet<IpAddr>,
    /// How many addresses of a namespace are left out at least, since they are more than its share.
    pub left_out: BTreeMap<String, usize>,
}

impl ClusterState {
    /// The pod or node that has an address.
    pub fn owner(&self, address: &IpAddr) -> Option<PodOrNode> {
        let claim = self.claims.get(address)?;
        let here = claim.nodes.iter().rfind(|node| self.is_here(Some(**node)));
        if let Some(node) = here {
            return Some(PodOrNode::Node(*node));
        }
        let pod = claim.pods.iter().copied().reduce(|best, next| if self.precedes(next, best) { next } else { best });
        pod.map(PodOrNode::Pod).or_else(|| claim.nodes.last().copied().map(PodOrNode::Node))
    }

    /// Whether the first of two pods with one address has it: one of this node before all others.
    fn precedes(&self, pod: PodId, other: PodId) -> bool {
        let (pod, other) = (&self.pods[pod], &self.pods[other]);
        match (self.is_here(pod.node), self.is_here(other.node)) {
            (true, true) | (false, false) => pod.pod.outranks(&other.pod),
            (is_here, _) => is_here,
        }
    }

    fn is_here(&self, node: Option<NodeNumber>) -> bool {
        let Some(own) = &self.own_node else { return true };
        node.is_some_and(|node| self.nodes[node].name == *own)
    }

    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, PodOrNode)> {
        self.claims.keys().filter_map(|address| Some((*address, self.owner(address)?)))
    }

    /// The addresses at which a node's kernel translates for a Service: cluster IPs and external addresses.
    ///
    /// No namespace takes the place of others. Its external addresses count up to a limit, and if all namespaces together have more
    /// than [`MAX_SERVICE_ADDRESSES`], each has at least as many as it could if all had equally many.
    pub fn service_addresses(&self) -> ServiceAddresses {
        let mut of_namespaces: BTreeMap<&str, [BTreeSet<IpAddr>; 2]> = BTreeMap::new();
        for service in self.services() {
            let [cluster, external] = of_namespaces.entry(&service.key.namespace).or_default();
            cluster.extend(service.addresses.iter().filter(|address| self.is_cluster_address(address)));
            external.extend(service.external.iter().filter(|address| self.owner(address).is_none()));
        }
        let wanted = |[cluster, external]: &[BTreeSet<IpAddr>; 2]| {
            cluster.len() + external.len().min(MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE)
        };
        let share = fair_share(of_namespaces.values().map(wanted).collect(), MAX_SERVICE_ADDRESSES);
        let mut found = ServiceAddresses::default();
        for (namespace, sets) in &of_namespaces {
            let [cluster, external] = sets;
            let counted = cluster.iter().chain(external.iter().take(MAX_EXTERNAL_ADDRESSES_IN_NAMESPACE)).take(share);
            found.addresses.extend(counted);
            let left_out = cluster.len() + external.len() - wanted(sets).min(share);
            if left_out > 0 {
                found.left_out.insert((*namespace).to_owned(), left_out);
            }
        }
        found
    }

    /// Whether [`ClusterState::service_addresses`] may have changed since the last call.
    pub fn take_service_addresses_changed(&mut self) -> bool {
        std::mem::take(&mut self.service_addresses_changed)
    }

    /// Counts which addresses Services name, when one takes the place of another.
    pub(super) fn count_named(&mut self, before: Option<&Service>, after: Option<&Service>) {
        let lists = |service: Option<&Service>| {
            service.map(|service| (service.addresses.clone(), service.external.clone())).unwrap_or_default()
        };
        let (before, after) = (lists(before), lists(after));
        if before == after {
            return;
        }
        self.service_addresses_changed = true;
        for address in after.0.iter().chain(&after.1) {
            *self.named_by_services.entry(*address).or_default() += 1;
        }
        for address in before.0.iter().chain(&before.1) {
            if let Some(count) = self.named_by_services.get_mut(address) {
                *count -= 1;
                if *count == 0 {
                    self.named_by_services.remove(address);
                }
            }
        }
    }

    /// Whether a cluster IP is a Service's: neither this node nor a pod of it has the address.
    fn is_cluster_address(&self, address: &IpAddr) -> bool {
        match self.owner(address) {
            None => true,
            Some(PodOrNode::Node(node)) => !self.is_here(Some(node)),
            Some(PodOrNode::Pod(pod)) => !self.is_here(self.pods[pod].node),
        }
    }

    /// Whether what is sent to an address of this Service is for the Service.
    pub fn is_address_of(&self, service: &Service, address: &IpAddr) -> bool {
        service.addresses.contains(address) && self.is_cluster_address(address)
            || service.external.contains(address) && self.owner(address).is_none()
    }

    /// What objects of other nodes claim of this node's pods, up to `limit`, in order.
    pub fn address_conflicts(&self, limit: usize) -> BTreeSet<AddressConflict> {
        if self.own_node.is_none() {
            return BTreeSet::new();
        }
        let disputed = self.disputed.iter().flat_map(|address| {
            let (claim, owner) = (self.claims.get(address), self.owner(address));
            let Some((claim, PodOrNode::Pod(owner))) = claim.zip(owner).filter(|(_, owner)| self.is_pod_here(*owner))
            else {
                return Vec::new();
            };
            let pods = claim.pods.iter().filter(|pod| !self.is_here(self.pods[**pod].node));
            let pods = pods.map(|pod| format!("pod {}", self.pods[*pod].pod.key));
            let nodes = claim.nodes.iter().map(|node| format!("node {}", self.nodes[*node].name));
            let owner = &self.pods[owner].pod.key;
            let conflict = |claimant| AddressConflict { address: *address, owner: owner.clone(), claimant };
            pods.chain(nodes).map(conflict).collect()
        });
        disputed.take(limit).collect()
    }

    fn is_pod_here(&self, owner: PodOrNode) -> bool {
        matches!(owner, PodOrNode::Pod(pod) if self.is_here(self.pods[pod].node))
    }

    /// Replaces the claims of one claimant; claims that stay keep their position.
    pub(super) fn replace_claims(
        &mut self,
        old: &[IpAddr],
        new: &[IpAddr],
        claimants: fn(&mut Claim) -> &mut Vec<u32>,
        claimant: u32,
    ) {
        let (had, has): (BTreeSet<&IpAddr>, BTreeSet<&IpAddr>) = (old.iter().collect(), new.iter().collect());
        for &&address in has.difference(&had) {
            self.service_addresses_changed |= self.named_by_services.contains_key(&address);
            let claim = self.claims.entry(address).or_default();
            claimants(claim).push(claimant);
            if claim.pods.len() + claim.nodes.len() > 1 {
                self.disputed.insert(address);
            }
        }
        for &&address in had.difference(&has) {
            self.service_addresses_changed |= self.named_by_services.contains_key(&address);
            let Some(claim) = self.claims.get_mut(&address) else { continue };
            let claims = claimants(claim);
            if let Some(place) = claims.iter().position(|other| *other == claimant) {
                claims.remove(place);
            }
            let left = claim.pods.len() + claim.nodes.len();
            if left < 2 {
                self.disputed.remove(&address);
            }
            if left == 0 {
                self.claims.remove(&address);
            }
        }
    }
}

/// The largest share that lets all that want less have what they want, and the others equally much, within the capacity.
fn fair_share(mut wanted: Vec<usize>, capacity: usize) -> usize {
    wanted.sort_unstable();
    let (mut left, mut sharing) = (capacity, wanted.len());
    for of_one in wanted {
        if of_one > left / sharing {
            return left / sharing;
        }
        left -= of_one;
        sharing -= 1;
    }
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::fair_share;

    #[test]
    fn who_wants_little_has_it_whatever_others_want() {
        for (wanted, capacity, share) in [
            (vec![], 10, usize::MAX),
            (vec![3, 4, 3], 10, usize::MAX),
            (vec![1, 100], 10, 9),
            (vec![100, 2, 100], 10, 4),
            (vec![5, 5, 5], 9, 3),
        ] {
            assert_eq!(fair_share(wanted.clone(), capacity), share, "{wanted:?} in {capacity}");
        }
    }
}
