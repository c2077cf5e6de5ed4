//! What pods may send to nodes in a wrapping: `[encapsulation]`.

use std::num::NonZeroU16;

use serde::Deserialize;

/// What becomes of tunnels' packets that pods send to nodes (`[encapsulation]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Encapsulation {
    /// Whether they are dropped.
    pub from_pods: FromPods,
    /// UDP ports of tunnels, beyond those that are well known and those of this node's interfaces.
    pub ports: Vec<NonZeroU16>,
}

/// Whether a node may take a pod's packet out of a tunnel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FromPods {
    /// No: policy would not be asked about what is inside.
    #[default]
    Drop,
    /// Yes.
    Allow,
}
