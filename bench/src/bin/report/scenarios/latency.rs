//! No-drop rates, and latency below them.

use std::time::Duration;

use anyhow::{Result, ensure};
use penstock_bench::load::{ProbeMode, RateSearch, Traffic, Trial, TrialResult};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;
use crate::testbeds::TestbedSpec;

const PROBES: f64 = 5000.0;

/// Peers whose no-drop rate is searched.
fn peers() -> [Peer; 6] {
    [Peer::penstock(), Peer::forward(), Peer::Kernel, Peer::Nftables, Peer::Iptables, Peer::OpenVSwitch]
}

/// Maximum repetitions of a search's trial.
const AGAIN: usize = 3;

fn search(testbed: &mut PeerTestbed, plan: &Plan, may_lose: f64, highest: f64) -> Result<f64> {
    let search = RateSearch { may_lose, highest, short: plan.length / 4, long: plan.length, width: 0.04, trials: 10 };
    let trial = |rate: f64, length: Duration| {
        let mut trial = Trial::paced(Traffic::SMALLEST, rate, length);
        (trial.warm_up, trial.high_priority) = (Duration::from_millis(20), true);
        let mut outcome = testbed.run(&trial)?;
        // Loss while the host had the cores says nothing about the rate.
        for _ in 0..AGAIN {
            if outcome.stolen.is_zero() || outcome.lost_share() <= may_lose {
                break;
            }
            outcome = testbed.run(&trial)?;
        }
        // Packets that the generator cannot send in time are not offered: such a rate does not count as reached.
        let short_of = 1.0 - outcome.offered_rate() / rate;
        Ok(if short_of > 0.02 { 1.0 } else { outcome.lost_share() })
    };
    Ok(search.run(trial)?.rate)
}

/// Key of a peer's no-drop rate for later scenarios.
fn known_as(peer: &str) -> String {
    format!("no-drop rate of {peer}")
}

const RATES: &[Metric] = &[
    Metric::higher("no-drop rate", "k packets/s", 0),
    Metric::higher("partial drop rate", "k packets/s", 0),
    Metric::higher("no-drop rate of the rate flat out", "share", 2),
];

pub(crate) fn no_drop_rates() -> Scenario {
    let cases = peers().map(|peer| {
        let name = TestbedSpec::of(peer.clone()).peer_name();
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, known: &mut KnownRates| {
            let flat_out = testbed.run(&Trial::flat_out(Traffic::SMALLEST, plan.length / 2))?;
            let partial = search(testbed, plan, 0.005, flat_out.rate().max(1e4))?;
            let none = search(testbed, plan, 0.0, partial)?;
            if none > 0.0 {
                known.insert(known_as(name), none);
            }
            Ok(vec![Some(none / 1e3), Some(partial / 1e3), Some(none / flat_out.rate())])
        };
        ScenarioCase::of(peer, measure)
    });
    Scenario {
        name: "ndr",
        title: "No-drop rate and partial drop rate, one UDP connection, 64 bytes",
        about: "The highest rate at which no packet is lost (NDR), and at which no more than 0.5 % are (PDR), by a search: \
                short trials narrow it down, a longer one confirms. A rate that the generator itself does not reach is not \
                counted as passed. What is lost while the host has the cores of a virtual machine is tried again, up to three times.",
        metrics: RATES,
        cases: cases.into(),
    }
}

const LATENCY: &[Metric] = &[
    Metric::lower("p99", "µs", 1),
    Metric::lower("p50", "µs", 1),
    Metric::lower("p99.9", "µs", 1),
    Metric::lower("one way p99", "µs", 1),
    Metric::higher("load", "k packets/s", 0),
    Metric::lower("lost of the load", "%", 3),
    Metric::lower("probes reordered or corrupted", "", 0),
];

fn latencies(outcome: &TrialResult) -> Result<Vec<Option<f64>>> {
    let probes = &outcome.probes;
    ensure!(probes.round_trip.len() > 10, "of {} probes {} were answered", probes.sent, probes.round_trip.len());
    let at = |share: f64| Some(probes.round_trip.value_at_quantile(share) as f64 / 1e3);
    Ok(vec![
        at(0.99),
        at(0.5),
        at(0.999),
        Some(probes.one_way.value_at_quantile(0.99) as f64 / 1e3),
        Some(outcome.offered_rate() / 1e3),
        Some(outcome.lost_share() * 100.0),
        Some((probes.reordered + probes.corrupted) as f64),
    ])
}

pub(crate) fn round_trip() -> Scenario {
    let peers = || [Peer::penstock(), Peer::penstock_by_tcx(true), Peer::Kernel, Peer::Nftables, Peer::OpenVSwitch];
    let cases = [10.0, 50.0, 90.0].into_iter().flat_map(|share: f64| {
        peers().into_iter().map(move |peer| {
            let measure = move |testbed: &mut PeerTestbed, plan: &Plan, known: &mut KnownRates| {
                // The same load for all: what both Penstock and the kernel carry without loss, if it was measured.
                let rates = ["Penstock", "kernel routing"].into_iter().filter_map(|peer| known.get(&known_as(peer)));
                let carried = rates.copied().reduce(f64::min).unwrap_or(FALLBACK);
                let mut trial = Trial::paced(Traffic::SMALLEST, carried * share / 100.0, plan.length);
                (trial.probing, trial.high_priority) = (ProbeMode::RoundTrip(PROBES), true);
                latencies(&testbed.run(&trial)?)
            };
            let case = ScenarioCase::of(peer, measure);
            let name = format!("{share} %: {}", case.spec.peer_name());
            case.named(name)
        })
    });
    Scenario {
        name: "round-trip",
        title: "Round trip beside a load of 10, 50 and 90 %",
        about: "5,000 probes a second are sent beside the load on a connection of their own and answered. A probe's time begins \
                when it was to be sent, late or not, and ends when it reaches the receiver's stack, by the kernel's time stamp; \
                the answer's likewise. What the two programs take in between is not counted. The thread that sends and receives goes before \
                all ordinary ones of its core, as Penstock's worker does on its own. The load is the same for all: a share \
                of the lower no-drop rate of Penstock and plain kernel routing, as far as it was measured before (300 k packets \
                a second otherwise).",
        metrics: LATENCY,
        cases: cases.collect(),
    }
}

/// The load of 100 % if no rate was measured.
const FALLBACK: f64 = 300e3;

const FIRST: &[Metric] = &[
    Metric::lower("added p99", "µs", 1),
    Metric::lower("added p50", "µs", 1),
    Metric::lower("first packets p99", "µs", 1),
    Metric::lower("later packets p99", "µs", 1),
    Metric::lower("first packets lost", "", 0),
];

pub(crate) fn first_packet() -> Scenario {
    let case = |peer: Peer| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let mut trial = Trial::paced(Traffic::SMALLEST, 50e3, plan.length);
            (trial.probing, trial.high_priority) = (ProbeMode::RoundTrip(PROBES), true);
            let established = testbed.run(&trial)?.probes;
            trial.probing = ProbeMode::FirstPacket(PROBES);
            let first = testbed.run(&trial)?.probes;
            ensure!(first.arrived > 10, "of {} first packets {} arrived", first.sent, first.arrived);
            let at = |histogram: &hdrhistogram::Histogram<u64>, share| histogram.value_at_quantile(share) as f64 / 1e3;
            let (one_way, before) = (&first.one_way, &established.one_way);
            // Additional latency of a first packet over a later one on the same testbed; at least the clock's
            // resolution.
            let added = |share| Some((at(one_way, share) - at(before, share)).max(0.1));
            Ok(vec![
                added(0.99),
                added(0.5),
                Some(at(one_way, 0.99)),
                Some(at(before, 0.99)),
                Some(first.lost() as f64),
            ])
        };
        ScenarioCase::of(peer, measure)
    };
    Scenario {
        name: "first-packet",
        title: "First packet of a connection",
        about: "5,000 connections a second are opened beside 50 k packets a second of an established one. Counted is what a first \
                packet takes one way beyond what a later packet takes on the same lane, in the same minute.",
        metrics: FIRST,
        cases: [
            Peer::penstock(),
            Peer::penstock_by_tcx(true),
            Peer::Nfqueue,
            Peer::Nftables,
            Peer::Iptables,
            Peer::OpenVSwitch,
        ]
        .map(case)
        .into(),
    }
}
