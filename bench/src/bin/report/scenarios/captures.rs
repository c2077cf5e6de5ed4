//! Measures the cost of a packet capture to the traffic that it captures.

use anyhow::{Context, Result, ensure};
use penstock_bench::load::{Traffic, Trial};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::tcp::streams;
use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

const METRICS: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::higher("one stream", "Gb/s", 2),
    Metric::higher("in the capture", "%", 1),
];

/// A capture's name, and its options.
type Captured = (&'static str, &'static [&'static str]);

const DENIED: Captured = ("what is denied", &["--verdict", "deny"]);
const ALL: Captured = ("all, 128 bytes each", &["--snaplen", "128"]);

pub(crate) fn captures() -> Scenario {
    let peers = [|| peer(""), || peer("offload true\n")];
    let cases =
        peers.into_iter().flat_map(|peer| [None, Some(DENIED), Some(ALL)].map(|captured| case(peer(), captured)));
    Scenario {
        name: "capture",
        title: "During a packet capture",
        about: "One UDP connection of 64 bytes flat out, then one TCP stream, while a capture runs whose reader discards it. By tcx, the \
                packets of captured pods go through the workers. What the reader is too slow for is lost to the capture, \
                and to nobody else; it shares the cores with the sender.",
        metrics: METRICS,
        cases: cases.collect(),
    }
}

fn peer(sections: &str) -> Peer {
    Peer::Penstock { enforces: true, sections: format!("{sections}capture on\n") }
}

fn case(peer: Peer, captured: Option<Captured>) -> ScenarioCase {
    let by = if peer == self::peer("") { "Penstock" } else { "Penstock, tcx" };
    let name = captured.map_or_else(|| by.to_owned(), |(what, _)| format!("{by}, capture of {what}"));
    let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
        let capture = captured.map(|(_, options)| testbed.capture(options)).transpose()?;
        let outcome = testbed.run(&Trial::flat_out(Traffic::SMALLEST, plan.length))?;
        ensure!(outcome.received > 0 && outcome.corrupted == 0, "{} of what arrived is corrupted", outcome.corrupted);
        let one_stream = streams(testbed, 2, 1, plan.length)?;
        let share = capture.is_some().then(|| share_in_capture(testbed)).transpose()?.flatten();
        capture.map(|capture| capture.end()).transpose()?;
        Ok(vec![Some(outcome.rate() / 1e3), Some(one_stream), share])
    };
    ScenarioCase::of(peer, measure).named(name)
}

/// Percent of the packets that the capture wanted; `None` if there were none.
fn share_in_capture(testbed: &PeerTestbed) -> Result<Option<f64>> {
    let capture = testbed.status()?.and_then(|status| status.capture).context("the capture has ended by itself")?;
    let wanted = capture.packets + capture.lost;
    Ok((wanted > 0).then(|| capture.packets as f64 / wanted as f64 * 100.0))
}
