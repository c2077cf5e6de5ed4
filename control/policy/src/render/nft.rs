//! An nftables ruleset equivalent to the tables, for `nft -f`.
//!
//! Packets of known connections are accepted first. The first packet of a connection passes the egress chain of its source,
//! then the ingress chain of its destination, each found by a verdict map. A chain returns if it allows the packet and
//! drops it otherwise. Peers are interval sets with excepts subtracted. Loading the text replaces the table atomically.

use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::policy::{Direction, PortProtocol, PortRange, PortSpec};
use rustc_hash::FxHashMap;

use crate::state::{ClusterState, PodId, PodOrNode};

use super::acl::always_reached;
use super::tables::{ExpandedRule, Tables};

/// The name of the table, of family `inet`.
pub const TABLE: &str = "penstock";

/// An address family as nftables names it.
#[derive(Clone, Copy)]
struct Family {
    /// Keyword of a match.
    word: &'static str,
    /// Type of a set.
    set_type: &'static str,
    /// Suffix of names.
    tag: &'static str,
    is_v4: bool,
}

const FAMILIES: [Family; 2] = [
    Family { word: "ip", set_type: "ipv4_addr", tag: "v4", is_v4: true },
    Family { word: "ip6", set_type: "ipv6_addr", tag: "v6", is_v4: false },
];

impl Family {
    fn has(&self, address: &IpAddr) -> bool {
        address.is_ipv4() == self.is_v4
    }
}

/// The ruleset for the pods in scope, on what the node forwards. It needs both directions to allow a flow: cluster-wide
/// evaluation has no such form.
pub fn render(state: &ClusterState, tables: &Tables) -> String {
    let (mut sets, mut chains) = (String::new(), String::new());
    let mut sides: Vec<(PodId, Direction, u32)> = tables
        .pods()
        .flat_map(|pod| [(pod, Direction::Egress), (pod, Direction::Ingress)])
        .filter_map(|(pod, direction)| Some((pod, direction, tables.table_of(pod, direction)?)))
        .collect();
    sides.sort_unstable();
    let expansion = tables.expand();
    let mut numbers: Vec<u32> = sides.iter().map(|(_, _, table)| *table).collect();
    numbers.sort_unstable();
    numbers.dedup();
    for table in numbers {
        side_chain(table, &expansion.rules(table), &mut sets, &mut chains);
    }
    for family in FAMILIES {
        exempt_set(state, tables, family, &mut sets);
        for direction in [Direction::Egress, Direction::Ingress] {
            verdict_map(state, &sides, direction, family, &mut sets);
        }
    }
    let mut text = format!("table inet {TABLE}\ndelete table inet {TABLE}\ntable inet {TABLE} {{\n");
    text.push_str(&sets);
    text.push_str(&chains);
    text.push_str("\tchain forward {\n\t\ttype filter hook forward priority filter; policy accept;\n");
    text.push_str("\t\tct state established,related accept\n");
    for Family { word, tag, .. } in FAMILIES {
        let _ = writeln!(text, "\t\t{word} saddr . {word} daddr @exempt_{tag} accept");
    }
    for Family { word, tag, .. } in FAMILIES {
        let _ = writeln!(text, "\t\t{word} saddr vmap @egress_{tag}");
        let _ = writeln!(text, "\t\t{word} daddr vmap @ingress_{tag}");
    }
    text.push_str("\t}\n}\n");
    text
}

/// The chain of a table, and the sets of its rules' peers.
fn side_chain(table: u32, rules: &[ExpandedRule<'_>], sets: &mut String, chains: &mut String) {
    let _ = writeln!(chains, "\tchain side_{table} {{");
    for (number, rule) in rules.iter().enumerate() {
        let _ = writeln!(chains, "\t\t# {}", rule.source.name());
        let direction = rule.source.direction;
        for ports in port_matches(rule.ports) {
            let Some(peers) = &rule.peers else {
                let _ = writeln!(chains, "\t\t{ports}return");
                continue;
            };
            for Family { word, tag, .. } in families_of(peers) {
                let end = peer_end(direction);
                let _ = writeln!(chains, "\t\t{word} {end} @peers_{table}_{number}_{tag} {ports}return");
            }
        }
        for family in families_of(rule.peers.as_deref().unwrap_or_default()) {
            let peers = rule.peers.iter().flatten().filter(|net| family.has(&net.addr()));
            let name = format!("peers_{table}_{number}_{}", family.tag);
            set(sets, &name, family.set_type, "flags interval; auto-merge;", peers.map(IpNet::to_string));
        }
    }
    chains.push_str("\t\tdrop\n\t}\n");
}

/// The address families that occur.
fn families_of(peers: &[IpNet]) -> impl Iterator<Item = Family> {
    FAMILIES.into_iter().filter(|family| peers.iter().any(|net| family.has(&net.addr())))
}

fn peer_end(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "daddr",
        Direction::Ingress => "saddr",
    }
}

/// The matches of a rule's ports, one for each protocol, each with a trailing blank; an empty one matches everything.
fn port_matches(ports: &PortSpec) -> Vec<String> {
    let PortSpec::AnyOf(ranges) = ports else { return vec![String::new()] };
    let mut by_protocol: FxHashMap<PortProtocol, Vec<&PortRange>> = FxHashMap::default();
    for range in ranges {
        by_protocol.entry(range.protocol).or_default().push(range);
    }
    let mut matches: Vec<String> =
        by_protocol.into_iter().map(|(protocol, ranges)| port_match(protocol, ranges)).collect();
    matches.sort_unstable();
    matches
}

fn port_match(protocol: PortProtocol, mut ranges: Vec<&PortRange>) -> String {
    let word = match protocol {
        PortProtocol::Tcp => "tcp",
        PortProtocol::Udp => "udp",
        PortProtocol::Sctp => "sctp",
    };
    ranges.sort_unstable_by_key(|range| range.first);
    // nftables rejects overlapping elements of an anonymous set.
    let mut merged: Vec<(u16, u16)> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some((_, last)) if u32::from(range.first) <= u32::from(*last) + 1 => *last = range.last.max(*last),
            _ => merged.push((range.first, range.last)),
        }
    }
    if merged == [(0, u16::MAX)] {
        return format!("meta l4proto {word} ");
    }
    let text = |(first, last): &(u16, u16)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    format!("{word} dport {{ {} }} ", merged.iter().map(text).collect::<Vec<_>>().join(", "))
}

/// The pairs of addresses that policy never denies: a pod with itself and with its node.
fn exempt_set(state: &ClusterState, tables: &Tables, family: Family, sets: &mut String) {
    let mut pairs: Vec<(IpAddr, IpAddr)> = Vec::new();
    for pod in tables.pods() {
        let others: Vec<IpAddr> = always_reached(state, pod).filter(|address| family.has(address)).collect();
        for own in own_addresses(state, pod).filter(|address| family.has(address)) {
            pairs.extend(others.iter().flat_map(|other| [(own, *other), (*other, own)]));
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
    let elements = pairs.into_iter().map(|(src, dst)| format!("{src} . {dst}"));
    set(sets, &format!("exempt_{}", family.tag), &format!("{0} . {0}", family.set_type), "", elements);
}

fn verdict_map(
    state: &ClusterState,
    sides: &[(PodId, Direction, u32)],
    direction: Direction,
    family: Family,
    sets: &mut String,
) {
    let sides = sides.iter().filter(|(_, of, _)| *of == direction);
    let elements = sides.flat_map(|(pod, _, table)| {
        let addresses = own_addresses(state, *pod).filter(|address| family.has(address));
        addresses.map(move |address| format!("{address} : jump side_{table}"))
    });
    let name = match direction {
        Direction::Egress => format!("egress_{}", family.tag),
        Direction::Ingress => format!("ingress_{}", family.tag),
    };
    let mut elements: Vec<String> = elements.collect();
    elements.sort_unstable();
    collection(sets, "map", &name, &format!("{} : verdict", family.set_type), "", elements.into_iter());
}

fn own_addresses(state: &ClusterState, pod: PodId) -> impl Iterator<Item = IpAddr> {
    let addresses = state.pod(pod).into_iter().flat_map(|pod| pod.addresses.iter().copied());
    addresses.filter(move |address| state.owner(address) == Some(PodOrNode::Pod(pod)))
}

fn set(text: &mut String, name: &str, of: &str, flags: &str, elements: impl Iterator<Item = String>) {
    collection(text, "set", name, of, flags, elements);
}

fn collection(
    text: &mut String,
    kind: &str,
    name: &str,
    of: &str,
    flags: &str,
    elements: impl Iterator<Item = String>,
) {
    let _ = writeln!(text, "\t{kind} {name} {{\n\t\ttype {of};");
    if !flags.is_empty() {
        let _ = writeln!(text, "\t\t{flags}");
    }
    let elements: Vec<String> = elements.collect();
    if !elements.is_empty() {
        let _ = writeln!(text, "\t\telements = {{\n\t\t\t{}\n\t\t}}", elements.join(",\n\t\t\t"));
    }
    text.push_str("\t}\n");
}
