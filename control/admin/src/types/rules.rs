//! The answer about rules and their use.

use serde::{Deserialize, Serialize};

/// `GET /v1/rules`: how often each rule in effect decided a connection.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Rules {
    /// When this was asked, in seconds of Unix time.
    pub now: i64,
    /// Rules that are not kept, because there are too many.
    pub left_out: usize,
    /// The rules, those without a hit first, then by the time of the last hit. Without rules that pass a flow on: another
    /// one decides it.
    pub rules: Vec<RuleUsage>,
}

/// The usage of a rule. Times are seconds of Unix time.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RuleUsage {
    /// Its name: `<namespace>-<ingress|egress>-<policy>-<rule>`, with the tier in place of the namespace.
    pub rule: String,
    /// Its policy: `<namespace>/<name>`, or `<tier>/<name>`.
    pub policy: String,
    /// Its direction: `ingress` or `egress`.
    pub direction: String,
    /// Its index among the policy's rules of this direction, from 0.
    pub index: usize,
    /// A hash of what it says: an edit makes it another rule.
    pub content: String,
    pub action: String,
    /// Connections that it decided, on this node; of a Deny, packets.
    pub hits: u64,
    /// When the last was, to within some seconds; `None` if there was none.
    pub last_hit: Option<i64>,
    /// Since when the rule is known.
    pub since: i64,
}

impl RuleUsage {
    /// Whether it is known for this many seconds and has not decided a connection within them.
    pub fn is_unused(&self, now: i64, seconds: i64) -> bool {
        let from = now.saturating_sub(seconds);
        self.since <= from && self.last_hit.is_none_or(|last| last < from)
    }
}
