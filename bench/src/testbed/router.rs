//! Several nodes joined by a router: by routes to each node's pods, or by a tunnel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;

use super::namespace::Namespace;
use super::namespace::{Netlink, RouteVia};
use super::node::{self, Gateways, MTU, Node, Outside, every, forwarding, settle_pair};

/// How a node reaches the pods of another node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InterNodeLink {
    /// Through routes on the router, as with a CNI plugin that announces them.
    Routes,
    /// Through a VXLAN overlay, wired as flannel does it; the router only knows the nodes.
    Vxlan,
}

impl InterNodeLink {
    /// The interface on which packets for a node's pods arrive: its uplink.
    pub fn uplink(self) -> &'static str {
        match self {
            Self::Routes => LINK,
            Self::Vxlan => TUNNEL,
        }
    }

    /// The longest packet that passes between two nodes, and so the MTU that a CNI plugin assigns to pods.
    pub fn mtu(self) -> u32 {
        match self {
            Self::Routes => MTU,
            Self::Vxlan => MTU - VXLAN_OVERHEAD,
        }
    }
}

/// A node's interface to the router.
const LINK: &str = "eth0";
/// A node's end of the overlay, with flannel's name and network.
const TUNNEL: &str = "flannel.1";
const VNI: u32 = 1;
/// Outer IPv4, UDP and VXLAN header, and the inner Ethernet header.
const VXLAN_OVERHEAD: u32 = 50;

/// A machine between nodes, on a separate network with each.
pub struct Router {
    namespace: Namespace,
    netlink: Netlink,
    /// Its interface to each node, in the order of the nodes.
    links: Vec<u32>,
}

impl Router {
    pub fn new(label: &str) -> Result<Self> {
        let namespace = forwarding(label)?;
        let netlink = namespace.netlink()?;
        Ok(Self { namespace, netlink, links: Vec::new() })
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub fn netlink(&self) -> &Netlink {
        &self.netlink
    }

    /// Its interface towards a node, by the node's index.
    pub fn link(&self, node: usize) -> u32 {
        self.links[node]
    }

    /// Adds a node with these addresses, one per family, on a separate network, /24 and /64, of which the router has
    /// the first address. The router is the node's default gateway.
    pub fn add_node(&mut self, label: &str, addresses: &[IpAddr]) -> Result<Node> {
        let number = self.links.len() + 1;
        let node = Node::unwired(label, addresses, Gateways::of_node(number.try_into()?))?;
        let name = format!("node{number}");
        let index = self.netlink.add_veth(&name, LINK, node.namespace(), MTU)?;
        let inside = node.netlink();
        let link = inside.index(LINK)?;
        inside.set_up(link)?;
        for &address in addresses {
            let network = network_of(address)?;
            self.netlink.add_address(index, IpNet::new(gateway_in(address), network.prefix_len())?)?;
            inside.add_address(link, IpNet::new(address, network.prefix_len())?)?;
            inside.add_route(every(address), link, RouteVia::Gateway(gateway_in(address)))?;
        }
        settle_pair(&self.netlink, index, node.namespace())?;
        self.links.push(index);
        Ok(node)
    }

    /// Lets every node reach the pods of the others; `networks` are those of each node's pods, in the order of
    /// addition.
    pub fn join(&self, nodes: &[&Node], networks: &[Vec<IpNet>], between: InterNodeLink) -> Result<()> {
        match between {
            InterNodeLink::Routes => self.join_by_routes(nodes, networks),
            InterNodeLink::Vxlan => join_by_tunnel(nodes, networks),
        }
    }

    fn join_by_routes(&self, nodes: &[&Node], networks: &[Vec<IpNet>]) -> Result<()> {
        for (number, (to, networks)) in nodes.iter().zip(networks).enumerate() {
            for &network in networks {
                let address = of_family(to.addresses(), network)?;
                self.netlink.add_route(network, self.links[number], RouteVia::Gateway(address))?;
                for from in nodes.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, node)| node) {
                    let gateway = gateway_in(of_family(from.addresses(), network)?);
                    from.netlink().add_route(network, from.netlink().index(LINK)?, RouteVia::Gateway(gateway))?;
                }
            }
        }
        Ok(())
    }

    /// Adds a machine behind the router: see [`Node::add_outside`].
    pub fn add_outside(&self, label: &str) -> Result<Outside> {
        Outside::behind(&self.netlink, label)
    }
}

/// An overlay of two nodes with addresses on it, over which each reaches the other's pods. Each knows the other's end by
/// permanent entries, as flanneld writes them, and neither floods nor learns.
fn join_by_tunnel(nodes: &[&Node], networks: &[Vec<IpNet>]) -> Result<()> {
    let [one, other] = nodes else { bail!("a tunnel joins two nodes, and there are {}", nodes.len()) };
    for node in [one, other] {
        let (netlink, mtu) = (node.netlink(), InterNodeLink::Vxlan.mtu());
        netlink.add_vxlan(TUNNEL, VNI, netlink.index(LINK)?, v4_of(node)?, mtu)?;
    }
    for (number, here, there) in [(1, one, other), (2, other, one)] {
        let netlink = here.netlink();
        let index = netlink.index(TUNNEL)?;
        let on_it = |number: u8| -> [IpAddr; 2] {
            [Ipv4Addr::new(100, 64, 0, number).into(), Ipv6Addr::new(0xfd00, 0x64, 0, 0, 0, 0, 0, number.into()).into()]
        };
        for address in on_it(number) {
            netlink.add_address(index, IpNet::new(address, network_of(address)?.prefix_len())?)?;
        }
        netlink.add_tunnel_peer(index, there.netlink().mac(TUNNEL)?, &on_it(3 - number), v4_of(there)?)?;
        let theirs = networks.get(2 - usize::from(number)).context("networks for both nodes")?;
        for &network in theirs {
            let gateway = of_family(&on_it(3 - number), network)?;
            let source = of_family(here.addresses(), network)?;
            netlink.add_route(network, index, RouteVia::GatewayAs { gateway, source })?;
        }
    }
    nodes.iter().try_for_each(|node| node::settle(node.netlink(), node.netlink().index(TUNNEL)?))
}

fn v4_of(node: &Node) -> Result<Ipv4Addr> {
    let v4 = node.addresses().iter().find_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    v4.context("the ends of a tunnel have IPv4 addresses")
}

fn of_family(addresses: &[IpAddr], network: IpNet) -> Result<IpAddr> {
    let found = addresses.iter().find(|address| address.is_ipv4() == network.addr().is_ipv4());
    found.copied().with_context(|| format!("no address of the family of {network}"))
}

/// The network of a node's or tunnel's address.
fn network_of(address: IpAddr) -> Result<IpNet> {
    Ok(IpNet::new(address, if address.is_ipv4() { 24 } else { 64 })?.trunc())
}

/// The first address of an address's network.
fn gateway_in(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            Ipv4Addr::new(a, b, c, 1).into()
        }
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 1).into()
        }
    }
}
