//! The workers' input: one immutable value, published as a whole.

use crate::epoch::Epoch;
use crate::forward::{Forwarding, PortId};
use crate::limits::LimitedPods;
use crate::names::Resolvers;
use crate::packet::{Address, Flow, Packet};
use crate::policy::{AddressOwner, PolicySet};

/// Tables of policy and forwarding at one time. Workers load it once per batch and never mix two snapshots.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Snapshot {
    /// Sequence number of its publication.
    pub epoch: Epoch,
    pub policy: PolicySet,
    pub forwarding: Forwarding,
    pub limits: LimitedPods,
    /// Whose answers teach pods domain names.
    pub resolvers: Resolvers,
}

impl Snapshot {
    /// Enters the ports of `forwarding` into the map of addresses of `policy`, unless
    /// [`PolicySetUpdate::set_local`](crate::policy::PolicySetUpdate::set_local) has done so.
    pub fn new(epoch: Epoch, policy: PolicySet, forwarding: Forwarding) -> Self {
        let mut update = policy.update();
        update.set_local(&forwarding);
        Self {
            epoch,
            policy: update.finish(),
            forwarding,
            limits: LimitedPods::default(),
            resolvers: Resolvers::default(),
        }
    }

    #[must_use]
    pub fn with_limits(self, limits: LimitedPods) -> Self {
        Self { limits, ..self }
    }

    #[must_use]
    pub fn with_resolvers(self, resolvers: Resolvers) -> Self {
        Self { resolvers, ..self }
    }

    /// Whether workers read the same in both, except for the epoch. Tables are compared as what is shared, so that two
    /// that became equal in different ways count as different.
    pub fn is_same(&self, other: &Self) -> bool {
        // By name, so that no new field is left out.
        let Self { epoch: _, policy, forwarding, limits, resolvers } = self;
        policy.is_same(&other.policy)
            && *forwarding == other.forwarding
            && limits.is_same(&other.limits)
            && *resolvers == other.resolvers
    }

    /// The port of the local pod with this address.
    #[inline(always)]
    pub(crate) fn pod_port(&self, address: Address) -> Option<PortId> {
        self.policy.find(address).port()
    }

    /// The address of this family that the pod of a port has.
    pub(crate) fn own_address(&self, pod: PortId, is_v4: bool) -> Option<Address> {
        let mut addresses = self.forwarding.port(pod)?.addresses.iter().copied();
        addresses.find(|&address| address.is_v4() == is_v4 && self.pod_port(address) == Some(pod))
    }

    /// Whether a node would decapsulate a packet from a pod, if its destination is not another pod of this node.
    #[inline(always)]
    pub(crate) fn would_be_decapsulated(&self, packet: &Packet) -> bool {
        let is_pod = |address| matches!(self.policy.owner(address), Some(AddressOwner::Pod { .. }));
        self.forwarding.would_be_decapsulated(packet, is_pod)
    }

    /// Whether a node may decapsulate what a pod sends to this address, by some port.
    pub(crate) fn may_end_tunnels(&self, address: Address) -> bool {
        self.forwarding.may_end_tunnels(address, |address| self.policy.find(address).is_pod())
    }

    /// Whether a flow's source is an address of the node itself, or of a Service at which its receiver's egress policy is postponed: what comes
    /// with it from elsewhere answers nothing that a pod has asked the node.
    #[inline(always)]
    pub(crate) fn has_nodes_source(&self, flow: &Flow) -> bool {
        self.forwarding.is_node(flow.src) || self.policy.find(flow.src).is_service() && self.policy.is_unasked(flow)
    }

    /// The egress port for `destination`: its pod's port, otherwise the host port.
    #[inline(always)]
    pub(crate) fn next_hop(&self, destination: Address) -> Option<PortId> {
        self.pod_port(destination).or(self.forwarding.host())
    }
}
