//! ClusterNetworkPolicy: ordered rules in tiers around NetworkPolicy.

use std::fmt;

use penstock_dataplane::names::NamePattern;
use penstock_dataplane::policy::RuleAction;
use serde::{Deserialize, Serialize};

use super::{PolicyNotes, Rule, Selector, Staging};

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct ClusterNetworkPolicy {
    pub name: String,
    pub tier: ClusterTier,
    /// Its place in the tier: lower numbers are evaluated first.
    pub priority: u16,
    pub subject: Subject,
    /// Its ingress rules, in order.
    pub ingress: Vec<ClusterRule>,
    /// Its egress rules, in order.
    pub egress: Vec<ClusterRule>,
    #[serde(default, skip_serializing_if = "Staging::is_in_force")]
    pub staging: Staging,
    #[serde(default, skip_serializing_if = "PolicyNotes::is_empty")]
    pub notes: PolicyNotes,
}

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
    pub namespaces: Selector,
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
    #[serde(with = "RuleActionForm")]
    pub action: RuleAction,
    pub matches: Rule,
    pub is_understood: bool,
}

/// A domain name of a rule: `example.org`, or `*.example.org` for every name below it. In lower case, without a dot at the end.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainPattern(NamePattern);

impl DomainPattern {
    /// A name as the API writes it: `^(\*\.)?(label\.)+label\.?$`. `None` for other texts.
    pub fn new(text: &str) -> Option<Self> {
        NamePattern::new(text).map(Self)
    }

    pub fn pattern(&self) -> &NamePattern {
        &self.0
    }

    /// Whether every name that the other matches is one that this matches.
    pub fn covers(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (NamePattern::Name(wide), NamePattern::Name(narrow)) => wide == narrow,
            (NamePattern::Name(_), NamePattern::Under(_)) => false,
            (NamePattern::Under(wide), NamePattern::Name(narrow)) => is_below(narrow, wide),
            (NamePattern::Under(wide), NamePattern::Under(narrow)) => wide == narrow || is_below(narrow, wide),
        }
    }
}

fn is_below(name: &str, parent: &str) -> bool {
    name.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'))
}

impl fmt::Display for DomainPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            NamePattern::Name(name) => f.write_str(name),
            NamePattern::Under(name) => write!(f, "*.{name}"),
        }
    }
}

impl From<DomainPattern> for String {
    fn from(pattern: DomainPattern) -> Self {
        pattern.to_string()
    }
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0:?} is not a domain name: write example.org or *.example.org")]
pub struct NotADomainName(String);

impl TryFrom<String> for DomainPattern {
    type Error = NotADomainName;

    fn try_from(text: String) -> Result<Self, NotADomainName> {
        Self::new(&text).ok_or(NotADomainName(text))
    }
}

impl ClusterNetworkPolicy {
    /// Its place in the order of evaluation: tier, priority, then name.
    pub fn order(&self) -> impl Ord + '_ {
        (self.tier, self.priority, self.name.as_str())
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "RuleAction")]
enum RuleActionForm {
    Accept,
    Deny,
    Pass,
}
