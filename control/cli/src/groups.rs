//! The subcommands, in the groups of `penstock --help`.
//!
//! clap has one list of subcommands without headings. Here each group is a type, so that every subcommand is in exactly
//! one, and the help text is generated from what clap knows of the group.

use clap::Subcommand;

use super::help::Group;
use super::{
    Failure, capture, check, cleanup, completion, dump, evaluate, explain, flows, learn, lint, man, matrix, names,
    ready, render, replay, rules, run, schema, status, top, trial,
};

/// All subcommands.
#[derive(Subcommand, Debug)]
pub(super) enum Command {
    #[command(flatten)]
    Node(NodeCommand),
    #[command(flatten)]
    Daemon(DaemonCommand),
    #[command(flatten)]
    Policy(PolicyCommand),
    #[command(flatten)]
    Capture(CaptureCommand),
    #[command(flatten)]
    Install(InstallCommand),
}

/// For who runs a node.
#[derive(Subcommand, Debug)]
pub(super) enum NodeCommand {
    Run(run::Args),
    Check(check::Args),
    Cleanup(cleanup::Args),
}

/// For who looks into a running daemon.
#[derive(Subcommand, Debug)]
pub(super) enum DaemonCommand {
    Status(status::Args),
    Flows(flows::Args),
    Top(top::Args),
    Ready(ready::Args),
    Capture(capture::Args),
    Rules(rules::Args),
    Names(names::Args),
    Dump(dump::Args),
}

/// For who writes policies.
#[derive(Subcommand, Debug)]
pub(super) enum PolicyCommand {
    Evaluate(evaluate::Args),
    Explain(explain::Args),
    Matrix(matrix::Args),
    Learn(learn::Args),
    Lint(lint::Args),
    Trial(trial::Args),
    Render(render::Args),
}

/// For who has captures.
#[derive(Subcommand, Debug)]
pub(super) enum CaptureCommand {
    Replay(replay::Args),
}

/// For who installs Penstock.
#[derive(Subcommand, Debug)]
pub(super) enum InstallCommand {
    Completion(completion::Args),
    Man(man::Args),
    Schema(schema::Args),
}

impl Command {
    pub(super) fn run(self) -> Result<(), Failure> {
        match self {
            Self::Node(NodeCommand::Run(args)) => run::run(args),
            Self::Node(NodeCommand::Check(args)) => check::run(args),
            Self::Node(NodeCommand::Cleanup(args)) => cleanup::run(args),
            Self::Daemon(DaemonCommand::Status(args)) => status::run(args),
            Self::Daemon(DaemonCommand::Flows(args)) => flows::run(args),
            Self::Daemon(DaemonCommand::Top(args)) => top::run(args),
            Self::Daemon(DaemonCommand::Capture(args)) => capture::run(args),
            Self::Daemon(DaemonCommand::Rules(args)) => rules::run(args),
            Self::Daemon(DaemonCommand::Names(args)) => names::run(args),
            Self::Daemon(DaemonCommand::Dump(args)) => dump::run(args),
            Self::Daemon(DaemonCommand::Ready(args)) => ready::run(args),
            Self::Policy(PolicyCommand::Evaluate(args)) => evaluate::run(args),
            Self::Policy(PolicyCommand::Explain(args)) => explain::run(args),
            Self::Policy(PolicyCommand::Matrix(args)) => matrix::run(args),
            Self::Policy(PolicyCommand::Learn(args)) => learn::run(args),
            Self::Policy(PolicyCommand::Lint(args)) => lint::run(args),
            Self::Policy(PolicyCommand::Trial(args)) => trial::run(args),
            Self::Policy(PolicyCommand::Render(args)) => render::run(args),
            Self::Capture(CaptureCommand::Replay(args)) => replay::run(args),
            Self::Install(InstallCommand::Completion(args)) => completion::run(args),
            Self::Install(InstallCommand::Man(args)) => man::run(args, &groups()),
            Self::Install(InstallCommand::Schema(args)) => schema::run(args),
        }
    }
}

/// All groups, in the order of the help text.
pub(super) fn groups() -> [Group; 5] {
    [
        Group::of::<NodeCommand>("Run a node"),
        Group::of::<DaemonCommand>("Look into a running daemon"),
        Group::of::<PolicyCommand>("Work on policies"),
        Group::of::<CaptureCommand>("Replay captures"),
        Group::of::<InstallCommand>("Install"),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::CommandFactory;

    use super::super::Cli;
    use super::*;

    #[test]
    fn every_subcommand_is_in_exactly_one_group_of_the_help_text() {
        let mut times = BTreeMap::new();
        for command in groups().iter().flat_map(|group| &group.commands) {
            *times.entry(command.get_name().to_owned()).or_insert(0) += 1;
        }
        let all = Cli::command();
        let expected: BTreeMap<String, i32> =
            all.get_subcommands().map(|command| (command.get_name().to_owned(), 1)).collect();
        assert_eq!(times, expected);
        let help = Cli::command().render_help().to_string();
        for (name, about) in all.get_subcommands().map(|command| (command.get_name(), command.get_about().unwrap())) {
            let shown = help.lines().filter(|line| line.trim_start().starts_with(&format!("{name} "))).count();
            assert_eq!(shown, 1, "{name}\n{help}");
            assert!(help.contains(&about.to_string()), "{name}\n{help}");
        }
        let longest = help.lines().map(str::len).max().unwrap();
        assert!(longest <= 100, "lines of the groups are not wrapped: {longest} columns\n{help}");
    }
}
