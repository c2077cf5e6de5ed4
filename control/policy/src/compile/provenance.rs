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
    /// Of its ingress or of its egress rules.
    pub direction: Direction,
    /// Its place among these, from 0.
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

/// A rule of a policy, and through which of its peers and ports it matched.
///
/// Written `<namespace>-<ingress|egress>-<policy>-<rule>-<ipBlock|podSelector|namespaceSelector|all>-<peer>-<port>`, all
/// numbers being places in the policy's lists from 0. A peer with both selectors is called `namespaceSelector`; where a
/// rule lists no peers or no ports, the number is 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Provenance {
    /// The policy.
    pub policy: ObjectKey,
    /// Of its ingress or of its egress rules.
    pub direction: Direction,
    /// The rule's place among these.
    pub rule: usize,
    /// What kind of peer matched.
    pub kind: PeerKind,
    /// The peer's place in the rule's list.
    pub peer: usize,
    /// The port's place in the rule's list.
    pub port: usize,
}

/// What kind of peer a rule matched.
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

/// How a direction is written in a rule's name.
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
