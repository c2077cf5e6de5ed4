//! Shared by the commands that query a running daemon.

use std::path::PathBuf;

use penstock_admin::client::{Client, ClientError, DEFAULT_SOCKET};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Failure;

/// Options of the commands that query a daemon.
#[derive(clap::Args, Clone, Debug)]
pub(super) struct DaemonArgs {
    /// The daemon's admin socket (admin.socket of its configuration)
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(super) socket: PathBuf,
}

impl DaemonArgs {
    /// A client of it.
    pub(super) fn client(&self) -> Result<Client, Failure> {
        Client::new(&self.socket).map_err(|error| Failure::Failed(error.into()))
    }

    /// Sends one query.
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str, query: &impl Serialize) -> Result<T, Failure> {
        self.client()?.get(path, query).map_err(failure)
    }
}

/// Maps a failed query to the command's failure: bad input, or a failed attempt.
pub(super) fn failure(error: ClientError) -> Failure {
    match error {
        ClientError::NoDaemon { .. } | ClientError::Rejected(_) => Failure::bad_input(error),
        ClientError::Failed { .. } => Failure::Failed(error.into()),
    }
}

/// Printed as JSON, for programs.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("strings and numbers are JSON") + "\n"
}

/// A number with a unit's prefix: `999`, `1.2k`, `34M`.
pub(super) fn short(number: f64) -> String {
    let scaled = [("G", 1e9), ("M", 1e6), ("k", 1e3)].into_iter().find(|(_, unit)| number >= *unit * 0.9995);
    match scaled {
        Some((prefix, unit)) if number / unit < 9.995 => format!("{:.1}{prefix}", number / unit),
        Some((prefix, unit)) => format!("{:.0}{prefix}", number / unit),
        None if number.fract() == 0.0 => format!("{number:.0}"),
        None if number < 9.995 => format!("{number:.1}"),
        None => format!("{number:.0}"),
    }
}

/// A share from 0 to 1 in percent.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_are_short_and_continuous_across_units() {
        for (number, text) in [
            (0.0, "0"),
            (0.25, "0.2"),
            (9.99, "10.0"),
            (7.0, "7"),
            (12.4, "12"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (1_234.0, "1.2k"),
            (56_789.0, "57k"),
            (2_500_000.0, "2.5M"),
            (3e9, "3.0G"),
        ] {
            assert_eq!(short(number), text, "{number}");
        }
    }
}
