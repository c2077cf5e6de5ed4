//! An nftables ruleset equivalent to the tables, for `nft -f`.
//!
//! Packets of known connections are accepted first. The first packet of a connection passes the egress chain of its source,
//! then the ingress chain of its destination, each found by a verdict map. A chain returns if it allows the packet and
//! drops it otherwise. A Pass of a ClusterNetworkPolicy goes to a second chain with the next tier, as does the end of the
//! Admin tier. Peers are interval sets with excepts subtracted. Loading the text replaces the table atomically.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::policy::{Direction, PortProtocol, PortRange, PortSpec};

use penstock_policy::compile::{TableKey, Tier};
use penstock_policy::model::RuleAction;
use penstock_policy::state::{ClusterState, PodId};

use super::acl::{own_addresses, own_node_addresses};
use penstock_policy::render::tables::{ExpandedRule, Tables};

pub const TABLE: &str = "penstock";

/// An address family as nftables names it.
#[derive(Clone, Copy)]
struct Family {
    /// Keyword of a match.
    word: &'static str,
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
    let mut shown: Vec<(u32, &TableKey)> =
        sides.iter().filter_map(|(pod, direction, table)| Some((*table, tables.key(*pod, *direction)?))).collect();
    shown.sort_unstable_by_key(|(table, _)| *table);
    shown.dedup_by_key(|(table, _)| *table);
    for (table, key) in shown {
        side_chains(table, key, &expansion.rules(table), &mut sets, &mut chains);
    }
    for family in FAMILIES {
        exempt_sets(state, tables, family, &mut sets);
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

/// The chains of a table, and the sets of its rules' peers.
fn side_chains(table: u32, key: &TableKey, rules: &[ExpandedRule<'_>], sets: &mut String, chains: &mut String) {
    let mut chain = |name: &str, first: usize, rules: &[ExpandedRule<'_>], pass: &str, end: &str| {
        let _ = writeln!(chains, "\tchain {name} {{");
        if key.is_tiered() && key.direction == Direction::Egress && end == "drop" {
            for Family { word, tag, .. } in FAMILIES {
                let _ = writeln!(chains, "\t\t{word} saddr . {word} daddr @own_node_{tag} return");
            }
        }
        for (number, rule) in (first..).zip(rules) {
            let verdict = match rule.source.action() {
                RuleAction::Accept => "return",
                RuleAction::Deny => "drop",
                RuleAction::Pass => pass,
            };
            rule_lines(table, number, rule, verdict, sets, chains);
        }
        let _ = writeln!(chains, "\t\t{end}\n\t}}");
    };
    let name = format!("side_{table}");
    let end = if key.isolation.is_some() { "drop" } else { "return" };
    if key.admin.is_empty() {
        return chain(&name, 0, rules, "return", end);
    }
    let admin = rules.partition_point(|rule| rule.source.policy.name().tier() == Tier::Admin);
    let (next, goto) = (format!("next_{table}"), format!("goto next_{table}"));
    // A chain must be defined before another goes to it.
    chain(&next, admin, &rules[admin..], "return", end);
    chain(&name, 0, &rules[..admin], &goto, &goto);
}

/// The lines of a rule, and the sets of its peers.
fn rule_lines(
    table: u32,
    number: usize,
    rule: &ExpandedRule<'_>,
    verdict: &str,
    sets: &mut String,
    chains: &mut String,
) {
    let _ = writeln!(chains, "\t\t# {}", rule.source.name());
    for ports in port_matches(rule.ports) {
        let Some(peers) = &rule.peers else {
            let _ = writeln!(chains, "\t\t{ports}{verdict}");
            continue;
        };
        for Family { word, tag, .. } in families_of(peers) {
            let end = peer_end(rule.source.direction);
            let _ = writeln!(chains, "\t\t{word} {end} @peers_{table}_{number}_{tag} {ports}{verdict}");
        }
    }
    for family in families_of(rule.peers.as_deref().unwrap_or_default()) {
        let peers = rule.peers.iter().flatten().filter(|net| family.has(&net.addr()));
        let name = format!("peers_{table}_{number}_{}", family.tag);
        set(sets, &name, family.set_type, "flags interval; auto-merge;", peers.map(IpNet::to_string));
    }
}

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
    let mut by_protocol: BTreeMap<PortProtocol, Vec<&PortRange>> = BTreeMap::new();
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

/// The pairs of addresses that no policy denies, a pod with itself and with its node; and those from a pod to its node
/// that only ClusterNetworkPolicies can deny.
fn exempt_sets(state: &ClusterState, tables: &Tables, family: Family, sets: &mut String) {
    let mut exempt: Vec<(IpAddr, IpAddr)> = Vec::new();
    let mut own_node: Vec<(IpAddr, IpAddr)> = Vec::new();
    for pod in tables.pods() {
        let nodes: Vec<IpAddr> = own_node_addresses(state, pod).filter(|address| family.has(address)).collect();
        let own: Vec<IpAddr> = own_addresses(state, pod).filter(|address| family.has(address)).collect();
        let to_node = if is_tiered(tables, pod) { &mut own_node } else { &mut exempt };
        to_node.extend(own.iter().flat_map(|own| nodes.iter().map(move |node| (*own, *node))));
        exempt.extend(own.iter().flat_map(|own| nodes.iter().map(move |node| (*node, *own))));
        exempt.extend(own.iter().flat_map(|own_address| own.iter().map(move |other| (*own_address, *other))));
    }
    let is_tiered = tables.pods().any(|pod| is_tiered(tables, pod));
    for (name, mut pairs, is_used) in [("exempt", exempt, true), ("own_node", own_node, is_tiered)] {
        if is_used {
            pairs.sort_unstable();
            pairs.dedup();
            let elements = pairs.into_iter().map(|(src, dst)| format!("{src} . {dst}"));
            set(sets, &format!("{name}_{}", family.tag), &format!("{0} . {0}", family.set_type), "", elements);
        }
    }
}

/// Whether ClusterNetworkPolicies apply to the egress of a pod.
fn is_tiered(tables: &Tables, pod: PodId) -> bool {
    tables.key(pod, Direction::Egress).is_some_and(TableKey::is_tiered)
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
