//! Tunnel packets from pods that a node would decapsulate.
//!
//! Policy does not see an encapsulated packet: the node's stack decapsulates packets to its addresses and routes the
//! content, whose source the sender chose. So pods may not send such packets to a node's address, nor to one of other nodes'
//! pod networks that is no pod's: a node has addresses there, too, for its pods' gateway and its tunnels.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use rustc_hash::FxHashSet;

use crate::packet::{Address, AddressScope, Packet, Protocol, Transport};

/// Well-known UDP tunnel ports, blocked whether or not this node is known to have such a tunnel: other nodes may, and
/// some tunnels have no interface. VXLAN by IANA and Linux' default, Geneve, GUE, GRE in UDP (RFC 8086; 4755 is DTLS),
/// MPLS in UDP (RFC 7510), L2TP, GTP-U and its predecessor.
pub const WELL_KNOWN_TUNNEL_PORTS: [u16; 9] = [4789, 8472, 6081, 6080, 4754, 6635, 1701, 2152, 3386];

/// IP protocols that Linux decapsulates without a key (`inet_add_protocol` and `inet6_add_protocol` in net/): IPIP,
/// IPv6 (sit, ip6_tunnel), GRE, IPComp, PIM (register messages), L2TP, MPLS in IP, Ethernet (segment routing). ESP and
/// AH are not included: they require a key. The same as in `is_encapsulation` in xdp-redirect/src/bpf/tunnel.h.
const PROTOCOLS: [u8; 8] = [4, 41, 47, 103, 108, 115, 137, 143];

/// The packets of pods that are dropped because a node would decapsulate them. None by default.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Encapsulation {
    /// UDP tunnel ports, sorted.
    ports: Vec<u16>,
    nodes: FxHashSet<Address>,
    /// Blocks whose addresses this node treats as its own.
    blocks: Vec<IpNet>,
    /// Pods' networks on other nodes: these have addresses there that nobody tells.
    networks: Networks,
    on: bool,
}

/// Rules out most packets without reading an [`Encapsulation`]: the bits of its destination ports, by [`bit`]. Packets
/// without ports count as port 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Hint(u64);

impl Hint {
    #[inline(always)]
    pub(super) const fn may_apply_to(self, packet: &Packet) -> bool {
        self.0 & bit(packet.flow.dst_port) != 0
    }
}

impl Encapsulation {
    /// Blocks packets to these nodes that they would decapsulate: the protocols that Linux decapsulates, and UDP to
    /// these ports. `blocks` are the node's own addresses beyond single ones: broadcast and anycast addresses.
    pub fn refused(
        ports: impl IntoIterator<Item = u16>,
        nodes: impl IntoIterator<Item = Address>,
        blocks: impl IntoIterator<Item = IpNet>,
    ) -> Self {
        let mut ports: Vec<u16> = ports.into_iter().collect();
        ports.sort_unstable();
        ports.dedup();
        Self {
            ports,
            nodes: nodes.into_iter().collect(),
            blocks: blocks.into_iter().collect(),
            on: true,
            ..Self::default()
        }
    }

    /// Blocks them also to all addresses of these networks that are no known pod's.
    #[must_use]
    pub fn with_networks(self, networks: impl IntoIterator<Item = IpNet>) -> Self {
        Self { networks: Networks::of(networks), ..self }
    }

    pub(super) fn hint(&self) -> Hint {
        let portless = if self.on { bit(0) } else { 0 };
        Hint(self.ports.iter().fold(portless, |hint, &port| hint | bit(port)))
    }

    pub(super) fn applies_to(&self, packet: &Packet, is_pod: impl FnOnce(Address) -> bool) -> bool {
        let is_wrapping = match packet.transport {
            Transport::Udp => self.ports.binary_search(&packet.flow.dst_port).is_ok(),
            Transport::Other => self.on && PROTOCOLS.contains(&packet.flow.protocol.0),
            // In fragments that each hold a part of the header, or read otherwise by the node: its port is not known.
            Transport::Unreadable => self.on && packet.flow.protocol == Protocol::UDP,
            // A later fragment passes only if its first one did.
            _ => false,
        };
        is_wrapping && self.may_end(packet.flow.dst, is_pod)
    }

    /// Whether packets to this address would be decapsulated, if they are such as a node decapsulates.
    pub(super) fn may_end(&self, address: Address, is_pod: impl FnOnce(Address) -> bool) -> bool {
        self.is_node(address) || (self.networks.contain(address) && !is_pod(address))
    }

    /// Whether a node may take packets to this address for its own. It is on the pod's link, and may be in any group.
    fn is_node(&self, address: Address) -> bool {
        let ip = IpAddr::from(address);
        address.scope() != AddressScope::Routable
            || self.nodes.contains(&address)
            || self.blocks.iter().any(|block| block.contains(&ip))
    }
}

/// Networks by the lengths of their prefixes, of which a cluster has few.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Networks(BTreeMap<(bool, u8), FxHashSet<IpNet>>);

impl Networks {
    fn of(networks: impl IntoIterator<Item = IpNet>) -> Self {
        let mut all = Self::default();
        for network in networks {
            let key = (network.addr().is_ipv4(), network.prefix_len());
            all.0.entry(key).or_default().insert(network.trunc());
        }
        all
    }

    fn contain(&self, address: Address) -> bool {
        let ip = IpAddr::from(address);
        self.0.iter().any(|(&(is_v4, length), networks)| {
            is_v4 == ip.is_ipv4() && IpNet::new(ip, length).is_ok_and(|network| networks.contains(&network.trunc()))
        })
    }
}

/// One of 64 bits. DNS, HTTPS and NTP share none with the well-known tunnels.
#[inline(always)]
const fn bit(port: u16) -> u64 {
    1 << (port.wrapping_mul(0x9e37) >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_their_addresses_alone() {
        let networks = Networks::of(["10.244.2.7/24", "10.5.0.0/16", "fd00:2::/64"].map(|text| text.parse().unwrap()));
        for (address, is_in) in [
            ("10.244.2.0", true),
            ("10.244.2.255", true),
            ("10.244.3.1", false),
            ("10.5.255.1", true),
            ("fd00:2::9", true),
            ("fd00:3::9", false),
        ] {
            assert_eq!(networks.contain(address.parse::<IpAddr>().unwrap().into()), is_in, "{address}");
        }
    }

    #[test]
    fn common_ports_do_not_reach_the_list() {
        let Hint(hint) = Encapsulation::refused(WELL_KNOWN_TUNNEL_PORTS, [], []).hint();
        for port in [53, 80, 123, 443, 5353, 8080] {
            assert_eq!(hint & bit(port), 0, "port {port}");
        }
        for port in WELL_KNOWN_TUNNEL_PORTS.into_iter().chain([0]) {
            assert_ne!(hint & bit(port), 0, "port {port}");
        }
    }
}
