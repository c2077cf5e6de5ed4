//! `penstock check`: is this configuration good, and can this machine run it?

use std::io::{self, Write};
use std::path::PathBuf;

use super::Failure;
use crate::service::config::Config;
use crate::service::preflight::Level;

/// Validate a configuration and look whether this machine can run it
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Each line says ok, warning or error, and what to do about it. Nothing is changed.

Examples:
  penstock check --config /etc/penstock/penstock.toml")]
pub(super) struct Args {
    /// The configuration file (TOML)
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let config = Config::load(&args.config).map_err(Failure::bad_input)?;
    let findings = crate::service::check(&config).map_err(|error| Failure::Failed(error.into()))?;
    let mut answer = format!("{:<8} {}\n", Level::Ok, args.config.display());
    for finding in &findings {
        answer.push_str(&format!("{:<8} {}\n", finding.level, finding.line));
    }
    io::stdout().write_all(answer.as_bytes()).or_else(Failure::from_output)?;
    match findings.iter().filter(|finding| finding.level == Level::Error).count() {
        0 => Ok(()),
        1 => Err(Failure::bad_input("1 error; mend it and check again")),
        errors => Err(Failure::bad_input(format!("{errors} errors; mend them and check again"))),
    }
}
