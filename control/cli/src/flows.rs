//! `penstock flows`: the connections of a running daemon.

use std::collections::HashMap;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::HumanBytes;
use penstock_admin::table::align_columns;
use penstock_admin::types::{ConnectionFlow, FlowEnd, Flows, FlowsQuery, Traffic};

use super::Failure;
use super::daemon::{DaemonArgs, failure, json};

/// List the connections of a running daemon
///
/// Each with its ends, its state, what both ends have sent, the rules that allow it now, the time since its last packet, and
/// the time until it expires. With --watch also its rate since the listing before.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Columns:
  CONNECTION       the number that the verdict log has for it
  TO               the other end; of a connection to a Service its backend
  SERVICE          the Service's port, cluster address and port; only if there is such a connection
  SENT, RECEIVED   packets and bytes of the end that opened it, and of the other; `-` with
                   `attach = \"xdp\"` or `offload = false`, where connections have counters only
                   while there are flow records
  RATE             with --watch: bits per second in both directions
  STATE            as in nf_conntrack (ESTABLISHED, SYN_SENT, TIME_WAIT), and REPLIED, ASSURED,
                   PICKED_UP (opened in mid-stream) and REVOKED (no longer allowed by policy)
  EGRESS, INGRESS  the rule that allows it, `open` (no policy isolates the pod), `exempt` (policy
                   does not apply), `denied`, or `not here` (that end is not local)

Exit codes:
  0  printed
  1  the daemon sent no valid answer
  2  bad input: a filter, or no daemon listens at the socket

Examples:
  penstock flows
  penstock flows --pod shop/web-1 --protocol TCP --state ESTABLISHED
  penstock flows --service kube-system/kube-dns
  penstock flows --state REVOKED --watch
  penstock flows --json | jq '.flows[] | select(.idle_seconds > 60)'")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Only connections from or to this pod (NAMESPACE/POD) or address
    #[arg(long, visible_alias = "address", value_name = "END")]
    pod: Option<String>,
    /// Only connections in this state
    #[arg(long, value_name = "STATE")]
    state: Option<String>,
    /// Only connections of this protocol: TCP, UDP, SCTP, ICMP, ICMPv6 or a number
    #[arg(long, value_name = "PROTOCOL")]
    protocol: Option<String>,
    /// Only connections to this destination port; to a Service: to its backends' port
    #[arg(long, value_name = "NUMBER")]
    port: Option<u16>,
    /// Only connections to this Service (NAMESPACE/NAME) or cluster address, where workers translate
    #[arg(long, value_name = "SERVICE")]
    service: Option<String>,
    /// List at most this many
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    limit: usize,
    /// Print as JSON; with --watch one object per line
    #[arg(long)]
    json: bool,
    /// List again every so many seconds, until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    watch: Option<u64>,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let query = FlowsQuery {
        end: args.pod.clone(),
        state: args.state.clone(),
        protocol: args.protocol.clone(),
        port: args.port,
        service: args.service.clone(),
        limit: Some(args.limit),
    };
    let client = args.daemon.client()?;
    let mut rates = Rates::default();
    loop {
        let flows: Flows = client.get("/v1/flows", &query).map_err(failure)?;
        let text = match (args.json, args.watch) {
            (true, None) => json(&flows),
            (true, Some(_)) => serde_json::to_string(&flows).expect("strings and numbers are JSON") + "\n",
            (false, None) => text(&flows, None),
            // From the top of an empty screen (ECMA-48: cursor to 1,1, then erase what is below).
            (false, Some(_)) => {
                format!("\x1b[H\x1b[J{}", text(&flows, Some(&rates.since_last(&flows, Instant::now()))))
            }
        };
        let mut output = io::stdout();
        if let Err(error) = output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            return Failure::from_output(error);
        }
        match args.watch {
            Some(seconds) => thread::sleep(Duration::from_secs(seconds)),
            None => return Ok(()),
        }
    }
}

/// The rate of each connection between two listings.
#[derive(Default)]
struct Rates {
    last: Option<Instant>,
    /// Bytes in both directions, by the connection's number.
    bytes: HashMap<String, u64>,
}

impl Rates {
    /// For each connection of a listing `now`: bits per second since the last one, if it was there and its counters have not
    /// started anew.
    fn since_last(&mut self, flows: &Flows, now: Instant) -> Vec<Option<f64>> {
        let seconds = self.last.replace(now).map(|last| (now - last).as_secs_f64());
        let both = |flow: &ConnectionFlow| Some(flow.sent?.bytes + flow.received?.bytes);
        let listed = flows.flows.iter().map(|flow| (&flow.connection, both(flow)));
        let rates = listed.clone().map(|(connection, bytes)| {
            let grown = bytes?.checked_sub(*self.bytes.get(connection)?)?;
            Some(grown as f64 * 8.0 / seconds.filter(|seconds| *seconds > 0.0)?)
        });
        let rates = rates.collect();
        self.bytes = listed.filter_map(|(connection, bytes)| Some((connection.clone(), bytes?))).collect();
        rates
    }
}

/// The listing; with rates, if there are some, in the order of the flows.
fn text(flows: &Flows, rates: Option<&[Option<f64>]>) -> String {
    let heading =
        ["CONNECTION", "PROTOCOL", "FROM", "TO", "STATE", "SENT", "RECEIVED", "EGRESS", "INGRESS", "IDLE", "EXPIRES"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(flows.flows.iter().map(row));
    if let Some(rates) = rates {
        insert(&mut rows, 7, "RATE", rates.iter().map(|rate| rate.map_or_else(|| "-".to_owned(), bits_per_second)));
    }
    if flows.flows.iter().any(|flow| flow.service.is_some()) {
        let services = flows.flows.iter().map(|flow| flow.service.as_ref().map_or_else(|| "-".to_owned(), end));
        insert(&mut rows, 4, "SERVICE", services);
    }
    let mut text = align_columns(&rows);
    let shown = flows.flows.len();
    text.push_str(&match flows.matching {
        1 if shown == 1 => "1 connection\n".to_owned(),
        matching if matching == shown => format!("{shown} connections\n"),
        matching => format!("{shown} of {matching} connections; list more with --limit\n"),
    });
    text
}

/// Adds a column to rows of which the first is the heading.
fn insert(rows: &mut [Vec<String>], at: usize, heading: &str, cells: impl Iterator<Item = String>) {
    let cells = std::iter::once(heading.to_owned()).chain(cells);
    rows.iter_mut().zip(cells).for_each(|(row, cell)| row.insert(at, cell));
}

/// `9 packets, 600 B`.
pub(super) fn amount(Traffic { packets, bytes }: &Traffic) -> String {
    let unit = if *packets == 1 { "packet" } else { "packets" };
    format!("{packets} {unit}, {}", HumanBytes(*bytes))
}

/// `3.5 Mbit/s`.
fn bits_per_second(rate: f64) -> String {
    let (divisor, unit) = match rate {
        rate if rate >= 1e9 => (1e9, "Gbit/s"),
        rate if rate >= 1e6 => (1e6, "Mbit/s"),
        rate if rate >= 1e3 => (1e3, "kbit/s"),
        _ => return format!("{rate:.0} bit/s"),
    };
    format!("{:.1} {unit}", rate / divisor)
}

fn row(flow: &ConnectionFlow) -> Vec<String> {
    let counted = |traffic: &Option<Traffic>| traffic.as_ref().map_or_else(|| "-".to_owned(), amount);
    vec![
        flow.connection.clone(),
        flow.protocol.clone(),
        end(&flow.from),
        end(&flow.to),
        flow.state.clone(),
        counted(&flow.sent),
        counted(&flow.received),
        flow.egress.clone(),
        flow.ingress.clone(),
        format!("{} s", flow.idle_seconds),
        format!("{} s", flow.expires_seconds),
    ]
}

/// `shop/web-1 10.1.0.5:8080`, `[fd00::1]:53`, `10.1.0.5`.
fn end(end: &FlowEnd) -> String {
    let address = match end.port {
        0 => end.address.to_string(),
        port => std::net::SocketAddr::new(end.address, port).to_string(),
    };
    match &end.name {
        Some(name) => format!("{name} {address}"),
        None => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_line_has_names_addresses_and_the_rule() {
        let end = |address: &str, port, name: Option<&str>| FlowEnd {
            address: address.parse().unwrap(),
            port,
            name: name.map(str::to_owned),
        };
        let flow = ConnectionFlow {
            connection: "00c0ffee00c0ffee".to_owned(),
            protocol: "TCP".to_owned(),
            from: end("10.1.0.5", 40_000, Some("shop/web")),
            to: end("fd00::7", 80, None),
            service: None,
            state: "ESTABLISHED".to_owned(),
            sent: Some(Traffic { packets: 1, bytes: 60 }),
            received: Some(Traffic { packets: 12, bytes: 5_000_000 }),
            egress: "open".to_owned(),
            ingress: "shop-ingress-db-0-all-0-0".to_owned(),
            idle_seconds: 3,
            expires_seconds: 40,
        };
        let listed = text(&Flows { matching: 2, flows: vec![flow.clone()] }, None);
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(
            lines[1],
            "00c0ffee00c0ffee  TCP       shop/web 10.1.0.5:40000  [fd00::7]:80  ESTABLISHED  1 packet, 60 B  12 packets, 4.77 MiB  open    shop-ingress-db-0-all-0-0  3 s   40 s"
        );
        assert_eq!(lines[2], "1 of 2 connections; list more with --limit");
        let to_service =
            ConnectionFlow { service: Some(end("fd00:96::1", 443, Some("shop/api:http"))), ..flow.clone() };
        let listed = text(&Flows { matching: 2, flows: vec![flow.clone(), to_service] }, None);
        let columns: Vec<Vec<&str>> = listed
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        let found = [columns[0][4], columns[1][4], columns[2][4], columns[2][3]];
        assert_eq!(found, ["SERVICE", "-", "shop/api:http [fd00:96::1]:443", "[fd00::7]:80"], "{listed}");
        let uncounted = ConnectionFlow { sent: None, received: None, ..flow };
        assert!(
            text(&Flows { matching: 1, flows: vec![uncounted] }, None).contains("ESTABLISHED  -     -         open")
        );
    }

    #[test]
    fn a_rate_is_what_was_counted_since_the_last_listing() {
        let listing = |counts: &[(&str, Option<u64>)]| {
            let counted = |bytes| Some(Traffic { packets: 1, bytes });
            let flow = |&(connection, bytes): &(&str, Option<u64>)| {
                let end = FlowEnd { address: [10, 1, 0, 5].into(), port: 80, name: None };
                let (from, to) = (end.clone(), end);
                ConnectionFlow {
                    connection: connection.to_owned(),
                    protocol: "TCP".to_owned(),
                    from,
                    to,
                    service: None,
                    state: "ESTABLISHED".to_owned(),
                    sent: bytes.and_then(counted),
                    received: bytes.and(counted(1000)),
                    egress: "open".to_owned(),
                    ingress: "open".to_owned(),
                    idle_seconds: 0,
                    expires_seconds: 40,
                }
            };
            Flows { matching: counts.len(), flows: counts.iter().map(flow).collect() }
        };
        let (mut rates, start) = (Rates::default(), Instant::now());
        let first = listing(&[("a", Some(1000)), ("b", Some(5000)), ("c", None)]);
        assert_eq!(rates.since_last(&first, start), [None, None, None], "nothing to compare with");
        // In another order; b's number was given to another connection; d is new.
        let second = listing(&[("d", Some(9)), ("b", Some(10)), ("a", Some(501_000)), ("c", None)]);
        let seen = rates.since_last(&second, start + Duration::from_secs(2));
        assert_eq!(seen, [None, None, Some(2_000_000.0), None]);
        let listed = text(&second, Some(&seen));
        assert!(listed.lines().nth(3).unwrap().contains("1000 B  2.0 Mbit/s  open"), "{listed}");
        for (rate, shown) in [(0.0, "0 bit/s"), (999.0, "999 bit/s"), (12_340.0, "12.3 kbit/s"), (9.87e9, "9.9 Gbit/s")]
        {
            assert_eq!(bits_per_second(rate), shown);
        }
    }
}
