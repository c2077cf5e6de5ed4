//! Where a rule comes from.

use std::fmt;
use std::sync::Arc;

use penstock_dataplane::policy::{Direction, RuleAction, RuleName};

use siphasher::sip::SipHasher13;

use crate::describe;
use crate::model::{ClusterNetworkPolicy, ClusterRule, ClusterTier, NetworkPolicy, ObjectKey, Peer, PolicyNotes, Rule};

/// A rule of a policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSource {
    /// The policy as it was when the rule was compiled.
    pub policy: SourcePolicy,
    /// The direction of the rule.
    pub direction: Direction,
    /// Its index among the policy's rules of this direction, from 0.
    pub rule: usize,
}

/// A policy of either kind.
#[derive(Clone, Debug)]
pub enum SourcePolicy {
    Network(Arc<NetworkPolicy>),
    Cluster(Arc<ClusterNetworkPolicy>),
}

impl PartialEq for SourcePolicy {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Network(policy), Self::Network(other)) => Arc::ptr_eq(policy, other) || policy == other,
            (Self::Cluster(policy), Self::Cluster(other)) => Arc::ptr_eq(policy, other) || policy == other,
            _ => false,
        }
    }
}

impl Eq for SourcePolicy {}

/// A tier of policies, in the order of evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// ClusterNetworkPolicies of the Admin tier.
    Admin,
    NetworkPolicy,
    /// ClusterNetworkPolicies of the Baseline tier.
    Baseline,
}

impl From<ClusterTier> for Tier {
    fn from(tier: ClusterTier) -> Self {
        match tier {
            ClusterTier::Admin => Self::Admin,
            ClusterTier::Baseline => Self::Baseline,
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin => "Admin",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Baseline => "Baseline",
        })
    }
}

/// Identifies a policy of either kind.
///
/// Displays as `<namespace>/<name>`, or `<tier>/<name>`: a namespace has no upper-case letter.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PolicyName {
    Cluster { tier: ClusterTier, name: String },
    Network(ObjectKey),
}

impl PolicyName {
    pub fn tier(&self) -> Tier {
        match self {
            Self::Cluster { tier, .. } => (*tier).into(),
            Self::Network(_) => Tier::NetworkPolicy,
        }
    }

    /// Its namespace; none for a ClusterNetworkPolicy.
    pub fn namespace(&self) -> Option<&str> {
        match self {
            Self::Cluster { .. } => None,
            Self::Network(key) => Some(&key.namespace),
        }
    }

    /// `<namespace>-<ingress|egress>-<policy>-<rule>`, with the tier in place of the namespace.
    fn rule(&self, direction: Direction, rule: usize) -> String {
        let word = describe::direction(direction);
        match self {
            Self::Cluster { tier, name } => format!("{tier}-{word}-{name}-{rule}"),
            Self::Network(ObjectKey { namespace, name }) => format!("{namespace}-{word}-{name}-{rule}"),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster { tier, name } => write!(f, "{tier}/{name}"),
            Self::Network(key) => key.fmt(f),
        }
    }
}

impl SourcePolicy {
    /// Identifies it.
    pub fn name(&self) -> PolicyName {
        match self {
            Self::Network(policy) => PolicyName::Network(policy.key.clone()),
            Self::Cluster(policy) => PolicyName::Cluster { tier: policy.tier, name: policy.name.clone() },
        }
    }
}

impl RuleSource {
    /// The flows that the rule matches.
    pub fn get(&self) -> &Rule {
        match &self.policy {
            SourcePolicy::Network(policy) => &super::rules_of(policy, self.direction).unwrap_or_default()[self.rule],
            SourcePolicy::Cluster(policy) => &super::cluster_rules_of(policy, self.direction)[self.rule].matches,
        }
    }

    pub fn cluster_rule(&self) -> Option<&ClusterRule> {
        match &self.policy {
            SourcePolicy::Network(_) => None,
            SourcePolicy::Cluster(policy) => Some(&super::cluster_rules_of(policy, self.direction)[self.rule]),
        }
    }

    /// Its action on the flows that it matches.
    pub fn action(&self) -> RuleAction {
        self.cluster_rule().map_or(RuleAction::Accept, |rule| rule.action)
    }

    /// How its policy wants its decisions reported.
    pub fn notes(&self) -> PolicyNotes {
        match &self.policy {
            SourcePolicy::Network(policy) => policy.notes,
            SourcePolicy::Cluster(policy) => policy.notes,
        }
    }

    /// The namespace of the policy; none for a ClusterNetworkPolicy.
    pub fn namespace(&self) -> Option<&str> {
        match &self.policy {
            SourcePolicy::Network(policy) => Some(&policy.key.namespace),
            SourcePolicy::Cluster(_) => None,
        }
    }

    /// A hash of what the rule says, the same in every run: two rules in one place of a policy that differ are two rules.
    pub fn content(&self) -> u64 {
        let text = serde_json::to_vec(&(self.get(), self.cluster_rule())).expect("rules have text keys only");
        SipHasher13::new().hash(&text)
    }

    /// `<namespace>-<ingress|egress>-<policy>-<rule>`, with the tier in place of the namespace where there is none.
    pub fn name(&self) -> RuleName {
        let policy = self.policy.name();
        RuleName::new(policy.to_string(), policy.rule(self.direction, self.rule))
    }
}

/// A rule of a policy, with the peer and the port through which it matched.
///
/// Displays as `<namespace>-<ingress|egress>-<policy>-<rule>-<kind of peer>-<peer>-<port>`. The kind is `ipBlock`,
/// `podSelector`, `namespaceSelector` or `all`; for a ClusterNetworkPolicy `networks`, `pods`, `namespaces`, `nodes`
/// or `domainNames`, and its tier stands in place of the namespace. The numbers are indexes in the policy's lists, from 0; a
/// `destinationNamedPort` counts as three entries, one for each protocol. A peer with both selectors is `namespaceSelector`; where a rule lists no
/// peers or no ports, the index is 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Provenance {
    pub policy: PolicyName,
    /// The direction of the rule.
    pub direction: Direction,
    /// The rule's index.
    pub rule: usize,
    /// The kind of peer that matched.
    pub kind: PeerKind,
    /// The peer's index in the rule's list.
    pub peer: usize,
    /// The port's index in the rule's list.
    pub port: usize,
}

/// The kind of peer through which a rule matched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum PeerKind {
    /// No peers are given: every peer.
    All,
    IpBlock,
    /// A `podSelector` alone.
    PodSelector,
    /// A `namespaceSelector`, with or without a `podSelector`.
    NamespaceSelector,
    /// `networks` of a ClusterNetworkPolicy.
    Networks,
    /// `pods` of a ClusterNetworkPolicy.
    Pods,
    /// `namespaces` of a ClusterNetworkPolicy.
    Namespaces,
    /// `nodes` of a ClusterNetworkPolicy.
    Nodes,
    /// `domainNames` of a ClusterNetworkPolicy.
    DomainNames,
}

impl PeerKind {
    /// The kind of a peer, as the policy writes it.
    pub(super) fn of(peer: &Peer, source: &RuleSource) -> Self {
        let is_cluster = source.cluster_rule().is_some();
        match peer {
            Peer::Pods(_) => Self::PodSelector,
            Peer::Namespaces(_) if is_cluster => Self::Namespaces,
            Peer::PodsInNamespaces { .. } if is_cluster => Self::Pods,
            Peer::Namespaces(_) | Peer::PodsInNamespaces { .. } => Self::NamespaceSelector,
            Peer::IpBlock(_) => Self::IpBlock,
            Peer::Networks(_) => Self::Networks,
            Peer::Nodes(_) => Self::Nodes,
            Peer::DomainNames(_) => Self::DomainNames,
        }
    }
}

impl fmt::Display for PeerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::IpBlock => "ipBlock",
            Self::PodSelector => "podSelector",
            Self::NamespaceSelector => "namespaceSelector",
            Self::Networks => "networks",
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
            Self::Nodes => "nodes",
            Self::DomainNames => "domainNames",
        })
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, direction, rule, kind, peer, port } = self;
        write!(f, "{}-{kind}-{peer}-{port}", policy.rule(*direction, *rule))
    }
}
