//! The host port: a veth pair into the node's own stack, and the node's routes to its pods that point into it.
//!
//! The routes stand in a table of their own that a rule puts before the main one. The main table, which the CNI
//! plugin keeps, is never changed: taking the rule away puts all back, and a killed process leaves nothing that
//! the next start (or the deletion of the pair) does not clear.
//!
//! Whether it outlasts the daemon is a setting. Where pods are to stay closed when the daemon dies, both ends are in the
//! node's namespace, and the next daemon takes them over. Where their packets are to pass then, the workers' end is in a
//! namespace of the daemon's own ([`Refuge`]): the pair dies with it, and the main table's routes hold again.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use futures_util::TryStreamExt;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteScope};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{IpVersion, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::facts::Link;
use super::netlink::{Netlink, NetlinkError, PROTOCOL, ip, table};
use super::refuge::{Inside, Refuge};
use super::sysctl::{Sysctl, Sysctls};
use crate::config;

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
    /// The namespace for the workers' end could not be made or entered.
    #[error("host_port: a network namespace of its own is needed for fail.mode = \"open\" ({0}); grant CAP_SYS_ADMIN")]
    Refuge(#[source] io::Error),
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

/// How long the pair lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// Until it is taken away: a daemon that dies leaves it to the next.
    Node,
    /// As long as the daemon.
    Daemon,
}

/// An end of the pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Node,
    Workers,
}

/// The pair, up and with its rules, but no route yet. To be taken down with [`HostPort::remove`].
#[derive(Debug)]
pub struct HostPort {
    netlink: Netlink,
    config: config::HostPort,
    node: Link,
    workers: Link,
    /// Where the workers' end is, if not beside the node's.
    refuge: Option<Refuge>,
    /// Whether a daemon was here before that did not put everything back.
    follows: bool,
    /// Families whose rule is in force.
    families: Vec<AddressFamily>,
    /// Kept bound as long as the pair is ours: abstract names belong to the network namespace and end with us.
    _lock: UnixDatagram,
}

impl HostPort {
    /// Makes the pair and the rules. What a daemon left that was killed, or ended to be followed, is taken over if it is
    /// whole: the node's routes to its pods lead into the pair all the time then. Else it is cleared first. On an error
    /// no more is left than there was.
    pub async fn create(
        netlink: &Netlink,
        config: &config::HostPort,
        mtu: u32,
        lifetime: Lifetime,
    ) -> Result<Self, HostPortError> {
        let lock = lock()?;
        for name in [config.node.as_str(), config.workers.as_str()] {
            if netlink.link(name).await?.is_some_and(|link| !link.veth || link.alias.as_deref() != Some(ALIAS)) {
                return Err(HostPortError::NameTaken(name.to_owned()));
            }
        }
        let follows = has_rules(netlink).await;
        if lifetime == Lifetime::Node && is_whole(netlink, config, mtu).await? {
            let taken_over = Self::make(netlink, config, mtu, Some(families()), None, lock).await?;
            return Ok(Self { follows, ..taken_over });
        }
        clear(netlink, config).await?;
        let refuge = match lifetime {
            Lifetime::Node => None,
            Lifetime::Daemon => Some(Refuge::new().map_err(HostPortError::Refuge)?),
        };
        let made = Self::make(netlink, config, mtu, None, refuge, lock).await;
        if made.is_err()
            && let Err(error) = clear(netlink, config).await
        {
            tracing::warn!(%error, "the host port could not be cleared away");
        }
        made.map(|made| Self { follows, ..made })
    }

    /// Makes what is not there yet: pair and rules are, where their families are given.
    async fn make(
        netlink: &Netlink,
        config: &config::HostPort,
        mtu: u32,
        there: Option<Vec<AddressFamily>>,
        refuge: Option<Refuge>,
        lock: UnixDatagram,
    ) -> Result<Self, HostPortError> {
        let (node, workers) = (config.node.as_str(), config.workers.as_str());
        if there.is_none() {
            let pair = LinkVeth::new(node, workers).mtu(mtu).alias(ALIAS).build();
            let made = netlink.handle.link().add(pair).execute().await;
            made.map_err(|error| NetlinkError::new(format!("cannot add {node}"), error))?;
        }
        let workers = match &refuge {
            None => set_up(netlink, workers, End::Workers, mtu).await?,
            Some(refuge) => {
                let moved = LinkUnspec::new_with_name(workers).setns_by_fd(refuge.file().as_raw_fd()).build();
                let moved = netlink.handle.link().set(moved).execute().await;
                moved.map_err(|error| NetlinkError::new(format!("cannot move {workers}"), error))?;
                set_up_inside(refuge, config, mtu)?
            }
        };
        let node = set_up(netlink, node, End::Node, mtu).await?;
        let families = match there {
            Some(families) => families,
            None => add_rules(netlink, config).await?,
        };
        let (netlink, config) = (netlink.clone(), config.clone());
        Ok(Self { node, workers, refuge, netlink, config, follows: false, families, _lock: lock })
    }

    /// Whether a daemon was here before that did not put everything back: its routing rules were there.
    pub fn follows(&self) -> bool {
        self.follows
    }

    /// Puts the calling thread where the workers' end is, until the value that it gets is dropped.
    pub fn beside_workers(&self) -> Result<Option<Inside>, HostPortError> {
        self.refuge.as_ref().map(Refuge::enter).transpose().map_err(HostPortError::Refuge)
    }

    /// The network namespace that the pair goes with, where it has one: when nobody has it open any more.
    pub fn namespace(&self) -> Option<BorrowedFd<'_>> {
        self.refuge.as_ref().map(|refuge| refuge.file().as_fd())
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

/// Sets an end of the pair up.
async fn set_up(netlink: &Netlink, name: &str, end: End, mtu: u32) -> Result<Link, HostPortError> {
    quiet(name, end)?;
    // There are no neighbours to ask for on the node's end: the workers take whatever it sends.
    let up = LinkUnspec::new_with_name(name).mtu(mtu).alias(ALIAS).arp(end == End::Workers).up().build();
    let set = netlink.handle.link().set(up).execute().await;
    set.map_err(|error| NetlinkError::new(format!("cannot set {name} up"), error))?;
    netlink.link(name).await?.ok_or_else(|| HostPortError::Gone(name.to_owned()))
}

/// Sets the workers' end up in a namespace of its own: by a thread of its own, since this one may have more to do
/// meanwhile that belongs to the node.
fn set_up_inside(refuge: &Refuge, config: &config::HostPort, mtu: u32) -> Result<Link, HostPortError> {
    let run = || {
        let _inside = refuge.enter().map_err(HostPortError::Refuge)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(HostPortError::Refuge)?.block_on(async {
            let (netlink, _) = Netlink::open(config.table)?;
            set_up(&netlink, config.workers.as_str(), End::Workers, mtu).await
        })
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Settings of an end of the pair that must be there before it comes up. They go with it.
fn quiet(name: &str, end: End) -> Result<(), HostPortError> {
    let settings = match end {
        // Nobody but the workers sends on their end.
        End::Workers => vec![(Sysctl::v6(name, "disable_ipv6"), 1)],
        End::Node => vec![
            // No link-local address and nothing said on the node's end: there are no neighbours on it.
            (Sysctl::v6(name, "addr_gen_mode"), 1),
            (Sysctl::v6(name, "accept_dad"), 0),
            (Sysctl::v6(name, "accept_ra"), 0),
            (Sysctl::v6(name, "router_solicitations"), 0),
            // What comes from a pod for another pod's Service address leaves where it came in: no news to the pod.
            (Sysctl::v4(name, "send_redirects"), 0),
        ],
    };
    let mut kept = Sysctls::default();
    for (sysctl, value) in settings {
        let told = sysctl.to_string();
        kept.set(sysctl, value).map_err(|error| HostPortError::Sysctl { sysctl: told, error })?;
    }
    // The settings live and die with the pair: nothing to put back.
    kept.keep();
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
fn forget_answering_arp(veth: &str) {
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

async fn has_rules(netlink: &Netlink) -> bool {
    !our_rules(netlink, IpVersion::V4).await.is_empty() || !our_rules(netlink, IpVersion::V6).await.is_empty()
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
    if has_rules(netlink).await {
        there = true;
        for link in netlink.facts().await?.links.values().filter(|link| link.veth) {
            forget_answering_arp(&link.name);
        }
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
