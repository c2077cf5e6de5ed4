//! How packets get between the node's own stack and the workers, by `attach`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use crate::discovery::{HostVeth, HostVethError, NetlinkError, NetworkState, PodRoute, WorkerPairs};

/// The interfaces of the daemon's own.
pub(crate) enum NodePath {
    /// `attach = "xdp"`: a veth pair that the node's routes to its pods lead into.
    HostVeth(Box<HostVeth>),
    /// `attach = "tcx"`: the workers' pairs. The node's routes stay as they are.
    Pairs(WorkerPairs),
}

impl NodePath {
    pub(crate) fn found_leftovers(&self) -> bool {
        match self {
            Self::HostVeth(host_veth) => host_veth.found_leftovers(),
            Self::Pairs(_) => false,
        }
    }

    /// An error if one of the interfaces was deleted. Both ends of a veth pair go together: checking one is enough.
    pub(crate) fn check(&self, netstate: &NetworkState) -> Result<(), HostVethError> {
        let ours = match self {
            Self::HostVeth(host_veth) => vec![host_veth.node()],
            Self::Pairs(pairs) => pairs.pairs().iter().map(|pair| &pair.node).collect(),
        };
        match ours.into_iter().find(|link| !netstate.links.contains_key(&link.index)) {
            Some(gone) => Err(HostVethError::Gone(gone.name.clone())),
            None => Ok(()),
        }
    }

    /// The daemon that ran has ended: what it has left of the same is removed.
    pub(crate) async fn replace_others(&mut self, config: &crate::config::HostVeth) -> Result<(), HostVethError> {
        match self {
            Self::HostVeth(_) => Ok(()),
            Self::Pairs(pairs) => pairs.replace_others(config).await,
        }
    }

    /// Sets exactly these routes into the host veth. Returns the addresses that the kernel rejected, with the errors.
    pub(crate) async fn set_routes(
        &self,
        wanted: &BTreeMap<IpAddr, PodRoute>,
    ) -> Result<Vec<(IpAddr, NetlinkError)>, HostVethError> {
        match self {
            Self::HostVeth(host_veth) => host_veth.set_routes(wanted).await,
            Self::Pairs(_) => Ok(Vec::new()),
        }
    }

    /// The private network namespace of the host veth, if there is one.
    pub(crate) fn namespace(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::HostVeth(host_veth) => host_veth.namespace(),
            Self::Pairs(_) => None,
        }
    }

    /// Removes the interfaces, and what of the node's refers to them.
    pub(crate) async fn remove(self) -> Result<(), HostVethError> {
        match self {
            Self::HostVeth(host_veth) => host_veth.remove().await,
            Self::Pairs(pairs) => pairs.remove().await,
        }
    }
}
