//! Reads links, routes and addresses over rtnetlink, and waits for changes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use dashmap::DashSet;
use futures_util::{Stream, StreamExt, TryStreamExt, pin_mut};
use ipnet::IpNet;
use netlink_packet_route::address::AddressAttribute;
use netlink_packet_route::link::{
    InfoAmt, InfoBareUdp, InfoData, InfoGeneve, InfoKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use netlink_packet_route::tc::{TcAttribute, TcHandle};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use penstock_dataplane::forward::Mac;
use penstock_xdp_redirect::filters_of_others;
use rtnetlink::packet_core::NetlinkPayload;
use rtnetlink::{Handle, MulticastGroup};
use tokio::sync::Notify;

use super::network_state::{HostRoute, Link, NetworkState, RemoteNetwork, Shaping};

#[derive(Debug, thiserror::Error)]
#[error("netlink: {what}: {error}")]
pub struct NetlinkError {
    what: String,
    pub error: io::Error,
}

impl NetlinkError {
    pub(super) fn new(what: impl Into<String>, error: rtnetlink::Error) -> Self {
        let error = match error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            other => io::Error::other(other.to_string()),
        };
        Self { what: what.into(), error }
    }

    /// Whether the kernel says that the object does not exist (any more).
    pub fn is_gone(&self) -> bool {
        use nix::errno::Errno;
        self.error
            .raw_os_error()
            .is_some_and(|code| [Errno::ENODEV, Errno::ENOENT, Errno::ESRCH].contains(&Errno::from_raw(code)))
    }
}

/// A netlink socket in the network namespace of the thread that opened it.
#[derive(Clone, Debug)]
pub struct Netlink {
    pub(super) handle: Handle,
    awaited: Arc<DashSet<IpAddr>>,
}

#[derive(Clone, Debug)]
pub struct Events {
    changed: Arc<Notify>,
}

impl Events {
    /// Waits until something has changed since the last call. Several changes wake it once.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

impl Netlink {
    /// Opens sockets for requests and events; must be called within a tokio runtime.
    pub fn open() -> Result<(Self, Events), NetlinkError> {
        let failed = |error| NetlinkError { what: "cannot open a socket".into(), error };
        let (connection, handle, _) = rtnetlink::new_connection().map_err(failed)?;
        tokio::spawn(connection);
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Neigh,
            MulticastGroup::Tc,
        ];
        let (connection, _, mut messages) = rtnetlink::new_multicast_connection(&groups).map_err(failed)?;
        tokio::spawn(connection);
        let changed = Arc::new(Notify::new());
        let events = Events { changed: changed.clone() };
        let netlink = Self { handle, awaited: Arc::default() };
        let awaited = netlink.awaited.clone();
        tokio::spawn(async move {
            while let Some((message, _)) = messages.next().await {
                use RouteNetlinkMessage::{DelNeighbour, NewNeighbour};
                match message.payload {
                    // Neighbour entries change all the time: only the awaited ones are events.
                    NetlinkPayload::InnerMessage(DelNeighbour(_)) => {}
                    NetlinkPayload::InnerMessage(NewNeighbour(entry)) => {
                        let known = neighbour(&entry).is_some_and(|(address, _)| awaited.remove(&address).is_some());
                        if known {
                            changed.notify_one();
                        }
                    }
                    _ => changed.notify_one(),
                }
            }
        });
        Ok((netlink, events))
    }

    /// Reads the network state. Requests the other end of each veth that leads to another network namespace.
    pub async fn network_state(&self) -> Result<NetworkState, NetlinkError> {
        let all = self.all_routes().await?;
        let is_main = |message: &&RouteMessage| table(message) == u32::from(RouteHeader::RT_TABLE_MAIN);
        let (main, others): (Vec<_>, Vec<_>) = all.iter().partition(is_main);
        let host_routes = |messages: Vec<&RouteMessage>| -> Vec<HostRoute> {
            let mut routes: Vec<HostRoute> = messages.into_iter().filter_map(host_route).collect();
            routes.sort_unstable();
            routes
        };
        let (routes, other_routes) = (host_routes(main), host_routes(others));
        let local_prefixes = all.iter().filter_map(local_prefix).collect();
        let messages = collect("cannot read the links", self.handle.link().get().execute()).await?;
        let mut links: BTreeMap<u32, Link> = messages.iter().map(link).map(|link| (link.index, link)).collect();
        for (index, shaping) in self.shaping().await {
            if let Some(link) = links.get_mut(&index) {
                link.shaping = shaping;
            }
        }
        let tunnel_ports = messages.iter().flat_map(tunnel_ports).collect();
        let tunnels: BTreeSet<u32> =
            messages.iter().filter(|message| is_tunnel(message)).map(|message| message.header.index).collect();
        let mut remote: Vec<RemoteNetwork> =
            all.iter().filter_map(|message| remote_network(message, &tunnels)).collect();
        remote.sort_unstable();
        let bridges: BTreeSet<u32> = links.values().filter(|link| link.bridge).map(|link| link.index).collect();
        let on_bridge =
            |link: &Link| link.peer_namespace.is_some() && link.master.is_some_and(|index| bridges.contains(&index));
        let unknown = self.read_peer_macs(&messages, &mut links).await;
        let mut bridged = Vec::new();
        if !unknown.is_empty() || links.values().any(on_bridge) {
            let neighbours = self.neighbours().await?;
            fill_peer_macs(&neighbours, &mut links, &unknown, &[&routes[..], &other_routes].concat());
            bridged = bridge_ports_of_neighbours(&neighbours, &links);
        }
        let (addresses, networks) = self.addresses(&bridges).await?;
        // The kernel makes such a route for each of the node's own IPv6 addresses with a prefix of 128 bits.
        let of_others = |routes: Vec<HostRoute>| -> Vec<HostRoute> {
            routes.into_iter().filter(|route| addresses.binary_search(&route.destination).is_err()).collect()
        };
        let (routes, other_routes) = (of_others(routes), of_others(other_routes));
        Ok(NetworkState {
            links,
            routes,
            other_routes,
            bridged,
            networks,
            addresses,
            local_prefixes,
            tunnel_ports,
            remote,
            longest: all.iter().filter_map(mtu).min(),
        })
    }

    /// Fills in the MAC address at the other end of each veth that leads to another network namespace. Returns the veths whose other end
    /// cannot be read.
    async fn read_peer_macs(&self, messages: &[LinkMessage], links: &mut BTreeMap<u32, Link>) -> BTreeSet<u32> {
        let mut unknown = BTreeSet::new();
        for message in messages {
            let Some(link) = links.get_mut(&message.header.index).filter(|link| link.veth) else { continue };
            if link.peer_namespace.is_some() {
                link.peer_mac = self.peer_mac(message).await;
                if link.peer_mac.is_none() {
                    unknown.insert(link.index);
                }
            }
        }
        unknown
    }

    /// The interfaces that have a queueing discipline or filters of somebody else. A kernel without traffic control has none.
    async fn shaping(&self) -> BTreeMap<u32, Shaping> {
        let mut found: BTreeMap<u32, Shaping> = BTreeMap::new();
        let request = collect("cannot read the queueing disciplines", self.handle.qdisc().get().execute());
        for message in request.await.unwrap_or_default() {
            let kind = message.attributes.iter().find_map(|attribute| match attribute {
                TcAttribute::Kind(kind) => Some(kind.as_str()),
                _ => None,
            });
            // The kernel's own have the handle 0.
            let is_own = message.header.handle == TcHandle::UNSPEC;
            let shaping = found.entry(message.header.index.cast_unsigned()).or_default();
            match kind {
                // Its filters may all be Penstock's.
                Some("clsact") => {
                    let others = filters_of_others(message.header.index.cast_unsigned());
                    [shaping.from_pod, shaping.to_pod] = others.unwrap_or([true, true]);
                }
                Some("ingress") => shaping.from_pod = true,
                Some(_) if !is_own && message.header.parent == TcHandle::ROOT => shaping.to_pod = true,
                _ => {}
            }
        }
        found.retain(|_, shaping| *shaping != Shaping::default());
        found
    }

    /// Has the kernel resolve `address` on a link. The resolved neighbour entry raises an event.
    pub async fn solicit(&self, link: u32, address: IpAddr) {
        self.awaited.insert(address);
        let mut request = self.handle.neighbours().add(link, address).state(NeighbourState::None);
        // NTF_USE: as if there were a packet to send (neigh_add in net/core/neighbour.c).
        request = request.flags(NeighbourFlags::Use).replace();
        if let Err(error) = request.execute().await {
            tracing::debug!(%address, link, %error, "cannot solicit the address");
        }
    }

    pub async fn link(&self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let request = self.handle.link().get().match_name(name).execute();
        match collect(&format!("cannot read {name}"), request).await {
            Ok(messages) => Ok(messages.first().map(link)),
            Err(error) if error.is_gone() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes a link, unless it is gone.
    pub(super) async fn delete_link(&self, link: &Link) -> Result<(), NetlinkError> {
        let deleted = self.handle.link().del(link.index).execute().await;
        match deleted.map_err(|error| NetlinkError::new(format!("cannot delete {}", link.name), error)) {
            Err(error) if !error.is_gone() => Err(error),
            _ => Ok(()),
        }
    }

    async fn routes(&self, family: AddressFamily) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        collect("cannot read the routes", self.handle.route().get(request).execute()).await
    }

    async fn all_routes(&self) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut found = self.routes(AddressFamily::Inet).await?;
        found.extend(self.routes(AddressFamily::Inet6).await?);
        Ok(found)
    }

    /// The node's own addresses, and the networks of the bridges' addresses.
    async fn addresses(&self, bridges: &BTreeSet<u32>) -> Result<(Vec<IpAddr>, Vec<(IpNet, u32)>), NetlinkError> {
        let messages = collect("cannot read the addresses", self.handle.address().get().execute()).await?;
        let reachable = |address: &IpAddr| match address {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
        };
        let (mut own, mut networks) = (BTreeSet::new(), Vec::new());
        for message in &messages {
            // A point-to-point interface has its own address in LOCAL and its peer's in ADDRESS.
            let local = message.attributes.iter().filter_map(|attribute| match attribute {
                AddressAttribute::Local(address) => Some((0, *address)),
                AddressAttribute::Address(address) => Some((1, *address)),
                _ => None,
            });
            let Some(address) = local.min().map(|(_, address)| address).filter(reachable) else { continue };
            own.insert(address);
            if bridges.contains(&message.header.index)
                && let Ok(network) = IpNet::new(address, message.header.prefix_len)
            {
                networks.push((network, message.header.index));
            }
        }
        Ok((own.into_iter().collect(), networks))
    }

    /// The MAC address of a veth's peer, in any namespace; `None` if it cannot be read.
    async fn peer_mac(&self, veth: &LinkMessage) -> Option<Mac> {
        let peer = veth.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Link(index) => Some(*index),
            _ => None,
        })?;
        let namespace = veth.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::LinkNetNsId(id) => Some(*id),
            _ => None,
        });
        let mut request = self.handle.link().get().match_index(peer);
        if let Some(id) = namespace {
            request.message_mut().attributes.push(LinkAttribute::IfNetnsId(id));
        }
        let replies = collect("cannot read a veth's other end", request.execute()).await;
        replies.ok()?.first().map(link).map(|peer| peer.mac).filter(|&mac| mac != Mac::default())
    }

    async fn neighbours(&self) -> Result<Vec<Neighbour>, NetlinkError> {
        let messages = collect("cannot read the neighbours", self.handle.neighbours().get().execute()).await?;
        let known = messages.iter().filter_map(|message| Some((message.header.ifindex, neighbour(message)?)));
        Ok(known.map(|(link, (address, mac))| Neighbour { link, address, mac }).collect())
    }
}

struct Neighbour {
    link: u32,
    address: IpAddr,
    mac: Mac,
}

/// Fills in the peer MAC addresses that only the neighbour table knows.
fn fill_peer_macs(
    neighbours: &[Neighbour],
    links: &mut BTreeMap<u32, Link>,
    unknown: &BTreeSet<u32>,
    routes: &[HostRoute],
) {
    for &Neighbour { link: index, address, mac } in neighbours.iter().filter(|entry| unknown.contains(&entry.link)) {
        if routes.contains(&HostRoute { destination: address, link: index })
            && let Some(link) = links.get_mut(&index)
        {
            link.peer_mac = Some(mac);
        }
    }
}

/// The bridge ports that each neighbour on a bridge may be behind: those whose peer has its MAC address, which a pod may have given
/// itself. The bridge's own forwarding table is no substitute: it ages out silent hosts.
fn bridge_ports_of_neighbours(neighbours: &[Neighbour], links: &BTreeMap<u32, Link>) -> Vec<HostRoute> {
    let mut ports: BTreeMap<(u32, [u8; 6]), Vec<u32>> = BTreeMap::new();
    for port in links.values() {
        if let (Some(bridge), Some(mac)) = (port.master, port.peer_mac) {
            ports.entry((bridge, mac.0)).or_default().push(port.index);
        }
    }
    let found = |entry: &Neighbour| -> Vec<HostRoute> {
        let behind = ports.get(&(entry.link, entry.mac.0)).into_iter().flatten();
        behind.map(|&link| HostRoute { destination: entry.address, link }).collect()
    };
    neighbours.iter().flat_map(found).collect()
}

async fn collect<T>(
    what: &str,
    stream: impl Stream<Item = Result<T, rtnetlink::Error>>,
) -> Result<Vec<T>, NetlinkError> {
    pin_mut!(stream);
    stream.try_collect().await.map_err(|error| NetlinkError::new(what, error))
}

fn link(message: &LinkMessage) -> Link {
    let (index, up) = (message.header.index, message.header.flags.contains(LinkFlags::Up));
    let mut link = Link { index, up, queues: 1, ..Link::default() };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::NumRxQueues(queues) => link.queues = *queues,
            LinkAttribute::LinkNetNsId(id) => link.peer_namespace = Some(*id),
            LinkAttribute::Controller(index) => link.master = Some(*index),
            LinkAttribute::Address(bytes) => link.mac = mac(bytes).unwrap_or_default(),
            LinkAttribute::LinkInfo(info) => {
                link.veth = info.contains(&LinkInfo::Kind(InfoKind::Veth));
                link.bridge = info.contains(&LinkInfo::Kind(InfoKind::Bridge));
            }
            _ => {}
        }
    }
    link
}

fn mac(bytes: &[u8]) -> Option<Mac> {
    bytes.try_into().ok().map(Mac)
}

fn neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Mac)> {
    let mut address = None;
    let mut ethernet = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => ethernet = mac(bytes),
            _ => {}
        }
    }
    Some((address?, ethernet.filter(|&mac| mac != Mac::default())?))
}

/// The table of a route: the header's field holds only numbers up to 255.
fn table(route: &RouteMessage) -> u32 {
    let attribute = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    attribute.unwrap_or(u32::from(route.header.table))
}

pub(super) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

/// The prefix that a route makes local to the node, unless pods cannot send there.
fn local_prefix(message: &RouteMessage) -> Option<IpNet> {
    if !matches!(message.header.kind, RouteType::Local | RouteType::Broadcast | RouteType::Anycast) {
        return None;
    }
    let destination = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(address) => ip(address),
        _ => None,
    });
    let network = IpNet::new(destination?, message.header.destination_prefix_length).ok()?;
    // IPv4's link-local addresses are routed as any.
    let reachable = match network.addr() {
        IpAddr::V4(v4) => !v4.is_loopback(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    };
    reachable.then_some(network)
}

/// UDP ports on which a link decapsulates packets. Not WireGuard's, which accepts packets from holders of a key only.
fn tunnel_ports(message: &LinkMessage) -> Vec<u16> {
    let info = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    let data = info.into_iter().flatten().find_map(|part| match part {
        LinkInfo::Data(data) => Some(data),
        _ => None,
    });
    match data {
        Some(InfoData::Vxlan(all)) => {
            all.iter().filter_map(|one| if let InfoVxlan::Port(port) = one { Some(*port) } else { None }).collect()
        }
        Some(InfoData::Geneve(all)) => {
            all.iter().filter_map(|one| if let InfoGeneve::Port(port) = one { Some(*port) } else { None }).collect()
        }
        Some(InfoData::BareUdp(all)) => {
            all.iter().filter_map(|one| if let InfoBareUdp::Port(port) = one { Some(*port) } else { None }).collect()
        }
        Some(InfoData::Amt(all)) => all
            .iter()
            .filter_map(|one| match one {
                InfoAmt::RelayPort(port) | InfoAmt::GatewayPort(port) => Some(*port),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Whether what is sent by a link goes on in packets to another machine.
fn is_tunnel(message: &LinkMessage) -> bool {
    let info = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    });
    let is_kind = |part: &LinkInfo| {
        use InfoKind::{
            BareUdp, Geneve, GreTap, GreTap6, GreTun, GreTun6, Ip6Tnl, IpIp, SitTun, Vti, Vti6, Vxlan, Wireguard, Xfrm,
        };
        let LinkInfo::Kind(kind) = part else { return false };
        matches!(
            kind,
            BareUdp
                | Geneve
                | GreTap
                | GreTap6
                | GreTun
                | GreTun6
                | Ip6Tnl
                | IpIp
                | SitTun
                | Vti
                | Vti6
                | Vxlan
                | Wireguard
                | Xfrm
        )
    };
    info.into_iter().flatten().any(is_kind)
}

/// The network of a unicast route by way of another machine, if it is not the default route.
fn remote_network(message: &RouteMessage, tunnels: &BTreeSet<u32>) -> Option<RemoteNetwork> {
    let header = &message.header;
    if header.kind != RouteType::Unicast
        || header.destination_prefix_length == 0
        || header.flags.contains(RouteFlags::Cloned)
        || table(message) == LOCAL_TABLE
    {
        return None;
    }
    let (mut destination, mut links, mut gateways) = (None, Vec::new(), Vec::new());
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address),
            RouteAttribute::Oif(index) => links.push(*index),
            RouteAttribute::MultiPath(hops) => {
                links.extend(hops.iter().map(|hop| hop.interface_index));
                gateways.extend(hops.iter().flat_map(|hop| hop.attributes.iter().filter_map(gateway)));
            }
            other => gateways.extend(gateway(other)),
        }
    }
    let network = IpNet::new(destination?, header.destination_prefix_length).ok()?;
    let by_tunnel = links.iter().any(|link| tunnels.contains(link));
    (by_tunnel || !gateways.is_empty()).then_some(RemoteNetwork { network, gateways, by_tunnel })
}

/// The MTU that an IPv4 route sets.
fn mtu(message: &RouteMessage) -> Option<u32> {
    let of_v4 = message.header.address_family == AddressFamily::Inet;
    let metrics = message.attributes.iter().filter_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) if of_v4 => Some(metrics),
        _ => None,
    });
    metrics.flatten().find_map(|metric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None })
}

fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(v4)) => Some(IpAddr::V4(*v4)),
        RouteAttribute::Via(RouteVia::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

/// `RT_TABLE_LOCAL` in include/uapi/linux/rtnetlink.h.
const LOCAL_TABLE: u32 = 255;

/// A unicast route to one address that is directly behind a link.
fn host_route(message: &RouteMessage) -> Option<HostRoute> {
    let header = &message.header;
    let host_prefix = match header.address_family {
        AddressFamily::Inet => 32,
        _ => 128,
    };
    if header.destination_prefix_length != host_prefix
        || header.kind != RouteType::Unicast
        || header.flags.contains(RouteFlags::Cloned)
        || table(message) == LOCAL_TABLE
    {
        return None;
    }
    let mut destination = None;
    let mut link = None;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => destination = ip(address),
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::MultiPath(_) => return None,
            _ => {}
        }
    }
    Some(HostRoute { destination: destination?, link: link? })
}
