//! Metrics for Prometheus and the kubelet's probes, over HTTP on their own port.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | all metrics ([`metrics`](super::metrics)), in the OpenMetrics text format |
//! | `/healthz` | 200 if every worker polls and the daemon's loop answers; otherwise 503 and one line |
//! | `/readyz` | 200 once all objects are read and policy is in effect on every worker; otherwise 503 and one line |

mod connections;
mod socket_owner;

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use connections::BoundedListener;

use super::metrics::encode;
use super::query::{QueryHandle, StateQuery};

/// The content type of the OpenMetrics text format.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A listening port, not served yet.
pub(super) struct MetricsListener(TcpListener);

#[derive(Debug, thiserror::Error)]
#[error(
    "metrics.listen = {address}: cannot listen there ({source}); set a free port on an address of this node, or \"off\""
)]
pub(super) struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

impl ListenError {
    pub(super) fn is_in_use(&self) -> bool {
        self.source.kind() == io::ErrorKind::AddrInUse
    }
}

impl MetricsListener {
    pub(super) async fn listen(address: SocketAddr) -> Result<Self, ListenError> {
        TcpListener::bind(address).await.map(Self).map_err(|source| ListenError { address, source })
    }

    /// Serves it on the current runtime until that ends.
    pub(super) fn serve(self, handle: QueryHandle) {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(handle);
        tokio::spawn(async move {
            if let Err(error) = axum::serve(BoundedListener::new(self.0), router).await {
                tracing::error!(%error, "metrics have stopped being served");
            }
        });
    }
}

async fn metrics(State(handle): State<QueryHandle>) -> Response {
    let text = match handle.query(StateQuery::Metrics).await {
        Ok(scrape) => encode(scrape, handle.scans()).await.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

async fn healthz(State(handle): State<QueryHandle>) -> Response {
    if handle.is_starting() {
        // It may wait long for its source, which is no reason to restart it.
        return probe(Ok(()));
    }
    probe(handle.query(StateQuery::Health).await.unwrap_or_else(|error| Err(error.to_string())))
}

async fn readyz(State(handle): State<QueryHandle>) -> Response {
    probe(handle.query(StateQuery::Readiness).await.unwrap_or_else(|error| Err(error.to_string())))
}

fn probe(answer: Result<(), String>) -> Response {
    match answer {
        Ok(()) => "ok\n".into_response(),
        Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")).into_response(),
    }
}
