//! The statistics as text: per port and per drop cause.

use std::fmt::Display;

use penstock_dataplane::forward::PortKind;
use penstock_dataplane::io::FrameAccount;
use penstock_dataplane::worker::{DataplaneStatistics, KernelDrops};

use penstock_xdp_redirect::{XdpOutcome, XdpOutcomeCounts};

use super::ports::Counted;
use super::table::layout;

/// One table of the ports and of the interfaces that wait for their pod, one of the workers.
pub(super) fn statistics(
    statistics: &DataplaneStatistics,
    ports: &[Counted],
    waiting: &[(String, XdpOutcomeCounts)],
) -> String {
    let heading = ["PORT", "INTERFACE", "POD", "RX", "TX", "DROPPED", "BY CAUSE", "XDP"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for figures in &statistics.ports {
        let counted = ports.iter().find(|counted| counted.id == figures.port);
        let behind = match counted {
            Some(Counted { pod: Some(pod), .. }) => pod.to_string(),
            Some(Counted { kind: PortKind::Host, .. }) => "(node)".to_owned(),
            Some(Counted { kind: PortKind::Uplink, .. }) => "(uplink)".to_owned(),
            _ => "(no pod)".to_owned(),
        };
        let outcomes = counted.and_then(|counted| counted.outcomes);
        let kernel = kernel_drops(&figures.kernel);
        let dropped = figures.traffic.dropped_packets() + figures.kernel.packets();
        let causes = figures.traffic.drops().map(|(cause, count)| (cause.name(), count)).chain(kernel);
        rows.push(vec![
            figures.port.to_string(),
            figures.interface.clone(),
            behind,
            figures.traffic.rx_packets.to_string(),
            figures.traffic.tx_packets.to_string(),
            dropped.to_string(),
            pairs(causes),
            pairs(outcomes.iter().flat_map(|outcomes| outcomes.iter())),
        ]);
    }
    for (interface, outcomes) in waiting {
        let causes = [XdpOutcome::NoSocket, XdpOutcome::VlanTag, XdpOutcome::ForgedNeighbour];
        let dropped: u64 = causes.into_iter().map(|cause| outcomes.get(cause)).sum();
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
    let mut text = layout(&rows);
    let mut rows = vec![["WORKER", "BATCHES", "HANDED OVER", "JOINED", "SLEEPS", "AWAKE"].map(str::to_owned).to_vec()];
    for (worker, figures) in statistics.workers.iter().enumerate() {
        rows.push(vec![
            worker.to_string(),
            figures.batches.to_string(),
            figures.handed_over.to_string(),
            figures.joined.to_string(),
            figures.sleeps.to_string(),
            format!("{:.1} %", figures.awake_share() * 100.0),
        ]);
    }
    text.push_str(&layout(&rows));
    text
}

/// The account of frames, in one line.
pub(super) fn frames(frames: &FrameAccount) -> String {
    let FrameAccount { total, free, fill, in_flight } = frames;
    let verdict = if frames.is_balanced() { "balanced" } else { "NOT balanced" };
    format!("frames: total {total}, free {free}, fill {fill}, in_flight {in_flight}: {verdict}\n")
}

/// What the kernel lost at a port's sockets, under names of the same style as the causes.
fn kernel_drops(kernel: &KernelDrops) -> Vec<(&'static str, u64)> {
    [
        ("kernel_rx_dropped", kernel.rx_dropped),
        ("kernel_rx_ring_full", kernel.rx_ring_full),
        ("kernel_fill_ring_empty", kernel.fill_ring_empty),
        ("kernel_invalid_descriptors", kernel.invalid_descriptors),
    ]
    .into_iter()
    .filter(|(_, count)| *count > 0)
    .collect()
}

/// `name count` of all that is not zero.
fn pairs<N: Display>(counted: impl Iterator<Item = (N, u64)>) -> String {
    let shown: Vec<String> =
        counted.filter(|(_, count)| *count > 0).map(|(name, count)| format!("{name} {count}")).collect();
    shown.join(", ")
}
