//! Verdicts of policy on a flow.

use super::EndpointId;
use crate::DropReason;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Direction {
    Egress,
    Ingress,
}

/// Refers to a rule of a [`PolicySet`](super::PolicySet) by endpoint, direction and number in the table. Only valid with the set that
/// returned it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RuleRef {
    pub endpoint: EndpointId,
    pub direction: Direction,
    pub rule: u32,
}

/// Verdict of one direction of a flow. The zero value denies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DirectionVerdict {
    /// The pod is isolated in this direction and no rule allows the flow.
    #[default]
    Denied,
    /// The pod is not enforced here (it is on another node), or there is no pod.
    NotLocal,
    /// The address is behind a pod's port of this node, but policy does not know the pod yet.
    NotReady,
    /// No policy applies to the pod in this direction.
    Open,
    /// This rule allows the flow: of a NetworkPolicy that isolates the pod, or an Accept of a ClusterNetworkPolicy.
    Allowed(RuleRef),
    /// This Deny rule of a ClusterNetworkPolicy denies the flow.
    DeniedBy(RuleRef),
    /// ClusterNetworkPolicies apply to the pod, and no rule of any tier decided: allowed.
    Default,
    /// Egress to an address of a Service, which the node's kernel translates: decided for what answers, once that is known.
    Postponed,
    /// The pod is isolated and none of its rules allows the flow, but this rule of the other direction does, and rules
    /// are honoured cluster-wide.
    AllowedByPeer(RuleRef),
    /// A pod and itself: never subject to policy. A pod and its node: never denied by NetworkPolicy.
    Exempt,
}

impl DirectionVerdict {
    #[inline]
    pub const fn is_allowed(&self) -> bool {
        !matches!(self, Self::Denied | Self::DeniedBy(_) | Self::NotReady)
    }

    /// The rule that decided, of either direction.
    pub const fn rule(&self) -> Option<RuleRef> {
        match self {
            Self::Allowed(rule) | Self::DeniedBy(rule) | Self::AllowedByPeer(rule) => Some(*rule),
            _ => None,
        }
    }
}

/// Policy verdict on a flow: both directions. The zero value denies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PolicyVerdict {
    /// Egress of the source.
    pub egress: DirectionVerdict,
    /// Ingress of the destination.
    pub ingress: DirectionVerdict,
}

impl PolicyVerdict {
    /// Whether a worker lets the flow pass: no direction denies it, and at least one end is enforced here.
    #[inline]
    pub const fn is_allowed(&self) -> bool {
        self.drop_reason().is_none()
    }

    /// Why a worker drops the flow; egress is checked before ingress. If neither end is known here, the flow belongs to
    /// a pod whose policies are not known yet.
    #[inline]
    pub const fn drop_reason(&self) -> Option<DropReason> {
        match (self.egress, self.ingress) {
            (DirectionVerdict::NotReady, _) | (_, DirectionVerdict::NotReady) => Some(DropReason::NotReady),
            (DirectionVerdict::Denied | DirectionVerdict::DeniedBy(_), _) => Some(DropReason::EgressDenied),
            (_, DirectionVerdict::Denied | DirectionVerdict::DeniedBy(_)) => Some(DropReason::IngressDenied),
            (DirectionVerdict::NotLocal, DirectionVerdict::NotLocal) => Some(DropReason::NotReady),
            _ => None,
        }
    }
}

/// Whether a rule of one direction also allows the flow in the other direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum RuleScope {
    /// Both directions must allow, as in the Kubernetes API.
    #[default]
    BothSides,
    /// A rule is honoured cluster-wide. A direction without policy has no rule and does not override the other.
    ClusterWide,
}

/// How policy was evaluated for a flow: what else may be asked of another set about the same packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EvaluationForm {
    /// As it stands.
    #[default]
    Plain,
    /// As one that the node's stack forwards: its source has no exemption as the node's.
    Forwarded,
    /// The same, and its source, which the stack has translated, is not known.
    Unknown,
    /// As one of a pod to itself through a Service.
    Hairpin,
}
