//! A flat list of six-tuples, for access lists without identities, tries or excepts.
//!
//! Each direction of a pod has its own list, since both ends of a flow must allow it. Excepts are subtracted from the
//! permits, so one deny at the end is enough and the order of permits does not affect the verdict. Permits are sorted most
//! specific first, for consumers that use longest-prefix match. The original form has single ports, TCP and UDP; this one
//! adds port ranges and SCTP.

use std::cmp::Reverse;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::policy::{Direction, PortProtocol, PortRange, PortSpec};

use crate::state::{ClusterState, PodId, PodOrNode};

use super::tables::{ExpandedRule, Expansion, Tables};

/// The action of an entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Action {
    /// Lets it pass.
    Permit,
    /// Drops it.
    Deny,
}

/// One entry: source address, source port, destination address, destination port, protocol, action. `None` means "any".
/// The source port is always any: policies do not match on it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SixTuple {
    /// Source address; `None` in an egress list, which is for one pod.
    pub src: Option<IpNet>,
    /// Destination address; `None` in an ingress list, which is for one pod.
    pub dst: Option<IpNet>,
    /// Protocol and destination ports.
    pub ports: Option<PortRange>,
    /// Its action.
    pub action: Action,
}

/// The list of one direction of an isolated pod. The first matching entry decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessList {
    /// The pod.
    pub pod: PodId,
    /// The direction.
    pub direction: Direction,
    /// The entries.
    pub entries: Vec<SixTuple>,
}

/// The lists of all pods in scope. A direction without a list is not isolated.
pub fn render(state: &ClusterState, tables: &Tables) -> Vec<AccessList> {
    let expansion = tables.expand();
    let sides = tables.pods().flat_map(|pod| [(pod, Direction::Egress), (pod, Direction::Ingress)]);
    sides.filter_map(|(pod, direction)| access_list(state, tables, &expansion, pod, direction)).collect()
}

fn access_list(
    state: &ClusterState,
    tables: &Tables,
    expansion: &Expansion<'_>,
    pod: PodId,
    direction: Direction,
) -> Option<AccessList> {
    let rules = expansion.rules(tables.table_of(pod, direction)?);
    let never_denied = always_reached(state, pod).map(|address| permit(direction, Some(address.into()), None));
    let mut entries: Vec<SixTuple> = never_denied.collect();
    entries.extend(rules.iter().flat_map(|rule| permits(direction, rule)));
    entries.sort_by_cached_key(specificity);
    entries.dedup();
    let everything = permit(direction, None, None);
    if entries.last() != Some(&everything) {
        entries.push(SixTuple { action: Action::Deny, ..everything });
    }
    Some(AccessList { pod, direction, entries })
}

/// The addresses that policy never denies a pod: its own and its node's.
pub(super) fn always_reached(state: &ClusterState, pod: PodId) -> impl Iterator<Item = IpAddr> {
    let node = state.node_of(pod);
    let of_node =
        state.addresses().filter(move |(_, holder)| node.is_some_and(|node| *holder == PodOrNode::Node(node)));
    let own = state.pod(pod).into_iter().flat_map(|pod| pod.addresses.clone());
    let own = own.filter(move |address| state.owner(address) == Some(PodOrNode::Pod(pod)));
    own.chain(of_node.map(|(address, _)| address))
}

fn permits(direction: Direction, rule: &ExpandedRule<'_>) -> Vec<SixTuple> {
    let peers: Vec<Option<IpNet>> = match &rule.peers {
        None => vec![None],
        Some(peers) => peers.iter().copied().map(Some).collect(),
    };
    let ports: Vec<Option<PortRange>> = match rule.ports {
        PortSpec::Every => vec![None],
        PortSpec::AnyOf(ranges) => ranges.iter().copied().map(Some).collect(),
    };
    peers.iter().flat_map(|peer| ports.iter().map(|ports| permit(direction, *peer, *ports))).collect()
}

fn permit(direction: Direction, peer: Option<IpNet>, ports: Option<PortRange>) -> SixTuple {
    let (src, dst) = match direction {
        Direction::Egress => (None, peer),
        Direction::Ingress => (peer, None),
    };
    SixTuple { src, dst, ports, action: Action::Permit }
}

/// Sort key: an entry sorts before every other entry that matches all that it matches.
fn specificity(entry: &SixTuple) -> impl Ord + use<> {
    let peer = entry.src.or(entry.dst);
    let spare_bits = peer.map_or(u8::MAX, |net| net.max_prefix_len() - net.prefix_len());
    let width = entry.ports.map_or(u32::MAX, |range| range.last as u32 - range.first as u32);
    let ports = entry.ports.map(|range| (range.protocol, range.first));
    (entry.action, spare_bits, width, peer, Reverse(ports.is_some()), ports)
}

impl AccessList {
    /// Whether the list permits a flow with this peer and destination; `ports` is `None` for protocols without ports.
    pub fn permits(&self, peer: IpAddr, ports: Option<(PortProtocol, u16)>) -> bool {
        let matching = |entry: &&SixTuple| {
            entry.src.or(entry.dst).is_none_or(|net| net.contains(&peer))
                && entry.ports.is_none_or(|range| {
                    ports.is_some_and(|(protocol, port)| {
                        range.protocol == protocol && (range.first..=range.last).contains(&port)
                    })
                })
        };
        self.entries.iter().find(matching).is_some_and(|entry| entry.action == Action::Permit)
    }
}

impl fmt::Display for SixTuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let net = |net: &Option<IpNet>| net.map_or("ANY".to_owned(), |net| net.to_string());
        let (port, protocol) = match self.ports {
            None => ("ANY".to_owned(), "ANY"),
            Some(range) => (port_text(&range), protocol_word(range.protocol)),
        };
        let action = match self.action {
            Action::Permit => "PERMIT",
            Action::Deny => "DENY",
        };
        write!(f, "{}, ANY, {}, {port}, {protocol}, {action}", net(&self.src), net(&self.dst))
    }
}

fn port_text(range: &PortRange) -> String {
    match (range.first, range.last) {
        (0, u16::MAX) => "ANY".to_owned(),
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    }
}

fn protocol_word(protocol: PortProtocol) -> &'static str {
    match protocol {
        PortProtocol::Tcp => "TCP",
        PortProtocol::Udp => "UDP",
        PortProtocol::Sctp => "SCTP",
    }
}
