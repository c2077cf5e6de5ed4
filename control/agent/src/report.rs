//! The statistics as text: ports with their drop reasons, workers, frames.

use std::fmt::Display;

use penstock_admin::table::align_columns;
use penstock_dataplane::io::FrameAccount;
use penstock_dataplane::worker::DataplaneStatistics;
use penstock_xdp_redirect::ProgramOutcomeCounts;

use super::ports::{PortOutcomes, PortRole};

/// One table of the ports and of the interfaces that wait for their pod, and one of the workers.
pub(super) fn statistics(
    statistics: &DataplaneStatistics,
    ports: &[PortOutcomes],
    closed_interfaces: &[(String, ProgramOutcomeCounts)],
) -> String {
    align_columns(&port_rows(statistics, ports, closed_interfaces)) + &align_columns(&worker_rows(statistics))
}

fn port_rows(
    statistics: &DataplaneStatistics,
    ports: &[PortOutcomes],
    closed_interfaces: &[(String, ProgramOutcomeCounts)],
) -> Vec<Vec<String>> {
    let heading = ["PORT", "INTERFACE", "POD", "RX", "TX", "DROPPED", "BY CAUSE", "OUTCOMES"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for counters in &statistics.ports {
        let port = ports.iter().find(|port| port.id == counters.port);
        let behind = match port {
            Some(PortOutcomes { pod: Some(pod), .. }) => pod.to_string(),
            Some(PortOutcomes { role: PortRole::Host, .. }) => "(node)".to_owned(),
            Some(PortOutcomes { role: PortRole::Pair, .. }) => "(pair)".to_owned(),
            _ => "(no pod)".to_owned(),
        };
        let outcomes = port.and_then(|port| port.outcomes);
        let kernel = counters.kernel.iter().map(|(cause, count)| (format!("kernel_{cause}"), count));
        let dropped = counters.traffic.dropped_packets() + counters.kernel.packets();
        let causes = counters.traffic.drops().map(|(cause, count)| (cause.name().to_owned(), count)).chain(kernel);
        rows.push(vec![
            counters.port.to_string(),
            counters.interface.clone(),
            behind,
            counters.traffic.rx_packets.to_string(),
            counters.traffic.tx_packets.to_string(),
            dropped.to_string(),
            pairs(causes),
            pairs(outcomes.iter().flat_map(|outcomes| outcomes.iter())),
        ]);
    }
    for (interface, outcomes) in closed_interfaces {
        let dropped = outcomes.iter().filter(|(outcome, _)| outcome.drop_reason().is_some());
        let dropped: u64 = dropped.map(|(_, packets)| packets).sum();
        let (none, no_worker) = ("-".to_owned(), "0".to_owned());
        rows.push(vec![
            none,
            interface.clone(),
            "(not known yet)".to_owned(),
            no_worker.clone(),
            no_worker,
            dropped.to_string(),
            String::new(),
            pairs(outcomes.iter()),
        ]);
    }
    rows
}

fn worker_rows(statistics: &DataplaneStatistics) -> Vec<Vec<String>> {
    let mut rows = vec![["WORKER", "BATCHES", "JOINED", "SLEEPS", "AWAKE"].map(str::to_owned).to_vec()];
    for (worker, counters) in statistics.workers.iter().enumerate() {
        rows.push(vec![
            worker.to_string(),
            counters.batches.to_string(),
            counters.joined.to_string(),
            counters.sleeps.to_string(),
            format!("{:.1} %", counters.awake_share() * 100.0),
        ]);
    }
    rows
}

pub(super) fn frames(frames: &FrameAccount) -> String {
    let FrameAccount { total, free, fill, in_flight } = frames;
    let verdict = if frames.is_balanced() { "balanced" } else { "NOT balanced" };
    format!("frames: total {total}, free {free}, fill {fill}, in_flight {in_flight}: {verdict}\n")
}

/// `name count` of every counter that is not zero.
fn pairs<N: Display>(counts: impl Iterator<Item = (N, u64)>) -> String {
    let shown: Vec<String> =
        counts.filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")).collect();
    shown.join(", ")
}
