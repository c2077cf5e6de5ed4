//! A node and its pods.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::kube_proxy::service_networks;
use super::namespace::Namespace;
use super::namespace::{Netlink, RouteVia};

/// MTU of pods' veths, unless another is asked for.
pub(super) const MTU: u32 = 1500;

/// Name of the bridge of pods: the one that Penstock expects by default.
const BRIDGE: &str = "cni0";

/// Longest name of an interface (the kernel's `IFNAMSIZ` less its final NUL).
const LONGEST_INTERFACE: usize = 15;

/// The gateway addresses on the host side of every pod's veth, one per family.
#[derive(Clone, Copy, Debug)]
pub struct Gateways {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Default for Gateways {
    fn default() -> Self {
        Self::of_node(1)
    }
}

impl Gateways {
    /// Gateways of node NUMBER of several: 10.244.NUMBER.1 and fd00:10:244:NUMBER::1.
    pub fn of_node(number: u8) -> Self {
        let v4 = Ipv4Addr::new(10, 244, number, 1);
        Self { v4, v6: Ipv6Addr::new(0xfd00, 0x10, 0x244, number.into(), 0, 0, 0, 1) }
    }

    fn for_family_of(&self, address: IpAddr) -> IpAddr {
        if address.is_ipv4() { self.v4.into() } else { self.v6.into() }
    }
}

/// A node: a namespace that forwards, with the node's addresses, and its pods.
pub struct Node {
    namespace: Namespace,
    netlink: Netlink,
    addresses: Vec<IpAddr>,
    gateways: Gateways,
    pods: Vec<Pod>,
}

/// A pod: a namespace with one veth to its node.
pub struct Pod {
    name: String,
    namespace: Namespace,
    addresses: Vec<IpAddr>,
    interface: String,
    index: u32,
}

/// A machine outside the cluster, reached through the node's routing and selected by no policy.
pub struct Outside {
    namespace: Namespace,
    addresses: Vec<IpAddr>,
    interface: String,
}

impl Node {
    /// A node with these addresses (on its loopback, since not every kernel has dummy interfaces) and the default pod
    /// gateways.
    pub fn new(label: &str, addresses: &[IpAddr]) -> Result<Self> {
        let node = Self::unwired(label, addresses, Gateways::default())?;
        let index = node.netlink.index("lo")?;
        for &address in addresses {
            node.netlink.add_address(index, host_net(address))?;
        }
        Ok(node)
    }

    /// A node whose addresses are not yet assigned to an interface.
    pub(super) fn unwired(label: &str, addresses: &[IpAddr], gateways: Gateways) -> Result<Self> {
        let namespace = forwarding(label)?;
        let netlink = namespace.netlink()?;
        Ok(Self { namespace, netlink, addresses: addresses.to_vec(), gateways, pods: Vec::new() })
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub fn netlink(&self) -> &Netlink {
        &self.netlink
    }

    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    pub fn gateways(&self) -> Gateways {
        self.gateways
    }

    /// Its pods in the order of addition.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    pub fn pod(&self, name: &str) -> Result<&Pod> {
        self.pods.iter().find(|pod| pod.name == name).with_context(|| format!("no pod {name} on this node"))
    }

    /// Adds a pod with these addresses and an MTU of 1,500 bytes. `name` may be `namespace/name`.
    pub fn add_pod(&mut self, name: &str, addresses: &[IpAddr]) -> Result<&Pod> {
        self.add_pod_with_mtu(name, addresses, MTU)
    }

    /// Adds a pod whose veth has this MTU.
    pub fn add_pod_with_mtu(&mut self, name: &str, addresses: &[IpAddr], mtu: u32) -> Result<&Pod> {
        let namespace = Namespace::new(&name.replace('/', "-"))?;
        let interface = self.free_interface_name(name)?;
        let index = self.netlink.add_veth(&interface, "eth0", &namespace, mtu)?;
        let pod = Pod { name: name.into(), namespace, addresses: addresses.to_vec(), interface, index };
        self.wire(&pod).with_context(|| format!("cannot wire pod {name}"))?;
        self.pods.push(pod);
        self.pods.last().context("a pod was just added")
    }

    /// Adds a pod as a port of the bridge `cni0`, as the `bridge` CNI plugin does: pods of a node share its network,
    /// /24 and /64, and the bridge has the gateway addresses. The first pod creates the bridge.
    pub fn add_bridged_pod(&mut self, name: &str, addresses: &[IpAddr], mtu: u32) -> Result<&Pod> {
        let bridge = match self.netlink.interface_names()?.iter().any(|name| name == BRIDGE) {
            true => self.netlink.index(BRIDGE)?,
            false => self.add_bridge()?,
        };
        let namespace = Namespace::new(&name.replace('/', "-"))?;
        let interface = self.free_interface_name(name)?;
        let index = self.netlink.add_veth(&interface, "eth0", &namespace, mtu)?;
        self.netlink.set_controller(index, bridge)?;
        let inside = namespace.netlink()?;
        let eth0 = inside.index("eth0")?;
        inside.set_up(eth0)?;
        for &address in addresses {
            inside.add_address(eth0, on_bridge(address)?)?;
            inside.add_route(every(address), eth0, RouteVia::Gateway(self.gateways.for_family_of(address)))?;
        }
        self.pods.push(Pod { name: name.into(), namespace, addresses: addresses.to_vec(), interface, index });
        self.pods.last().context("a pod was just added")
    }

    fn add_bridge(&self) -> Result<u32> {
        let bridge = self.netlink.add_bridge(BRIDGE)?;
        for gateway in [self.gateways.v4.into(), self.gateways.v6.into()] {
            self.netlink.add_address(bridge, on_bridge(gateway)?)?;
        }
        Ok(bridge)
    }

    /// Removes a pod as a container runtime does: its veth first, then its namespace.
    pub fn remove_pod(&mut self, name: &str) -> Result<()> {
        let Some(position) = self.pods.iter().position(|pod| pod.name == name) else {
            bail!("no pod {name} on this node");
        };
        let pod = self.pods.remove(position);
        self.netlink.remove(pod.index)
    }

    fn wire(&self, pod: &Pod) -> Result<()> {
        let inside = pod.namespace.netlink()?;
        let eth0 = inside.index("eth0")?;
        inside.set_up(eth0)?;
        for &address in &pod.addresses {
            self.netlink.add_route(host_net(address), pod.index, RouteVia::Link)?;
            inside.add_address(eth0, host_net(address))?;
        }
        for address in [false, true].into_iter().filter_map(|v6| pod.address(v6)) {
            let gateway = self.gateways.for_family_of(address);
            self.netlink.add_address(pod.index, host_net(gateway))?;
            inside.add_route(host_net(gateway), eth0, RouteVia::Link)?;
            inside.add_route(every(address), eth0, RouteVia::Gateway(gateway))?;
        }
        Ok(())
    }

    /// Waits until the kernel's asynchronous setup of all links is complete. Packets sent earlier are dropped.
    pub fn settle(&self) -> Result<()> {
        self.pods.iter().try_for_each(|pod| settle_pair(&self.netlink, pod.index, &pod.namespace))
    }

    fn free_interface_name(&self, name: &str) -> Result<String> {
        let taken = self.netlink.interface_names()?;
        let short = name.rsplit('/').next().unwrap_or(name);
        let mut candidate = format!("veth-{short}");
        candidate.truncate(LONGEST_INTERFACE);
        let numbered = (0..).map(|number| format!("veth{number}"));
        std::iter::once(candidate).chain(numbered).find(|name| !taken.contains(name)).context("names do not end")
    }

    /// Lets the node's own processes send to Services' cluster addresses, as a default route does: rules for Services
    /// decide where their packets go.
    pub fn add_service_routes(&self) -> Result<()> {
        let index = self.netlink.index("lo")?;
        service_networks()?.into_iter().try_for_each(|network| self.netlink.add_route(network, index, RouteVia::Link))
    }

    /// Adds a machine behind the node on a separate network: 198.51.100.0/24 and fd00:51:100::/64, the node at .1 and
    /// the machine at .2.
    pub fn add_outside(&mut self, label: &str) -> Result<Outside> {
        Outside::behind(&self.netlink, label)
    }
}

impl Pod {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    pub fn address(&self, v6: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv6() == v6)
    }

    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// The index of the host side of its veth.
    pub fn interface_index(&self) -> u32 {
        self.index
    }
}

impl Outside {
    /// A machine behind a forwarding namespace: a node, or a router between nodes.
    pub(super) fn behind(netlink: &Netlink, label: &str) -> Result<Self> {
        let namespace = Namespace::new(label)?;
        let interface = "eth1".to_owned();
        let index = netlink.add_veth(&interface, "eth0", &namespace, MTU)?;
        let inside = namespace.netlink()?;
        let eth0 = inside.index("eth0")?;
        inside.set_up(eth0)?;
        let networks: [(IpNet, IpAddr); 2] = [
            ("198.51.100.1/24".parse()?, "198.51.100.2".parse()?),
            ("fd00:51:100::1/64".parse()?, "fd00:51:100::2".parse()?),
        ];
        for (gateway, machine) in networks {
            netlink.add_address(index, gateway)?;
            inside.add_address(eth0, IpNet::new(machine, gateway.prefix_len())?)?;
            inside.add_route(every(machine), eth0, RouteVia::Gateway(gateway.addr()))?;
        }
        settle_pair(netlink, index, &namespace)?;
        let addresses = networks.iter().map(|(_, machine)| *machine).collect();
        Ok(Self { namespace, addresses, interface })
    }

    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    pub fn interface(&self) -> &str {
        &self.interface
    }
}

/// A namespace that forwards IPv4 and IPv6.
pub(super) fn forwarding(label: &str) -> Result<Namespace> {
    let namespace = Namespace::new(label)?;
    namespace.set_sysctl("net/ipv4/ip_forward", "1")?;
    namespace.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
    Ok(namespace)
}

/// Waits until both ends of a veth pair, the peer named `eth0`, carry packets and have all of their IPv6 routes.
pub(super) fn settle_pair(netlink: &Netlink, index: u32, peer: &Namespace) -> Result<()> {
    let inside = peer.netlink()?;
    settle(netlink, index)?;
    settle(&inside, inside.index("eth0")?).with_context(|| format!("in {}", peer.name()))
}

pub(super) fn settle(netlink: &Netlink, index: u32) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    while !netlink.is_settled(index)? {
        if Instant::now() > deadline {
            bail!("interface {index} is not ready after 5 s");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn host_net(address: IpAddr) -> IpNet {
    IpNet::from(address)
}

/// An address with the prefix length of its bridge's network.
fn on_bridge(address: IpAddr) -> Result<IpNet> {
    Ok(IpNet::new(address, if address.is_ipv4() { 24 } else { 64 })?)
}

/// The default route's destination for a family.
pub(super) fn every(family_of: IpAddr) -> IpNet {
    match family_of {
        IpAddr::V4(_) => Ipv4Net::default().into(),
        IpAddr::V6(_) => Ipv6Net::default().into(),
    }
}
