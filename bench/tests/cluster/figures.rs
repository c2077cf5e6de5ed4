//! What Penstock costs in the cluster: the same pods with it and without it, in turn.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use penstock_bench::load::{TransactionEnds, connected_transactions, round_trips, streams_for};

use crate::documented::remove;
use crate::real_cluster::RealCluster;

/// How often each is measured.
const TURNS: usize = 3;
const LENGTH: Duration = Duration::from_secs(2);
/// The first port; no pod of the workload uses those from here on.
const PORT: u16 = 7000;
/// The pod that sends, on the first node, and those that it sends to.
const FROM: &str = "lab/builder";
const TO: [(&str, &str); 2] = [("same node", "ops/monitor"), ("other node", "ops/dash")];
const MEASURES: [&str; 4] = ["round trip, µs", "round trip each ms, µs", "TCP, one stream, Gb/s", "connections/s"];

/// Prints the medians of all turns as a table.
pub(crate) fn figures(cluster: &mut RealCluster) -> Result<()> {
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
        samples[without].push(measure(cluster).with_context(|| format!("turn {turn}"))?);
    }
    println!("\n{} in {TURNS} turns, medians:", cluster.cni.name());
    println!("| measure | with Penstock | without | with / without |\n|---|---:|---:|---:|");
    for (at, (place, _)) in TO.iter().enumerate() {
        for (number, measure) in MEASURES.iter().enumerate() {
            let of = |turns: &Vec<Vec<f64>>| median(turns.iter().map(|turn| turn[at * MEASURES.len() + number]));
            let [with, without] = [of(&samples[0]), of(&samples[1])];
            println!("| {place}: {measure} | {with:.1} | {without:.1} | {:.2} |", with / without);
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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
