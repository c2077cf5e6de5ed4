//! The host port: a veth pair into the node's own stack, and the node's routes to its pods that point into it.
//!
//! The routes stand in a table of their own that a rule puts before the main one. The main table, which the CNI
//! plugin keeps, is never changed: taking the rule away puts all back, and a killed process leaves nothing that
//! the next start (or the deletion of the pair) does not clear.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use futures_util::TryStreamExt;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteScope};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{IpVersion, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::facts::Link;
use super::netlink::{Netlink, NetlinkError, PROTOCOL, ip, table};
use super::sysctl::{Sysctl, Sysctls};
use crate::service::config;

/// Alias by which an end of the pair is known as Penstock's.
const ALIAS: &str = "penstock host port";

/// Why the host port could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum HostPortError {
    /// Another daemon has it.
    #[error("host_port: another penstock runs in this network namespace; end it first")]
    Running,
    /// A link of that name is not ours.
    #[error("host_port: interface {0} exists and is not penstock's; delete it, or give another name under [host_port]")]
    NameTaken(String),
    /// The kernel refused.
    #[error("host_port: {0}")]
    Netlink(#[from] NetlinkError),
    /// A setting of the pair could not be made.
    #[error("host_port: {sysctl} cannot be set: {error}; /proc/sys must be writable")]
    Sysctl {
        /// Which setting.
        sysctl: String,
        /// Why.
        error: io::Error,
    },
    /// The pair is gone.
    #[error("host_port: interface {0} is gone; restart penstock, and leave the interface to it")]
    Gone(String),
}

/// How the node is to reach one pod's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PodRoute {
    /// Index of the pod's veth: the source address is the one that a packet by that link would have.
    pub link: u32,
    /// MTU towards the pod, in octets.
    pub mtu: u32,
}

/// The pair, up and with its rules, but no route yet. To be taken down with [`HostPort::remove`].
#[derive(Debug)]
pub struct HostPort {
    netlink: Netlink,
    config: config::HostPort,
    node: Link,
    workers: Link,
    /// Families whose rule is in force.
    families: Vec<AddressFamily>,
    /// Kept bound as long as the pair is ours: abstract names belong to the network namespace and end with us.
    _lock: UnixDatagram,
}

impl HostPort {
    /// Makes the pair and the rules. What a daemon left that was killed, or ended to be followed, is taken over if it is
    /// whole: the node's routes to its pods lead into the pair all the time then. Else it is cleared first. On an error
    /// no more is left than there was.
    pub async fn create(netlink: &Netlink, config: &config::HostPort, mtu: u32) -> Result<Self, HostPortError> {
        let lock = lock()?;
        for name in [config.node.as_str(), config.workers.as_str()] {
            if netlink.link(name).await?.is_some_and(|link| !link.veth || link.alias.as_deref() != Some(ALIAS)) {
                return Err(HostPortError::NameTaken(name.to_owned()));
            }
        }
        let there = is_whole(netlink, config, mtu).await?;
        if !there {
            clear(netlink, config).await?;
        }
        let made = Self::make(netlink, config, mtu, there, lock).await;
        if made.is_err()
            && !there
            && let Err(error) = clear(netlink, config).await
        {
            tracing::warn!(%error, "the host port could not be cleared away");
        }
        made
    }

    async fn make(
        netlink: &Netlink,
        config: &config::HostPort,
        mtu: u32,
        there: bool,
        lock: UnixDatagram,
    ) -> Result<Self, HostPortError> {
        let (node, workers) = (config.node.as_str(), config.workers.as_str());
        let links = netlink.handle.link();
        let failed = |what: String| move |error| NetlinkError::new(what, error);
        if !there {
            let pair = LinkVeth::new(node, workers).mtu(mtu).alias(ALIAS).build();
            links.add(pair).execute().await.map_err(failed(format!("cannot add {node}")))?;
        }
        quiet(node, workers)?;
        for (name, arp) in [(workers, true), (node, false)] {
            let up = LinkUnspec::new_with_name(name).mtu(mtu).alias(ALIAS).arp(arp).up().build();
            links.set(up).execute().await.map_err(failed(format!("cannot set {name} up")))?;
        }
        let families = if there { families() } else { add_rules(netlink, config).await? };
        let find = async |name: &str| -> Result<Link, HostPortError> {
            netlink.link(name).await?.ok_or_else(|| HostPortError::Gone(name.to_owned()))
        };
        Ok(Self {
            node: find(node).await?,
            workers: find(workers).await?,
            netlink: netlink.clone(),
            config: config.clone(),
            families,
            _lock: lock,
        })
    }

    /// The node's end.
    pub fn node(&self) -> &Link {
        &self.node
    }

    /// The workers' end, which gets a socket.
    pub fn workers(&self) -> &Link {
        &self.workers
    }

    /// Makes the routes into the pair these and no others. Returns the addresses that the kernel refused, with why.
    pub async fn set_routes(
        &self,
        wanted: &BTreeMap<IpAddr, PodRoute>,
    ) -> Result<Vec<(IpAddr, NetlinkError)>, HostPortError> {
        let mut there = self.routes().await?;
        let mut refused = Vec::new();
        for (&address, route) in wanted {
            let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            if !self.families.contains(&family) {
                continue;
            }
            let source = self.netlink.source_address(address, route.link).await;
            let mtu = (route.mtu < self.node.mtu).then_some(route.mtu);
            if there.remove(&address).is_some_and(|(_, has)| has == Details { source, mtu }) {
                continue;
            }
            let message = self.route(address, source, mtu);
            let added = self.netlink.handle.route().add(message).replace().execute().await;
            if let Err(error) = added {
                refused.push((
                    address,
                    NetlinkError::new(format!("cannot route {address} into {}", self.node.name), error),
                ));
            }
        }
        for (address, (message, _)) in there {
            let gone = self.netlink.handle.route().del(message).execute().await;
            let gone = gone.map_err(|error| NetlinkError::new(format!("cannot delete the route to {address}"), error));
            if let Err(error) = gone.or_else(|error| if error.is_gone() { Ok(()) } else { Err(error) }) {
                refused.push((address, error));
            }
        }
        Ok(refused)
    }

    /// Takes rules, routes and the pair away.
    pub async fn remove(self) -> Result<(), HostPortError> {
        clear(&self.netlink, &self.config).await
    }

    fn route(&self, address: IpAddr, source: Option<IpAddr>, mtu: Option<u32>) -> RouteMessage {
        let mut message = match address {
            IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(v4, 32).build(),
            IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(v6, 128).build(),
        };
        message.header.table = 0;
        message.header.protocol = PROTOCOL;
        message.header.scope = if address.is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
        let attributes = &mut message.attributes;
        attributes.extend([RouteAttribute::Oif(self.node.index), RouteAttribute::Table(self.config.table)]);
        attributes.extend(source.map(|source| RouteAttribute::PrefSource(source.into())));
        attributes.extend(mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
        message
    }

    /// The routes of our table as the kernel has them.
    async fn routes(&self) -> Result<BTreeMap<IpAddr, (RouteMessage, Details)>, HostPortError> {
        let mut found = BTreeMap::new();
        for &family in &self.families {
            for message in self.netlink.routes(family).await? {
                if table(&message) == self.config.table
                    && let Some((address, details)) = details(&message)
                {
                    found.insert(address, (message, details));
                }
            }
        }
        Ok(found)
    }
}

/// What tells one of our routes from another to the same address.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Details {
    source: Option<IpAddr>,
    mtu: Option<u32>,
}

fn details(message: &RouteMessage) -> Option<(IpAddr, Details)> {
    let mut address = None;
    let mut details = Details::default();
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(to) => address = ip(to),
            RouteAttribute::PrefSource(from) => details.source = ip(from),
            RouteAttribute::Metrics(metrics) => {
                details.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    Some((address?, details))
}

/// One daemon a network namespace: two would take each other's pods.
fn lock() -> Result<UnixDatagram, HostPortError> {
    let bound = SocketAddr::from_abstract_name(b"penstock").and_then(|name| UnixDatagram::bind_addr(&name));
    bound.map_err(|_| HostPortError::Running)
}

/// Settings of the pair that must be there before it comes up. They go with it.
fn quiet(node: &str, workers: &str) -> Result<(), HostPortError> {
    let settings = [
        // Nobody but the workers sends on their end.
        (Sysctl::v6(workers, "disable_ipv6"), 1),
        // No link-local address and nothing said on the node's end: there are no neighbours on it.
        (Sysctl::v6(node, "addr_gen_mode"), 1),
        (Sysctl::v6(node, "accept_dad"), 0),
        (Sysctl::v6(node, "accept_ra"), 0),
        (Sysctl::v6(node, "router_solicitations"), 0),
        // What comes from a pod for another pod's Service address leaves where it came in: no news to the pod.
        (Sysctl::v4(node, "send_redirects"), 0),
    ];
    let mut kept = Sysctls::default();
    for (sysctl, value) in settings {
        let name = sysctl.to_string();
        kept.set(sysctl, value).map_err(|error| HostPortError::Sysctl { sysctl: name, error })?;
    }
    // The settings live and die with the pair: nothing to put back.
    [node, workers].into_iter().for_each(|name| kept.forget(name));
    Ok(())
}

/// Lets the kernel go on answering ARP on a pod's veth, now that the route back to the pod is another.
///
/// `arp_process` (net/ipv4/arp.c) validates the asker's address like any source: under a strict `rp_filter` the
/// request is dropped, and under `arp_filter` it is not answered, where the route to the pod is by another interface.
/// Loose (2) wins over strict in `all`; `arp_filter` in `all` cannot be undone for one interface.
///
/// Where an earlier daemon did so already, `follows`, what it was before is not known but by the kernel's default.
pub fn keep_answering_arp(settings: &mut Sysctls, veth: &str, follows: bool) -> io::Result<()> {
    if follows {
        ANSWERING.into_iter().for_each(|name| settings.was_default(Sysctl::v4(veth, name)));
    }
    let strict = |name: &str| Sysctl::v4(name, "rp_filter").read() == Some(1);
    if (strict("all") || strict(veth)) && Sysctl::v4(veth, "rp_filter").read() != Some(2) {
        settings.set(Sysctl::v4(veth, "rp_filter"), 2)?;
    }
    settings.set(Sysctl::v4(veth, "arp_filter"), 0)
}

/// A kernel without IPv6 has no pods with IPv6 addresses either.
fn families() -> Vec<AddressFamily> {
    let v6 = Sysctl::v6("all", "disable_ipv6").read().is_some();
    [(AddressFamily::Inet, true), (AddressFamily::Inet6, v6)]
        .into_iter()
        .filter_map(|(family, has)| has.then_some(family))
        .collect()
}

/// The settings that [`keep_answering_arp`] changes.
const ANSWERING: [&str; 2] = ["rp_filter", "arp_filter"];

/// Puts back what [`keep_answering_arp`] changed in a process that is gone.
pub fn forget_answering_arp(veth: &str) {
    let mut settings = Sysctls::default();
    // Put back when dropped.
    ANSWERING.into_iter().for_each(|name| settings.was_default(Sysctl::v4(veth, name)));
}

async fn add_rules(netlink: &Netlink, config: &config::HostPort) -> Result<Vec<AddressFamily>, HostPortError> {
    let rule = || {
        let mut rule = netlink.handle.rule().add().table_id(config.table).priority(config.rule);
        rule = rule.action(RuleAction::ToTable);
        rule.message_mut().attributes.push(RuleAttribute::Protocol(PROTOCOL));
        rule
    };
    let failed = |error| NetlinkError::new(format!("cannot add the rule of preference {}", config.rule), error);
    let families = families();
    for family in &families {
        match family {
            AddressFamily::Inet => rule().v4().execute().await,
            _ => rule().v6().execute().await,
        }
        .map_err(failed)?;
    }
    Ok(families)
}

/// Our rules of one family.
async fn our_rules(netlink: &Netlink, version: IpVersion) -> Vec<RuleMessage> {
    let rules: Vec<RuleMessage> = netlink.handle.rule().get(version).execute().try_collect().await.unwrap_or_default();
    rules.into_iter().filter(is_ours).collect()
}

/// Whether pair and rules are there, as this configuration would make them.
async fn is_whole(netlink: &Netlink, config: &config::HostPort, mtu: u32) -> Result<bool, HostPortError> {
    for name in [config.node.as_str(), config.workers.as_str()] {
        if netlink.link(name).await?.is_none_or(|link| !link.up || link.mtu != mtu) {
            return Ok(false);
        }
    }
    let wanted = [RuleAttribute::Table(config.table), RuleAttribute::Priority(config.rule)];
    for family in families() {
        let version = if family == AddressFamily::Inet { IpVersion::V4 } else { IpVersion::V6 };
        let rules = our_rules(netlink, version).await;
        let [rule] = &rules[..] else { return Ok(false) };
        if !wanted.iter().all(|attribute| rule.attributes.contains(attribute)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Takes away what a daemon left that did not put everything back. Whether there was anything.
pub async fn clear_left(netlink: &Netlink, config: &config::HostPort) -> Result<bool, HostPortError> {
    let _lock = lock()?;
    let mut there = false;
    for name in [config.node.as_str(), config.workers.as_str()] {
        if let Some(link) = netlink.link(name).await? {
            if !link.veth || link.alias.as_deref() != Some(ALIAS) {
                return Err(HostPortError::NameTaken(name.to_owned()));
            }
            there = true;
        }
    }
    for version in [IpVersion::V4, IpVersion::V6] {
        there |= !our_rules(netlink, version).await.is_empty();
    }
    clear(netlink, config).await?;
    Ok(there)
}

/// Deletes our rules and the pair of these names, and its routes with it.
async fn clear(netlink: &Netlink, config: &config::HostPort) -> Result<(), HostPortError> {
    let mut first_error = None;
    for version in [IpVersion::V4, IpVersion::V6] {
        for rule in our_rules(netlink, version).await {
            let gone = netlink.handle.rule().del(rule).execute().await;
            let gone = gone.map_err(|error| NetlinkError::new("cannot delete a rule", error));
            first_error = first_error.or(gone.err().filter(|error| !error.is_gone()));
        }
    }
    for name in [config.node.as_str(), config.workers.as_str()] {
        let Some(link) = netlink.link(name).await? else { continue };
        let gone = netlink.handle.link().del(link.index).execute().await;
        let gone = gone.map_err(|error| NetlinkError::new(format!("cannot delete {name}"), error));
        first_error = first_error.or(gone.err().filter(|error| !error.is_gone()));
    }
    first_error.map_or(Ok(()), |error| Err(error.into()))
}

fn is_ours(rule: &RuleMessage) -> bool {
    rule.attributes.contains(&RuleAttribute::Protocol(PROTOCOL))
}
