//! The `penstock` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    penstock_control::cli::main()
}
