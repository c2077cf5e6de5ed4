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
    pub(super) fn client(&self) -> Result<Client, Failure> {
        Client::new(&self.socket).map_err(|error| Failure::Failed(error.into()))
    }

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
