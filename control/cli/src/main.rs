//! The `penstock` command: one file a subcommand.
//!
//! Every subcommand is a module with `Args` (what clap reads, with its help) and `run(Args)`. Answers go to
//! standard output, complaints to standard error as one line each. Exit codes: 0 all was done, 1 it was tried
//! and failed, 2 the input (arguments, configuration, manifests, the machine) is bad, 3 what was compared differs.
//!
//! What is printed, and how, is decided here: the crates below hand over values and plain text. No crate depends on this one.

mod check;
mod cleanup;
mod cluster;
mod completion;
mod configuration;
mod daemon;
mod dump;
mod evaluate;
mod explain;
mod failure;
mod flows;
mod lint;
mod matrix;
mod render;
mod replay;
mod run;
mod status;
mod style;
mod top;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use failure::Failure;

/// NetworkPolicy in userspace, at packet rate.
#[derive(Parser, Debug)]
#[command(name = "penstock", version, max_term_width = 110, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Evaluate(evaluate::Args),
    Explain(explain::Args),
    Matrix(matrix::Args),
    Render(render::Args),
    Lint(lint::Args),
    Check(check::Args),
    Cleanup(cleanup::Args),
    Completion(completion::Args),
    Replay(replay::Args),
    Run(run::Args),
    Status(status::Args),
    Flows(flows::Args),
    Top(top::Args),
    Dump(dump::Args),
}

/// Parses the command line, runs the subcommand, returns the process's exit code.
fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Evaluate(args) => evaluate::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Matrix(args) => matrix::run(args),
        Command::Render(args) => render::run(args),
        Command::Lint(args) => lint::run(args),
        Command::Check(args) => check::run(args),
        Command::Cleanup(args) => cleanup::run(args),
        Command::Completion(args) => completion::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Run(args) => run::run(args),
        Command::Status(args) => status::run(args),
        Command::Flows(args) => flows::run(args),
        Command::Top(args) => top::run(args),
        Command::Dump(args) => dump::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_a_description_and_examples() {
        for command in super::Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Examples:"), "{} has no examples", command.get_name());
            assert!(help.contains(&format!("penstock {}", command.get_name())), "{}", command.get_name());
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }
}
