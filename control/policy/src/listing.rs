//! The workers' tables in readable form: each rule table once, numbered from 0, with the pods that use it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use penstock_dataplane::policy::{Direction, PortRange, PortSpec};
use serde::Serialize;

use crate::describe::{self, direction as word};
use crate::engine::Engine;
use crate::state::PodId;

/// The rule tables of the workers as JSON.
pub fn json(engine: &Engine) -> String {
    serde_json::to_string_pretty(&listing(engine)).expect("strings and numbers are JSON") + "\n"
}

pub fn text(engine: &Engine) -> String {
    listing(engine).to_text()
}

/// The tables, each once, and the pods that use them.
#[derive(Serialize)]
struct Listing {
    endpoints: Vec<ListedEndpoint>,
    tables: Vec<Table>,
}

#[derive(Serialize)]
struct ListedEndpoint {
    pod: String,
    node: Option<String>,
    addresses: Vec<String>,
    /// Its table's number, `null` where no policy applies.
    egress: Option<u32>,
    ingress: Option<u32>,
}

#[derive(Serialize)]
struct Table {
    table: u32,
    direction: &'static str,
    /// The fate of a flow that no rule decides, where ClusterNetworkPolicies contribute; elsewhere it is denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<&'static str>,
    rules: Vec<ListedRule>,
}

#[derive(Serialize)]
struct ListedRule {
    bit: usize,
    rule: String,
    /// Its action, in a table to which ClusterNetworkPolicies contribute; elsewhere every rule accepts.
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<&'static str>,
    /// Prefixes; `null` for every peer.
    peers: Option<Vec<String>>,
    /// `null` for every port and protocol.
    ports: Option<Vec<String>>,
}

/// The pods in scope, by namespace and name.
fn pods(engine: &Engine) -> Vec<PodId> {
    let mut pods: Vec<PodId> = engine.tables().pods().collect();
    pods.sort_by_key(|pod| engine.state().pod(*pod).map(|pod| pod.key.clone()));
    pods
}

fn listing(engine: &Engine) -> Listing {
    // The engine reuses its numbers; these count up in order of first use.
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    let (mut endpoints, mut tables) = (Vec::new(), Vec::new());
    let expansion = engine.tables().expand();
    for id in pods(engine) {
        let Some(pod) = engine.state().pod(id) else { continue };
        let mut table = |direction| {
            let own = engine.tables().table_of(id, direction)?;
            let next = numbers.len() as u32;
            let number = *numbers.entry(own).or_insert(next);
            if number == next {
                let key = engine.tables().key(id, direction).filter(|key| key.is_tiered());
                let rules = (0..).zip(expansion.rules(own)).map(|(bit, rule)| ListedRule {
                    bit,
                    rule: rule.source.name().to_string(),
                    action: key.map(|_| describe::action(rule.source.action())),
                    peers: rule.peers.map(|peers| peers.iter().map(ToString::to_string).collect()),
                    ports: ports(rule.ports),
                });
                let default = key.map(|key| if key.isolation.is_some() { "denied" } else { "allowed" });
                tables.push(Table { table: number, direction: word(direction), default, rules: rules.collect() });
            }
            Some(number)
        };
        let (egress, ingress) = (table(Direction::Egress), table(Direction::Ingress));
        endpoints.push(ListedEndpoint {
            pod: pod.key.to_string(),
            node: pod.node.clone(),
            addresses: pod.addresses.iter().map(ToString::to_string).collect(),
            egress,
            ingress,
        });
    }
    Listing { endpoints, tables }
}

fn ports(ports: &PortSpec) -> Option<Vec<String>> {
    let text = |range: &PortRange| {
        let protocol = range.protocol.number();
        match (range.first, range.last) {
            (0, u16::MAX) => protocol.to_string(),
            (first, last) if first == last => format!("{first}/{protocol}"),
            (first, last) => format!("{first}-{last}/{protocol}"),
        }
    };
    match ports {
        PortSpec::Every => None,
        PortSpec::AnyOf(ranges) => Some(ranges.iter().map(text).collect()),
    }
}

impl Listing {
    fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        for endpoint in &self.endpoints {
            let table = |table: Option<u32>| table.map_or("open".to_owned(), |table| format!("table {table}"));
            let (egress, ingress) = (table(endpoint.egress), table(endpoint.ingress));
            let addresses = endpoint.addresses.join(" ");
            let _ = writeln!(text, "endpoint {}  egress: {egress}  ingress: {ingress}  {addresses}", endpoint.pod);
        }
        for table in &self.tables {
            let users = self.endpoints.iter().filter(|endpoint| match table.direction {
                "egress" => endpoint.egress == Some(table.table),
                _ => endpoint.ingress == Some(table.table),
            });
            let users = users.map(|endpoint| endpoint.pod.as_str()).collect::<Vec<_>>().join(", ");
            let _ = writeln!(text, "\ntable {}, {} of {users}", table.table, table.direction);
            if table.rules.is_empty() && table.default.is_none() {
                let _ = writeln!(text, "  no rule: everything is denied");
            }
            for rule in &table.rules {
                let list = |list: &Option<Vec<String>>| match list.as_deref() {
                    None => "every".to_owned(),
                    Some([]) => "none".to_owned(),
                    Some(list) => list.join(" "),
                };
                let (peers, ports) = (list(&rule.peers), list(&rule.ports));
                let action = rule.action.map(|action| format!("  {action}")).unwrap_or_default();
                let _ = writeln!(
                    text,
                    "  bit {}  {}{action}\n         peers  {peers}\n         ports  {ports}",
                    rule.bit, rule.rule
                );
            }
            if let Some(default) = table.default {
                let _ = writeln!(text, "  without a rule: {default}");
            }
        }
        text
    }
}
