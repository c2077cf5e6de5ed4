//! The node's interfaces and what passes them: `[xdp]`, `[host_port]`, `[encapsulation]`.

use std::num::NonZeroU16;

use penstock_xdp_redirect::ModeChoice;
use serde::Deserialize;

use super::InterfaceName;

/// Where the programs on pods' interfaces and uplinks run (`[xdp]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Xdp {
    /// In the driver where it can, or in the kernel's generic path.
    pub mode: XdpMode,
}

/// In which of the kernel's two places a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum XdpMode {
    /// In the driver; where the driver has no XDP, in the generic path.
    #[default]
    Native,
    /// In the generic path, also where the driver has XDP.
    Generic,
}

impl XdpMode {
    /// As the loader is told.
    pub fn choice(self) -> ModeChoice {
        match self {
            Self::Native => ModeChoice::NativeElseGeneric,
            Self::Generic => ModeChoice::Generic,
        }
    }
}

/// The veth pair into the node's own stack (`[host_port]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostPort {
    /// The node's end: the node's routes to its pods point into it.
    pub node: InterfaceName,
    /// The workers' end.
    pub workers: InterfaceName,
    /// The routing table that holds those routes; consulted before the node's main table.
    pub table: u32,
    /// Preference of the routing rule that points to that table, below the main table's 32766.
    pub rule: u32,
}

impl Default for HostPort {
    fn default() -> Self {
        let name = |name: &str| InterfaceName::try_from(name.to_owned()).expect("a valid name");
        Self { node: name("penstock-host"), workers: name("penstock0"), table: 11_200, rule: 90 }
    }
}

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
