//! `penstock ready`: a readiness probe.

use anyhow::anyhow;
use penstock_admin::client::ClientError;

use super::Failure;
use super::daemon::{DaemonArgs, failure};

/// Tell whether the daemon of this container is ready, for a readiness probe
///
/// Ready: all objects are read, and policy is in effect on every worker. While one daemon takes over from another, both
/// containers see the socket of the one that serves; the other container is not ready.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  ready
  1  not ready, or another container's daemon serves this node
  2  bad input: arguments, or no daemon listens at the socket

Examples:
  penstock ready
  penstock ready --socket /run/penstock/admin.sock")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let client = args.daemon.client()?;
    if !client.reaches_visible_process().map_err(failure)? {
        return Err(Failure::Failed(anyhow!("another container's daemon serves this node")));
    }
    client.get("/v1/ready", &()).map_err(|error| match error {
        ClientError::Rejected(missing) => Failure::Failed(anyhow!("not ready: {missing}")),
        other => failure(other),
    })
}
