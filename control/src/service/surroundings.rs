//! What a snapshot says of the node beside its ports: whose addresses are what, and which tunnels end where.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::forward::{Encapsulation, Forwarding, WELL_KNOWN_TUNNEL_PORTS};
use penstock_dataplane::packet::Address;

use super::config::{self, FromPods};
use super::objects::Objects;
use crate::discovery::Facts;

/// All of it. Where one differs from that of the last snapshot, another is due.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Surroundings {
    /// This node's addresses.
    node: BTreeSet<IpAddr>,
    /// Addresses of this node's pods, served or not.
    pods: BTreeSet<IpAddr>,
    tunnels: Option<Tunnels>,
}

/// What pods may not send to nodes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Tunnels {
    ports: BTreeSet<u16>,
    nodes: BTreeSet<IpAddr>,
    /// What this node takes for its own.
    taken: BTreeSet<IpNet>,
}

impl Surroundings {
    pub(super) fn of(config: &config::Encapsulation, facts: &Facts, objects: &Objects) -> Self {
        let tunnels = || {
            let found = facts.tunnel_ports.iter().copied();
            let configured = config.ports.iter().map(|port| port.get());
            let own = objects.node_addresses().iter().copied();
            let (single, blocks): (BTreeSet<IpNet>, BTreeSet<IpNet>) =
                facts.taken.iter().partition(|net| net.prefix_len() == net.max_prefix_len());
            Tunnels {
                ports: found.chain(configured).chain(WELL_KNOWN_TUNNEL_PORTS).collect(),
                nodes: own.chain(objects.other_nodes()).chain(single.iter().map(|net| net.addr())).collect(),
                taken: blocks,
            }
        };
        Self {
            node: objects.node_addresses().iter().copied().collect(),
            pods: objects.pod_addresses(),
            tunnels: (config.from_pods == FromPods::Drop).then(tunnels),
        }
    }

    /// Addresses of this node's pods, served or not.
    pub(super) fn pods(&self) -> &BTreeSet<IpAddr> {
        &self.pods
    }

    /// A forwarding table without ports.
    pub(super) fn forwarding(&self) -> Forwarding {
        let addresses = |all: &BTreeSet<IpAddr>| all.iter().copied().map(Address::from).collect::<Vec<_>>();
        let forwarding = Forwarding::new(addresses(&self.node)).with_portless(addresses(&self.pods));
        match &self.tunnels {
            None => forwarding,
            Some(Tunnels { ports, nodes, taken }) => forwarding.with_encapsulation(Encapsulation::refused(
                ports.iter().copied(),
                addresses(nodes),
                taken.iter().copied(),
            )),
        }
    }
}
