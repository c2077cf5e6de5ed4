//! The route netlink requests that a testbed needs, as blocking calls.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use futures_util::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkMessage, LinkXdp, Stats64,
};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourState};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteScope, RouteType};
use rtnetlink::{
    Handle, IpVersion, LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth, LinkVxlan, RouteMessageBuilder,
};
use tokio::runtime::{Builder, Runtime};

use super::Namespace;

/// UDP port of VXLAN that Linux had before RFC 7348, and that flannel uses.
const VXLAN_PORT: u16 = 8472;

/// A route netlink socket in one namespace.
pub struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

#[derive(Clone, Copy, Debug)]
pub enum RouteVia {
    Link,
    Gateway(IpAddr),
    /// Through a gateway on the link; packets of this machine use this source address.
    GatewayAs {
        gateway: IpAddr,
        source: IpAddr,
    },
}

impl Netlink {
    pub fn open(namespace: &Namespace) -> Result<Self> {
        namespace.run(Self::open_here).with_context(|| format!("cannot open netlink in {}", namespace.name()))
    }

    /// Opens a socket in the calling thread's namespace.
    pub fn open_here() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().build()?;
        let handle = runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection()?;
            tokio::spawn(connection);
            std::io::Result::Ok(handle)
        })?;
        Ok(Self { runtime, handle })
    }

    fn wait<T>(&self, request: impl Future<Output = Result<T, rtnetlink::Error>>) -> Result<T> {
        Ok(self.runtime.block_on(request)?)
    }

    pub fn index(&self, name: &str) -> Result<u32> {
        let mut links = self.handle.link().get().match_name(name).execute();
        match self.wait(links.try_next()).with_context(|| format!("no interface {name}"))? {
            Some(link) => Ok(link.header.index),
            None => bail!("no interface {name}"),
        }
    }

    /// The MAC address of an interface.
    pub fn mac(&self, name: &str) -> Result<[u8; 6]> {
        let mut links = self.handle.link().get().match_name(name).execute();
        let link = self.wait(links.try_next())?.with_context(|| format!("no interface {name}"))?;
        let mac = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Address(mac) => <[u8; 6]>::try_from(mac.as_slice()).ok(),
            _ => None,
        });
        mac.with_context(|| format!("interface {name} has no MAC address"))
    }

    /// The MTU of an interface.
    pub fn mtu(&self, name: &str) -> Result<u32> {
        let mut links = self.handle.link().get().match_name(name).execute();
        let link = self.wait(links.try_next())?.with_context(|| format!("no interface {name}"))?;
        let mtu = link.attributes.iter().find_map(|attribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(*mtu),
            _ => None,
        });
        mtu.with_context(|| format!("interface {name} has no MTU"))
    }

    /// Adds a veth pair with this MTU: `name` here, up, and `peer` inside `peer_namespace`. `peer_namespace` must
    /// exist.
    pub fn add_veth(&self, name: &str, peer: &str, peer_namespace: &Namespace, mtu: u32) -> Result<u32> {
        let peer =
            LinkMessageBuilder::<LinkUnspec>::new().name(peer).mtu(mtu).setns_by_fd(peer_namespace.as_raw_fd()).build();
        let link = LinkMessageBuilder::<LinkVeth>::new_with_info_kind(InfoKind::Veth)
            .name(name)
            .mtu(mtu)
            .up()
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .build();
        self.wait(self.handle.link().add(link).execute()).with_context(|| format!("cannot add the veth {name}"))?;
        self.index(name)
    }

    /// Adds an end of a VXLAN overlay with this network identifier, up, over this link. It learns no peers: see
    /// [`Netlink::add_tunnel_peer`].
    pub(crate) fn add_vxlan(&self, name: &str, vni: u32, over: u32, local: Ipv4Addr, mtu: u32) -> Result<u32> {
        let tunnel = LinkVxlan::new(name, vni).dev(over).local(local).learning(false).port(VXLAN_PORT);
        self.wait(self.handle.link().add(tunnel.mtu(mtu).up().build()).execute())
            .with_context(|| format!("cannot add the tunnel {name}"))?;
        self.index(name)
    }

    /// Tells an end of an overlay where another end is: its MAC address for these addresses on the overlay, and the machine
    /// that has this MAC address.
    pub(crate) fn add_tunnel_peer(
        &self,
        tunnel: u32,
        mac: [u8; 6],
        addresses: &[IpAddr],
        machine: Ipv4Addr,
    ) -> Result<()> {
        let neighbours = self.handle.neighbours();
        for &address in addresses {
            let entry = neighbours.add(tunnel, address).link_layer_address(&mac).state(NeighbourState::Permanent);
            self.wait(entry.execute()).with_context(|| format!("cannot add the neighbour {address}"))?;
        }
        // The device's own table, not a bridge's.
        let entry = neighbours.add_bridge(tunnel, &mac).flags(NeighbourFlags::Own).destination(machine.into());
        self.wait(entry.execute()).with_context(|| format!("cannot add the forwarding entry of {machine}"))
    }

    pub(crate) fn add_bridge(&self, name: &str) -> Result<u32> {
        self.wait(self.handle.link().add(LinkBridge::new(name).up().build()).execute())
            .with_context(|| format!("cannot add the bridge {name}"))?;
        self.index(name)
    }

    /// Makes an interface a port of a bridge.
    pub fn set_controller(&self, index: u32, bridge: u32) -> Result<()> {
        self.change(LinkUnspec::new_with_index(index).controller(bridge).build())
            .with_context(|| format!("cannot make interface {index} a port of {bridge}"))
    }

    /// Lets an interface send and receive TCP packets of this many bytes, that is joined segments (BIG TCP), of both families.
    pub fn set_longest_joined(&self, index: u32, bytes: u32) -> Result<()> {
        use LinkAttribute::{GroIpv4MaxSize, GroMaxSize, GsoIpv4MaxSize, GsoMaxSize};
        let mut message = LinkUnspec::new_with_index(index).build();
        message.attributes.extend([GsoMaxSize(bytes), GsoIpv4MaxSize(bytes), GroMaxSize(bytes), GroIpv4MaxSize(bytes)]);
        self.change(message).with_context(|| format!("cannot let interface {index} have packets of {bytes} bytes"))
    }

    fn change(&self, message: LinkMessage) -> Result<()> {
        self.wait(self.handle.link().change(message).execute())
    }

    pub fn set_up(&self, index: u32) -> Result<()> {
        self.change(LinkUnspec::new_with_index(index).up().build())
            .with_context(|| format!("cannot set interface {index} up"))
    }

    pub fn set_down(&self, index: u32) -> Result<()> {
        self.change(LinkUnspec::new_with_index(index).down().build())
            .with_context(|| format!("cannot set interface {index} down"))
    }

    /// Sets an interface's MTU.
    pub fn set_mtu(&self, index: u32, mtu: u32) -> Result<()> {
        self.change(LinkUnspec::new_with_index(index).mtu(mtu).build())
            .with_context(|| format!("cannot set the MTU of interface {index} to {mtu}"))
    }

    pub fn remove(&self, index: u32) -> Result<()> {
        self.wait(self.handle.link().del(index).execute()).with_context(|| format!("cannot remove interface {index}"))
    }

    /// Puts an interface into a group that [`Netlink::remove_group`] removes.
    pub fn set_group(&self, index: u32, group: u32) -> Result<()> {
        let message = LinkMessageBuilder::<LinkUnspec>::new()
            .index(index)
            .append_extra_attribute(LinkAttribute::Group(group))
            .build();
        self.wait(self.handle.link().set(message).execute())
            .with_context(|| format!("cannot put interface {index} into group {group}"))
    }

    /// Removes all interfaces of a group at once, as the kernel removes those of namespaces that have ended
    /// (`cleanup_net` in net/core/net_namespace.c): it waits once for all of them.
    pub fn remove_group(&self, group: u32) -> Result<()> {
        let mut request = self.handle.link().del(0);
        request.message_mut().attributes.push(LinkAttribute::Group(group));
        self.wait(request.execute()).with_context(|| format!("cannot remove the interfaces of group {group}"))
    }

    pub fn add_address(&self, index: u32, address: IpNet) -> Result<()> {
        let mut request = self.handle.address().add(index, address.addr(), address.prefix_len());
        // Addresses of a testbed are distinct by construction; duplicate address detection would take a second for
        // each.
        request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        self.wait(request.execute()).with_context(|| format!("cannot add {address} to interface {index}"))
    }

    /// Adds a route to `destination` out of an interface.
    pub fn add_route(&self, destination: IpNet, index: u32, via: RouteVia) -> Result<()> {
        let message = route(destination, index, via)?;
        self.wait(self.handle.route().add(message).execute())
            .with_context(|| format!("cannot add the route to {destination} by interface {index} ({via:?})"))
    }

    /// Whether the interface has its link-local IPv6 address and a local route for each of its IPv6 addresses. The
    /// kernel adds these from work queues some time after the link came up.
    pub(crate) fn is_settled(&self, index: u32) -> Result<bool> {
        let query = self.handle.address().get().set_link_index_filter(index);
        let messages: Vec<_> = self.wait(query.execute().try_collect())?;
        let addresses =
            messages.iter().flat_map(|message| &message.attributes).filter_map(|attribute| match attribute {
                AddressAttribute::Address(IpAddr::V6(address)) => Some(*address),
                _ => None,
            });
        let mut query = RouteMessage::default();
        query.header.address_family = AddressFamily::Inet6;
        let routes: Vec<_> = self.wait(self.handle.route().get(query).execute().try_collect())?;
        let is_local = |address: Ipv6Addr| {
            let destination = RouteAttribute::Destination(RouteAddress::Inet6(address));
            let local = |route: &RouteMessage| {
                route.header.kind == RouteType::Local
                    && route.attributes.contains(&destination)
                    && route.attributes.contains(&RouteAttribute::Oif(index))
            };
            routes.iter().any(local)
        };
        let mut link_local = false;
        let settled = addresses.into_iter().all(|address| {
            link_local |= address.is_unicast_link_local();
            is_local(address)
        });
        Ok(settled && link_local)
    }

    fn links(&self) -> Result<Vec<LinkMessage>> {
        self.wait(self.handle.link().get().execute().try_collect())
    }

    /// The kernel's neighbour table: interface, address and MAC of each resolved entry.
    pub fn neighbours(&self) -> Result<BTreeSet<(u32, IpAddr, Vec<u8>)>> {
        let entries: Vec<_> = self.wait(self.handle.neighbours().get().execute().try_collect())?;
        let known = entries.into_iter().filter_map(|entry| {
            let mut known = (entry.header.ifindex, None, None);
            for attribute in entry.attributes {
                match attribute {
                    NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => known.1 = Some(address.into()),
                    NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => known.1 = Some(address.into()),
                    NeighbourAttribute::LinkLayerAddress(mac) => known.2 = Some(mac),
                    _ => {}
                }
            }
            Some((known.0, known.1?, known.2?))
        });
        Ok(known.collect())
    }

    pub fn interface_names(&self) -> Result<Vec<String>> {
        Ok(self.links()?.iter().filter_map(name_of).collect())
    }

    /// How many packets the interface sent. Of a veth: those that its peer took.
    pub fn tx_packets(&self, name: &str) -> Result<u64> {
        Ok(self.statistics(name)?.tx_packets)
    }

    /// How many packets the interface dropped instead of sending.
    pub fn tx_dropped(&self, name: &str) -> Result<u64> {
        Ok(self.statistics(name)?.tx_dropped)
    }

    fn statistics(&self, name: &str) -> Result<Stats64> {
        let links = self.links()?;
        let link = links.iter().find(|link| name_of(link).as_deref() == Some(name));
        let statistics = link.into_iter().flat_map(|link| &link.attributes).find_map(|attribute| match attribute {
            LinkAttribute::Stats64(statistics) => Some(*statistics),
            _ => None,
        });
        statistics.with_context(|| format!("no statistics of interface {name}"))
    }
}

fn route(destination: IpNet, index: u32, via: RouteVia) -> Result<RouteMessage> {
    let mut builder = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(destination.network(), destination.prefix_len())?
        .output_interface(index);
    match via {
        RouteVia::Link if destination.addr().is_ipv4() => builder = builder.scope(RouteScope::Link),
        RouteVia::Link => {}
        RouteVia::Gateway(gateway) | RouteVia::GatewayAs { gateway, .. } => builder = builder.gateway(gateway)?,
    }
    let mut message = builder.build();
    if let RouteVia::GatewayAs { source, .. } = via {
        message.attributes.push(RouteAttribute::PrefSource(source.into()));
    }
    Ok(message)
}

fn name_of(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

fn xdp_of(link: &LinkMessage) -> Option<u32> {
    let xdp = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Xdp(xdp) => Some(xdp),
        _ => None,
    })?;
    xdp.iter().find_map(|item| match item {
        LinkXdp::ProgId(id) | LinkXdp::DrvProgId(id) | LinkXdp::SkbProgId(id) if *id != 0 => Some(*id),
        _ => None,
    })
}

/// Links, addresses, routes and routing rules as lines of text for comparison, without counters or ages.
///
/// A link's line has its flags, MTU, MAC and XDP program.
pub fn network_state(netlink: &Netlink) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for link in netlink.links()? {
        lines.push(describe_link(&link));
    }
    let addresses: Vec<_> = netlink.wait(netlink.handle.address().get().execute().try_collect())?;
    for mut address in addresses {
        address.attributes.retain(|attribute| !matches!(attribute, AddressAttribute::CacheInfo(_)));
        lines.push(format!("address {address:?}"));
    }
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut query = RouteMessage::default();
        query.header.address_family = family;
        let routes: Vec<_> = netlink.wait(netlink.handle.route().get(query).execute().try_collect())?;
        for mut route in routes {
            route.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::CacheInfo(_)));
            lines.push(format!("route {route:?}"));
        }
    }
    for version in [IpVersion::V4, IpVersion::V6] {
        let rules: Vec<_> = netlink.wait(netlink.handle.rule().get(version).execute().try_collect())?;
        lines.extend(rules.iter().map(|rule| format!("rule {rule:?}")));
    }
    lines.sort();
    Ok(lines)
}

fn describe_link(link: &LinkMessage) -> String {
    let mut line = format!("link {} {}", link.header.index, name_of(link).unwrap_or_default());
    let up = link.header.flags.contains(LinkFlags::Up);
    let _ = write!(line, " up={up} xdp={:?}", xdp_of(link));
    for attribute in &link.attributes {
        if let LinkAttribute::Mtu(_) | LinkAttribute::Address(_) | LinkAttribute::Controller(_) = attribute {
            let _ = write!(line, " {attribute:?}");
        }
    }
    line
}
