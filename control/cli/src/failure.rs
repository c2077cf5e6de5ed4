//! How a subcommand ends when it does not succeed.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Why a subcommand failed; decides its exit code.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// The input is bad: each line names the thing, the value and the remedy. Exit code 2.
    #[error("{}", .0.join("\n"))]
    BadInput(Vec<String>),
    /// The input was good, but doing it failed. Exit code 1.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
    /// Succeeded, and the comparison found differences; the answer lists them. Exit code 3.
    #[error("")]
    Differs,
}

impl Failure {
    /// Bad input, as a one-line message.
    pub(super) fn bad_input(problem: impl Display) -> Self {
        Self::BadInput(vec![problem.to_string()])
    }

    /// Writing the answer failed. A reader that has seen enough (`penstock … | head`) is no failure.
    pub(super) fn from_output(error: io::Error) -> Result<(), Self> {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(Self::Failed(anyhow::Error::new(error).context("cannot write the answer"))),
        }
    }

    /// Prints itself on standard error, one line a problem, and gives the exit code.
    pub(super) fn report(&self) -> ExitCode {
        for line in self.to_string().lines() {
            eprintln!("penstock: {line}");
        }
        match self {
            Self::BadInput(_) => ExitCode::from(2),
            Self::Failed(_) => ExitCode::FAILURE,
            Self::Differs => ExitCode::from(3),
        }
    }
}
