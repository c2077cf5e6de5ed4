//! `penstock cleanup`: removes what a daemon left behind.

use penstock_agent::{self as agent, CleanedUp, RunError};

use super::Failure;
use super::configuration::ConfigArgs;

/// Remove what a killed daemon, or one with fail.on_exit = "keep", left on the node
///
/// Removes the programs from interfaces, the host veth, its routes and rules, and the files of conntrack.mapping (the
/// connections among them) and admin.socket. From then on the kernel forwards pods' packets, and NO POLICY IS ENFORCED.
/// Rejected while a daemon runs. It is no error if nothing is left.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  removed, or nothing was left
  1  failed
  2  bad input: the configuration, a running daemon, or an interface of another program

Examples:
  penstock cleanup --config /etc/penstock/penstock.toml")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let config = args.config.load()?.config;
    let CleanedUp { programs, worker_pairs, files } = agent::cleanup(&config).map_err(|error| match error {
        RunError::BadInput(lines) => Failure::BadInput(lines),
        RunError::Occupied(line) => Failure::bad_input(line),
        RunError::Failed(error) => Failure::Failed(error),
    })?;
    let pairs = if worker_pairs { "the workers' veth pairs" } else { "no veth pair" };
    let answer = format!("removed: {programs} programs on interfaces, {pairs}, {files} files\n");
    Failure::print(answer)
}
