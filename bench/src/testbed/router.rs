//! Several nodes, and what joins them: a router, and over it routes to each node's pods or a tunnel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, bail};
use ipnet::IpNet;

use super::namespace::Namespace;
use super::netlink::{Netlink, Via};
use super::node::{self, Gateways, MTU, Node, Outside, every, forwarding, settle_pair};

/// How one node's pods are reached from another node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Between {
    /// By the router, which knows where each pod is: as a CNI plugin does it that tells routers of its routes.
    Routes,
    /// Through a VXLAN tunnel; the router knows of the nodes alone.
    Vxlan,
}

impl Between {
    /// The interface on which packets for a node's pods arrive: its uplink.
    pub fn uplink(self) -> &'static str {
        match self {
            Self::Routes => LINK,
            Self::Vxlan => TUNNEL,
        }
    }

    /// The longest packet that passes between two nodes, and so the MTU that a CNI plugin gives to pods.
    pub fn mtu(self) -> u32 {
        match self {
            Self::Routes => MTU,
            Self::Vxlan => MTU - VXLAN_OVERHEAD,
        }
    }
}

/// A node's interface to the router.
const LINK: &str = "eth0";
/// A node's tunnel.
const TUNNEL: &str = "vxlan0";
const VNI: u32 = 42;
/// Outer IPv4, UDP and VXLAN header, and the inner Ethernet header.
const VXLAN_OVERHEAD: u32 = 50;

/// A machine between nodes. Each node is on a network of its own with it.
pub struct Router {
    namespace: Namespace,
    netlink: Netlink,
    /// Its interface to each node, in the order of the nodes.
    links: Vec<u32>,
}

impl Router {
    /// Without any node yet.
    pub fn new(label: &str) -> Result<Self> {
        let namespace = forwarding(label)?;
        let netlink = namespace.netlink()?;
        Ok(Self { namespace, netlink, links: Vec::new() })
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// A netlink socket inside it.
    pub fn netlink(&self) -> &Netlink {
        &self.netlink
    }

    /// Its interface to a node, by the node's number from 0 on.
    pub fn link(&self, node: usize) -> u32 {
        self.links[node]
    }

    /// A node with these addresses, one a family: on a network of its own, /24 and /64, of which the router has the
    /// first address. All that the node has no route for goes to the router.
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
            inside.add_route(every(address), link, Via::Gateway(gateway_in(address)))?;
        }
        settle_pair(&self.netlink, index, node.namespace())?;
        self.links.push(index);
        Ok(node)
    }

    /// Has every node reach the pods of every other one; `networks` are those of each node's pods, in the order in which
    /// the nodes were added.
    pub fn join(&self, nodes: &[&Node], networks: &[Vec<IpNet>], between: Between) -> Result<()> {
        match between {
            Between::Routes => self.join_by_routes(nodes, networks),
            Between::Vxlan => join_by_tunnel(nodes, networks),
        }
    }

    fn join_by_routes(&self, nodes: &[&Node], networks: &[Vec<IpNet>]) -> Result<()> {
        for (number, (to, networks)) in nodes.iter().zip(networks).enumerate() {
            for &network in networks {
                let address = of_family(to.addresses(), network)?;
                self.netlink.add_route(network, self.links[number], Via::Gateway(address))?;
                for from in nodes.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, node)| node) {
                    let gateway = gateway_in(of_family(from.addresses(), network)?);
                    from.netlink().add_route(network, from.netlink().index(LINK)?, Via::Gateway(gateway))?;
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

/// A tunnel between two nodes, with addresses of its own on it, over which each reaches the other's pods.
fn join_by_tunnel(nodes: &[&Node], networks: &[Vec<IpNet>]) -> Result<()> {
    let [one, other] = nodes else { bail!("a tunnel joins two nodes, and there are {}", nodes.len()) };
    for (number, here, there) in [(1, one, other), (2, other, one)] {
        let netlink = here.netlink();
        let ends = (v4_of(here)?, v4_of(there)?);
        let index = netlink.add_vxlan(TUNNEL, VNI, netlink.index(LINK)?, ends, Between::Vxlan.mtu())?;
        let on_it = |number: u8| -> [IpAddr; 2] {
            [Ipv4Addr::new(100, 64, 0, number).into(), Ipv6Addr::new(0xfd00, 0x64, 0, 0, 0, 0, 0, number.into()).into()]
        };
        for address in on_it(number) {
            netlink.add_address(index, IpNet::new(address, network_of(address)?.prefix_len())?)?;
        }
        let theirs = networks.get(2 - usize::from(number)).context("networks for both nodes")?;
        for &network in theirs {
            let gateway = of_family(&on_it(3 - number), network)?;
            let source = of_family(here.addresses(), network)?;
            netlink.add_route(network, index, Via::GatewayAs { gateway, source })?;
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

/// The network that an address of a node or a tunnel is on.
fn network_of(address: IpAddr) -> Result<IpNet> {
    Ok(IpNet::new(address, if address.is_ipv4() { 24 } else { 64 })?.trunc())
}

/// The first address of the network that an address is on.
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
