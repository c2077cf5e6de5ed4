//! The `penstock` command: one file a subcommand.
//!
//! Every subcommand is a module with `Args` (what clap reads, with its help) and `run(Args)`. Answers go to standard
//! output, errors to standard error as one line each. Exit codes: 0 done, 1 tried and failed, 2 the input (arguments,
//! configuration, manifests, the machine) is bad, 3 what was compared differs.
//!
//! The text behind the options (`after_help`) consists of sections: a heading with a colon, and indented lines. The
//! manual pages ([`man`]) have the same sections. Each subcommand has "Exit codes" and "Examples", which a test parses.
//!
//! This crate decides what is printed, and how: the crates below hand over values and plain text. No crate depends on this one.

mod capture;
mod check;
mod cleanup;
mod cluster;
mod completion;
mod configuration;
mod daemon;
mod dump;
mod evaluate;
mod explain;
mod flows;
mod groups;
mod help;
mod learn;
mod lint;
mod man;
mod matrix;
mod names;
mod ready;
mod render;
mod replay;
mod rules;
mod run;
mod schema;
mod status;
mod style;
mod top;
mod trial;

use std::process::ExitCode;

use clap::Parser;

use groups::Command;
use penstock_text::failure::Failure;

/// NetworkPolicy in userspace, at packet rate
#[derive(Parser, Debug)]
#[command(
    name = "penstock",
    version,
    max_term_width = 110,
    arg_required_else_help = true,
    help_template = help::template(&groups::groups()),
    after_help = "\
Exit codes:
  0  done
  1  tried, and failed
  2  bad input: arguments, configuration, manifests, the machine, or no daemon
  3  replay --compare, learn --holdout, trial status: verdicts differ

`penstock COMMAND --help` has a command's options, exit codes and examples."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Parses the command line, runs the subcommand, returns the process's exit code.
fn main() -> ExitCode {
    match Cli::parse().command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report("penstock"),
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

    /// The lines of a section of a subcommand's help.
    fn section(command: &clap::Command, heading: &str) -> Vec<String> {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let lines = help.lines().skip_while(|line| *line != format!("{heading}:")).skip(1);
        lines.take_while(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()).collect()
    }

    #[test]
    fn every_subcommand_has_exit_codes_and_examples_that_parse() {
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name}");
            let codes = section(command, "Exit codes");
            assert!(codes.first().is_some_and(|line| line.starts_with("0 ")), "{name}: {codes:?}");
            assert!(codes.iter().any(|line| line.starts_with("2 ")), "{name}: {codes:?}");
            let examples = section(command, "Examples");
            let mut own = 0;
            for words in examples.iter().flat_map(|line| penstock_commands(line)) {
                own += usize::from(words[1] == name);
                if let Err(error) = Cli::command().try_get_matches_from(&words) {
                    panic!("{words:?}: {error}");
                }
            }
            assert!(own > 0, "{name} has no example: {examples:?}");
        }
    }

    /// The calls of penstock in a line for a shell, each with its words.
    fn penstock_commands(line: &str) -> Vec<Vec<String>> {
        // A process substitution is a call, too.
        let line = line.replace("<(", "; ").replace(')', " ;").replace(';', " ; ");
        let words = shlex::split(&line).unwrap_or_else(|| panic!("not a command: {line}"));
        let calls = words.split(|word| ["|", ";", "&&"].contains(&word.as_str()));
        let calls = calls.filter_map(|call| {
            let start = call.iter().position(|word| word == "penstock")?;
            Some(call[start..].iter().take_while(|word| ![">", "<"].contains(&word.as_str())).cloned().collect())
        });
        calls.collect()
    }
}
