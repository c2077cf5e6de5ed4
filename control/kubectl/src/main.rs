//! The `kubectl penstock` command: what `penstock` says of one node, of all nodes of a cluster.
//!
//! Finds the pods of Penstock at the API server, runs the daemon's own commands in them by `pods/exec`, and merges the answers. It
//! has the rights of the user's kubeconfig, and none of the daemon's. One file a command, as in `penstock`.
//!
//! A node that does not answer is named, with the reason and the remedy; its absence changes the exit code.

mod api;
mod ask;
mod capture;
mod cluster;
mod dump;
mod explain;
#[cfg(test)]
mod fake;
mod flows;
mod folder;
mod rules;
mod status;
mod top;
mod trial;
mod wait;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use jiff::{Span, SpanRelativeTo, Unit};
use tokio::runtime::Builder;

use api::{ApiCluster, ClusterArgs};
use ask::Asking;
use penstock_text::failure::Failure;

/// Penstock on all nodes of a cluster
#[derive(Parser, Debug)]
#[command(
    name = "kubectl-penstock",
    bin_name = "kubectl penstock",
    version,
    max_term_width = 110,
    arg_required_else_help = true,
    after_help = "\
Exit codes:
  0  done; all nodes have answered
  1  tried, and failed; or no node has answered
  2  bad input: arguments, the kubeconfig, or rights that the user lacks
  3  trial status: something would change
  4  some nodes have answered and some have not; they are named on standard error

`kubectl penstock COMMAND --help` has a command's options, exit codes and examples."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// How long a node may take to answer
    #[arg(long, global = true, value_name = "TIME", default_value = "30s", value_parser = time, help_heading = "Cluster options")]
    request_timeout: Duration,
    /// Nodes that are asked at a time
    #[arg(long, global = true, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000), help_heading = "Cluster options")]
    parallel: u16,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Status(status::Args),
    Wait(wait::Args),
    Flows(flows::Args),
    Top(top::Args),
    Rules(rules::Args),
    Explain(explain::Args),
    Trial(trial::Args),
    Capture(Box<capture::Args>),
    Dump(dump::Args),
}

fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a length of time: write a number and s, m, h or d, such as 30s");
    let span: Span = text.parse().map_err(|_| wrong())?;
    let seconds = span.total((Unit::Second, SpanRelativeTo::days_are_24_hours())).map_err(|_| wrong())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// Tells the user something beside the answer.
fn tell(note: Option<&str>) {
    if let Some(note) = note {
        eprintln!("kubectl penstock: {note}");
    }
}

impl Cli {
    fn run(self) -> Result<(), Failure> {
        let Self { command, cluster, request_timeout, parallel } = self;
        let asking = Asking { timeout: request_timeout, parallel: usize::from(parallel) };
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::Failed(error.into()))?;
        let outcome = runtime.block_on(async {
            let cluster = ApiCluster::new(cluster).await?;
            match command {
                Command::Status(args) => status::run(&cluster, asking, args).await,
                Command::Wait(args) => wait::run(&cluster, asking, args).await,
                Command::Flows(args) => flows::run(&cluster, asking, args).await,
                Command::Top(args) => top::run(&cluster, asking, args).await,
                Command::Rules(args) => rules::run(&cluster, asking, args).await,
                Command::Explain(args) => explain::run(&cluster, asking, args).await,
                Command::Trial(args) => trial::run(&cluster, asking, args).await,
                Command::Capture(args) => capture::run(&cluster, asking, *args).await,
                Command::Dump(args) => dump::run(&cluster, asking, args).await,
            }
        });
        // A pending name lookup must not delay the end.
        runtime.shutdown_background();
        outcome
    }
}

/// Parses the command line, runs the command, returns the process's exit code.
fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("kubectl penstock"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_exit_codes_and_examples_that_parse() {
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name}");
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let section = |heading: &str| {
                let lines = help.lines().skip_while(|line| *line != format!("{heading}:")).skip(1);
                lines.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()).collect::<Vec<_>>()
            };
            let codes = section("Exit codes");
            for code in ["0 ", "1 ", "2 ", "4 "] {
                assert!(codes.iter().any(|line| line.starts_with(code)), "{name}: {codes:?}");
            }
            let examples = section("Examples");
            let calls = examples.iter().flat_map(|line| calls(line)).collect::<Vec<_>>();
            assert!(calls.iter().any(|words| words[1] == name), "{name} has no example: {examples:?}");
            for words in calls {
                if let Err(error) = Cli::command().try_get_matches_from(&words) {
                    panic!("{words:?}: {error}");
                }
            }
        }
    }

    /// The calls of `kubectl penstock` in a line for a shell, each with its words.
    fn calls(line: &str) -> Vec<Vec<String>> {
        let words = shlex::split(line).unwrap_or_else(|| panic!("not a command: {line}"));
        let calls = words.split(|word| ["|", ";", "&&"].contains(&word.as_str()));
        let calls = calls.filter(|call| call.starts_with(&["kubectl".to_owned(), "penstock".to_owned()]));
        calls.map(|call| call[1..].iter().take_while(|word| *word != ">").cloned().collect()).collect()
    }

    #[test]
    fn times_have_units_and_others_are_refused() {
        for (text, seconds) in [("30s", 30.0), ("1m", 60.0), ("2h", 7200.0), ("7d", 604_800.0), ("500ms", 0.5)] {
            assert_eq!(time(text).unwrap(), Duration::from_secs_f64(seconds), "{text}");
        }
        for text in ["", "30", "-5s", "soon", "1 parsec"] {
            assert!(time(text).unwrap_err().contains("such as 30s"), "{text}");
        }
    }
}
