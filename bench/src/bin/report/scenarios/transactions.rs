//! Questions and answers over TCP, as netperf's TCP_RR and TCP_CRR, and over UDP.

use std::time::{Duration, Instant};

use anyhow::Result;
use penstock_bench::load::{
    CoreTimes, DATAGRAM_SERVERS, PORTS, TransactionEnds, connected_transactions, datagram_transactions, round_trips,
};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

const METRICS: &[Metric] = &[
    Metric::lower("TCP_RR, one core", "µs", 1),
    Metric::lower("TCP_RR, one core, p99", "µs", 1),
    Metric::lower("TCP_RR, two cores", "µs", 1),
    Metric::lower("TCP_RR, two cores, p99", "µs", 1),
    Metric::lower("TCP_RR, 1,000 a second", "µs", 1),
    Metric::lower("TCP_RR, 1,000 a second, p99", "µs", 1),
    Metric::higher("TCP_RR, 32 at once", "k transactions/s", 1),
    Metric::lower("TCP_RR, processor", "µs/transaction", 1),
    Metric::higher("TCP_CRR, one at a time", "k transactions/s", 2),
    Metric::higher("TCP_CRR, 32 at once", "k transactions/s", 2),
    Metric::lower("TCP_CRR, processor", "µs/transaction", 1),
    Metric::higher("UDP questions, one at a time", "k transactions/s", 2),
    Metric::higher("UDP questions, 32 at once", "k transactions/s", 2),
];

/// The result, the seconds that it took, and those for which the cores were busy meanwhile, all together.
pub(super) fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, f64, f64)> {
    let (before, start) = (CoreTimes::read()?, Instant::now());
    let result = work()?;
    let took = start.elapsed().as_secs_f64();
    let busy: Duration = CoreTimes::read()?.since(&before).iter().sum();
    Ok((result, took, busy.as_secs_f64()))
}

fn measure(testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates) -> Result<Vec<Option<f64>>> {
    let (cores, length) = (plan.cores, plan.length);
    testbed.with_peer(|testbed| {
        let ends = |first: u16, client_core, server_core| -> Result<TransactionEnds<'_>> {
            let (from, to, address) = testbed.ends()?;
            Ok(TransactionEnds { from, to, address: (address, PORTS.start + first).into(), client_core, server_core })
        };
        let here = Some(cores.generator);
        let one = round_trips(&ends(30, here, here)?, 1, Duration::ZERO, length)?;
        let two = round_trips(&ends(31, here, Some(cores.worker))?, 1, Duration::ZERO, length)?;
        let slow = round_trips(&ends(32, here, here)?, 1, Duration::from_millis(1), length)?;
        let (many, took, busy) = timed(|| round_trips(&ends(33, None, None)?, 32, Duration::ZERO, length))?;
        let one_opened = connected_transactions(&ends(10, here, here)?, 1, length)?;
        let (opened, opening, busy_opening) = timed(|| connected_transactions(&ends(10, None, None)?, 32, length))?;
        let servers = DATAGRAM_SERVERS.start - PORTS.start;
        let one_asked = datagram_transactions(&ends(servers, here, here)?, 1, length)?;
        let asked = datagram_transactions(&ends(servers, None, None)?, 32, length)?;
        let of =
            |times: &hdrhistogram::Histogram<u64>, quantile: f64| Some(times.value_at_quantile(quantile) as f64 / 1e3);
        Ok(vec![
            of(&one, 0.5),
            of(&one, 0.99),
            of(&two, 0.5),
            of(&two, 0.99),
            of(&slow, 0.5),
            of(&slow, 0.99),
            Some(many.len() as f64 / took / 1e3),
            Some(busy * 1e6 / many.len() as f64),
            Some(one_opened / 1e3),
            Some(opened / 1e3),
            (opened > 0.0).then(|| busy_opening * 1e6 / (opened * opening)),
            Some(one_asked / 1e3),
            Some(asked / 1e3),
        ])
    })
}

pub(crate) fn transactions() -> Scenario {
    let case = |peer| ScenarioCase::of(peer, measure);
    let to_service = |peer| {
        let case = case(peer).with(|spec| spec.services(1, true));
        let name = format!("{}, to its Service", case.name);
        case.named(name)
    };
    Scenario {
        name: "transactions",
        title: "Questions and answers of one byte",
        about: "As netperf's TCP_RR: round trips in one connection, with both ends on one core, with an end on each, and \
                with a pause of 1 ms after each; and in 32 connections. As TCP_CRR: each question in a connection of its own, from one \
                client with both ends on one core, and from 32 clients; and the same by UDP, each question from a port of its own. \
                The processor's time is that of both cores, of ends and \
                forwarder together.",
        metrics: METRICS,
        cases: vec![
            case(Peer::penstock_by_tcx(true)),
            case(Peer::penstock_by_tcx(false)),
            case(Peer::penstock()),
            case(Peer::Kernel),
            case(Peer::Nftables),
            case(Peer::Iptables),
            to_service(Peer::penstock_by_tcx(true)),
            to_service(Peer::Nftables),
            to_service(Peer::Kernel),
            case(Peer::penstock_by_tcx(true)).with_other_node(),
            case(Peer::Kernel).with_other_node(),
            case(Peer::Nftables).with_other_node(),
            case(Peer::Redirect).with_other_node(),
        ],
    }
}
