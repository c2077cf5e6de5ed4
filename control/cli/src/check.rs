//! `penstock check`: whether a configuration is valid, and this machine can run it.

use std::io::{self, Write};

use penstock_agent::preflight::Level;

use super::Failure;
use super::configuration::ConfigArgs;

/// Validate a configuration, and check that this machine can run it
///
/// Prints a line for each check: `ok`, `warning` or `error`, the value found, and the remedy. Changes nothing.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  no errors; there may be warnings
  1  a check could not be made
  2  bad input: an error in the configuration, or a machine that cannot run it

Examples:
  penstock check --config /etc/penstock/penstock.toml
  PENSTOCK_NODE=worker-1 penstock check --config penstock.toml --set umem.memory=1GiB")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let (_, loaded) = args.config.load()?;
    let findings = penstock_agent::check(&loaded.config).map_err(|error| Failure::Failed(error.into()))?;
    let mut answer = format!("{:<8} {}\n", Level::Ok, args.config.config.display());
    for finding in &findings {
        answer.push_str(&format!("{:<8} {}\n", finding.level, finding.line));
    }
    io::stdout().write_all(answer.as_bytes()).or_else(Failure::from_output)?;
    match findings.iter().filter(|finding| finding.level == Level::Error).count() {
        0 => Ok(()),
        1 => Err(Failure::bad_input("1 error: fix it and check again")),
        errors => Err(Failure::bad_input(format!("{errors} errors: fix them and check again"))),
    }
}
