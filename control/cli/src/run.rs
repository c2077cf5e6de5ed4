//! `penstock run`: the node service.

use penstock_agent::{self as agent, RunError};

use super::Failure;
use super::configuration::ConfigArgs;

/// Run the node service
///
/// Enforces policy for the pods of this node until SIGINT or SIGTERM, in the network namespace that it is started in.
/// At the end it restores what it changed on the node (a veth pair, routing rules, settings of pods' interfaces), unless
/// fail.on_exit is "keep". After a crash, pods' interfaces drop everything until the next start, unless fail.mode is "open".
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
  PENSTOCK_NODE=worker-1 penstock run --config penstock.toml --set log.level=debug
  penstock run --config penstock.toml --set verdict_log.output=stdout --set verdict_log.opened=true")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    agent::run(&args.config.layers()?).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Failed(error) => Failure::Failed(error),
    })
}
