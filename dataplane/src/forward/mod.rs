//! Forwarding of allowed packets: logical ports, next hops and MAC addresses.
//!
//! A *logical port* is a pod, the node or an uplink; the queues of its interface belong to `crate::io`. The
//! separation allows other ways to reach a pod.

mod encapsulation;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use rustc_hash::FxHashMap;

pub use crate::packet::Mac;
use crate::packet::{Address, AddressScope, Packet};
pub use encapsulation::{Encapsulation, WELL_KNOWN_TUNNEL_PORTS};

/// A logical port of this node. Numbers are small and dense: they index arrays.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct PortId(pub u16);

impl PortId {
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortKind {
    /// The host side of a pod's veth: packets received on it must have one of the pod's source addresses.
    Pod,
    /// The veth pair into the node's own stack (the host port): its source addresses are trusted, and it receives
    /// packets for addresses that are not local pods.
    Host,
    /// A NIC or tunnel device that receives packets for local pods.
    Uplink,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    pub kind: PortKind,
    /// Source MAC of frames sent on it.
    pub own_mac: Mac,
    /// Destination MAC of frames sent on it.
    pub peer_mac: Mac,
    /// MTU: maximum length of an IP packet sent on it, in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Index of a pod's interface on the node, for the kernel's programs; 0 of any other port.
    pub interface: u32,
    /// Packets of a pod to another one of the node take the node's stack: others have filters on its interface there.
    pub by_stack: bool,
    /// Index of the bridge that a pod's interface is a port of; 0: of none.
    pub bridge: u32,
    /// Allowed source addresses; empty for host and uplink ports, which may use any.
    pub addresses: Vec<Address>,
}

impl Port {
    /// One whose packets workers forward all, on no bridge and with nobody's filters.
    pub fn new(kind: PortKind, own_mac: Mac, peer_mac: Mac, mtu: u16, addresses: Vec<Address>) -> Self {
        Self { kind, own_mac, peer_mac, mtu, interface: 0, by_stack: false, bridge: 0, addresses }
    }

    /// Whether what comes in by it goes straight to the port of its destination, as by a router: it is on no bridge, and nobody has
    /// filters on it.
    #[inline(always)]
    pub(crate) const fn is_plain(&self) -> bool {
        !self.by_stack && self.bridge == 0
    }
}

/// The ports towards the two ends of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PathPorts {
    /// Towards the packet's destination.
    pub(crate) forward: Option<PortId>,
    /// Towards its sender, for replies.
    pub(crate) reply: Option<PortId>,
}

/// The addresses of this node's pods, with their ports; `None` for a pod without a port.
pub(crate) type LocalAddresses = FxHashMap<Address, Option<PortId>>;

/// The forwarding table of a snapshot: ports, and what is special about addresses outside of pods.
///
/// It is also the input from which a snapshot enters the ports of pods into its map of addresses
/// ([`Snapshot::new`](crate::Snapshot::new)); workers read that map, and from here only ports.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Forwarding {
    ports: Vec<Option<Port>>,
    local: Arc<LocalAddresses>,
    node: Vec<Address>,
    services: Vec<IpNet>,
    host: Option<PortId>,
    encapsulation: Arc<Encapsulation>,
    /// [`Encapsulation::hint`], where every packet finds it.
    encapsulation_hint: encapsulation::Hint,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "address {address} is on port {first} and on port {second}: one address belongs to one pod; correct the pods' status.podIPs"
)]
pub struct AddressTaken {
    pub address: Address,
    pub first: PortId,
    /// The port that it was to be assigned to.
    pub second: PortId,
}

impl Forwarding {
    /// A table without ports for a node with these addresses: every packet is dropped.
    pub fn new(node: impl IntoIterator<Item = Address>) -> Self {
        Self { node: node.into_iter().collect(), ..Self::default() }
    }

    #[must_use]
    pub fn with_services(self, blocks: &[IpNet]) -> Self {
        Self { services: blocks.to_vec(), ..self }
    }

    /// Sets addresses of this node's pods that have no port (yet, or any more).
    #[must_use]
    pub fn with_portless(mut self, addresses: impl IntoIterator<Item = Address>) -> Self {
        let local = Arc::make_mut(&mut self.local);
        for address in addresses {
            local.entry(address).or_insert(None);
        }
        self
    }

    /// Sets the tunnel packets that pods may not send to nodes.
    #[must_use]
    pub fn with_encapsulation(self, encapsulation: Arc<Encapsulation>) -> Self {
        Self { encapsulation_hint: encapsulation.hint(), encapsulation, ..self }
    }

    /// Adds a port with this identifier. With several host ports the last one is used.
    pub fn insert(&mut self, id: PortId, port: Port) -> Result<(), AddressTaken> {
        for &address in &port.addresses {
            if let Some(first) = self.pod_port(address).filter(|&first| first != id) {
                return Err(AddressTaken { address, first, second: id });
            }
        }
        Arc::make_mut(&mut self.local).extend(port.addresses.iter().map(|&address| (address, Some(id))));
        if port.kind == PortKind::Host {
            self.host = Some(id);
        }
        if self.ports.len() <= id.index() {
            self.ports.resize_with(id.index() + 1, || None);
        }
        self.ports[id.index()] = Some(port);
        Ok(())
    }

    #[inline]
    pub fn port(&self, id: PortId) -> Option<&Port> {
        self.ports.get(id.index())?.as_ref()
    }

    #[inline]
    pub fn host(&self) -> Option<PortId> {
        self.host
    }

    /// Whether a node would decapsulate a packet from a pod, if its destination is not another pod. `is_pod`: whether an address is a
    /// pod's, of this node or another.
    #[inline(always)]
    pub fn would_be_decapsulated(&self, packet: &Packet, is_pod: impl FnOnce(Address) -> bool) -> bool {
        self.encapsulation_hint.may_apply_to(packet) && self.is_tunnel_packet(packet, is_pod)
    }

    #[cold]
    #[inline(never)]
    fn is_tunnel_packet(&self, packet: &Packet, is_pod: impl FnOnce(Address) -> bool) -> bool {
        self.encapsulation.applies_to(packet, is_pod)
    }

    /// Whether a node may decapsulate what a pod sends to this address, by some port. `is_pod`: as for [`Forwarding::would_be_decapsulated`].
    pub fn may_end_tunnels(&self, address: Address, is_pod: impl FnOnce(Address) -> bool) -> bool {
        self.encapsulation.may_end(address, is_pod)
    }

    /// The port of the local pod with this address.
    pub fn pod_port(&self, address: Address) -> Option<PortId> {
        self.local.get(&address).copied().flatten()
    }

    pub(crate) fn local_addresses(&self) -> &Arc<LocalAddresses> {
        &self.local
    }

    /// An address of the node in this family, as the source of ICMP errors.
    pub fn node_address(&self, v4: bool) -> Option<Address> {
        let usable = |address: &Address| address.scope() == AddressScope::Routable;
        self.node.iter().copied().find(|address| address.is_v4() == v4 && usable(address))
    }

    #[inline]
    pub fn is_node(&self, address: Address) -> bool {
        self.node.contains(&address)
    }

    pub fn is_service(&self, address: Address) -> bool {
        let address = IpAddr::from(address);
        self.services.iter().any(|block| block.contains(&address))
    }

    pub fn ports(&self) -> impl Iterator<Item = (PortId, &Port)> {
        self.ports.iter().enumerate().filter_map(|(index, port)| Some((PortId(index as u16), port.as_ref()?)))
    }
}
