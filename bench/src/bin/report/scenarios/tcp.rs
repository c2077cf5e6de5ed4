//! TCP between two pods, through their kernels' stacks.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::time::{ClockId, clock_gettime};
use penstock_bench::load::{PORTS, connections_for, pin, streams_for};
use penstock_bench::peers::{Peer, PeerTestbed, further_policy};
use penstock_bench::testbed::Offload;

use super::disturbances::often;
use super::throughput::{FEW_MORE, opening};
use super::transactions::timed;
use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

const OPENED: &[Metric] = &[Metric::higher("opened", "k connections/s", 1), Metric::lower("failed", "", 0)];

pub(crate) fn connections() -> Scenario {
    let measure = |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
        let length = plan.length;
        let (rate, failed) = testbed.with_peer(|testbed| {
            let (from, to, address) = testbed.ends()?;
            // The lowest ports are used by the bulk transfers.
            connections_for(from, to, address, PORTS.start + 10, length)
        })?;
        ensure!(rate > 0.0, "no connection was opened, {failed} failed");
        Ok(vec![Some(rate / 1e3), Some(failed as f64)])
    };
    Scenario {
        name: "tcp-connections",
        title: "New TCP connections",
        about: "Two threads open connections and close them, one accepts and closes. They run on both cores, wherever the \
                scheduler puts them, with whoever forwards.",
        metrics: OPENED,
        cases: FEW_MORE
            .into_iter()
            .chain([by_tcx as fn() -> Peer])
            .map(|peer| ScenarioCase::of(peer(), measure))
            .collect(),
    }
}

fn by_tcx() -> Peer {
    Peer::penstock_by_tcx(true)
}

pub(crate) fn new_udp() -> Scenario {
    opening()
}

/// The largest MTU of a veth with native XDP and single-buffer packets: a page less the program's headroom and the
/// kernel's tailroom.
pub(super) const LARGEST: u32 = 3506;

/// Throughput of this many streams of the first pod in Gb/s. Each port serves one call at a time.
pub(super) fn streams(testbed: &PeerTestbed, port: u16, streams: usize, length: Duration) -> Result<f64> {
    let (from, to, address) = testbed.ends()?;
    streams_for(from, to, SocketAddr::new(address, PORTS.start + port), streams, length)
}

/// The rate of one stream in Gb/s, and the processor's milliseconds for a gigabit of it: of both cores, of ends and forwarder
/// together.
pub(super) fn one_stream(testbed: &PeerTestbed, port: u16, length: Duration) -> Result<[Option<f64>; 2]> {
    let (one, took, busy) = timed(|| streams(testbed, port, 1, length))?;
    Ok([Some(one), (one > 0.0).then(|| busy * 1e3 / (one * took))])
}

/// Rate and cost of one stream, and the rates of eight and of 32.
fn one_and_many(testbed: &PeerTestbed, length: Duration) -> Result<[Option<f64>; 4]> {
    let [one, a_gigabit] = one_stream(testbed, 0, length)?;
    let [eight, many] = [(1, 8), (3, 32)].map(|(port, number)| streams(testbed, port, number, length));
    Ok([one, a_gigabit, Some(eight?), Some(many?)])
}

/// The figures of [`BULK`].
fn figures(transfers: [Option<f64>; 4], changes: Option<Changes>) -> Vec<Option<f64>> {
    let changes = [changes.map(|changes| changes.a_second), changes.map(|changes| changes.milliseconds)];
    transfers.into_iter().chain(changes).collect()
}

/// Changes of policy that a daemon has brought into effect.
#[derive(Clone, Copy)]
struct Changes {
    a_second: f64,
    /// Processor time of the daemon for each.
    milliseconds: f64,
}

impl Changes {
    /// The result of the daemon of an earlier case of this run.
    fn known(known: &KnownRates) -> Option<Self> {
        let of = |name: &str| known.get(name).copied();
        Some(Self { a_second: of(CHANGES_IN_FORCE)?, milliseconds: of(WORK_OF_A_CHANGE)? })
    }
}

/// The epoch in effect, and the processor time of the daemon so far; `None`: there is no daemon.
fn progress(testbed: &PeerTestbed) -> Result<Option<(u32, Duration)>> {
    let Some(daemon) = testbed.daemon() else { return Ok(None) };
    let epoch = testbed.status_reader().epoch()?;
    Ok(Some((epoch.context("the daemon has no epoch")?, daemon.processor_time()?)))
}

/// The same while a policy's file is saved [`CHANGES`] times a second: how often that was in effect, and which processor time the
/// daemon took for it. Where no daemon reads the file, a thread computes as long and as often as the daemon last did.
fn one_and_many_beside_changes(testbed: &PeerTestbed, plan: &Plan, known: &mut KnownRates) -> Result<Vec<Option<f64>>> {
    let (reload, ends) = (testbed.reload(), AtomicBool::new(false));
    let (before, start) = (progress(testbed)?, Instant::now());
    let as_daemon = match before {
        Some(_) => None,
        None => Some(
            Changes::known(known)
                .context("what a change takes is not known: measure Penstock's case in the same run")?,
        ),
    };
    let rates = std::thread::scope(|scope| {
        let changing = scope.spawn(|| {
            pin(plan.cores.worker)?;
            let changes = often(CHANGES, &ends, |turn| reload.save_as(FILE, &further_policy(turn)));
            reload.remove(FILE)?;
            changes
        });
        let working = as_daemon.map(|Changes { a_second, milliseconds }| {
            let ends = &ends;
            scope.spawn(move || often(a_second, ends, |_| compute(milliseconds)))
        });
        let rates = one_and_many(testbed, plan.length);
        ends.store(true, Ordering::Relaxed);
        for thread in [Some(changing), working].into_iter().flatten() {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        rates
    });
    let seconds = start.elapsed().as_secs_f64();
    let rates = rates?;
    let Some(((before, took_before), (after, took))) = before.zip(progress(testbed)?) else {
        return Ok(figures(rates, None));
    };
    ensure!(after > before, "no change came into effect");
    let changes = f64::from(after - before);
    let changes =
        Changes { a_second: changes / seconds, milliseconds: (took - took_before).as_secs_f64() * 1e3 / changes };
    known.insert(CHANGES_IN_FORCE.to_owned(), changes.a_second);
    known.insert(WORK_OF_A_CHANGE.to_owned(), changes.milliseconds);
    Ok(figures(rates, Some(changes)))
}

/// Computes until this thread has had so many milliseconds of a processor.
fn compute(milliseconds: f64) -> Result<()> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let until = now()? + Duration::from_secs_f64(milliseconds / 1e3);
    while now()? < until {
        for number in 0..1000 {
            std::hint::black_box(number);
        }
    }
    Ok(())
}

const BULK: &[Metric] = &[
    Metric::higher("one stream", "Gb/s", 2),
    Metric::lower("one stream, processor", "ms/Gb", 1),
    Metric::higher("eight streams", "Gb/s", 2),
    Metric::higher("32 streams", "Gb/s", 2),
    Metric::higher(CHANGES_IN_FORCE, "a second", 0),
    Metric::lower(WORK_OF_A_CHANGE, "ms", 2),
];

/// Changes of policy a second beside a bulk transfer.
const CHANGES: f64 = 100.0;
const CHANGES_IN_FORCE: &str = "changes in effect";
const WORK_OF_A_CHANGE: &str = "a change, processor";
const FILE: &str = "changing.yaml";

/// Makes the pods' stacks segment what they send, or restores the default.
fn segment_in_stack(testbed: &PeerTestbed, itself: bool) -> Result<()> {
    // A veth end keeps these offloads off once its peer has had an XDP program.
    if testbed.daemon().is_some() {
        return Ok(());
    }
    for pod in [testbed.pod(0)?, testbed.pod(1)?] {
        for offload in [Offload::Tso, Offload::Gso] {
            pod.namespace().set_offload("eth0", offload, !itself)?;
        }
    }
    Ok(())
}

pub(crate) fn bulk() -> Scenario {
    let rates = |gso: bool| {
        move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            let length = plan.length;
            testbed.with_peer(|testbed| {
                segment_in_stack(testbed, !gso)?;
                let rates = one_and_many(testbed, length);
                segment_in_stack(testbed, false)?;
                Ok(figures(rates?, None))
            })
        }
    };
    let large = |peer: Peer, name: &str| {
        ScenarioCase::of(peer, rates(true))
            .with(|spec| spec.mtu(LARGEST))
            .named(format!("{name}, largest single frame"))
    };
    let beside_changes = |testbed: &mut PeerTestbed, plan: &Plan, known: &mut KnownRates| {
        testbed.with_peer(|testbed| one_and_many_beside_changes(testbed, plan, known))
    };
    let large_frames = |enforces| Peer::Penstock { enforces, sections: "umem frame_size = 4096\n".to_owned() };
    Scenario {
        name: "bulk",
        title: "Bulk TCP between two pods",
        about: "What arrives of one stream, of eight and of 32, and what a gigabit of the one costs both cores. Where all packets go through workers, \
                they are as long as the MTU; the programs and the kernel's peers hand super-packets over unless that is turned off. The largest single frame is an MTU of 3,506 bytes, with UMEM frames of 4,096. Another node is a namespace \
                behind a veth of the node, where nothing enforces policy. In one case a policy of the receiver changes 100 times \
                a second; after each change every connection is evaluated again. The same files are saved beside kernel routing, too, \
                where nothing reads them, while a thread takes the processor for as long as Penstock took for its changes. \
                A case fails if a stream breaks.",
        metrics: BULK,
        cases: vec![
            ScenarioCase::of(Peer::penstock(), rates(true)),
            large(large_frames(true), "Penstock"),
            ScenarioCase::of(Peer::forward(), rates(true)),
            large(large_frames(false), "Penstock, raw forward"),
            ScenarioCase::of(Peer::penstock_by_tcx(true), rates(true)),
            ScenarioCase::of(Peer::penstock_by_tcx(true), beside_changes)
                .named("Penstock, tcx, 100 policy changes a second"),
            ScenarioCase::of(Peer::penstock_by_tcx(false), rates(true)),
            ScenarioCase::of(Peer::Kernel, rates(true)),
            ScenarioCase::of(Peer::Kernel, beside_changes).named("kernel routing, 100 saves a second and as much work"),
            ScenarioCase::of(Peer::Kernel, rates(false)).named("kernel routing, without GSO"),
            large(Peer::Kernel, "kernel routing"),
            ScenarioCase::of(Peer::Nftables, rates(true)),
            ScenarioCase::of(Peer::Nftables, rates(false)).named("nftables, sets + conntrack, without GSO"),
            ScenarioCase::of(Peer::penstock_by_tcx(true), rates(true)).with_other_node(),
            ScenarioCase::of(Peer::Kernel, rates(true)).with_other_node(),
            ScenarioCase::of(Peer::Nftables, rates(true)).with_other_node(),
        ],
    }
}
