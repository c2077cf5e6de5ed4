//! Annotations of a policy that ask for something beside its verdicts.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct PolicyNotes {
    /// Which of its decisions are written to the verdict log.
    pub log: PolicyLog,
    /// The answer to the sender of a connection that it denies; `None`: as the node is configured.
    pub deny_answer: Option<DenyAnswer>,
}

impl PolicyNotes {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Which decisions of a policy are written to the verdict log.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum PolicyLog {
    /// Nothing for its sake.
    #[default]
    Off,
    Denied,
    Allowed,
    All,
}

impl PolicyLog {
    pub const fn has_denied(self) -> bool {
        matches!(self, Self::Denied | Self::All)
    }

    pub const fn has_allowed(self) -> bool {
        matches!(self, Self::Allowed | Self::All)
    }
}

/// The answer to a connection that a policy denies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum DenyAnswer {
    /// None: the client waits until it gives up.
    None,
    /// A RST, or an ICMP error.
    Reject,
}
