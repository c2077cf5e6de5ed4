//! `penstock render`: the policy of manifests in the forms that enforce it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};

use clap::ValueEnum;
use penstock_dataplane::policy::{Direction, PortRange, PortSpec};
use serde::Serialize;

use super::Failure;
use super::cluster::ManifestArgs;
use crate::engine::Engine;
use crate::render::tables::Scope;
use crate::render::{acl, nft};
use crate::state::PodId;

/// Print the policy of manifests in the forms that enforce it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  penstock render --manifests policies/ --node node-a --format table
  penstock render --manifests policies/ --format nft | nft --check --file -")]
pub(super) struct Args {
    #[command(flatten)]
    manifests: ManifestArgs,
    /// Only for the pods of this node; all pods otherwise
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
    /// The form
    #[arg(long, value_enum)]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Format {
    /// The rule tables of the workers, for a person
    Table,
    /// Six-tuples for a device that takes the first that matches, excepts subtracted
    Acl,
    /// A ruleset for nftables
    Nft,
    /// The rule tables of the workers, for a program
    Json,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if args.format == Format::Nft && args.manifests.is_cluster_wide() {
        return Err(Failure::bad_input(
            "--cluster-wide has no rendering for nftables: use --format acl, table or json",
        ));
    }
    let scope = args.node.clone().map_or(Scope::AllPods, Scope::Node);
    let engine = args.manifests.engine(scope)?;
    if let Some(node) = &args.node
        && engine.state().find_node(node).is_none()
    {
        return Err(Failure::bad_input(format_args!(
            "--node {node}: no manifest has this node, or a pod on it: correct its name"
        )));
    }
    let text = match args.format {
        Format::Table => listing(&engine).to_text(),
        Format::Json => json(&engine),
        Format::Acl => access_lists(&engine),
        Format::Nft => nft::render(engine.state(), engine.tables()),
    };
    io::stdout().write_all(text.as_bytes()).or_else(Failure::from_output)
}

/// The rule tables of the workers as JSON.
pub(crate) fn json(engine: &Engine) -> String {
    serde_json::to_string_pretty(&listing(engine)).expect("strings and numbers are JSON") + "\n"
}

/// The tables, each once, and who has them.
#[derive(Serialize)]
struct Listing {
    endpoints: Vec<Endpoint>,
    tables: Vec<Table>,
}

#[derive(Serialize)]
struct Endpoint {
    pod: String,
    node: Option<String>,
    addresses: Vec<String>,
    /// Number of its table, `null` where it is open.
    egress: Option<u32>,
    ingress: Option<u32>,
}

#[derive(Serialize)]
struct Table {
    table: u32,
    direction: &'static str,
    rules: Vec<Rule>,
}

#[derive(Serialize)]
struct Rule {
    bit: usize,
    rule: String,
    /// Prefixes; `null` for every peer.
    peers: Option<Vec<String>>,
    /// `null` for every port and protocol.
    ports: Option<Vec<String>>,
}

fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "egress",
        Direction::Ingress => "ingress",
    }
}

/// The pods in scope, by namespace and name.
fn pods(engine: &Engine) -> Vec<PodId> {
    let mut pods: Vec<PodId> = engine.tables().pods().collect();
    pods.sort_by_key(|pod| engine.state().pod(*pod).map(|pod| pod.key.clone()));
    pods
}

fn listing(engine: &Engine) -> Listing {
    // The engine's own numbers are free again once used: here they count up in the order in which they are met.
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
                let rules = (0..).zip(expansion.rules(own)).map(|(bit, rule)| Rule {
                    bit,
                    rule: rule.source.name().0.to_string(),
                    peers: rule.peers.map(|peers| peers.iter().map(ToString::to_string).collect()),
                    ports: ports(rule.ports),
                });
                tables.push(Table { table: number, direction: word(direction), rules: rules.collect() });
            }
            Some(number)
        };
        let (egress, ingress) = (table(Direction::Egress), table(Direction::Ingress));
        endpoints.push(Endpoint {
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
            if table.rules.is_empty() {
                let _ = writeln!(text, "  no rule: everything is denied");
            }
            for rule in &table.rules {
                let list = |list: &Option<Vec<String>>| match list.as_deref() {
                    None => "every".to_owned(),
                    Some([]) => "none".to_owned(),
                    Some(list) => list.join(" "),
                };
                let (peers, ports) = (list(&rule.peers), list(&rule.ports));
                let _ = writeln!(
                    text,
                    "  bit {}  {}\n         peers  {peers}\n         ports  {ports}",
                    rule.bit, rule.rule
                );
            }
        }
        text
    }
}

fn access_lists(engine: &Engine) -> String {
    let mut lists = acl::render(engine.state(), engine.tables());
    lists.sort_by_key(|list| (engine.state().pod(list.pod).map(|pod| pod.key.clone()), list.direction));
    let mut text = "# source, source port, destination, destination port, protocol, action\n".to_owned();
    for list in lists {
        let Some(pod) = engine.state().pod(list.pod) else { continue };
        let addresses = pod.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "\n# {} of {} ({addresses})", word(list.direction), pod.key);
        for entry in &list.entries {
            let _ = writeln!(text, "{entry}");
        }
    }
    text
}
