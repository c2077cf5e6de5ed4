//! The admin API: HTTP with JSON over a unix socket, for the commands and for scripts. It changes nothing of what is in effect.
//!
//! | path | answer |
//! |---|---|
//! | `/v1/status` | [`penstock_admin::types::Status`] |
//! | `/v1/flows` | [`penstock_admin::types::Flows`]; query: [`penstock_admin::types::FlowsQuery`] |
//! | `/v1/explain` | [`penstock_admin::types::Explanation`]; query: [`penstock_admin::types::ExplainQuery`] |
//! | `/v1/names` | [`penstock_admin::types::Names`]; query: [`penstock_admin::types::NamesQuery`] |
//! | `/v1/dump` | [`penstock_admin::types::Dump`] |
//! | `/v1/rules` | [`penstock_admin::types::Rules`] |
//! | `/v1/trial` | [`penstock_admin::types::TrialStatus`]; `POST` takes a [`penstock_admin::types::TrialRequest`], `DELETE` ends it |
//! | `/v1/ready` | nothing, or an error with what is missing, as `/readyz` of the metrics |
//!
//! Captures have a socket of their own ([`captures`]), because packets say more than names and numbers:
//!
//! | path | answer |
//! |---|---|
//! | `/v1/capture` | messages of [`penstock_admin::capture`]; query: [`penstock_admin::capture::CaptureQuery`] |
//!
//! So does the CNI plugin ([`new_pods`]): what it tells is in effect at once.
//!
//! | path | answer |
//! |---|---|
//! | `/v1/pods` | `POST` takes a [`penstock_admin::types::NewPod`]; [`penstock_admin::types::NewPodState`] |
//!
//! The control thread answers between its other steps. The answers share nothing with the workers but their counters,
//! and take no lock. Scans of the connection table, which take long, run on their own thread, one at a time.

mod answer;
mod bundle;
mod captures;
pub(crate) mod names;
mod new_pods;
mod routes;
mod trial;

use std::path::Path;

use tokio::net::UnixListener;

use crate::query::QueryHandle;
use crate::unix_socket::{AdminSocketError, SocketFile, listen};

/// A listening socket, not served yet.
pub(super) struct AdminListener {
    listener: UnixListener,
    file: SocketFile,
}

/// A served socket. Dropping it removes the file, so that the path is free.
pub(super) struct AdminServer {
    _file: SocketFile,
}

impl AdminListener {
    /// Listens at `path`, which is the value of `key`.
    pub(super) fn listen(path: &Path, key: &'static str) -> Result<Self, AdminSocketError> {
        let (listener, file) = listen(path, key)?;
        Ok(Self { listener, file })
    }

    /// Serves captures on the current runtime.
    pub(super) fn serve_captures(self, handle: QueryHandle) -> AdminServer {
        tokio::spawn(captures::serve(self.listener, handle));
        AdminServer { _file: self.file }
    }

    /// Serves the CNI plugin on the current runtime.
    pub(super) fn serve_new_pods(self, handle: QueryHandle) -> AdminServer {
        tokio::spawn(new_pods::serve(self.listener, handle));
        AdminServer { _file: self.file }
    }

    /// Serves the admin API on the current runtime.
    pub(super) fn serve(self, handle: QueryHandle) -> AdminServer {
        tokio::spawn(routes::serve(self.listener, handle));
        AdminServer { _file: self.file }
    }
}
