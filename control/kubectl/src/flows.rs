//! `kubectl penstock flows`: the connections of all nodes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Instant;

use penstock_admin::table::align_columns;
use penstock_admin::types::{ConnectionFlow, Flows};
use penstock_text::arguments::{FlowArgs, ListingArgs};
use penstock_text::flows::{Rates, insert, listed, table};
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, ask_all, parsed, print, print_again, whole, words};
use super::cluster::{Cluster, Daemon};

/// List the connections of all nodes
///
/// A connection between pods of two nodes is listed by both: each says which rule of its own side allows it, and `not here` of
/// the other. Both lines are next to each other. See `penstock flows --help` for the columns. With --watch also the rate of each
/// since the listing before.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all nodes have answered
  1  no node has answered, or the API server is away
  2  bad input: a filter, the kubeconfig, or rights that the user lacks
  4  some nodes have not answered; they are named

Examples:
  kubectl penstock flows --pod shop/web-1
  kubectl penstock flows --pod shop/web-1 --protocol TCP --state ESTABLISHED
  kubectl penstock flows --pod shop/db-0 --watch 5
  kubectl penstock flows --json | jq '.flows[] | select(.state == \"REVOKED\") | .node'")]
pub(super) struct Args {
    #[command(flatten)]
    flows: FlowArgs,
    #[command(flatten)]
    listing: ListingArgs,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct NodeFlow {
    node: String,
    #[serde(flatten)]
    flow: ConnectionFlow,
    /// Bits per second in both directions since the listing before.
    #[serde(skip)]
    rate: Option<f64>,
}

#[derive(Clone, PartialEq, Debug, Serialize)]
struct Merged {
    matching: usize,
    /// Sorted by their ends, then by node.
    flows: Vec<NodeFlow>,
}

/// The rates of each node's connections: nodes number them on their own.
#[derive(Debug, Default)]
struct NodeRates(HashMap<String, Rates>);

impl NodeRates {
    fn since_last(&mut self, daemon: &Daemon, flows: &Flows, now: Instant) -> Vec<Option<f64>> {
        self.0.entry(daemon.node.clone()).or_default().since_last(flows, now)
    }
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let Args { flows, listing } = args;
    let command = [words(&["penstock", "flows", "--json"]), flows.options()].concat();
    let mut rates = NodeRates::default();
    let mut is_noted = false;
    loop {
        let fleet = cluster.daemons().await?;
        if !std::mem::replace(&mut is_noted, true) {
            super::tell(fleet.note.as_deref());
        }
        let answers: Answers<Flows> = ask_all(cluster, asking, fleet, |_| command.clone(), None, parsed).await;
        let answers = answers.some()?;
        let merged = merge(&answers.answers, &mut rates, Instant::now());
        let text = listing.render(&whole(&merged, &answers.missing), || text(&merged, listing.watch.is_some()));
        let Some(seconds) = listing.watch else { return print(&text, &answers) };
        if let Err(error) = print_again(&text, &answers.missing, listing.json, seconds).await {
            return Failure::from_output(error);
        }
    }
}

fn merge(answers: &[(Daemon, Flows)], rates: &mut NodeRates, now: Instant) -> Merged {
    let matching = answers.iter().map(|(_, flows)| flows.matching).sum();
    let of_node = |(daemon, flows): &(Daemon, Flows)| {
        let rates = rates.since_last(daemon, flows, now);
        let flows = flows.flows.iter().cloned().zip(rates);
        flows.map(|(flow, rate)| NodeFlow { node: daemon.node.clone(), flow, rate }).collect::<Vec<_>>()
    };
    let mut flows: Vec<NodeFlow> = answers.iter().flat_map(of_node).collect();
    flows.sort_by(|one, other| key(one).cmp(&key(other)));
    Merged { matching, flows }
}

type Key<'a> = (IpAddr, u16, IpAddr, u16, &'a str, &'a str, &'a str);

fn key(NodeFlow { node, flow, .. }: &NodeFlow) -> Key<'_> {
    let ConnectionFlow { from, to, protocol, connection, .. } = flow;
    (from.address, from.port, to.address, to.port, protocol, node, connection)
}

fn text(merged: &Merged, with_rates: bool) -> String {
    let flows: Vec<ConnectionFlow> = merged.flows.iter().map(|flow| flow.flow.clone()).collect();
    let rates: Vec<Option<f64>> = merged.flows.iter().map(|flow| flow.rate).collect();
    let mut rows = table(&flows, with_rates.then_some(&rates[..]));
    insert(&mut rows, 0, "NODE", merged.flows.iter().map(|flow| flow.node.clone()));
    align_columns(&rows) + &listed(flows.len(), merged.matching)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use penstock_admin::types::{FlowEnd, Traffic};
    use proptest::prelude::*;

    use super::*;
    use crate::fake::{ASKING, FakeCluster, Reply};

    fn flow(from: u8, to: u8, port: u16) -> ConnectionFlow {
        let end = |last: u8, port| FlowEnd { address: [10, 0, 0, last].into(), port, name: None };
        ConnectionFlow {
            connection: format!("{from:02x}{to:02x}{port:04x}"),
            protocol: "TCP".to_owned(),
            from: end(from, 4000),
            to: end(to, port),
            state: "ESTABLISHED".to_owned(),
            sent: Some(Traffic { packets: 1, bytes: 60 }),
            received: None,
            egress: "open".to_owned(),
            ingress: "not here".to_owned(),
            idle_seconds: 0,
            expires_seconds: 9,
        }
    }

    fn answer(node: &str, flows: Vec<ConnectionFlow>) -> (Daemon, Flows) {
        (Daemon { node: node.to_owned(), pod: String::new() }, Flows { matching: flows.len(), flows })
    }

    #[tokio::test]
    async fn filters_are_passed_on_as_they_are() {
        let cluster = FakeCluster::new([("a", vec![Reply::ok(r#"{"matching": 0, "flows": []}"#)])]);
        let (pod, state) = (Some("shop/web-1".to_owned()), Some("--json".to_owned()));
        let flows = FlowArgs { pod, state, port: Some(80), limit: 7, ..FlowArgs::default() };
        run(&cluster, ASKING, Args { flows, listing: ListingArgs::default() }).await.unwrap();
        let expected = ["penstock", "flows", "--json", "--pod=shop/web-1", "--state=--json", "--port=80", "--limit=7"];
        assert_eq!(cluster.asked.lock().unwrap()[0].1, expected);
    }

    #[test]
    fn both_ends_of_a_connection_are_beside_each_other() {
        let both = || vec![flow(1, 2, 80)];
        let answers = [answer("b", both()), answer("a", [both(), vec![flow(1, 3, 80)]].concat())];
        let merged = merge(&answers, &mut NodeRates::default(), Instant::now());
        let text = text(&merged, false);
        let nodes: Vec<&str> = text.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
        assert_eq!(nodes, ["NODE", "a", "b", "a", "3"], "{text}");
        assert!(text.ends_with("\n3 connections\n"), "{text}");
        let limited = Merged { matching: 9, ..merged };
        assert!(super::text(&limited, false).ends_with("3 of 9 connections; list more with --limit\n"));
        let value = serde_json::to_value(&limited).unwrap();
        assert_eq!(
            (value["flows"][1]["node"].as_str(), value["flows"][1]["from"]["port"].as_u64()),
            (Some("b"), Some(4000))
        );
    }

    #[test]
    fn each_nodes_rate_is_of_its_own_counters() {
        let counted = |node: &str, bytes| {
            let traffic = Some(Traffic { packets: 1, bytes });
            answer(node, vec![ConnectionFlow { sent: traffic, received: traffic, ..flow(1, 2, 80) }])
        };
        let (mut rates, start) = (NodeRates::default(), Instant::now());
        let first = merge(&[counted("a", 100), counted("b", 1000)], &mut rates, start);
        assert!(first.flows.iter().all(|flow| flow.rate.is_none()), "nothing to compare with: {first:?}");
        let later = start + Duration::from_secs(2);
        let second = merge(&[counted("b", 2000), counted("a", 350), counted("c", 9)], &mut rates, later);
        let found: Vec<_> = second.flows.iter().map(|flow| (flow.node.as_str(), flow.rate)).collect();
        assert_eq!(found, [("a", Some(2000.0)), ("b", Some(8000.0)), ("c", None)]);
        let text = text(&second, true);
        assert!(
            text.lines().nth(2).is_some_and(|line| line.starts_with("b ") && line.contains(" 8.0 kbit/s ")),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn merging_does_not_depend_on_order_and_loses_nothing(
            parts in prop::collection::vec(prop::collection::vec((0u8..4, 0u8..4, 0u16..3), 0..6), 1..5),
            turn in 0usize..5,
        ) {
            let mut answers: Vec<_> = parts.iter().enumerate().map(|(number, flows)| {
                answer(&format!("n{number}"), flows.iter().map(|&(from, to, port)| flow(from, to, port)).collect())
            }).collect();
            let merge = |answers: &[_]| merge(answers, &mut NodeRates::default(), Instant::now());
            let merged = merge(&answers);
            let count = answers.len();
            answers.rotate_left(turn % count);
            answers.iter_mut().for_each(|(_, flows)| flows.flows.reverse());
            prop_assert_eq!(&merge(&answers), &merged);
            prop_assert_eq!(merged.matching, parts.iter().map(Vec::len).sum::<usize>());
            for (number, part) in parts.iter().enumerate() {
                let node = format!("n{number}");
                prop_assert_eq!(merged.flows.iter().filter(|flow| flow.node == node).count(), part.len());
            }
        }
    }
}
