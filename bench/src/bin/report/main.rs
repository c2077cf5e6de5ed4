//! `make bench`: throughput, latency and loss of Penstock beside its alternatives, in one run on one machine.
//!
//! Every figure is the median of repetitions that alternate between cases. `scenarios` defines what is measured,
//! [`penstock_bench::peers`] what forwards, `thresholds` what must be met; `output` writes the report.

mod host;
mod machine;
mod output;
mod results;
mod run;
mod scenarios;
mod testbeds;
mod thresholds;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Parser;
use penstock_bench::peers::Cores;

/// Measure Penstock beside its alternatives and write a report.
#[derive(Parser, Debug)]
struct Arguments {
    /// Only scenarios whose name begins with this; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Only cases whose name contains this; may be given several times
    #[arg(long, value_name = "NAME")]
    case: Vec<String>,
    /// Seconds of the counted part of a measurement
    #[arg(long, default_value_t = 0.5)]
    seconds: f64,
    /// How often the cases of the first table and of the thresholds are measured, in turn; the others in each fourth repetition
    #[arg(long, default_value_t = 9)]
    repetitions: u32,
    /// No repetition begins that would end after this many minutes; the first one always ends
    #[arg(long, default_value_t = 18.0)]
    minutes: f64,
    /// A quick run: 0.1 s, twice
    #[arg(long)]
    quick: bool,
    /// List the scenarios and exit
    #[arg(long)]
    list: bool,
    /// Directory of the report
    #[arg(long, value_name = "DIRECTORY", default_value = "target/bench")]
    output: PathBuf,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) length: Duration,
    pub(crate) repetitions: u32,
    /// No repetition begins that would end later than this.
    pub(crate) limit: Duration,
    pub(crate) cores: Cores,
}

fn main() -> ExitCode {
    match report(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn report(arguments: &Arguments) -> Result<()> {
    let all = scenarios::all();
    if arguments.list {
        for scenario in &all {
            println!("{:16} {}", scenario.name, scenario.title);
        }
        return Ok(());
    }
    let (seconds, repetitions) = match arguments.quick {
        true => (0.1, 2),
        false => (arguments.seconds, arguments.repetitions),
    };
    ensure!(repetitions > 0, "--repetitions 0 measures nothing; give 1 or more");
    ensure!((0.0..=10_000.0).contains(&arguments.minutes), "--minutes must be between 0 and 10000");
    ensure!((0.05..=60.0).contains(&seconds), "--seconds must be between 0.05 and 60");
    let named = |name: &str, only: &[String]| only.is_empty() || only.iter().any(|part| name.contains(part.as_str()));
    let begins =
        |name: &str, only: &[String]| only.is_empty() || only.iter().any(|part| name.starts_with(part.as_str()));
    let mut chosen: Vec<scenarios::Scenario> =
        all.into_iter().filter(|scenario| begins(scenario.name, &arguments.only)).collect();
    for scenario in &mut chosen {
        scenario.cases.retain(|case| named(&case.name, &arguments.case));
    }
    chosen.retain(|scenario| !scenario.cases.is_empty());
    ensure!(!chosen.is_empty(), "no scenario is left by --only and --case; see --list");
    let limit = Duration::from_secs_f64(arguments.minutes * 60.0);
    let plan = Plan { length: Duration::from_secs_f64(seconds), repetitions, limit, cores: Cores::first_two()? };
    let results = run::run(&plan, chosen)?;
    let files = output::write(&arguments.output, &results)?;
    print!("{}", output::markdown::summary(&results));
    for file in files {
        println!("written: {}", file.display());
    }
    Ok(())
}
