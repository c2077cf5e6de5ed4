//! Interfaces and packets between them: `[xdp]`, `[host_veth]`, `[encapsulation]`.

use std::num::NonZeroU16;

use penstock_xdp_redirect::ModeChoice;
use serde::Deserialize;

use super::InterfaceName;

/// The XDP mode of the programs on pods' interfaces and uplinks (`[xdp]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Xdp {
    /// Native if the driver can, or generic.
    pub mode: XdpMode,
}

/// The XDP mode of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// Native; generic if the driver has no XDP.
    #[default]
    Native,
    /// Generic, also if the driver has XDP.
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
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostVeth {
    /// The node's end: the node's routes to its pods go through it.
    pub node: InterfaceName,
    /// The workers' end.
    pub workers: InterfaceName,
    /// The routing table of those routes; looked up before the main table.
    pub table: u32,
    /// Preference of the routing rule for that table; must be below the main table's 32766.
    pub rule: u32,
}

impl Default for HostVeth {
    fn default() -> Self {
        let name = |name: &str| InterfaceName::try_from(name.to_owned()).expect("a valid name");
        Self { node: name("penstock-host"), workers: name("penstock0"), table: 11_200, rule: 90 }
    }
}

/// What happens to encapsulated packets that pods send to nodes (`[encapsulation]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Encapsulation {
    /// Whether they are dropped.
    pub from_pods: FromPods,
    /// UDP ports of tunnels, in addition to the well-known ones and those of this node's interfaces.
    pub ports: Vec<NonZeroU16>,
}

/// Whether a node may decapsulate pods' packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FromPods {
    /// No: policy would not see the inner packet.
    #[default]
    Drop,
    /// Yes.
    Allow,
}
