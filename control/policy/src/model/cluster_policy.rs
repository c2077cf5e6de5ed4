//! ClusterNetworkPolicy: ordered rules in tiers around NetworkPolicy.

use std::fmt;

use penstock_dataplane::policy::RuleAction;
use serde::{Deserialize, Serialize};

use super::{Rule, Selector, Staging};

/// A ClusterNetworkPolicy.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ClusterNetworkPolicy {
    /// Its name.
    pub name: String,
    /// Its tier.
    pub tier: ClusterTier,
    /// Its place in the tier: lower numbers are evaluated first.
    pub priority: u16,
    /// Which pods it selects.
    pub subject: Subject,
    /// Its ingress rules, in order.
    pub ingress: Vec<ClusterRule>,
    /// Its egress rules, in order.
    pub egress: Vec<ClusterRule>,
    /// Whether it is in force, or staged.
    #[serde(default, skip_serializing_if = "Staging::is_in_force")]
    pub staging: Staging,
}

/// The tier of a ClusterNetworkPolicy.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum ClusterTier {
    /// Evaluated before NetworkPolicy.
    Admin,
    /// Evaluated after NetworkPolicy, for pods that it does not isolate.
    Baseline,
}

impl fmt::Display for ClusterTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin => "Admin",
            Self::Baseline => "Baseline",
        })
    }
}

/// The pods to which a ClusterNetworkPolicy applies: both selectors must match.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Subject {
    /// Selects the namespaces.
    pub namespaces: Selector,
    /// Selects the pods in them.
    pub pods: Selector,
}

/// One rule of a ClusterNetworkPolicy.
///
/// A rule that is not fully understood keeps its place and has its most restrictive meaning: an Accept matches nothing,
/// everything else becomes a Deny that matches everything.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ClusterRule {
    /// Its name, for people; need not be unique.
    pub name: Option<String>,
    /// What it does.
    #[serde(with = "RuleActionForm")]
    pub action: RuleAction,
    /// What it matches.
    pub matches: Rule,
    /// Whether it is fully understood.
    pub is_understood: bool,
}

impl ClusterNetworkPolicy {
    /// Its place in the order of evaluation: tier, priority, then name.
    pub fn order(&self) -> impl Ord + '_ {
        (self.tier, self.priority, self.name.as_str())
    }
}

/// How a [`RuleAction`] is written.
#[derive(Serialize, Deserialize)]
#[serde(remote = "RuleAction")]
enum RuleActionForm {
    Accept,
    Deny,
    Pass,
}
