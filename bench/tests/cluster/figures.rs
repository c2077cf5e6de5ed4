//! Measures the cost of Penstock in the cluster: the same pods with it and without it, in turn.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use penstock_bench::load::{TransactionEnds, connected_transactions, round_trips, streams_for};

use crate::documented::remove;
use crate::real_cluster::RealCluster;

/// How often Penstock is installed and removed.
const TURNS: usize = 4;
/// How often each is measured in a turn, one after the other: what disturbs a machine often lasts some seconds.
const ROUNDS: usize = 4;
const LENGTH: Duration = Duration::from_millis(500);
/// The first port; no pod of the workload uses those from here on.
const PORT: u16 = 7000;
/// The pod that sends, on the first node, and those that it sends to.
const FROM: &str = "lab/builder";
const TO: [(&str, &str); 2] = [("same node", "ops/monitor"), ("other node", "ops/dash")];
const MEASURES: [&str; 4] = ["round trip, µs", "round trip each ms, µs", "TCP, one stream, Gb/s", "connections/s"];

/// Prints the medians of all turns as a table.
pub(crate) fn figures(cluster: &mut RealCluster) -> Result<()> {
    // With Penstock and without, for each round.
    let mut samples: [Vec<Vec<f64>>; 2] = Default::default();
    for turn in 0..2 * TURNS {
        let without = turn % 2;
        match without {
            0 if turn > 0 => cluster.install()?,
            0 => {}
            _ => remove(cluster)?,
        }
        // The kubelet and the daemon have something to do after a start.
        std::thread::sleep(Duration::from_secs(3));
        for _ in 0..ROUNDS {
            samples[without].push(measure(cluster).with_context(|| format!("turn {turn}"))?);
        }
    }
    println!("\n{}, {TURNS} turns of {ROUNDS} rounds, medians (lowest – highest):", cluster.cni.name());
    println!("| measure | with Penstock | without | with / without |\n|---|---:|---:|---:|");
    for (at, (place, _)) in TO.iter().enumerate() {
        for (number, measure) in MEASURES.iter().enumerate() {
            let of = |rounds: &Vec<Vec<f64>>| sorted(rounds.iter().map(|round| round[at * MEASURES.len() + number]));
            let figures = samples.each_ref().map(of);
            let [with, without] = figures.each_ref().map(|figures| described(figures));
            let ratio = median(&figures[0]) / median(&figures[1]);
            println!("| {place}: {measure} | {with} | {without} | {ratio:.2} |");
        }
    }
    cluster.install()
}

/// Each measure of each place.
fn measure(cluster: &RealCluster) -> Result<Vec<f64>> {
    let mut figures = Vec::new();
    for (_, to) in TO {
        let address = SocketAddr::new(cluster.target(to, false).1, PORT);
        let (from, to) = (&cluster.site(FROM).namespace, &cluster.site(to).namespace);
        let ends = TransactionEnds { from, to, address, client_core: None, server_core: None };
        for pause in [Duration::ZERO, Duration::from_millis(1)] {
            figures.push(round_trips(&ends, 1, pause, LENGTH)?.value_at_quantile(0.5) as f64 / 1e3);
        }
        figures.push(streams_for(from, to, address, 1, LENGTH)?);
        figures.push(connected_transactions(&ends, 1, LENGTH)?);
    }
    Ok(figures)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}

fn described(sorted: &[f64]) -> String {
    format!("{:.1} ({:.1} – {:.1})", median(sorted), sorted[0], sorted[sorted.len() - 1])
}
