//! The node in a snapshot, besides its ports: the owners of addresses, and where tunnels end.

use std::collections::BTreeSet;
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
    /// Addresses on the node's interfaces.
    pub(super) addresses: Vec<IpAddr>,
    /// Other prefixes that the node accepts as its own.
    local_prefixes: BTreeSet<IpNet>,
    tunnel_ports: BTreeSet<u16>,
    /// Whether programs see all that leaves the node.
    pub(super) watches_uplinks: bool,
    /// Networks behind other machines.
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
    /// This node's addresses.
    node: BTreeSet<IpAddr>,
    /// Addresses of this node's pods, served or not.
    pods: BTreeSet<IpAddr>,
    encapsulation: Arc<Encapsulation>,
}

impl NodeContext {
    pub(super) fn of(config: &config::Encapsulation, network: &NodeNetwork, objects: &NodeObjects) -> Self {
        Self {
            node: objects.node_addresses().iter().copied().collect(),
            pods: objects.pod_addresses(),
            encapsulation: Arc::new(match config.from_pods {
                FromPods::Drop => encapsulation(config, network, objects),
                FromPods::Allow => Encapsulation::default(),
            }),
        }
    }

    /// A forwarding table without ports.
    pub(super) fn forwarding(&self) -> Forwarding {
        let addresses = |all: &BTreeSet<IpAddr>| all.iter().copied().map(Address::from).collect::<Vec<_>>();
        let forwarding = Forwarding::new(addresses(&self.node)).with_portless(addresses(&self.pods));
        forwarding.with_encapsulation(self.encapsulation.clone())
    }
}

/// Which encapsulated packets pods may not send to nodes.
fn encapsulation(config: &config::Encapsulation, network: &NodeNetwork, objects: &NodeObjects) -> Encapsulation {
    let configured = config.ports.iter().map(|port| port.get());
    let ports = WELL_KNOWN_TUNNEL_PORTS.into_iter().chain(configured).chain(network.tunnel_ports.iter().copied());
    let is_single = |network: &&IpNet| network.prefix_len() == network.max_prefix_len();
    let (single, blocks): (Vec<IpNet>, Vec<IpNet>) = network.local_prefixes.iter().partition(is_single);
    let own = objects.node_addresses().iter().copied().chain(single.iter().map(IpNet::addr));
    // Networks that other nodes route, by a tunnel or as gateways, are their pods': with addresses of theirs that no object lists.
    let others: BTreeSet<IpAddr> = objects.other_nodes().collect();
    let is_of_nodes =
        |remote: &&RemoteNetwork| remote.by_tunnel || remote.gateways.iter().any(|gateway| others.contains(gateway));
    let networks = network.remote.iter().filter(is_of_nodes).map(|remote| remote.network);
    let nodes = own.chain(others.iter().copied()).map(Address::from).collect::<Vec<_>>();
    Encapsulation::refused(ports, nodes, blocks).with_networks(networks)
}
