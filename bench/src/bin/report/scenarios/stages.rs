//! Cost of a packet in the worker, by stage.

use anyhow::{Context, Result, ensure};
use penstock_bench::load::{Traffic, Trial, TrialResult};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

/// The worker's stages as named in `penstock status --json`.
const STAGES: [&str; 7] = ["ring_read", "parse", "connection", "policy", "rewrite", "ring_write", "send"];

const CLOCKS: &[Metric] = &[
    Metric::lower("outside system calls", "clocks/packet", 0),
    Metric::lower("ring read", "clocks", 0),
    Metric::lower("parse", "clocks", 0),
    Metric::lower("connection", "clocks", 0),
    Metric::lower("policy", "clocks", 0),
    Metric::lower("rewrite", "clocks", 0),
    Metric::lower("ring write", "clocks", 0),
    Metric::lower("send", "clocks", 0),
    Metric::higher("received", "k packets/s", 0),
];

/// Packets, and clocks by stage, of all poll iterations timed so far.
fn timed(testbed: &PeerTestbed) -> Result<(u64, [u64; STAGES.len()])> {
    let status = testbed.status()?.context("only Penstock reports the cost of its stages")?;
    let packets = status.workers.iter().map(|worker| worker.stages.packets).sum();
    let of = |stage: &str| status.workers.iter().filter_map(|worker| worker.stages.clocks.get(stage)).sum();
    Ok((packets, STAGES.map(of)))
}

/// Clocks per packet.
pub(super) struct PacketClocks {
    each: [f64; STAGES.len()],
}

impl PacketClocks {
    /// In the system calls that send.
    pub(super) fn send(&self) -> f64 {
        self.each[STAGES.len() - 1]
    }

    /// In everything else.
    pub(super) fn outside(&self) -> f64 {
        self.each[..STAGES.len() - 1].iter().sum()
    }
}

/// Runs a trial and returns the cost per packet.
pub(super) fn clocks(testbed: &mut PeerTestbed, trial: &Trial) -> Result<(PacketClocks, TrialResult)> {
    let (packets, before) = testbed.with_peer(timed)?;
    let outcome = testbed.run(trial)?;
    let (packets_after, after) = testbed.with_peer(timed)?;
    let packets = packets_after - packets;
    ensure!(packets > 0, "no poll iteration of the worker was timed");
    let mut each = [0.0; STAGES.len()];
    for (each, (after, before)) in each.iter_mut().zip(after.into_iter().zip(before)) {
        *each = (after - before) as f64 / packets as f64;
    }
    Ok((PacketClocks { each }, outcome))
}

pub(crate) fn stages() -> Scenario {
    let case = |peer: Peer, traffic: Traffic| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let (clocks, outcome) = clocks(testbed, &Trial::flat_out(traffic, plan.length))?;
            let figures = std::iter::once(clocks.outside()).chain(clocks.each).chain([outcome.rate() / 1e3]);
            Ok(figures.map(Some).collect())
        };
        ScenarioCase::of(peer, measure)
    };
    let many = Traffic { connections: 10_000, ..Traffic::SMALLEST };
    let new = Traffic { new: 1.0, ..Traffic::SMALLEST };
    Scenario {
        name: "stages",
        title: "What a packet costs the worker by stage",
        about: "Clocks of the processor's time stamp counter, from one turn in 64 that the worker times. Frames of 64 bytes, flat \
                out. \"ring write\" is everything outside of system calls that is nothing else: descriptors, frames that come \
                back, counters, the loop. \"send\" is the system call, in which the kernel also runs the receiver's stack.",
        metrics: CLOCKS,
        cases: vec![
            case(Peer::penstock(), Traffic::SMALLEST),
            case(Peer::forward(), Traffic::SMALLEST),
            case(Peer::penstock(), many).named("Penstock, 10,000 connections"),
            case(Peer::penstock(), new).named("Penstock, every packet opens a connection"),
            case(Peer::penstock(), new)
                .with(|spec| spec.policies(10_000))
                .named("Penstock, every packet opens a connection, 10,000 policies"),
        ],
    }
}
