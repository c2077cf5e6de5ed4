//! Common to the host veth and the workers' pairs: the mark of this daemon's links, the lock that keeps a second daemon out, and
//! the removal of pairs, which both do before they make their own.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use netlink_packet_route::link::LinkMessage;

use super::netlink::{Netlink, NetlinkError};
use super::network_state::Link;
use super::sysctl::{Sysctl, Sysctls};

/// Interface alias that marks both ends of a pair as Penstock's.
pub(super) const ALIAS: &str = "penstock host veth";

#[derive(Debug, thiserror::Error)]
pub enum HostVethError {
    #[error("host_veth: another penstock runs in this network namespace; stop it first")]
    Running,
    #[error("host_veth: interface {0} exists and is not penstock's; delete it, or set another name under [host_veth]")]
    NameTaken(String),
    #[error("host_veth: {0}")]
    Netlink(#[from] NetlinkError),
    #[error("host_veth: cannot set {sysctl}: {error}; make /proc/sys writable")]
    Sysctl { sysctl: String, error: io::Error },
    #[error("host_veth: cannot create a network namespace for fail.mode = \"open\" ({0}); grant CAP_SYS_ADMIN")]
    PrivateNetns(#[source] io::Error),
    #[error("host_veth: interface {0} is gone; restart penstock, and do not delete the interface")]
    Gone(String),
}

/// Allows one daemon per network namespace: two would attach to the same pods.
pub(super) fn lock() -> Result<UnixDatagram, HostVethError> {
    let bound = SocketAddr::from_abstract_name(b"penstock").and_then(|name| UnixDatagram::bind_addr(&name));
    bound.map_err(|_| HostVethError::Running)
}

/// Names of a worker's pair without its number: the node's end and the worker's. A daemon that starts beside another one has those that it has not.
pub(super) const PAIR_NAMES: [[&str; 2]; 2] = [["penstock-w", "penstock-x"], ["penstock-y", "penstock-z"]];

/// Deletes the pairs of all workers, of which an earlier daemon may have had more, except those whose node's end is one of these interfaces.
/// Returns whether there were any.
pub(super) async fn clear_pairs(netlink: &Netlink, kept: &[u32]) -> Result<bool, HostVethError> {
    let state = netlink.network_state().await?;
    let is_node_end = |name: &str| PAIR_NAMES.iter().any(|[node, _]| name.starts_with(node));
    let ours = state.links.values().filter(|link| {
        link.veth && is_node_end(&link.name) && link.alias.as_deref() == Some(ALIAS) && !kept.contains(&link.index)
    });
    let mut there = false;
    for link in ours {
        there = true;
        netlink.delete_link(link).await?;
    }
    Ok(there)
}

/// Sets what must be set before an end of a pair comes up.
pub(super) fn set_before_up(settings: impl IntoIterator<Item = (Sysctl, i64)>) -> Result<(), HostVethError> {
    let mut kept = Sysctls::default();
    for (sysctl, value) in settings {
        let name = sysctl.to_string();
        kept.set(sysctl, value).map_err(|error| HostVethError::Sysctl { sysctl: name, error })?;
    }
    // The settings are deleted with the pair: nothing to restore.
    kept.keep();
    Ok(())
}

/// Brings an end of a pair up.
pub(super) async fn bring_up(netlink: &Netlink, name: &str, up: LinkMessage) -> Result<Link, HostVethError> {
    let set = netlink.handle.link().set(up).execute().await;
    set.map_err(|error| NetlinkError::new(format!("cannot set {name} up"), error))?;
    netlink.link(name).await?.ok_or_else(|| HostVethError::Gone(name.to_owned()))
}

impl Link {
    /// Whether it is one of this daemon's own, or of another daemon that runs or has run here.
    pub(crate) fn is_penstocks(&self) -> bool {
        self.veth && self.alias.as_deref() == Some(ALIAS)
    }
}
