//! Traffic to a Service's cluster address, beside the same to its pod.

use anyhow::{Result, ensure};
use penstock_bench::load::{PORTS, Traffic, Trial, connections_for};
use penstock_bench::peers::{Peer, PeerTestbed};

use super::tcp::one_stream;
use super::{KnownRates, Scenario, ScenarioCase};
use crate::Plan;
use crate::results::Metric;

const METRICS: &[Metric] = &[
    Metric::higher("received", "k packets/s", 0),
    Metric::lower("generator core", "ns/packet", 0),
    Metric::higher("one stream", "Gb/s", 2),
    Metric::lower("one stream, processor", "ms/Gb", 1),
    Metric::higher("opened", "k connections/s", 1),
];

fn measure(testbed: &mut PeerTestbed, plan: &Plan, _: &mut KnownRates) -> Result<Vec<Option<f64>>> {
    let packets = testbed.run(&Trial::flat_out(Traffic::SMALLEST, plan.length))?;
    ensure!(packets.corrupted == 0, "{} packets arrived with a wrong checksum", packets.corrupted);
    ensure!(packets.received > 0, "nothing arrived");
    let length = plan.length;
    let ([stream, a_gigabit], (opened, failed)) = testbed.with_peer(|testbed| {
        let (from, to, address) = testbed.ends()?;
        let stream = one_stream(testbed, 2, length)?;
        Ok((stream, connections_for(from, to, address, PORTS.start + 10, length)?))
    })?;
    ensure!(opened > 0.0, "no connection was opened, {failed} failed");
    let core = packets.busy_nanoseconds(plan.cores.generator);
    Ok(vec![Some(packets.rate() / 1e3), core, stream, a_gigabit, Some(opened / 1e3)])
}

pub(crate) fn services() -> Scenario {
    let case = |peer: Peer, services: usize, to_service: bool| {
        let case = ScenarioCase::of(peer, measure).with(|spec| spec.services(services, to_service));
        let to = match (to_service, services) {
            (false, _) => "to the pod".to_owned(),
            (true, 1) => "to its Service".to_owned(),
            (true, _) => format!("to its Service of {services}"),
        };
        let name = format!("{}, {to}", case.spec.peer_name());
        case.named(name)
    };
    Scenario {
        name: "services",
        title: "To a pod, and to a Service whose only backend it is",
        about: "One UDP connection of 64 bytes, flat out; one TCP stream; new TCP connections. The node's kernel translates, by a \
                map of addresses, a random choice and DNAT, as kube-proxy's nftables mode sets it up.",
        metrics: METRICS,
        cases: vec![
            case(Peer::penstock_by_tcx(true), 1, true),
            case(Peer::penstock_by_tcx(true), 1, false),
            case(Peer::penstock_by_tcx(true), 10_000, true),
            case(Peer::penstock_by_tcx(false), 1, true),
            case(Peer::penstock_by_tcx(false), 1, false),
            case(Peer::Nftables, 1, true),
            case(Peer::Nftables, 1, false),
        ],
    }
}
