//! The first packets of connections that a worker decides about.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use penstock_bench::load::{FloodPackets, Generator, PORTS, TransactionEnds, handshakes, pin};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

/// Connections that are opened a second.
const OPENED: f64 = 1000.0;
/// SYNs a second of another pod.
const FLOOD: f64 = 100e3;

const METRICS: &[Metric] = &[
    Metric::lower("p99", "µs", 1),
    Metric::lower("p50", "µs", 1),
    Metric::lower("p99.9", "µs", 1),
    Metric::higher("flood", "k packets/s", 0),
];

pub(crate) fn first_handshakes() -> Scenario {
    let case = |peer: fn() -> Peer, rate: f64| {
        let measure = move |testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates| {
            testbed.with_peer(|testbed| measure(testbed, plan, rate))
        };
        let case = ScenarioCase::of(peer(), measure).with(|spec| spec.pods(3));
        let name = format!("{}, {:.0} k SYNs a second", case.spec.peer_name(), rate / 1e3);
        case.named(name)
    };
    let peers: [fn() -> Peer; 5] = [
        Peer::penstock_by_tcx_without_repeats,
        Peer::penstock_by_tcx_with_one_worker_without_repeats,
        || Peer::penstock_by_tcx(true),
        || Peer::Kernel,
        || Peer::Nftables,
    ];
    Scenario {
        name: "handshakes",
        title: "From SYN to SYN-ACK, beside idle pods and beside a pod that floods",
        about: "A pod opens 1,000 connections a second, one after the other: what each waits for the SYN-ACK. In the cases without repeated \
                connections each SYN meets a worker, as the first one to a port does. Beside it, on the other core, another pod of the \
                node sends 100 k SYNs a second, each of a connection of its own, to an allowed port of the same pod at which nobody \
                listens. By default the flood has a worker of its own core; where there is one worker, it is on the flood's core, and both pods wait for it.",
        metrics: METRICS,
        cases: peers.into_iter().flat_map(|peer| [0.0, FLOOD].map(|rate| case(peer, rate))).collect(),
    }
}

fn measure(testbed: &PeerTestbed, plan: &Plan, rate: f64) -> Result<Vec<Option<f64>>> {
    let length = (plan.length * 2).max(Duration::from_millis(500));
    let (from, to, address) = testbed.ends()?;
    let (client_core, server_core) = (Some(plan.cores.generator), None);
    let ends = TransactionEnds { from, to, address: (address, PORTS.start + 10).into(), client_core, server_core };
    let IpAddr::V4(flooded) = address else { unreachable!("the benchmarks' pods have IPv4 addresses") };
    let (is_over, core, began) = (AtomicBool::new(false), plan.cores.worker, Instant::now());
    let (times, sent) = std::thread::scope(|scope| {
        let flooding =
            (rate > 0.0).then(|| scope.spawn(|| flood(testbed, (flooded, PORTS.start + 9), (rate, core), &is_over)));
        let times = handshakes(&ends, OPENED, length);
        is_over.store(true, Ordering::Relaxed);
        let sent = flooding.map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        (times, sent.transpose())
    });
    let (times, sent) = (times?, sent?.unwrap_or(0) as f64 / began.elapsed().as_secs_f64());
    let at = |share| Some(times.value_at_quantile(share) as f64 / 1e3);
    Ok(vec![at(0.99), at(0.5), at(0.999), Some(sent / 1e3)])
}

/// Floods from the third pod until the end; how many packets it has sent.
fn flood(testbed: &PeerTestbed, to: (Ipv4Addr, u16), (rate, core): (f64, usize), is_over: &AtomicBool) -> Result<u64> {
    pin(core)?;
    let (mut flood, pod) = testbed.flood_from_pod(2, FloodPackets::Syn, to)?;
    let generator = pod.run(|| Generator::open("eth0")).context("the pod that floods")?;
    flood.run(&generator, rate, is_over)
}
