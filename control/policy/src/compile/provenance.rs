//! Where a rule comes from.

use std::fmt;
use std::sync::Arc;

use penstock_dataplane::policy::{Direction, RuleName};

use crate::model::{NetworkPolicy, ObjectKey, Peer, Rule};

/// A rule of a policy.
#[derive(Clone, Debug)]
pub struct RuleSource {
    /// The policy as it was when the rule was compiled.
    pub policy: Arc<NetworkPolicy>,
    /// The direction of the rule.
    pub direction: Direction,
    /// Its index among the policy's rules of this direction, from 0.
    pub rule: usize,
}

impl RuleSource {
    /// The rule itself.
    pub fn get(&self) -> &Rule {
        let rules = super::rules_of(&self.policy, self.direction).unwrap_or_default();
        &rules[self.rule]
    }

    /// `<namespace>-<ingress|egress>-<policy>-<rule>`.
    pub fn name(&self) -> RuleName {
        let ObjectKey { namespace, name } = &self.policy.key;
        RuleName(format!("{namespace}-{}-{name}-{}", word(self.direction), self.rule).into())
    }
}

/// A rule of a policy, with the peer and the port through which it matched.
///
/// Displays as `<namespace>-<ingress|egress>-<policy>-<rule>-<ipBlock|podSelector|namespaceSelector|all>-<peer>-<port>`.
/// The numbers are indexes in the policy's lists, from 0. A peer with both selectors is `namespaceSelector`; where a rule
/// lists no peers or no ports, the index is 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Provenance {
    /// The policy.
    pub policy: ObjectKey,
    /// The direction of the rule.
    pub direction: Direction,
    /// The rule's index.
    pub rule: usize,
    /// What kind of peer matched.
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
    /// An `ipBlock`.
    IpBlock,
    /// A `podSelector` alone.
    PodSelector,
    /// A `namespaceSelector`, with or without a `podSelector`.
    NamespaceSelector,
}

impl From<&Peer> for PeerKind {
    fn from(peer: &Peer) -> Self {
        match peer {
            Peer::Pods(_) => Self::PodSelector,
            Peer::Namespaces(_) | Peer::PodsInNamespaces { .. } => Self::NamespaceSelector,
            Peer::IpBlock(_) => Self::IpBlock,
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
        })
    }
}

/// A direction as rule names write it.
fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "egress",
        Direction::Ingress => "ingress",
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, direction, rule, kind, peer, port } = self;
        write!(f, "{}-{}-{}-{rule}-{kind}-{peer}-{port}", policy.namespace, word(*direction), policy.name)
    }
}
