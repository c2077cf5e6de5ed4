//! `penstock run`: the node service.

use penstock_agent::{self as agent, RunError};

use super::Failure;
use super::configuration::ConfigArgs;

/// Run the node service
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Runs in the network namespace that it is started in, until SIGINT or SIGTERM. SIGUSR1 prints statistics; SIGHUP reads the
configuration again, takes in log.level, node_addresses and verdict_log, and says which other changes need a restart.
What it changed on the node (a veth pair, routing rules, settings of pods' interfaces) it puts back at the end,
unless fail.on_exit is \"keep\". After a crash pods' interfaces stay closed (fail.mode) until the next start.

Examples:
  penstock run --config /etc/penstock/penstock.toml
  PENSTOCK_NODE=worker-1 penstock run --config penstock.toml --set log.level=debug
  penstock run --config penstock.toml --set verdict_log.output=stdout --set verdict_log.opened=true")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let (layers, loaded) = args.config.load()?;
    agent::logging::start(&loaded.config.log);
    agent::run(&layers, &loaded).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Failed(error) => Failure::Failed(error),
    })
}
