//! `penstock run`: the node service.

use std::path::PathBuf;

use super::Failure;
use crate::service::config::Config;
use crate::service::{self, RunError};

/// Run the node service
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Runs in the network namespace that it is started in, until SIGINT or SIGTERM. SIGUSR1 prints statistics.
What it changed on the node (a veth pair, routing rules, settings of pods' interfaces) it puts back at the end,
unless fail.on_exit is \"keep\". After a crash pods' interfaces stay closed (fail.mode) until the next start.

Examples:
  penstock run --config /etc/penstock/penstock.toml")]
pub(super) struct Args {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let config = Config::load(&args.config).map_err(Failure::bad_input)?;
    service::logging::start(&config.log);
    service::run(&config).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Failed(error) => Failure::Failed(error),
    })
}
