//! `penstock check`: is this configuration good, and can this machine run it?

use std::path::PathBuf;

use super::Failure;
use crate::service::config::Config;

/// Validate a configuration and check that this machine can run it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  penstock check --config /etc/penstock/penstock.toml")]
pub(super) struct Args {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    Config::load(&args.config).map_err(Failure::bad_input)?;
    Ok(())
}
