//! `penstock cleanup`: removes what a daemon left behind.

use std::io::{self, Write};
use std::path::PathBuf;

use penstock_agent::config::Config;
use penstock_agent::{self as agent, CleanedUp, RunError};

use super::Failure;

/// Remove what a daemon left that was killed or keeps the node closed
#[derive(clap::Args, Debug)]
#[command(after_help = "\
XDP programs of pods' interfaces, the host port's veth pair, its routes and rules: after this the kernel forwards
pods' packets again, AND NO POLICY IS ENFORCED. Refused while a daemon runs. Doing it twice is no error.

Examples:
  penstock cleanup --config /etc/penstock/penstock.toml")]
pub(super) struct Args {
    /// The configuration file (TOML) of the daemon
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let config = Config::load(&args.config).map_err(Failure::bad_input)?;
    let CleanedUp { programs, host_veth } = agent::cleanup(&config).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Failed(error) => Failure::Failed(error),
    })?;
    let host_veth = if host_veth { "the host veth" } else { "no host veth" };
    let answer = format!("taken away: {programs} XDP programs, {host_veth}\n");
    io::stdout().write_all(answer.as_bytes()).or_else(Failure::from_output)
}
