//! `penstock flows`: the connections of a running daemon.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use penstock_admin::types::{Flows, FlowsQuery};
use penstock_text::flows::{Rates, text};
use penstock_text::number::json;

use super::Failure;
use super::daemon::{DaemonArgs, failure};

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
