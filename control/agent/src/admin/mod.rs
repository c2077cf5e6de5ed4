//! The admin API: HTTP with JSON over a unix socket, read-only, for the commands and for scripts.
//!
//! | path | answer |
//! |---|---|
//! | `/v1/status` | [`penstock_admin::types::Status`] |
//! | `/v1/flows` | [`penstock_admin::types::Flows`]; query: [`penstock_admin::types::FlowsQuery`] |
//! | `/v1/explain` | [`penstock_admin::types::Explanation`]; query: [`penstock_admin::types::ExplainQuery`] |
//! | `/v1/dump` | [`penstock_admin::types::Dump`] |
//!
//! The control thread answers between two of its own steps; nothing here is shared with the workers but
//! their counters, and no lock is. What takes long, going through the connection table, is done on a thread of its own, once at
//! a time.

mod answer;
mod bundle;
mod routes;
mod socket;

use std::path::Path;

use tokio::net::UnixListener;

pub(super) use socket::SocketError;
use socket::SocketFile;

use crate::query::Asker;

/// A socket that is listened on and not served yet.
pub(super) struct Admin {
    listener: UnixListener,
    file: SocketFile,
}

/// A socket that is served. It is removed, and its path free, when this is dropped.
pub(super) struct Served {
    _file: SocketFile,
}

impl Admin {
    /// Listens at `path`.
    pub(super) fn listen(path: &Path) -> Result<Self, SocketError> {
        let (listener, file) = socket::listen(path)?;
        Ok(Self { listener, file })
    }

    /// Serves it from the current runtime.
    pub(super) fn serve(self, asker: Asker) -> Served {
        tokio::spawn(routes::serve(self.listener, asker));
        Served { _file: self.file }
    }
}
