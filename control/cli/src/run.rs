//! `penstock run`: the node service.

use penstock_agent::{self as agent, RunError, StartMode};

use super::Failure;
use super::configuration::ConfigArgs;

/// Run the node service
///
/// Enforces policy for the pods of this node until SIGINT or SIGTERM, in the network namespace that it is started in.
/// At the end it restores the node (removes its veth pairs, routing rules and programs), unless fail.on_exit is "keep". After a
/// crash, established connections go on, and new connections are dropped unless they repeat an allowed one, until the next
/// start. With fail.mode "open" the kernel forwards everything instead.
///
/// With --take-over, an established connection loses nothing where packets are taken by tcx. The daemon that ran before stays
/// without workers until it is ended, and fails if this one is gone.
///
/// If the configuration is refused, it starts with the one with which it was ready last, and does not get ready.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Signals:
  SIGINT, SIGTERM  end the daemon
  SIGHUP           read the configuration again: log.level, node_addresses and verdict_log take
                   effect; for every other change the log says that it needs a restart
  SIGUSR1          print statistics

Exit codes:
  0  ended by a signal
  1  failed after the start
  2  bad input: the configuration, the source of objects, or the machine cannot be used

Examples:
  penstock run --config /etc/penstock/penstock.toml
  penstock run --config /etc/penstock/penstock.toml --take-over
  PENSTOCK_NODE=worker-1 penstock run --config penstock.toml --set log.level=debug
  penstock run --config penstock.toml --set verdict_log.output=stdout --set verdict_log.opened=true")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Take over from a daemon that runs: it serves until this one has read all objects
    #[arg(long)]
    take_over: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mode = if args.take_over { StartMode::TakeOver } else { StartMode::Alone };
    agent::run(&args.config.layers()?, mode).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Occupied(line) => Failure::bad_input(line),
        RunError::Failed(error) => Failure::Failed(error),
    })
}
