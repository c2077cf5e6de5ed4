//! A flat list of six-tuples, for access lists without identities, tries or excepts.
//!
//! Each direction of a pod has its own list, since both ends of a flow must allow it. Excepts are subtracted from the
//! permits. Where only NetworkPolicies apply, one deny at the end is enough and the order of permits does not affect the
//! verdict: permits are sorted most specific first, for consumers that use longest-prefix match. Where
//! ClusterNetworkPolicies apply, the order counts and is that of the tiers. A list has no Pass: in its place stand the
//! entries of the next tier, limited to what the Pass matches. The original form has single ports, TCP and UDP; this one
//! adds port ranges and SCTP.

use std::cmp::Reverse;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::policy::{Direction, PortProtocol, PortRange, PortSpec};

use penstock_policy::compile::{TableKey, Tier};
use penstock_policy::model::RuleAction;
use penstock_policy::state::{ClusterState, PodId, PodOrNode};

use penstock_policy::render::tables::{ExpandedRule, Expansion, Tables};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Action {
    Permit,
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
    pub action: Action,
}

/// The list of one direction of a pod to which policies apply. The first matching entry decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessList {
    pub pod: PodId,
    pub direction: Direction,
    pub entries: Vec<SixTuple>,
}

/// The lists of all pods in scope. A direction without a list is open.
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
    let (key, rules) = (tables.key(pod, direction)?, expansion.rules(tables.table_of(pod, direction)?));
    let entries = match key.is_tiered() {
        false => isolated_list(state, pod, direction, &rules),
        true => tiered_list(state, pod, key, &rules),
    };
    Some(AccessList { pod, direction, entries })
}

/// The list of a direction that only NetworkPolicies isolate.
fn isolated_list(state: &ClusterState, pod: PodId, direction: Direction, rules: &[ExpandedRule<'_>]) -> Vec<SixTuple> {
    let never_denied = own_addresses(state, pod).chain(own_node_addresses(state, pod));
    let mut entries: Vec<SixTuple> =
        never_denied.map(|address| entry(direction, Some(address.into()), None, Action::Permit)).collect();
    entries.extend(rules.iter().flat_map(|rule| entries_of(direction, rule, Action::Permit)));
    entries.sort_by_cached_key(specificity);
    entries.dedup();
    let everything = entry(direction, None, None, Action::Permit);
    if entries.last() != Some(&everything) {
        entries.push(SixTuple { action: Action::Deny, ..everything });
    }
    entries
}

/// The list of a direction to which ClusterNetworkPolicies apply.
fn tiered_list(state: &ClusterState, pod: PodId, key: &TableKey, rules: &[ExpandedRule<'_>]) -> Vec<SixTuple> {
    let direction = key.direction;
    let (admin, rest) = rules.split_at(rules.partition_point(|rule| rule.source.policy.name().tier() == Tier::Admin));
    // No peer of an ingress rule is a node.
    let own_node = own_node_addresses(state, pod).filter(|_| direction == Direction::Ingress);
    let never_denied = own_addresses(state, pod).chain(own_node);
    let mut entries: Vec<SixTuple> =
        never_denied.map(|address| entry(direction, Some(address.into()), None, Action::Permit)).collect();
    let next = match key.isolation {
        Some(_) => isolated_list(state, pod, direction, rest),
        None => ordered(direction, rest, &[entry(direction, None, None, Action::Permit)]),
    };
    entries.extend(ordered(direction, admin, &next));
    entries
}

/// The entries of ordered rules, and those of the next tier, which decides what they leave or pass.
fn ordered(direction: Direction, rules: &[ExpandedRule<'_>], next: &[SixTuple]) -> Vec<SixTuple> {
    let mut entries = Vec::new();
    for rule in rules {
        match rule.source.action() {
            RuleAction::Accept => entries.extend(entries_of(direction, rule, Action::Permit)),
            RuleAction::Deny => entries.extend(entries_of(direction, rule, Action::Deny)),
            RuleAction::Pass => {
                for passed in entries_of(direction, rule, Action::Permit) {
                    entries.extend(next.iter().filter_map(|next| next.within(&passed)));
                }
            }
        }
    }
    entries.extend_from_slice(next);
    entries
}

/// The pod's own addresses, which policy never denies it.
pub(super) fn own_addresses(state: &ClusterState, pod: PodId) -> impl Iterator<Item = IpAddr> {
    let own = state.pod(pod).into_iter().flat_map(|pod| pod.addresses.clone());
    own.filter(move |address| state.owner(address) == Some(PodOrNode::Pod(pod)))
}

/// The addresses of the pod's node, which NetworkPolicy never denies it.
pub(super) fn own_node_addresses(state: &ClusterState, pod: PodId) -> impl Iterator<Item = IpAddr> {
    let node = state.node_of(pod);
    let of_node =
        state.addresses().filter(move |(_, holder)| node.is_some_and(|node| *holder == PodOrNode::Node(node)));
    of_node.map(|(address, _)| address)
}

fn entries_of(direction: Direction, rule: &ExpandedRule<'_>, action: Action) -> Vec<SixTuple> {
    let peers: Vec<Option<IpNet>> = match &rule.peers {
        None => vec![None],
        Some(peers) => peers.iter().copied().map(Some).collect(),
    };
    let ports: Vec<Option<PortRange>> = match rule.ports {
        PortSpec::Every => vec![None],
        PortSpec::AnyOf(ranges) => ranges.iter().copied().map(Some).collect(),
    };
    peers.iter().flat_map(|peer| ports.iter().map(|ports| entry(direction, *peer, *ports, action))).collect()
}

fn entry(direction: Direction, peer: Option<IpNet>, ports: Option<PortRange>, action: Action) -> SixTuple {
    let (src, dst) = match direction {
        Direction::Egress => (None, peer),
        Direction::Ingress => (peer, None),
    };
    SixTuple { src, dst, ports, action }
}

/// Sort key: an entry sorts before every other entry that matches all that it matches.
fn specificity(entry: &SixTuple) -> impl Ord + use<> {
    let peer = entry.src.or(entry.dst);
    let spare_bits = peer.map_or(u8::MAX, |net| net.max_prefix_len() - net.prefix_len());
    let width = entry.ports.map_or(u32::MAX, |range| range.last as u32 - range.first as u32);
    let ports = entry.ports.map(|range| (range.protocol, range.first));
    (entry.action, spare_bits, width, peer, Reverse(ports.is_some()), ports)
}

impl SixTuple {
    /// This entry for what another matches; `None` if they have nothing in common.
    fn within(&self, other: &Self) -> Option<Self> {
        let net = |a: Option<IpNet>, b: Option<IpNet>| match (a, b) {
            (Some(a), Some(b)) if a.contains(&b) => Some(Some(b)),
            (Some(a), Some(b)) => b.contains(&a).then_some(Some(a)),
            (a, b) => Some(a.or(b)),
        };
        let ports = match (self.ports, other.ports) {
            (Some(a), Some(b)) => {
                let (first, last) = (a.first.max(b.first), a.last.min(b.last));
                let both = (a.protocol == b.protocol && first <= last).then_some(PortRange { first, last, ..a });
                Some(both?)
            }
            (a, b) => a.or(b),
        };
        Some(Self { src: net(self.src, other.src)?, dst: net(self.dst, other.dst)?, ports, action: self.action })
    }
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
