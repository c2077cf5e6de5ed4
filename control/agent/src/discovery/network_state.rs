//! The state of this network namespace, as far as the daemon needs it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::forward::Mac;
use penstock_xdp_redirect::Bridge;

/// One read of the kernel's links, routes and addresses.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NetworkState {
    pub links: BTreeMap<u32, Link>,
    /// Routes of the main table to single addresses without a gateway.
    pub routes: Vec<HostRoute>,
    /// The same of other tables, to which rules lead.
    pub other_routes: Vec<HostRoute>,
    /// Neighbours behind bridge ports, as the `bridge` CNI plugin sets pods up.
    pub bridged: Vec<HostRoute>,
    /// The networks of bridges' addresses, each with the bridge's index.
    pub networks: Vec<(IpNet, u32)>,
    /// The node's own addresses that a pod can reach, without loopback and link-local ones.
    pub addresses: Vec<IpAddr>,
    /// All prefixes that the node accepts as its own: its addresses, and its local, broadcast and anycast routes.
    pub local_prefixes: BTreeSet<IpNet>,
    /// UDP ports of the node's tunnel interfaces.
    pub tunnel_ports: BTreeSet<u16>,
    /// Networks that other machines route: of pods on other nodes, and others.
    pub remote: Vec<RemoteNetwork>,
    /// The smallest MTU that an IPv4 route sets. The kernel forwards nothing longer by it, but does not say so to programs that ask for the
    /// route (`ip_mtu_from_fib_result` in net/ipv4/route.c).
    pub longest: Option<u32>,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Link {
    /// Its index in this namespace.
    pub index: u32,
    pub name: String,
    pub alias: Option<String>,
    /// Its Ethernet address; zero where it has none.
    pub mac: Mac,
    /// Its MTU in bytes, without the link header.
    pub mtu: u32,
    pub up: bool,
    /// Whether it is one end of a veth pair.
    pub veth: bool,
    pub bridge: bool,
    /// The kernel's number here of the network namespace that its other end is in; `None` for this one.
    pub peer_namespace: Option<i32>,
    /// Index of its bridge, bond or other master.
    pub master: Option<u32>,
    pub queues: u32,
    /// The MAC address of a veth's peer in another network namespace.
    pub peer_mac: Option<Mac>,
    /// Queueing disciplines and filters that others have set on it.
    pub shaping: Shaping,
}

/// Queueing disciplines and filters of somebody else on a pod's interface: limits of bandwidth, for example.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shaping {
    /// On what the node sends to the pod.
    pub to_pod: bool,
    /// On what the pod sends.
    pub from_pod: bool,
}

impl Shaping {
    /// Which of the pod's packets they are for, in words.
    pub fn directions(self) -> Option<&'static str> {
        match (self.to_pod, self.from_pod) {
            (false, false) => None,
            (true, false) => Some("what it receives"),
            (false, true) => Some("what it sends"),
            (true, true) => Some("what it sends and receives"),
        }
    }
}

/// A network behind another machine.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RemoteNetwork {
    pub network: IpNet,
    /// The machines that route it.
    pub gateways: Vec<IpAddr>,
    /// Whether the way there is a tunnel of this node.
    pub by_tunnel: bool,
}

/// A route to one address directly behind a link, as ptp-like CNI plugins set it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct HostRoute {
    pub destination: IpAddr,
    pub link: u32,
}

#[cfg(test)]
impl Link {
    pub(crate) fn veth(index: u32, name: &str) -> Self {
        Self {
            index,
            name: name.to_owned(),
            alias: None,
            mac: Mac([2, 0, 0, 0, 0, index as u8]),
            mtu: 1500,
            up: true,
            veth: true,
            bridge: false,
            peer_namespace: Some(index as i32),
            master: None,
            queues: 1,
            peer_mac: Some(Mac([2, 0, 0, 0, 1, index as u8])),
            shaping: Shaping::default(),
        }
    }
}

impl NetworkState {
    pub fn link(&self, name: &str) -> Option<&Link> {
        self.links.values().find(|link| link.name == name)
    }

    /// The link that each address is behind, by routes to single addresses. The main table's take precedence.
    pub fn routed(&self) -> BTreeMap<IpAddr, u32> {
        self.other_routes.iter().chain(&self.routes).map(|found| (found.destination, found.link)).collect()
    }

    /// The same with what neighbours of bridges claim.
    pub fn behind(&self) -> BTreeMap<IpAddr, u32> {
        let mut behind: BTreeMap<IpAddr, u32> =
            self.bridged.iter().map(|found| (found.destination, found.link)).collect();
        behind.append(&mut self.routed());
        behind
    }

    /// Whether a route to a single address leads to this link.
    pub fn is_routed(&self, link: u32) -> bool {
        self.routes.iter().chain(&self.other_routes).any(|route| route.link == link)
    }

    pub fn bridge_of(&self, address: IpAddr) -> Option<u32> {
        self.networks.iter().find(|(network, _)| network.contains(&address)).map(|&(_, bridge)| bridge)
    }

    pub fn master_of(&self, link: &Link) -> Option<&Link> {
        link.master.and_then(|index| self.links.get(&index))
    }

    pub fn bridge(&self, link: &Link) -> Option<Bridge> {
        let bridge = self.master_of(link).filter(|master| master.bridge)?;
        Some(Bridge { index: bridge.index, mac: bridge.mac.0 })
    }
}
