//! What a packet costs the worker by stage, and what the ways of receiving and sending change.

use anyhow::{Context, Result, ensure};
use penstock_bench::load::{Traffic, Trial};
use penstock_bench::peers::{Lane, Peer};

use super::{Case, Known, Scenario};
use crate::Plan;
use crate::results::Metric;

/// The worker's stages, by the names that `penstock status --json` has.
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

/// Packets, and clocks by stage, of all turns that were timed so far.
fn timed(lane: &Lane) -> Result<(u64, [u64; STAGES.len()])> {
    let status = lane.status()?.context("only Penstock tells what its stages cost")?;
    let packets = status.workers.iter().map(|worker| worker.stages.packets).sum();
    let of = |stage: &str| status.workers.iter().filter_map(|worker| worker.stages.clocks.get(stage)).sum();
    Ok((packets, STAGES.map(of)))
}

/// Runs a trial; what a packet cost by stage meanwhile, and the rate.
fn clocks(lane: &mut Lane, trial: &Trial) -> Result<([f64; STAGES.len()], f64)> {
    let (packets, before) = lane.with_peer(timed)?;
    let outcome = lane.run(trial)?;
    let (packets_after, after) = lane.with_peer(timed)?;
    let packets = packets_after - packets;
    ensure!(packets > 0, "no turn of the worker was timed");
    let mut each = [0.0; STAGES.len()];
    for (each, (after, before)) in each.iter_mut().zip(after.into_iter().zip(before)) {
        *each = (after - before) as f64 / packets as f64;
    }
    Ok((each, outcome.rate() / 1e3))
}

pub(crate) fn stages() -> Scenario {
    let case = |peer: Peer, traffic: Traffic| {
        let measure = move |lane: &mut Lane, plan: &Plan, _: &mut Known| {
            let (each, rate) = clocks(lane, &Trial::flat_out(traffic, plan.length))?;
            let outside = each[..STAGES.len() - 1].iter().sum();
            Ok(std::iter::once(outside).chain(each).chain([rate]).map(Some).collect())
        };
        Case::of(peer, measure)
    };
    let many = Traffic { connections: 10_000, ..Traffic::SMALLEST };
    let new = Traffic { new: 1.0, ..Traffic::SMALLEST };
    Scenario {
        name: "stages",
        title: "What a packet costs the worker by stage",
        about: "Clocks of the processor's time stamp counter, from one turn in 64 that the worker times. Frames of 64 octets, flat \
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

const IO: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::lower("outside system calls", "clocks/packet", 0),
    Metric::lower("send", "clocks/packet", 0),
    Metric::lower("forwarding core", "ns/packet", 0),
    Metric::lower("forwarding core at 50 k packets/s", "%", 0),
];

/// Settings of the daemon, each as lines that begin with their section.
const MATRIX: [(&str, &str); 9] = [
    ("defaults", ""),
    ("polling = busy", "workers polling = \"busy\"\n"),
    ("spin = 0", "workers spin = \"0us\"\n"),
    ("send_budget = 32", "workers send_budget = 32\n"),
    ("ring_size = 256", "umem ring_size = 256\n"),
    ("ring_size = 4096", "umem ring_size = 4096\n"),
    ("frame_size = 4096", "umem frame_size = 4096\n"),
    ("huge_pages = never", "umem huge_pages = \"never\"\n"),
    ("time_stages = false", "workers time_stages = false\n"),
];

pub(crate) fn matrix() -> Scenario {
    let cases = MATRIX.map(|(name, sections)| {
        let is_timed = !sections.contains("time_stages");
        let measure = move |lane: &mut Lane, plan: &Plan, _: &mut Known| {
            let trial = Trial::flat_out(Traffic::SMALLEST, plan.length);
            let (outside, send) = match is_timed {
                true => clocks(lane, &trial)
                    .map(|(each, _)| (Some(each[..STAGES.len() - 1].iter().sum()), Some(each[STAGES.len() - 1])))?,
                false => (None, None),
            };
            let outcome = lane.run(&trial)?;
            ensure!(outcome.received > 0, "nothing arrived");
            let light = lane.run(&Trial::paced(Traffic::SMALLEST, 50e3, plan.length))?;
            let busy =
                light.busy.get(plan.cores.worker).map(|busy| busy.as_secs_f64() / light.time.as_secs_f64() * 100.0);
            let core = outcome.busy_nanoseconds(plan.cores.worker);
            Ok(vec![Some(outcome.rate() / 1e3), outside, send, core, busy])
        };
        Case::of(Peer::Penstock { enforces: true, sections: sections.to_owned() }, measure).named(name)
    });
    Scenario {
        name: "io",
        title: "Ways of receiving and sending",
        about: "The daemon's settings one by one, all else as it is by default. One UDP connection, 64 octets, flat out, and what of \
                the core is taken at 50 k packets a second. Huge pages are used where the machine has any free. Checksums are \
                finished in software: nothing else was built. Generic XDP is used where native is not to be had, by no setting.",
        metrics: IO,
        cases: cases.into(),
    }
}
