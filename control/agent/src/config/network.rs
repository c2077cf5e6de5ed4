//! Packets between interfaces: `[encapsulation]`.

use std::num::NonZeroU16;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether encapsulated packets of pods reach nodes (`[encapsulation]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Encapsulation {
    /// Whether tunnel packets from pods to nodes' addresses pass.
    pub from_pods: FromPods,
    /// UDP ports of tunnels, in addition to the well-known ports and those of this node's interfaces.
    pub ports: Vec<NonZeroU16>,
}

/// Whether tunnel packets from pods to nodes' addresses pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FromPods {
    /// They are dropped, and counted as `encapsulation`: policy would not see the inner packet.
    #[default]
    Drop,
    /// They pass, if policy allows the outer packet.
    Allow,
}
