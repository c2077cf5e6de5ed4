//! `penstock check`: whether a configuration is valid, and this machine can run it.

use std::fmt::Display;

use penstock_admin::printable::Printable;
use penstock_agent::CheckedSource;
use penstock_agent::config::LoadedConfig;
use penstock_agent::last_good::{self, LastGood};
use penstock_agent::preflight::{Level, PreflightFinding};

use super::Failure;
use super::configuration::ConfigArgs;

/// Validate a configuration, and check that this machine can run it
///
/// Prints a line for each check: `ok`, `warning` or `error`, the value found, and the remedy. Changes nothing.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  no errors; there may be warnings. With --or-last-good also if a daemon starts all the same
  1  a check could not be made
  2  bad input: an error in the configuration, or a machine that cannot run it

Examples:
  penstock check --config /etc/penstock/penstock.toml
  penstock check --config /etc/penstock/penstock.toml --or-last-good --offline
  PENSTOCK_NODE=worker-1 penstock check --config penstock.toml --set umem.memory=1GiB")]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Accept errors with which `penstock run` starts: with the last good configuration instead, or without getting ready
    #[arg(long)]
    or_last_good: bool,
    /// Do not ask an API server, and so do not check pods' interfaces: `penstock run` waits for one that is away
    #[arg(long)]
    offline: bool,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let layers = args.config.layers()?;
    let file = args.config.config.display().to_string();
    let source = if args.offline { CheckedSource::Manifests } else { CheckedSource::Any };
    let errors = match layers.load() {
        Ok(loaded) => checked(&file, &loaded, source, args.or_last_good)?,
        Err(errors) if args.or_last_good => {
            let findings = errors.lines().into_iter().map(|line| PreflightFinding { level: Level::Error, line });
            let findings: Vec<_> = findings.collect();
            print(&findings)?;
            findings.len()
        }
        Err(errors) => return Err(Failure::BadInput(errors.lines())),
    };
    if errors == 0 {
        return Ok(());
    }
    let fix = match errors {
        1 => "1 error: fix it and check again".to_owned(),
        errors => format!("{errors} errors: fix them and check again"),
    };
    if !args.or_last_good {
        return Err(Failure::bad_input(fix));
    }
    let no_other = |reason: &dyn Display| Failure::bad_input(format_args!("{fix} ({reason})"));
    let last_good = last_good::find(&layers).map_err(|error| no_other(&error))?;
    let LastGood { loaded, since } = last_good.ok_or_else(|| no_other(&"there is no last good configuration"))?;
    match checked(&format!("the last good configuration, in effect at {since}"), &loaded, source, true)? {
        0 => Ok(()),
        _ => Err(no_other(&"the last good configuration has errors, too")),
    }
}

/// Checks a configuration and prints what was found. Returns the number of errors; with `only_starts`, of those that keep a daemon from
/// starting.
fn checked(name: &str, loaded: &LoadedConfig, source: CheckedSource, only_starts: bool) -> Result<usize, Failure> {
    let findings = penstock_agent::check(&loaded.config, source).map_err(|error| Failure::Failed(error.into()))?;
    print(&[PreflightFinding { level: Level::Ok, line: name.to_owned() }])?;
    print(&findings)?;
    let least = if only_starts { Level::Error } else { Level::NotReady };
    Ok(findings.iter().filter(|finding| finding.level >= least).count())
}

fn print(findings: &[PreflightFinding]) -> Result<(), Failure> {
    let lines: String =
        findings.iter().map(|PreflightFinding { level, line }| format!("{level:<8} {}\n", Printable(line))).collect();
    Failure::print(lines)
}
