//! The node in a snapshot, besides its ports: the owners of addresses, and where tunnels end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use penstock_dataplane::forward::{Encapsulation, Forwarding, WELL_KNOWN_TUNNEL_PORTS};
use penstock_dataplane::packet::Address;

use super::config::{self, FromPods};
use super::objects::NodeObjects;
use crate::discovery::{NetworkState, RemoteNetwork};

/// The part of the network state that snapshots need.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct NodeNetwork {
    pub(super) addresses: Vec<IpAddr>,
    /// Other prefixes that the node accepts as its own.
    pub(super) local_prefixes: BTreeSet<IpNet>,
    tunnel_ports: BTreeSet<u16>,
    /// Whether programs see all that leaves the node.
    pub(super) watches_uplinks: bool,
    remote: Vec<RemoteNetwork>,
}

impl NodeNetwork {
    pub(super) fn of(netstate: &NetworkState, watches_uplinks: bool) -> Self {
        Self {
            watches_uplinks,
            addresses: netstate.addresses.clone(),
            local_prefixes: netstate.local_prefixes.clone(),
            tunnel_ports: netstate.tunnel_ports.clone(),
            remote: netstate.remote.clone(),
        }
    }
}

/// The node's part of a snapshot. A change of it needs a new snapshot.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct NodeContext {
    node: BTreeSet<IpAddr>,
    /// Addresses of this node's pods, served or not.
    pods: BTreeSet<IpAddr>,
    encapsulation: Arc<Encapsulation>,
    tunnels: Arc<RefusedTunnels>,
}

/// The tunnel packets that this node does not unwrap.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct RefusedTunnels {
    pub(super) ports: BTreeSet<u16>,
    /// Other nodes' networks, and whether pods are there: of two that contain an address the longer one counts.
    pub(super) networks: BTreeMap<IpNet, bool>,
}

impl NodeContext {
    pub(super) fn of(config: &config::Encapsulation, network: &NodeNetwork, objects: &NodeObjects) -> Self {
        let (encapsulation, tunnels) = match config.from_pods {
            FromPods::Drop => (
                encapsulation(config, network, objects),
                RefusedTunnels { ports: tunnel_ports(config, network), networks: networks_of_pods(network, objects) },
            ),
            FromPods::Allow => Default::default(),
        };
        Self {
            node: objects.node_addresses().iter().copied().collect(),
            pods: objects.pod_addresses(),
            encapsulation: Arc::new(encapsulation),
            tunnels: Arc::new(tunnels),
        }
    }

    pub(super) fn tunnels(&self) -> &Arc<RefusedTunnels> {
        &self.tunnels
    }

    /// A forwarding table without ports.
    pub(super) fn forwarding(&self) -> Forwarding {
        let addresses = |all: &BTreeSet<IpAddr>| all.iter().copied().map(Address::from).collect::<Vec<_>>();
        let forwarding = Forwarding::new(addresses(&self.node)).with_portless(addresses(&self.pods));
        forwarding.with_encapsulation(self.encapsulation.clone())
    }
}

/// UDP ports at which nodes may unwrap packets.
fn tunnel_ports(config: &config::Encapsulation, network: &NodeNetwork) -> BTreeSet<u16> {
    let configured = config.ports.iter().map(|port| port.get());
    WELL_KNOWN_TUNNEL_PORTS.into_iter().chain(configured).chain(network.tunnel_ports.iter().copied()).collect()
}

/// Which encapsulated packets pods may not send to nodes.
fn encapsulation(config: &config::Encapsulation, network: &NodeNetwork, objects: &NodeObjects) -> Encapsulation {
    let is_single = |network: &&IpNet| network.prefix_len() == network.max_prefix_len();
    let (single, blocks): (Vec<IpNet>, Vec<IpNet>) = network.local_prefixes.iter().partition(is_single);
    let own = objects.node_addresses().iter().copied().chain(single.iter().map(IpNet::addr));
    let others: BTreeSet<IpAddr> = objects.other_nodes().collect();
    let nodes = own.chain(others.iter().copied()).map(Address::from).collect::<Vec<_>>();
    let networks = remote_networks(network, &others).map(|remote| remote.network);
    Encapsulation::refused(tunnel_ports(config, network), nodes, blocks).with_networks(networks)
}

/// Networks that other nodes route, by a tunnel or as gateways: of their pods, with addresses of theirs that no object lists.
fn remote_networks<'a>(network: &'a NodeNetwork, others: &BTreeSet<IpAddr>) -> impl Iterator<Item = &'a RemoteNetwork> {
    let is_of_nodes =
        |remote: &&RemoteNetwork| remote.by_tunnel || remote.gateways.iter().any(|gateway| others.contains(gateway));
    network.remote.iter().filter(is_of_nodes)
}

/// The networks of these from which pods may send. Not those that are behind no gateway: a network on a tunnel's own link may be that in
/// which nodes have the ends of other tunnels. Nor the nodes' own addresses.
fn networks_of_pods(network: &NodeNetwork, objects: &NodeObjects) -> BTreeMap<IpNet, bool> {
    let others: BTreeSet<IpAddr> = objects.other_nodes().collect();
    let of_pods = remote_networks(network, &others).filter(|remote| !remote.gateways.is_empty());
    let mut networks: BTreeMap<IpNet, bool> = of_pods.map(|remote| (remote.network.trunc(), true)).collect();
    if !networks.is_empty() {
        networks.extend(others.iter().map(|&address| (IpNet::from(address), false)));
    }
    networks
}

#[cfg(test)]
mod tests {
    use penstock_policy::model::{Node, Object, ObjectChange};

    use super::*;
    use crate::config::Config;

    #[test]
    fn pods_networks_are_those_behind_nodes_without_the_nodes() {
        let remote = |network: &str, gateway: Option<&str>, by_tunnel| RemoteNetwork {
            network: network.parse().unwrap(),
            gateways: gateway.iter().map(|gateway| gateway.parse().unwrap()).collect(),
            by_tunnel,
        };
        let network = NodeNetwork {
            remote: vec![
                remote("10.244.2.0/24", Some("10.244.2.0"), true),
                remote("10.244.3.0/24", Some("172.18.0.3"), false),
                // Where nodes have the ends of another tunnel, and machines outside.
                remote("10.9.0.0/24", None, true),
                remote("192.0.2.0/24", Some("172.18.0.99"), false),
            ],
            tunnel_ports: [5555].into(),
            ..NodeNetwork::default()
        };
        let addresses = vec!["172.18.0.3".parse().unwrap()];
        let node =
            Node { name: "other".into(), labels: Default::default(), status_addresses: addresses.clone(), addresses };
        let mut objects = NodeObjects::new("here", &[]);
        objects.apply([ObjectChange::Set(Object::Node(node))], &[]);
        let of = |settings: &str| {
            let text = format!("node = \"here\"\n[source]\nmanifests = \"/tmp\"\n[encapsulation]\n{settings}\n");
            let config = Config::parse(&text, std::path::Path::new("/tmp/penstock.toml")).unwrap();
            NodeContext::of(&config.encapsulation, &network, &objects).tunnels().as_ref().clone()
        };
        let refused = of("ports = [7777]");
        let expected = [("10.244.2.0/24", true), ("10.244.3.0/24", true), ("172.18.0.3/32", false)];
        assert_eq!(refused.networks, expected.map(|(network, of_pods)| (network.parse().unwrap(), of_pods)).into());
        assert!([5555, 7777, 4789].iter().all(|port| refused.ports.contains(port)), "{refused:?}");
        assert_eq!(of("from_pods = \"allow\""), RefusedTunnels::default());
    }
}
