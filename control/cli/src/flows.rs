//! `penstock flows`: the connections of a running daemon.

use std::io::{self, Write};
use std::thread;
use std::time::Duration;

use penstock_admin::table::align_columns;
use penstock_admin::types::{ConnectionFlow, FlowEnd, Flows, FlowsQuery};

use super::Failure;
use super::daemon::{DaemonArgs, failure, json};

/// List the connections of a running daemon
///
/// Each with its ends, its state, the rules that allow it now, the time since its last packet, and the time until it
/// expires. There are no packet or byte counters: an entry of the connection table fills one cache line, and a second line
/// would double its cost per packet. `penstock status` and the metrics count per pod.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Columns:
  CONNECTION       the number that the verdict log has for it
  TO               the other end; of a connection to a Service its backend
  SERVICE          the Service's port, cluster address and port; only if there is such a connection
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
    loop {
        let flows: Flows = client.get("/v1/flows", &query).map_err(failure)?;
        let text = match (args.json, args.watch) {
            (true, None) => json(&flows),
            (true, Some(_)) => serde_json::to_string(&flows).expect("strings and numbers are JSON") + "\n",
            (false, None) => text(&flows),
            // From the top of an empty screen (ECMA-48: cursor to 1,1, then erase what is below).
            (false, Some(_)) => format!("\x1b[H\x1b[J{}", text(&flows)),
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

fn text(flows: &Flows) -> String {
    let heading = ["CONNECTION", "PROTOCOL", "FROM", "TO", "STATE", "EGRESS", "INGRESS", "IDLE", "EXPIRES"];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(flows.flows.iter().map(row));
    if flows.flows.iter().any(|flow| flow.service.is_some()) {
        let services = flows.flows.iter().map(|flow| flow.service.as_ref().map_or_else(|| "-".to_owned(), end));
        let cells = std::iter::once("SERVICE".to_owned()).chain(services);
        rows.iter_mut().zip(cells).for_each(|(row, cell)| row.insert(4, cell));
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

fn row(flow: &ConnectionFlow) -> Vec<String> {
    vec![
        flow.connection.clone(),
        flow.protocol.clone(),
        end(&flow.from),
        end(&flow.to),
        flow.state.clone(),
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
            egress: "open".to_owned(),
            ingress: "shop-ingress-db-0-all-0-0".to_owned(),
            idle_seconds: 3,
            expires_seconds: 40,
        };
        let listed = text(&Flows { matching: 2, flows: vec![flow.clone()] });
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(
            lines[1],
            "00c0ffee00c0ffee  TCP       shop/web 10.1.0.5:40000  [fd00::7]:80  ESTABLISHED  open    shop-ingress-db-0-all-0-0  3 s   40 s"
        );
        assert_eq!(lines[2], "1 of 2 connections; list more with --limit");
        let to_service =
            ConnectionFlow { service: Some(end("fd00:96::1", 443, Some("shop/api:http"))), ..flow.clone() };
        let listed = text(&Flows { matching: 2, flows: vec![flow, to_service] });
        let columns: Vec<Vec<&str>> = listed
            .lines()
            .map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect())
            .collect();
        let found = [columns[0][4], columns[1][4], columns[2][4], columns[2][3]];
        assert_eq!(found, ["SERVICE", "-", "shop/api:http [fd00:96::1]:443", "[fd00::7]:80"], "{listed}");
    }
}
