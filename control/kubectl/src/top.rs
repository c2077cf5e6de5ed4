//! `kubectl penstock top`: rates and load of all nodes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use penstock_admin::table::align_columns;
use penstock_admin::types::{PortRates, Status};
use penstock_text::number::{json, percent, short};
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, WithMissing, lines, print};
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
    /// Show again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    watch: Option<u64>,
    /// Print as JSON; with --watch one object per line
    #[arg(long)]
    json: bool,
}

/// The load of one node, or of all.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
struct Load {
    workers: usize,
    /// The sum of the shares of their time in which they moved packets.
    busy: f64,
    rate: Rate,
    connections: usize,
    /// Packets dropped since the start, by reason.
    drops: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
struct Rate {
    rx_packets: f64,
    rx_bytes: f64,
    tx_packets: f64,
    tx_bytes: f64,
    dropped_packets: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct PodLoad {
    pod: String,
    node: String,
    rate: Rate,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Merged {
    sum: Load,
    nodes: BTreeMap<String, Load>,
    /// Those with the most packets first.
    pods: Vec<PodLoad>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    loop {
        let answers = status::ask(cluster, asking, cluster.daemons().await?).await.some()?;
        let mut merged = merge(&answers);
        merged.pods.truncate(args.pods);
        let whole = WithMissing { answer: &merged, missing: &answers.missing };
        let text = match (args.json, args.watch) {
            (true, None) => json(&whole),
            (true, Some(_)) => serde_json::to_string(&whole).expect("strings and numbers are JSON") + "\n",
            (false, _) => text(&merged),
        };
        let Some(seconds) = args.watch else { return print(&text, &answers) };
        // From the top of an empty screen (ECMA-48: cursor to 1,1, then erase what is below).
        let clear = if args.json { "" } else { "\x1b[H\x1b[J" };
        let mut rest = String::new();
        if !args.json {
            lines(&answers.missing).iter().for_each(|line| rest += &format!("{line}\n"));
        }
        let mut output = io::stdout();
        let written = output.write_all(format!("{clear}{text}{rest}").as_bytes()).and_then(|()| output.flush());
        if let Err(error) = written {
            return Failure::from_output(error);
        }
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }
}

fn merge(answers: &Answers<Status>) -> Merged {
    let mut nodes = BTreeMap::new();
    let mut pods = Vec::new();
    for (daemon, status) in &answers.answers {
        nodes.insert(daemon.node.clone(), Load::of(status));
        pods.extend(status.ports.iter().filter_map(|port| {
            let mut rate = Rate::default();
            rate.add(&port.rate);
            Some(PodLoad { pod: port.pod.clone()?, node: daemon.node.clone(), rate })
        }));
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
        let mut rate = Rate::default();
        status.ports.iter().for_each(|port| rate.add(&port.rate));
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
        let Rate { rx_packets, rx_bytes, tx_packets, tx_bytes, dropped_packets } = other.rate;
        self.rate.add(&PortRates { rx_packets, rx_bytes, tx_packets, tx_bytes, dropped_packets });
        for (reason, count) in &other.drops {
            *self.drops.entry(reason.clone()).or_default() += count;
        }
    }
}

impl Rate {
    fn add(&mut self, other: &PortRates) {
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.dropped_packets += other.dropped_packets;
    }

    fn cells(&self) -> [String; 5] {
        [self.rx_packets, self.tx_packets, self.rx_bytes * 8.0, self.tx_bytes * 8.0, self.dropped_packets].map(short)
    }
}

fn text(merged: &Merged) -> String {
    let rates = ["RX/S", "TX/S", "RX BIT/S", "TX BIT/S", "DROPS/S"];
    let heading = |first: &[&str], last: &[&str]| {
        first.iter().chain(&rates).chain(last).map(|&cell| cell.to_owned()).collect::<Vec<String>>()
    };
    let row = |name: &str, load: &Load| {
        let busy = if load.workers == 0 { 0.0 } else { load.busy / load.workers as f64 };
        let mut row = vec![name.to_owned(), load.workers.to_string(), percent(busy)];
        row.extend(load.rate.cells());
        row.push(load.connections.to_string());
        row
    };
    let mut nodes = vec![heading(&["NODE", "WORKERS", "BUSY"], &["CONNECTIONS"])];
    nodes.extend(merged.nodes.iter().map(|(node, load)| row(node, load)));
    nodes.push(row("(all)", &merged.sum));
    let mut pods = vec![heading(&["POD", "NODE"], &[])];
    pods.extend(merged.pods.iter().map(|pod| {
        let names = [pod.pod.clone(), pod.node.clone()];
        names.into_iter().chain(pod.rate.cells()).collect()
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
                "drops": {}, "kernel_drops": {}, "xdp": {}, "queue": {"receiving": 0, "sending": 0, "size": 0}})
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
