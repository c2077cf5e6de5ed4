//! `kubectl penstock top`: rates and load of all nodes.

use std::collections::BTreeMap;

use penstock_admin::table::align_columns;
use penstock_admin::types::{PortRates, Status};
use penstock_text::arguments::ListingArgs;
use penstock_text::number::{percent, short};
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, print, print_again, whole};
use super::cluster::Cluster;
use super::status;

/// Show rates and load of all nodes, and their pods with the most packets
///
/// Rates are those of the last one or two seconds. What a node forwards between two of its ports counts once as received and once
/// as sent; what goes from node to node counts on both.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all nodes have answered
  1  no node has answered, or the API server is away
  2  bad input: arguments, the kubeconfig, or rights that the user lacks
  4  some nodes have not answered; they are named, and not in the sums

Examples:
  kubectl penstock top
  kubectl penstock top --watch 5 --pods 10
  kubectl penstock top --json | jq '.sum'")]
pub(super) struct Args {
    /// Pods to list
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pods: usize,
    #[command(flatten)]
    listing: ListingArgs,
}

#[derive(Clone, PartialEq, Debug, Default, Serialize)]
struct Load {
    workers: usize,
    /// The sum of the shares of their time in which they moved packets.
    busy: f64,
    rate: PortRates,
    connections: usize,
    /// Packets dropped since the start, by reason.
    drops: BTreeMap<String, u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct PodLoad {
    pod: String,
    node: String,
    rate: PortRates,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Merged {
    sum: Load,
    nodes: BTreeMap<String, Load>,
    /// Those with the most packets first.
    pods: Vec<PodLoad>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let Args { pods, listing } = args;
    loop {
        let answers = status::ask(cluster, asking, cluster.daemons().await?).await.some()?;
        let mut merged = merge(&answers);
        merged.pods.truncate(pods);
        let text = listing.render(&whole(&merged, &answers.missing), || text(&merged));
        let Some(seconds) = listing.watch else { return print(&text, &answers) };
        if let Err(error) = print_again(&text, &answers.missing, listing.json, seconds).await {
            return Failure::from_output(error);
        }
    }
}

fn merge(answers: &Answers<Status>) -> Merged {
    let mut nodes = BTreeMap::new();
    let mut pods = Vec::new();
    for (daemon, status) in &answers.answers {
        nodes.insert(daemon.node.clone(), Load::of(status));
        pods.extend(
            status.ports.iter().filter_map(|port| {
                Some(PodLoad { pod: port.pod.clone()?, node: daemon.node.clone(), rate: port.rate })
            }),
        );
    }
    // From node to node in one order: sums of fractions depend on it.
    let mut sum = Load::default();
    nodes.values().for_each(|load| sum.add(load));
    let packets = |pod: &PodLoad| pod.rate.rx_packets + pod.rate.tx_packets;
    pods.sort_by(|one, other| {
        packets(other).total_cmp(&packets(one)).then_with(|| (&one.pod, &one.node).cmp(&(&other.pod, &other.node)))
    });
    Merged { sum, nodes, pods }
}

impl Load {
    fn of(status: &Status) -> Self {
        let mut rate = PortRates::default();
        status.ports.iter().for_each(|port| rate += &port.rate);
        Self {
            workers: status.workers.len(),
            busy: status.workers.iter().map(|worker| worker.busy).sum(),
            rate,
            connections: status.connections.entries,
            drops: status.all_drops(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.workers += other.workers;
        self.busy += other.busy;
        self.connections += other.connections;
        self.rate += &other.rate;
        for (reason, count) in &other.drops {
            *self.drops.entry(reason.clone()).or_default() += count;
        }
    }
}

fn cells(rate: &PortRates) -> [String; 5] {
    [rate.rx_packets, rate.tx_packets, rate.rx_bytes * 8.0, rate.tx_bytes * 8.0, rate.dropped_packets].map(short)
}

fn text(merged: &Merged) -> String {
    let rates = ["RX/S", "TX/S", "RX BIT/S", "TX BIT/S", "DROPS/S"];
    let heading = |first: &[&str], last: &[&str]| {
        first.iter().chain(&rates).chain(last).map(|&cell| cell.to_owned()).collect::<Vec<String>>()
    };
    let row = |name: &str, load: &Load| {
        let busy = if load.workers == 0 { 0.0 } else { load.busy / load.workers as f64 };
        let mut row = vec![name.to_owned(), load.workers.to_string(), percent(busy)];
        row.extend(cells(&load.rate));
        row.push(load.connections.to_string());
        row
    };
    let mut nodes = vec![heading(&["NODE", "WORKERS", "BUSY"], &["CONNECTIONS"])];
    nodes.extend(merged.nodes.iter().map(|(node, load)| row(node, load)));
    nodes.push(row("(all)", &merged.sum));
    let mut pods = vec![heading(&["POD", "NODE"], &[])];
    pods.extend(merged.pods.iter().map(|pod| {
        let names = [pod.pod.clone(), pod.node.clone()];
        names.into_iter().chain(cells(&pod.rate)).collect()
    }));
    let drops: Vec<String> = merged.sum.drops.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    let drops = if drops.is_empty() { "nothing".to_owned() } else { drops.join(", ") };
    format!("{}\n{}\ndropped since the start: {drops}\n", align_columns(&nodes), align_columns(&pods))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::Daemon;
    use crate::status::tests::status;

    /// A node with a port for each pair of a pod and its packets per second.
    fn node(name: &str, ports: &[(&str, f64)], drops: u64) -> (Daemon, Status) {
        let ports = ports.iter().map(|(pod, rate)| {
            serde_json::json!({
                "port": 1, "interface": "veth", "kind": "pod", "pod": pod,
                "total": {"rx_packets": 0, "rx_bytes": 0, "tx_packets": 0, "tx_bytes": 0, "dropped_packets": 0},
                "rate": {"rx_packets": rate, "rx_bytes": rate * 100.0, "tx_packets": 1.0, "tx_bytes": 0.0, "dropped_packets": 2.0},
                "drops": {}, "kernel_drops": {}, "outcomes": {}})
        });
        let ports = ports.map(|port| serde_json::from_value(port).unwrap()).collect();
        let status = status(|it| {
            it.ports = ports;
            it.drops = BTreeMap::from([("ingress_denied".to_owned(), drops)]);
        });
        (Daemon { node: name.to_owned(), pod: String::new() }, status)
    }

    #[test]
    fn nodes_are_summed_and_pods_sorted_by_packets() {
        let answers =
            vec![node("a", &[("shop/web", 1000.0), ("shop/db", 10.0)], 3), node("b", &[("shop/web-2", 500.0)], 4)];
        let merged = merge(&Answers { answers, missing: Vec::new() });
        let text = text(&merged);
        let line = |start: &str| {
            text.lines().find(|line| line.starts_with(start)).unwrap().split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(line("(all)"), ["(all)", "0", "0.0", "%", "1.5k", "3", "1.2M", "0", "6", "10"]);
        let pods: Vec<&str> = merged.pods.iter().map(|pod| pod.pod.as_str()).collect();
        assert_eq!(pods, ["shop/web", "shop/web-2", "shop/db"]);
        assert!(text.ends_with("dropped since the start: ingress_denied 7\n"), "{text}");
    }

    proptest! {
        #[test]
        fn sums_equal_their_parts_in_any_order(
            parts in prop::collection::vec((prop::collection::vec(0u32..1000, 0..4), 0u64..1000), 1..5), turn in 0usize..5,
        ) {
            let names = ["a", "b", "c", "d"];
            let mut answers: Vec<_> = parts.iter().zip(names).map(|((rates, drops), name)| {
                let ports: Vec<(&str, f64)> = rates.iter().map(|&rate| ("shop/web", f64::from(rate))).collect();
                node(name, &ports, *drops)
            }).collect();
            let merged = merge(&Answers { answers: answers.clone(), missing: Vec::new() });
            let count = answers.len();
            answers.rotate_left(turn % count);
            prop_assert_eq!(&merge(&Answers { answers, missing: Vec::new() }), &merged);
            let rates: u32 = parts.iter().take(4).flat_map(|(rates, _)| rates).sum();
            prop_assert_eq!(merged.sum.rate.rx_packets, f64::from(rates));
            prop_assert_eq!(merged.sum.drops["ingress_denied"], parts.iter().take(4).map(|(_, drops)| drops).sum::<u64>());
        }
    }
}
