//! Requests and answers about staged policies.

use serde::{Deserialize, Serialize};

use super::Traffic;

/// `POST /v1/trial`: policies to judge beside what is in effect, instead of those of an earlier trial. `admin.trials` must allow
/// it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrialRequest {
    pub manifests: Vec<TrialManifest>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrialManifest {
    /// The file's name, for errors.
    pub name: String,
    pub text: String,
}

/// `POST` and `DELETE /v1/trial`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TrialPolicies {
    /// The policies that are judged from now on; none after `DELETE`.
    pub policies: Vec<String>,
    /// Objects of other kinds, which are not used: pods and namespaces are those of the cluster.
    pub left_out: usize,
}

/// `GET /v1/trial`: what would change if everything that is staged were promoted.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TrialStatus {
    /// The policies that are judged, each with what would happen to it; empty if nothing is staged.
    pub staged: Vec<String>,
    pub from_files: bool,
    /// When these policies were first judged, as in RFC 3339; what is counted is counted from then on.
    pub since: Option<String>,
    /// Doubts whether the staged policies are as they are meant.
    pub problems: Vec<String>,
    /// Connections that were open when they were judged last.
    pub live_judged: u64,
    /// Packets that opened a connection, or tried to, and were judged.
    pub opening_judged: u64,
    /// Packets whose verdict would change that are in no group, because there were too many at a time.
    pub unrecorded: u64,
    /// Connections that would change and are in no group, because there are too many groups.
    pub ungrouped: u64,
    /// The groups, those that would be denied first.
    pub changes: Vec<StagedChange>,
}

impl TrialStatus {
    pub fn has_changes(&self) -> bool {
        !self.changes.is_empty() || self.unrecorded > 0 || self.ungrouped > 0
    }
}

/// Connections that would change alike.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StagedChange {
    /// Who opens them: a pod, a node, or `outside`.
    pub from: String,
    /// Whom they are for; of connections to a Service its backend.
    pub to: String,
    pub protocol: String,
    /// Their destination port; 0 where the protocol has none.
    pub port: u16,
    /// The verdict in effect.
    pub present: StagedVerdict,
    /// The verdict after promotion.
    pub promoted: StagedVerdict,
    /// Where no rule would allow them: the policies that isolate the pod.
    #[serde(default)]
    pub isolating: Vec<String>,
    /// Those that are open.
    pub live: u64,
    /// Traffic of these, in both directions; `None` where connections have no counters.
    #[serde(default)]
    pub live_traffic: Option<Traffic>,
    /// Those that were opened, or denied, since the policies are judged.
    pub opened: u64,
    /// Packets that opened them, or were denied. Other packets of a connection are not counted one by one.
    pub packets: u64,
    /// Bytes of these packets, Ethernet headers included.
    pub bytes: u64,
    /// The earliest packet that is known, as in RFC 3339.
    pub first_seen: String,
    pub last_seen: String,
    pub example: String,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StagedVerdict {
    pub allowed: bool,
    /// The rules that decided, or why there is none.
    pub reason: String,
}
