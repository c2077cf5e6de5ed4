//! The workers' veth pairs: the programs on pods' veths put packets into a pair, the worker's socket is at its other end.
//!
//! No route, rule or setting of the node refers to them. They are removed at the end; what a killed daemon left is removed by the next. A
//! daemon that takes over creates its own under other names, while the one that runs keeps its pairs.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rtnetlink::{LinkUnspec, LinkVeth};

use super::netlink::{Netlink, NetlinkError};
use super::network_state::{Link, NetworkState};
use super::sysctl::Sysctl;

/// Interface alias that marks both ends of a pair as Penstock's.
const ALIAS: &str = "penstock worker pair";

/// Names of a worker's pair without its number: the node's end and the worker's. A daemon that takes over uses those that the other does not.
const PAIR_NAMES: [[&str; 2]; 2] = [["penstock-w", "penstock-x"], ["penstock-y", "penstock-z"]];

#[derive(Debug, thiserror::Error)]
pub enum WorkerPairError {
    #[error("worker pairs: another penstock runs in this network namespace; stop it first")]
    Running,
    #[error("worker pairs: interface {0} exists; delete it")]
    NameTaken(String),
    #[error("worker pairs: {0}")]
    Netlink(#[from] NetlinkError),
    #[error("worker pairs: cannot set {sysctl}: {error}; make /proc/sys writable")]
    Sysctl { sysctl: Sysctl, error: io::Error },
    #[error("worker pairs: interface {0} is gone; restart penstock, and do not delete the interface")]
    Gone(String),
}

#[derive(Clone, Debug)]
pub struct WorkerVeth {
    /// The end that programs put packets into, and where the worker's come out.
    pub node: Link,
    pub worker: Link,
}

/// The pairs of all workers, up. Take them down with [`WorkerPairs::remove`].
#[derive(Debug)]
pub struct WorkerPairs {
    netlink: Netlink,
    pairs: Vec<WorkerVeth>,
    /// Keeps other daemons out, once these are the only ones: abstract socket names belong to the network namespace and end with the process.
    lock: Option<UnixDatagram>,
}

impl WorkerPairs {
    /// Creates a pair for each of this many workers, with this MTU, and removes those that an earlier daemon left. On an error nothing new
    /// is left.
    pub async fn create(netlink: &Netlink, workers: usize, mtu: u32) -> Result<Self, WorkerPairError> {
        let lock = lock()?;
        clear_pairs(netlink, &[]).await?;
        let pairs = create_all(netlink, PAIR_NAMES[0], workers, mtu).await?;
        Ok(Self { netlink: netlink.clone(), pairs, lock: Some(lock) })
    }

    /// Creates pairs while another daemon runs, whose pairs stay until [`WorkerPairs::replace_others`].
    pub async fn create_beside(netlink: &Netlink, workers: usize, mtu: u32) -> Result<Self, WorkerPairError> {
        let state = netlink.network_state().await?;
        let is_taken = |[node, _]: &[&str; 2]| state.links.values().any(|link| link.name.starts_with(node));
        let names = PAIR_NAMES.into_iter().find(|names| !is_taken(names));
        let names = names.ok_or_else(|| WorkerPairError::NameTaken(format!("{}0", PAIR_NAMES[1][0])))?;
        let pairs = create_all(netlink, names, workers, mtu).await?;
        Ok(Self { netlink: netlink.clone(), pairs, lock: None })
    }

    /// The daemon that ran has ended: removes its pairs.
    pub async fn replace_others(&mut self) -> Result<(), WorkerPairError> {
        self.lock = Some(lock()?);
        let own: Vec<u32> = self.pairs.iter().map(|pair| pair.node.index).collect();
        clear_pairs(&self.netlink, &own).await.map(drop)
    }

    pub fn pairs(&self) -> &[WorkerVeth] {
        &self.pairs
    }

    /// An error if one of them was deleted. Both ends of a veth pair go together: checking one is enough.
    pub fn check(&self, netstate: &NetworkState) -> Result<(), WorkerPairError> {
        let mut ours = self.pairs.iter().map(|pair| &pair.node);
        match ours.find(|link| !netstate.links.contains_key(&link.index)) {
            Some(gone) => Err(WorkerPairError::Gone(gone.name.clone())),
            None => Ok(()),
        }
    }

    pub async fn remove(self) -> Result<(), WorkerPairError> {
        remove_all(&self.netlink, &self.pairs).await
    }
}

/// Allows one daemon per network namespace: two would attach to the same pods.
fn lock() -> Result<UnixDatagram, WorkerPairError> {
    let bound = SocketAddr::from_abstract_name(b"penstock").and_then(|name| UnixDatagram::bind_addr(&name));
    bound.map_err(|_| WorkerPairError::Running)
}

/// Removes the pairs that an earlier daemon left. Returns whether there were any.
pub async fn clear_leftovers(netlink: &Netlink) -> Result<bool, WorkerPairError> {
    let _lock = lock()?;
    clear_pairs(netlink, &[]).await
}

/// Deletes the pairs of all workers, of which an earlier daemon may have had more, except those whose node's end is one of these interfaces.
/// Returns whether there were any.
async fn clear_pairs(netlink: &Netlink, kept: &[u32]) -> Result<bool, WorkerPairError> {
    let state = netlink.network_state().await?;
    let is_node_end = |name: &str| PAIR_NAMES.iter().any(|[node, _]| name.starts_with(node));
    let ours = state
        .links
        .values()
        .filter(|link| is_node_end(&link.name) && link.is_penstocks() && !kept.contains(&link.index));
    let mut there = false;
    for link in ours {
        there = true;
        netlink.delete_link(link).await?;
    }
    Ok(there)
}

async fn remove_all(netlink: &Netlink, pairs: &[WorkerVeth]) -> Result<(), WorkerPairError> {
    for pair in pairs {
        netlink.delete_link(&pair.node).await?;
    }
    Ok(())
}

/// On an error none is left, if the kernel removes them.
async fn create_all(
    netlink: &Netlink,
    names: [&str; 2],
    workers: usize,
    mtu: u32,
) -> Result<Vec<WorkerVeth>, WorkerPairError> {
    let mut pairs = Vec::new();
    for worker in 0..workers {
        match create(netlink, names.map(|name| format!("{name}{worker}")), mtu).await {
            Ok(pair) => pairs.push(pair),
            Err(error) => {
                if let Err(error) = remove_all(netlink, &pairs).await {
                    tracing::warn!(%error, "cannot remove the workers' veth pairs");
                }
                return Err(error);
            }
        }
    }
    Ok(pairs)
}

async fn create(netlink: &Netlink, [node, far]: [String; 2], mtu: u32) -> Result<WorkerVeth, WorkerPairError> {
    let pair = LinkVeth::new(&node, &far).mtu(mtu).alias(ALIAS).build();
    let made = netlink.handle.link().add(pair).execute().await;
    made.map_err(|error| NetlinkError::new(format!("cannot add {node}"), error))?;
    Ok(WorkerVeth { node: set_up(netlink, &node, mtu).await?, worker: set_up(netlink, &far, mtu).await? })
}

async fn set_up(netlink: &Netlink, name: &str, mtu: u32) -> Result<Link, WorkerPairError> {
    // The stack sends nothing on a pair by itself, and takes workers' errors that have an address of the node.
    for (sysctl, value) in [(Sysctl::v6(name, "disable_ipv6"), 1), (Sysctl::v4(name, "accept_local"), 1)] {
        // A kernel without IPv6 lacks the first.
        if sysctl.read().is_some_and(|before| before != value) {
            sysctl.write(value).map_err(|error| WorkerPairError::Sysctl { sysctl, error })?;
        }
    }
    let up = LinkUnspec::new_with_name(name).mtu(mtu).alias(ALIAS).arp(false).up().build();
    let set = netlink.handle.link().set(up).execute().await;
    set.map_err(|error| NetlinkError::new(format!("cannot set {name} up"), error))?;
    netlink.link(name).await?.ok_or_else(|| WorkerPairError::Gone(name.to_owned()))
}

impl Link {
    /// Whether it belongs to a worker's pair of this daemon, or of another one that runs or has run here.
    pub(crate) fn is_penstocks(&self) -> bool {
        self.veth && self.alias.as_deref() == Some(ALIAS)
    }
}
