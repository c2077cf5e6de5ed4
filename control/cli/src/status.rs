//! `penstock status`: the state of a running daemon.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use penstock_admin::table::align_columns;
use penstock_admin::types::{
    CaptureStatus, ConnectionLimitStatus, FlowRecordsStatus, HostRoutingStatus, NamesStatus, NotEnforced, PodStatus,
    PortStatus, RingDepth, StaleObjects, Status,
};
use penstock_text::number::{json, percent, short, uptime};

use super::Failure;
use super::daemon::DaemonArgs;
use super::style;

/// Show a running daemon: workers, ports, pods, and whether policy is in effect
///
/// A pod is enforced once its own rules, and all that is known of its peers, are in effect on every worker: from then on no
/// packet is evaluated under anything older. IN FORCE is the snapshot under which a worker evaluates. Rates are those of
/// the last one or two seconds. RINGS has frames that wait to receive packets, and frames that are being sent.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the daemon sent no valid answer
  2  bad input: arguments, or no daemon listens at the socket

Examples:
  penstock status
  penstock status --json | jq '.pods[] | select(.enforced | not)'
  penstock status --socket /run/penstock/admin.sock")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let status: Status = args.daemon.get("/v1/status", &())?;
    let text = if args.json { json(&status) } else { text(&status) };
    Failure::print(text)
}

fn text(status: &Status) -> String {
    let mut text = heading(status);
    for table in [workers(status), ports(&status.ports), pods(&status.pods, &status.not_enforced)] {
        text.push('\n');
        text.push_str(&align_columns(&table));
    }
    text.push('\n');
    let frames = &status.frames;
    line(
        &mut text,
        &format!(
            "frames: total {}, free {}, receiving {}, in flight {}",
            frames.total, frames.free, frames.fill, frames.in_flight
        ),
    );
    for (pod, filtered) in status.pods.iter().filter_map(|it| Some((&it.pod, it.filtered.as_ref()?))) {
        line(&mut text, &format!("pod {pod}: limits or filters of somebody else for {filtered}"));
    }
    for (pod, limit) in status.pods.iter().flat_map(|it| it.limits.iter().map(|limit| (&it.pod, limit))) {
        line(&mut text, &limit_line(pod, limit));
    }
    for interface in &status.host_routing {
        line(&mut text, &host_routing_line(interface));
    }
    let connections = &status.connections;
    line(&mut text, &format!("connections: {} of {}", connections.entries, connections.capacity));
    if let Some(names) = &status.domain_names {
        line(&mut text, &names_line(names));
    }
    if let Some(capture) = &status.capture {
        line(&mut text, &capture_line(capture));
    }
    if let Some(records) = &status.flow_records {
        line(&mut text, &records_line(records));
    }
    for problem in &status.object_problems {
        line(&mut text, &format!("objects: {problem}"));
    }
    let drops = pairs(&status.all_drops());
    line(&mut text, &format!("dropped since the start: {}", if drops.is_empty() { "nothing" } else { &drops }));
    text
}

fn host_routing_line(HostRoutingStatus { interface, ipv4_kept_by, ipv6_kept_by }: &HostRoutingStatus) -> String {
    let way = |kept_by: &Option<String>| match kept_by {
        None => "past the node's stack".to_owned(),
        Some(reason) => format!("by the node's stack, for {reason}"),
    };
    match (way(ipv4_kept_by), way(ipv6_kept_by)) {
        (ipv4, ipv6) if ipv4 == ipv6 => format!("uplink {interface}: {ipv4}"),
        (ipv4, ipv6) => format!("uplink {interface}: IPv4 {ipv4}; IPv6 {ipv6}"),
    }
}

fn limit_line(pod: &str, limit: &ConnectionLimitStatus) -> String {
    let rate = limit.each_second.map(|most| format!("{most} a second ({} refused)", limit.refused_each_second));
    let open = limit
        .most_open
        .map(|most| format!("{} of {most} open ({} refused)", limit.open.unwrap_or_default(), limit.refused_open));
    let both: Vec<String> = open.into_iter().chain(rate).collect();
    format!("pod {pod}: {} connections limited: {}", limit.direction, both.join(", "))
}

fn names_line(NamesStatus { kept, learnt, evicted, not_understood, unasked, has_resolver }: &NamesStatus) -> String {
    let without = "; no DNS server is known whose answers count: set domain_names.resolvers";
    format!(
        "domain names: {kept} kept, {learnt} learnt, {evicted} evicted, {not_understood} DNS answers not understood, {unasked} not asked \
         for{}",
        if *has_resolver { "" } else { without }
    )
}

fn capture_line(CaptureStatus { seconds, pod, packets, lost }: &CaptureStatus) -> String {
    let of = pod.as_deref().unwrap_or("all pods");
    format!("capture: of {of}, for {seconds} s, {packets} packets, {lost} lost to it")
}

fn records_line(records: &FlowRecordsStatus) -> String {
    let or_nothing = |counts: &BTreeMap<String, u64>| {
        let some = counts.iter().filter(|(_, count)| **count > 0).map(|(name, count)| (name.clone(), *count));
        match pairs(&some.collect()) {
            none if none.is_empty() => "nothing".to_owned(),
            some => some,
        }
    };
    format!("flow records: {}; lost: {}", or_nothing(&records.made), or_nothing(&records.lost))
}

fn heading(status: &Status) -> String {
    let Status { version, node, process, policies, published, in_force, .. } = status;
    let force = match in_force {
        true => style::good(format!("snapshot {published} is in effect on every worker")),
        false => style::mixed(format!("snapshot {published} is not in effect on every worker yet")),
    };
    let uptime = uptime(status.uptime_seconds);
    let node = style::strong(node);
    let mut text =
        format!("penstock {version} on {node}, process {process}, up {uptime}, {policies} policies; {force}\n");
    for reason in &status.configuration_refused {
        line(&mut text, &style::bad(format!("configuration refused, the last good one is in effect: {reason}")));
    }
    if status.refused_files > 0 {
        let refused = status.refused_files;
        line(&mut text, &style::bad(format!("manifests refused: {refused}; their last good objects are in effect")));
    }
    if let Some(StaleObjects { recorded, objects }) = &status.stale {
        let stale = format!("stale: {objects} objects as recorded at {recorded}; the API server has not been read yet");
        line(&mut text, &style::bad(stale));
    }
    for NotEnforced { pod, reason } in &status.not_enforced {
        let of = pod.as_deref().map_or(String::new(), |pod| format!(" on {pod}"));
        line(&mut text, &style::bad(format!("policy is not enforced{of}: {reason}")));
    }
    text
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn workers(status: &Status) -> Vec<Vec<String>> {
    let heading = ["WORKER", "CORE", "IN FORCE", "BUSY", "AWAKE", "PACKETS/S", "PER BATCH", "POLL P50", "P99", "RINGS"];
    let time = |seconds: Option<f64>| seconds.map_or_else(String::new, |seconds| format!("{:.1} us", seconds * 1e6));
    let rows = status.workers.iter().map(|worker| {
        let RingDepth { receiving, sending, size } = worker.rings;
        vec![
            worker.worker.to_string(),
            worker.core.to_string(),
            worker.epoch.to_string(),
            percent(worker.busy),
            percent(worker.awake),
            short(worker.packets_per_second),
            format!("{:.1}", worker.packets_per_batch),
            time(worker.poll_iteration_median_seconds),
            time(worker.poll_iteration_p99_seconds),
            format!("{receiving}/{size} {sending}/{size}"),
        ]
    });
    std::iter::once(row(heading)).chain(rows).collect()
}

fn ports(ports: &[PortStatus]) -> Vec<Vec<String>> {
    let heading =
        ["PORT", "INTERFACE", "PROGRAM", "POD", "RX/S", "TX/S", "RX BIT/S", "TX BIT/S", "DROPS/S", "DROPPED BY REASON"];
    let rows = ports.iter().map(|port| {
        let behind = port.pod.clone().unwrap_or_else(|| format!("({})", port.kind));
        vec![
            port.port.to_string(),
            port.interface.clone(),
            port.program.clone(),
            behind,
            short(port.rate.rx_packets),
            short(port.rate.tx_packets),
            short(port.rate.rx_bytes * 8.0),
            short(port.rate.tx_bytes * 8.0),
            short(port.rate.dropped_packets),
            pairs(&port.all_drops()),
        ]
    });
    std::iter::once(row(heading)).chain(rows).collect()
}

fn pods(pods: &[PodStatus], not_enforced: &[NotEnforced]) -> Vec<Vec<String>> {
    let heading = ["POD", "ADDRESSES", "INTERFACE", "CHANGED", "PUBLISHED", "ENFORCED", "CONNECTIONS"];
    let number = |epoch: Option<u32>| epoch.map_or_else(|| "-".to_owned(), |epoch| epoch.to_string());
    let is_open = |pod: &str| not_enforced.iter().any(|one| one.pod.as_deref() == Some(pod));
    let rows = pods.iter().map(|pod| {
        let enforced = match (&pod.waiting, pod.enforced) {
            (Some(waiting), _) if is_open(&pod.pod) => format!("NOT ENFORCED: {waiting}"),
            (Some(waiting), _) => format!("not attached: {waiting}"),
            (None, _) if is_open(&pod.pod) => "NOT EVERYWHERE".to_owned(),
            (None, true) => "yes".to_owned(),
            (None, false) if pod.building => "not yet: its tables are being built".to_owned(),
            (None, false) => "not yet".to_owned(),
        };
        vec![
            pod.pod.clone(),
            pod.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            pod.interface.clone().unwrap_or_else(|| "-".to_owned()),
            number(pod.changed),
            number(pod.published),
            enforced,
            pod.connections.to_string(),
        ]
    });
    std::iter::once(row(heading)).chain(rows).collect()
}

/// `name count` of all.
fn pairs(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
}

fn line(text: &mut String, line: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(text, "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a daemon sends it, with what the tables leave out left out.
    const STATUS: &str = r#"{
        "version": "1", "node": "n", "process": 1, "uptime_seconds": 1, "policies": 0, "published": 1, "in_force": true,
        "workers": [], "pods": [], "drops": {"ingress_denied": 3}, "kernel_drops": {"fill_ring_empty": 40, "rx_dropped": 2},
        "ports": [{
            "port": 1, "interface": "veth-a", "kind": "pod", "pod": "test/a",
            "total": {"rx_packets": 9, "rx_bytes": 0, "tx_packets": 0, "tx_bytes": 0, "dropped_packets": 45},
            "rate": {"rx_packets": 0, "rx_bytes": 0, "tx_packets": 0, "tx_bytes": 0, "dropped_packets": 0},
            "drops": {"ingress_denied": 3}, "kernel_drops": {"fill_ring_empty": 40, "rx_dropped": 2}, "outcomes": {}}],
        "frames": {"total": 0, "free": 0, "fill": 0, "in_flight": 0},
        "connections": {"entries": 0, "capacity": 0, "events": {}}}"#;

    #[test]
    fn dropped_since_the_start_has_what_the_kernel_lost_too() {
        let mut status: Status = serde_json::from_str(STATUS).unwrap();
        let all = "ingress_denied 3, kernel_fill_ring_empty 40, kernel_rx_dropped 2";
        let shown = text(&status);
        assert!(shown.ends_with(&format!("dropped since the start: {all}\n")), "{shown}");
        let port = shown.lines().find(|line| line.contains("veth-a")).unwrap();
        assert!(port.ends_with(all), "{port}");
        assert_eq!(status.ports[0].all_drops().values().sum::<u64>(), status.ports[0].total.dropped_packets);
        status.drops.clear();
        status.kernel_drops.clear();
        assert!(text(&status).ends_with("dropped since the start: nothing\n"));
    }

    #[test]
    fn uplinks_say_what_keeps_packets_to_the_nodes_stack() {
        let mut status: Status = serde_json::from_str(STATUS).unwrap();
        assert!(!text(&status).contains("uplink"));
        let by = |reason: Option<&str>| reason.map(str::to_owned);
        for (kept_by, line) in [
            ([None, None], "uplink eth0: past the node's stack"),
            ([Some("netfilter hooks"); 2], "uplink eth0: by the node's stack, for netfilter hooks"),
            (
                [Some("netfilter hooks"), None],
                "uplink eth0: IPv4 by the node's stack, for netfilter hooks; IPv6 past the node's stack",
            ),
        ] {
            let [ipv4_kept_by, ipv6_kept_by] = kept_by.map(by);
            status.host_routing = vec![HostRoutingStatus { interface: "eth0".to_owned(), ipv4_kept_by, ipv6_kept_by }];
            assert!(text(&status).lines().any(|shown| shown == line), "{}", text(&status));
        }
    }

    #[test]
    fn learnt_names_are_counted_where_they_are_followed() {
        let mut status: Status = serde_json::from_str(STATUS).unwrap();
        assert!(!text(&status).contains("domain names:"));
        status.domain_names =
            Some(NamesStatus { kept: 5, learnt: 9, evicted: 1, not_understood: 2, unasked: 3, has_resolver: true });
        let line = "domain names: 5 kept, 9 learnt, 1 evicted, 2 DNS answers not understood, 3 not asked for";
        assert!(text(&status).lines().any(|shown| shown == line), "{}", text(&status));
    }

    #[test]
    fn a_capture_that_runs_is_shown() {
        let mut status: Status = serde_json::from_str(STATUS).unwrap();
        assert!(!text(&status).contains("capture:"));
        status.capture = Some(CaptureStatus { seconds: 12, pod: Some("shop/web".to_owned()), packets: 340, lost: 5 });
        assert!(
            text(&status).contains("\ncapture: of shop/web, for 12 s, 340 packets, 5 lost to it\n"),
            "{}",
            text(&status)
        );
    }

    #[test]
    fn records_of_flows_are_shown_with_what_was_lost() {
        let mut status: Status = serde_json::from_str(STATUS).unwrap();
        assert!(!text(&status).contains("flow records:"));
        let counts = |counts: &[(&str, u64)]| counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let mut records = FlowRecordsStatus { made: counts(&[("end", 7), ("denied", 2)]), ..Default::default() };
        status.flow_records = Some(records.clone());
        assert!(text(&status).contains("\nflow records: denied 2, end 7; lost: nothing\n"), "{}", text(&status));
        records.lost = counts(&[("file", 3), ("otlp", 0)]);
        status.flow_records = Some(records);
        assert!(text(&status).contains("; lost: file 3\n"), "{}", text(&status));
    }

    #[test]
    fn an_older_daemons_status_is_read() {
        let older = STATUS.replacen(r#""kernel_drops": {"fill_ring_empty": 40, "rx_dropped": 2},"#, "", 1);
        assert!(older.len() < STATUS.len());
        let status: Status = serde_json::from_str(&older).unwrap();
        assert!(text(&status).ends_with("dropped since the start: ingress_denied 3\n"));
    }
}
