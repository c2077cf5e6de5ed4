//! `penstock completion`: completions for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use super::Failure;

/// Print a completion script for a shell
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  printed
  1  the output cannot be written
  2  bad arguments

Examples:
  penstock completion bash > /etc/bash_completion.d/penstock
  source <(penstock completion zsh)")]
pub(super) struct Args {
    shell: Shell,
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::Cli::command(), "penstock", &mut script);
    Failure::print(&script)
}
