//! Where XDP programs run: `[xdp]`.

use penstock_xdp_redirect::ModeChoice;
use serde::Deserialize;

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
