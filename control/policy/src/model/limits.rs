//! How many connections a pod may have, by its annotations.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct ConnectionLimits {
    #[serde(default)]
    pub egress: ConnectionLimit,
    /// The limit of connections that others open to it.
    #[serde(default)]
    pub ingress: ConnectionLimit,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct ConnectionLimit {
    /// Most that are opened in a second.
    #[serde(default)]
    pub each_second: Option<u32>,
    #[serde(default)]
    pub open: Option<u32>,
}

impl ConnectionLimits {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
