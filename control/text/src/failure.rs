//! How a command ends when it does not succeed.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use penstock_admin::printable::Printable;

/// Why a command failed; decides its exit code.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The input is bad: each line names the thing, the value and the remedy. Exit code 2.
    #[error("{}", .0.join("\n"))]
    BadInput(Vec<String>),
    /// The input was good, but doing it failed. Exit code 1.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
    /// Succeeded, and what was compared differs; the answer lists it. Exit code 3.
    #[error("")]
    Differs,
    /// Some nodes have answered and some have not; each line names one that has not. Exit code 4.
    #[error("{}", .0.join("\n"))]
    Partial(Vec<String>),
}

impl Failure {
    pub fn bad_input(problem: impl Display) -> Self {
        Self::BadInput(vec![problem.to_string()])
    }

    /// Prints an answer on standard output.
    pub fn print(answer: impl AsRef<[u8]>) -> Result<(), Self> {
        io::stdout().write_all(answer.as_ref()).or_else(Self::from_output)
    }

    /// Writing the answer failed. A reader that has seen enough (`penstock … | head`) is no failure.
    ///
    /// # Errors
    /// Every other error, as [`Failure::Failed`].
    pub fn from_output(error: io::Error) -> Result<(), Self> {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Ok(()),
            _ => Err(Self::Failed(anyhow::Error::new(error).context("cannot write the answer"))),
        }
    }

    /// Prints itself on standard error, one line a problem behind the command's name, and gives the exit code.
    pub fn report(&self, command: &str) -> ExitCode {
        for line in self.to_string().lines() {
            eprintln!("{command}: {}", Printable(line));
        }
        match self {
            Self::BadInput(_) => ExitCode::from(2),
            Self::Failed(_) => ExitCode::FAILURE,
            Self::Differs => ExitCode::from(3),
            Self::Partial(_) => ExitCode::from(4),
        }
    }
}
