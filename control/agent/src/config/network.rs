//! Interfaces and packets between them: `[xdp]`, `[host_veth]`, `[encapsulation]`.

use std::num::NonZeroU16;
use std::ops::RangeInclusive;

use penstock_xdp_redirect::ModeChoice;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::InterfaceName;

/// The XDP mode of the programs on pods' interfaces and uplinks (`[xdp]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Xdp {
    /// XDP mode of the programs on pods' interfaces and uplinks.
    pub mode: XdpMode,
}

/// The XDP mode of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// Native; generic where the driver has no XDP.
    #[default]
    Native,
    /// Generic everywhere, to measure it.
    Generic,
}

impl XdpMode {
    /// The mode as the XDP loader takes it.
    pub fn choice(self) -> ModeChoice {
        match self {
            Self::Native => ModeChoice::NativeElseGeneric,
            Self::Generic => ModeChoice::Generic,
        }
    }
}

/// The veth pair into the node's network stack (`[host_veth]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HostVeth {
    /// Name of the node's end: the node's routes to its pods go through it.
    pub node: InterfaceName,
    /// Name of the workers' end.
    pub workers: InterfaceName,
    /// Routing table of those routes, looked up before the main table: any but 253 to 255.
    #[schemars(range(min = 1))]
    pub table: u32,
    /// Preference of the routing rule that leads to that table.
    #[schemars(range(min = *Self::RULES.start(), max = *Self::RULES.end()))]
    pub rule: u32,
}

impl HostVeth {
    /// Preferences before the main table's rule, which has 32766.
    pub(super) const RULES: RangeInclusive<u32> = 1..=32_765;
}

impl Default for HostVeth {
    fn default() -> Self {
        let name = |name: &str| InterfaceName::try_from(name.to_owned()).expect("a valid name");
        Self { node: name("penstock-host"), workers: name("penstock0"), table: 11_200, rule: 90 }
    }
}

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
