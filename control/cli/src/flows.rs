//! `penstock flows`: the connections of a running daemon.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use penstock_admin::types::Flows;
use penstock_text::arguments::{FlowArgs, ListingArgs};
use penstock_text::flows::{Rates, text};

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
  TO               the other end
  SENT, RECEIVED   packets and bytes of the end that opened it, and of the other; `-` with
                   `offload = false`, where connections have counters only while there are flow
                   records
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
  penstock flows --state REVOKED --watch
  penstock flows --json | jq '.flows[] | select(.idle_seconds > 60)'")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    #[command(flatten)]
    flows: FlowArgs,
    #[command(flatten)]
    listing: ListingArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let Args { daemon, flows, listing } = args;
    let (client, query) = (daemon.client()?, flows.query());
    let mut rates = Rates::default();
    loop {
        let flows: Flows = client.get("/v1/flows", &query).map_err(failure)?;
        let rates = listing.watch.map(|_| rates.since_last(&flows, Instant::now()));
        let text = listing.render(&flows, || text(&flows, rates.as_deref()));
        let mut output = io::stdout();
        if let Err(error) = output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
            return Failure::from_output(error);
        }
        match listing.watch {
            Some(seconds) => thread::sleep(Duration::from_secs(seconds)),
            None => return Ok(()),
        }
    }
}
