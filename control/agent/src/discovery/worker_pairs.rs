//! The workers' veth pairs with `attach = "tcx"`: the programs on pods' veths put packets into a pair, the worker's socket
//! is at its other end.
//!
//! Nothing in the node's routes, rules or settings refers to them. They are removed at the end, and what a killed daemon
//! left is made anew by the next. One that takes over makes its own beside those of the daemon that runs, under other names.

use std::os::unix::net::UnixDatagram;

use rtnetlink::{LinkUnspec, LinkVeth};

use super::host_veth::clear_host_veth;
use super::netlink::{Netlink, NetlinkError};
use super::network_state::Link;
use super::own_links::{ALIAS, HostVethError, PAIR_NAMES, bring_up, clear_pairs, lock, set_before_up};
use super::sysctl::Sysctl;
use crate::config;

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
    /// Keeps other daemons out, once these are the only ones.
    lock: Option<UnixDatagram>,
}

impl WorkerPairs {
    /// Creates a pair for each of this many workers, with this MTU. What an earlier daemon left is removed first, be it
    /// pairs or a host veth. On an error nothing new is left.
    pub async fn create(
        netlink: &Netlink,
        host_veth: &config::HostVeth,
        workers: usize,
        mtu: u32,
    ) -> Result<Self, HostVethError> {
        let lock = lock()?;
        clear_host_veth(netlink, host_veth).await?;
        clear_pairs(netlink, &[]).await?;
        let pairs = create_all(netlink, PAIR_NAMES[0], workers, mtu).await?;
        Ok(Self { netlink: netlink.clone(), pairs, lock: Some(lock) })
    }

    /// The same beside the pairs of a daemon that runs, which stay until [`WorkerPairs::replace_others`].
    pub async fn create_beside(netlink: &Netlink, workers: usize, mtu: u32) -> Result<Self, HostVethError> {
        let state = netlink.network_state().await?;
        let is_taken = |[node, _]: &[&str; 2]| state.links.values().any(|link| link.name.starts_with(node));
        let names = PAIR_NAMES.into_iter().find(|names| !is_taken(names));
        let names = names.ok_or_else(|| HostVethError::NameTaken(format!("{}0", PAIR_NAMES[1][0])))?;
        let pairs = create_all(netlink, names, workers, mtu).await?;
        Ok(Self { netlink: netlink.clone(), pairs, lock: None })
    }

    /// The daemon that ran has ended: removes its pairs.
    pub async fn replace_others(&mut self, host_veth: &config::HostVeth) -> Result<(), HostVethError> {
        self.lock = Some(lock()?);
        clear_host_veth(&self.netlink, host_veth).await?;
        clear_pairs(&self.netlink, &self.indices()).await.map(drop)
    }

    fn indices(&self) -> Vec<u32> {
        self.pairs.iter().map(|pair| pair.node.index).collect()
    }

    pub fn pairs(&self) -> &[WorkerVeth] {
        &self.pairs
    }

    pub async fn remove(self) -> Result<(), HostVethError> {
        remove_all(&self.netlink, &self.pairs).await
    }
}

async fn remove_all(netlink: &Netlink, pairs: &[WorkerVeth]) -> Result<(), HostVethError> {
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
) -> Result<Vec<WorkerVeth>, HostVethError> {
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

async fn create(netlink: &Netlink, [node, far]: [String; 2], mtu: u32) -> Result<WorkerVeth, HostVethError> {
    let pair = LinkVeth::new(&node, &far).mtu(mtu).alias(ALIAS).build();
    let made = netlink.handle.link().add(pair).execute().await;
    made.map_err(|error| NetlinkError::new(format!("cannot add {node}"), error))?;
    Ok(WorkerVeth { node: set_up(netlink, &node, mtu).await?, worker: set_up(netlink, &far, mtu).await? })
}

async fn set_up(netlink: &Netlink, name: &str, mtu: u32) -> Result<Link, HostVethError> {
    // The stack sends nothing on a pair by itself, and takes workers' errors that have an address of the node.
    set_before_up([(Sysctl::v6(name, "disable_ipv6"), 1), (Sysctl::v4(name, "accept_local"), 1)])?;
    let up = LinkUnspec::new_with_name(name).mtu(mtu).alias(ALIAS).arp(false).up().build();
    bring_up(netlink, name, up).await
}
