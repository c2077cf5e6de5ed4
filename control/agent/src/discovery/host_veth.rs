//! The host veth: a veth pair into the node's network stack, and the node's routes to its pods through it.
//!
//! The routes are in a table of their own, which a rule puts before the main table. The main table belongs to the CNI
//! plugin and is never changed: removing the rule restores the previous state, and whatever a killed process leaves is
//! removed by the next start (or by deleting the pair).
//!
//! `fail.mode` decides whether the pair survives the daemon. With `closed`, both ends are in the node's namespace and
//! the next daemon takes them over. With `open`, the workers' end is in a namespace of the daemon's own
//! ([`PrivateNetns`]): the pair dies with the daemon, and the main table's routes apply again.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;

use futures_util::TryStreamExt;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteScope};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use penstock_dataplane::io::has_ipv4_address;
use rtnetlink::{IpVersion, LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::netlink::{Netlink, NetlinkError, PROTOCOL, ip, table};
use super::network_state::Link;
use super::own_links::{ALIAS, HostVethError, bring_up, clear_pairs, lock, set_before_up};
use super::private_netns::{NetnsGuard, PrivateNetns};
use super::sysctl::{Sysctl, Sysctls};
use crate::config;

/// The alias that earlier versions set. A pair that one of them left is taken over or removed like any other.
const EARLIER_ALIAS: &str = "penstock host port";

/// Whether this link is an end of the pair, and not another program's.
fn is_our_end(link: &Link) -> bool {
    link.veth && matches!(link.alias.as_deref(), Some(ALIAS | EARLIER_ALIAS))
}

/// A route of the node to one pod's address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PodRoute {
    /// Index of the pod's veth: packets get the source address that they would have on that link.
    pub link: u32,
    /// MTU towards the pod, in bytes.
    pub mtu: u32,
    /// Index of the interface by which the pod's packets enter the node's stack: its veth, or the bridge of that.
    pub enters_by: u32,
}

/// MAC address of the node's end, whose frames have it as source and destination, as it answers no ARP. One that the kernel draws could begin like a
/// tag of the programs and workers (`struct tag` in xdp-redirect/src/bpf/worker.h).
const NODE_MAC: [u8; 6] = [0x06, 0, 0, 0, 0, 1];

/// How long the pair lives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// Until it is removed: a daemon that dies leaves it to the next.
    Node,
    /// As long as the daemon lives.
    Daemon,
}

/// An end of the pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Node,
    Workers,
}

/// The pair with its rules, up, but without routes. Take it down with [`HostVeth::remove`].
#[derive(Debug)]
pub struct HostVeth {
    netlink: Netlink,
    config: config::HostVeth,
    node: Link,
    workers: Link,
    /// The namespace of the workers' end, if not the node's.
    private_netns: Option<PrivateNetns>,
    /// Whether an earlier daemon left rules behind.
    found_leftovers: bool,
    /// Address families that have a rule.
    families: Vec<AddressFamily>,
    /// Settings that are not of the pair, restored with it.
    _settings: Sysctls,
    /// Keeps other daemons out: abstract socket names belong to the network namespace and end with the process.
    _lock: UnixDatagram,
}

impl HostVeth {
    /// Creates the pair and the rules. If an earlier daemon was killed or ended with `keep`, a complete pair is taken
    /// over, so that the node's routes to its pods stay in place; an incomplete one is removed first. On an error
    /// nothing new is left.
    pub async fn create(
        netlink: &Netlink,
        config: &config::HostVeth,
        mtu: u32,
        lifetime: Lifetime,
    ) -> Result<Self, HostVethError> {
        let lock = lock()?;
        // An earlier daemon with `attach = "tcx"` may have left them.
        clear_pairs(netlink, &[]).await?;
        for name in [config.node.as_str(), config.workers.as_str()] {
            if netlink.link(name).await?.is_some_and(|link| !is_our_end(&link)) {
                return Err(HostVethError::NameTaken(name.to_owned()));
            }
        }
        let found_leftovers = has_rules(netlink).await;
        if lifetime == Lifetime::Node && is_complete(netlink, config, mtu).await? {
            let taken_over = Self::make(netlink, config, mtu, Some(families()), None, lock).await?;
            return Ok(Self { found_leftovers, ..taken_over });
        }
        clear(netlink, config).await?;
        let private_netns = match lifetime {
            Lifetime::Node => None,
            Lifetime::Daemon => Some(PrivateNetns::new().map_err(HostVethError::PrivateNetns)?),
        };
        let made = Self::make(netlink, config, mtu, None, private_netns, lock).await;
        if made.is_err()
            && let Err(error) = clear(netlink, config).await
        {
            tracing::warn!(%error, "cannot remove the host veth");
        }
        made.map(|made| Self { found_leftovers, ..made })
    }

    /// Creates the missing parts. With `present` given, pair and rules exist, with rules for those families.
    async fn make(
        netlink: &Netlink,
        config: &config::HostVeth,
        mtu: u32,
        present: Option<Vec<AddressFamily>>,
        private_netns: Option<PrivateNetns>,
        lock: UnixDatagram,
    ) -> Result<Self, HostVethError> {
        let (node, workers) = (config.node.as_str(), config.workers.as_str());
        if present.is_none() {
            let pair = LinkVeth::new(node, workers).mtu(mtu).alias(ALIAS).build();
            let made = netlink.handle.link().add(pair).execute().await;
            made.map_err(|error| NetlinkError::new(format!("cannot add {node}"), error))?;
        }
        let workers = match &private_netns {
            None => set_up(netlink, workers, End::Workers, mtu).await?,
            Some(private_netns) => {
                let message = LinkUnspec::new_with_name(workers).setns_by_fd(private_netns.file().as_raw_fd()).build();
                let moved = netlink.handle.link().set(message).execute().await;
                moved.map_err(|error| NetlinkError::new(format!("cannot move {workers}"), error))?;
                set_up_in(private_netns, config, mtu)?
            }
        };
        let node = set_up(netlink, node, End::Node, mtu).await?;
        let _settings = without_redirects(present.is_some())?;
        let families = match present {
            Some(families) => families,
            None => add_rules(netlink, config).await?,
        };
        let (netlink, config) = (netlink.clone(), config.clone());
        Ok(Self {
            node,
            workers,
            private_netns,
            netlink,
            config,
            found_leftovers: false,
            families,
            _settings,
            _lock: lock,
        })
    }

    /// Whether an earlier daemon left its routing rules behind.
    pub fn found_leftovers(&self) -> bool {
        self.found_leftovers
    }

    /// Moves the calling thread to the workers' end's namespace until the returned guard is dropped.
    pub fn enter_workers_netns(&self) -> Result<Option<NetnsGuard>, HostVethError> {
        self.private_netns.as_ref().map(PrivateNetns::enter).transpose().map_err(HostVethError::PrivateNetns)
    }

    /// The private netns, if there is one. The pair is deleted when its last descriptor is closed.
    pub fn namespace(&self) -> Option<BorrowedFd<'_>> {
        self.private_netns.as_ref().map(|private_netns| private_netns.file().as_fd())
    }

    /// The node's end.
    pub fn node(&self) -> &Link {
        &self.node
    }

    /// The workers' end, which gets an AF_XDP socket.
    pub fn workers(&self) -> &Link {
        &self.workers
    }

    /// Sets exactly these routes through the pair. Returns the addresses that the kernel rejected, with the errors.
    pub async fn set_routes(
        &self,
        wanted: &BTreeMap<IpAddr, PodRoute>,
    ) -> Result<Vec<(IpAddr, NetlinkError)>, HostVethError> {
        let mut present = self.routes().await?;
        let mut rejected = Vec::new();
        for (&address, route) in wanted {
            let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            if !self.families.contains(&family) {
                continue;
            }
            let source = self.netlink.source_address(address, route.link).await;
            let mtu = (route.mtu < self.node.mtu).then_some(route.mtu);
            if present.remove(&address).is_some_and(|(_, has)| has == Details { source, mtu }) {
                continue;
            }
            let message = self.route(address, source, mtu);
            let added = self.netlink.handle.route().add(message).replace().execute().await;
            if let Err(error) = added {
                rejected.push((
                    address,
                    NetlinkError::new(format!("cannot route {address} into {}", self.node.name), error),
                ));
            }
        }
        for (address, (message, _)) in present {
            let deleted = self.netlink.handle.route().del(message).execute().await;
            let deleted =
                deleted.map_err(|error| NetlinkError::new(format!("cannot delete the route to {address}"), error));
            if let Err(error) = deleted.or_else(|error| if error.is_gone() { Ok(()) } else { Err(error) }) {
                rejected.push((address, error));
            }
        }
        Ok(rejected)
    }

    /// Removes rules, routes and the pair.
    pub async fn remove(self) -> Result<(), HostVethError> {
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

    /// The routes of our table in the kernel.
    async fn routes(&self) -> Result<BTreeMap<IpAddr, (RouteMessage, Details)>, HostVethError> {
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

/// The attributes that may differ between two of our routes to the same address.
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

/// Brings an end of the pair up.
async fn set_up(netlink: &Netlink, name: &str, end: End, mtu: u32) -> Result<Link, HostVethError> {
    set_initial_sysctls(name, end)?;
    // No ARP on the node's end: it has no neighbours, and the workers take whatever it sends.
    let up = LinkUnspec::new_with_name(name).mtu(mtu).alias(ALIAS).arp(end == End::Workers).up();
    let up = if end == End::Node { up.address(NODE_MAC.to_vec()) } else { up }.build();
    bring_up(netlink, name, up).await
}

/// Brings the workers' end up in the private netns. On a thread of its own, since this thread also runs tasks that
/// belong to the node's namespace.
fn set_up_in(private_netns: &PrivateNetns, config: &config::HostVeth, mtu: u32) -> Result<Link, HostVethError> {
    let run = || {
        let _guard = private_netns.enter().map_err(HostVethError::PrivateNetns)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(HostVethError::PrivateNetns)?.block_on(async {
            let (netlink, _) = Netlink::open(config.table)?;
            set_up(&netlink, config.workers.as_str(), End::Workers, mtu).await
        })
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Sets what must be set before an end comes up. The settings are deleted with the pair.
fn set_initial_sysctls(name: &str, end: End) -> Result<(), HostVethError> {
    let settings = match end {
        // Only the workers send on their end.
        End::Workers => vec![(Sysctl::v6(name, "disable_ipv6"), 1)],
        End::Node => vec![
            // No link-local address and no messages of its own on the node's end: it has no neighbours.
            (Sysctl::v6(name, "addr_gen_mode"), 1),
            (Sysctl::v6(name, "accept_dad"), 0),
            (Sysctl::v6(name, "accept_ra"), 0),
            (Sysctl::v6(name, "router_solicitations"), 0),
            // As for all interfaces, see `REDIRECTS`.
            (Sysctl::v4(name, REDIRECTS.1), 0),
        ],
    };
    set_before_up(settings)
}

/// The setting that keeps the kernel from telling pods of a shorter way.
///
/// A packet between pods through a Service's address leaves by the interface where it came in, and the kernel sends a
/// redirect for that if `send_redirects` is set on the interface or for `all`. Redirects use up what the pod may get of other
/// ICMP errors (`ip_rt_send_redirect` and `inet_peer_xrlim_allow` share their counter): a refused connection would time out.
const REDIRECTS: (&str, &str) = ("all", "send_redirects");

/// Turns [`REDIRECTS`] off; other interfaces keep their own setting. With `was_off` an earlier daemon has done so.
fn without_redirects(was_off: bool) -> Result<Sysctls, HostVethError> {
    let mut settings = Sysctls::default();
    let sysctl = Sysctl::v4(REDIRECTS.0, REDIRECTS.1);
    if was_off {
        settings.was_default(sysctl.clone());
    }
    let set = settings.set(sysctl.clone(), 0);
    set.map_err(|error| HostVethError::Sysctl { sysctl: sysctl.to_string(), error })?;
    Ok(settings)
}

/// Keeps the kernel answering ARP on a pod's veth although the route to the pod is through another interface.
///
/// `arp_process` (net/ipv4/arp.c) validates the sender's address like any source. If the route to the pod is through
/// another interface, `rp_filter` may drop the request ([`SourceFilter`]), and `arp_filter` does not answer it; `arp_filter` in
/// `all` cannot be overridden for one interface.
///
/// With `found_leftovers`, an earlier daemon may have changed the settings: their previous value is taken to be the
/// default.
pub fn keep_answering_arp(settings: &mut Sysctls, veth: &str, found_leftovers: bool) -> io::Result<()> {
    if found_leftovers {
        ANSWERING.into_iter().for_each(|name| settings.was_default(Sysctl::v4(veth, name)));
    }
    if let ArpAnswers::With(value) = SourceFilter::of(veth).arp_answers() {
        settings.set(Sysctl::v4(veth, "rp_filter"), value)?;
    }
    settings.set(Sysctl::v4(veth, "arp_filter"), 0)
}

/// The kernel's answer, by its source validation, to a pod's ARP request, whose sender's route is through another interface
/// (`__fib_validate_source` in net/ipv4/fib_frontend.c). The larger of both settings counts. Strict (1) drops it. Loose (2) takes it
/// where the pod's interface has an IPv4 address, and drops it where that has none, as with Calico.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SourceFilter {
    /// `rp_filter` of all interfaces.
    pub all: i64,
    /// `rp_filter` of this one.
    pub own: i64,
    /// Whether it has an IPv4 address.
    pub has_address: bool,
}

/// Whether ARP requests are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArpAnswers {
    /// As the settings are.
    AsIs,
    /// With this `rp_filter` of the interface.
    With(i64),
    /// With no setting of the interface.
    Never,
}

impl SourceFilter {
    /// That of an interface in the calling thread's network namespace.
    pub fn of(interface: &str) -> Self {
        let setting = |name: &str| Sysctl::v4(name, "rp_filter").read().unwrap_or(0);
        let has_address = has_ipv4_address(interface);
        Self { all: setting("all"), own: setting(interface), has_address }
    }

    /// Whether the kernel answers, or with which setting it would.
    pub fn arp_answers(self) -> ArpAnswers {
        match self {
            Self { all: 0, own: 0, .. } => ArpAnswers::AsIs,
            Self { all: 0, has_address: false, .. } => ArpAnswers::With(0),
            Self { has_address: false, .. } => ArpAnswers::Never,
            Self { own: 2, .. } => ArpAnswers::AsIs,
            Self { all: 2, .. } => ArpAnswers::AsIs,
            _ => ArpAnswers::With(2),
        }
    }
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

/// Restores what a dead process changed with [`keep_answering_arp`].
fn restore_answering_arp(veth: &str) {
    let mut settings = Sysctls::default();
    // Restored when dropped.
    ANSWERING.into_iter().for_each(|name| settings.was_default(Sysctl::v4(veth, name)));
}

async fn add_rules(netlink: &Netlink, config: &config::HostVeth) -> Result<Vec<AddressFamily>, HostVethError> {
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

/// Our rules for one family.
async fn our_rules(netlink: &Netlink, version: IpVersion) -> Vec<RuleMessage> {
    let rules: Vec<RuleMessage> = netlink.handle.rule().get(version).execute().try_collect().await.unwrap_or_default();
    rules.into_iter().filter(is_ours).collect()
}

async fn has_rules(netlink: &Netlink) -> bool {
    !our_rules(netlink, IpVersion::V4).await.is_empty() || !our_rules(netlink, IpVersion::V6).await.is_empty()
}

/// Whether pair and rules exist as this configuration would create them.
async fn is_complete(netlink: &Netlink, config: &config::HostVeth, mtu: u32) -> Result<bool, HostVethError> {
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

/// Removes what an earlier daemon left. Returns whether there was anything.
pub async fn clear_leftovers(netlink: &Netlink, config: &config::HostVeth) -> Result<bool, HostVethError> {
    let _lock = lock()?;
    let had_pair = clear_host_veth(netlink, config).await?;
    Ok(clear_pairs(netlink, &[]).await? || had_pair)
}

/// Removes the host veth of an earlier daemon, its rules and what else it changed. Returns whether there was anything.
pub(super) async fn clear_host_veth(netlink: &Netlink, config: &config::HostVeth) -> Result<bool, HostVethError> {
    let mut present = false;
    for name in [config.node.as_str(), config.workers.as_str()] {
        if let Some(link) = netlink.link(name).await? {
            if !is_our_end(&link) {
                return Err(HostVethError::NameTaken(name.to_owned()));
            }
            present = true;
        }
    }
    if has_rules(netlink).await {
        present = true;
        for link in netlink.network_state().await?.links.values().filter(|link| link.veth) {
            restore_answering_arp(&link.name);
        }
        // Restored when dropped.
        Sysctls::default().was_default(Sysctl::v4(REDIRECTS.0, REDIRECTS.1));
    }
    clear(netlink, config).await?;
    Ok(present)
}

/// Deletes our rules and the pair of these names, and the routes with the pair.
async fn clear(netlink: &Netlink, config: &config::HostVeth) -> Result<(), HostVethError> {
    let mut first_error = None;
    for version in [IpVersion::V4, IpVersion::V6] {
        for rule in our_rules(netlink, version).await {
            let deleted = netlink.handle.rule().del(rule).execute().await;
            let deleted = deleted.map_err(|error| NetlinkError::new("cannot delete a rule", error));
            first_error = first_error.or(deleted.err().filter(|error| !error.is_gone()));
        }
    }
    for name in [config.node.as_str(), config.workers.as_str()] {
        let Some(link) = netlink.link(name).await? else { continue };
        first_error = first_error.or(netlink.delete_link(&link).await.err());
    }
    first_error.map_or(Ok(()), |error| Err(error.into()))
}

fn is_ours(rule: &RuleMessage) -> bool {
    rule.attributes.contains(&RuleAttribute::Protocol(PROTOCOL))
}
