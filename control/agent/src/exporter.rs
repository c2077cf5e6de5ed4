//! Metrics for Prometheus, and the two questions that a kubelet asks, over HTTP on a port of their own.
//!
//! | path | answer |
//! |---|---|
//! | `/metrics` | everything that is measured ([`metrics`](super::metrics)), in the OpenMetrics text format |
//! | `/healthz` | 200 if every worker moves and the daemon's loop answers; 503 and one line otherwise |
//! | `/readyz` | 200 once the objects are read, and policy is in force on every worker; 503 and one line before |

use std::io;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;

use super::metrics::encode;
use super::query::{Asker, Question};

/// The content type of the OpenMetrics text format.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A port that is listened on and not served yet.
pub(super) struct Metrics(TcpListener);

/// The port cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error(
    "metrics.listen = {address}: cannot be listened on ({source}); give a free port of an address of this node, or \"off\""
)]
pub(super) struct ListenError {
    address: SocketAddr,
    source: io::Error,
}

impl Metrics {
    /// Listens at `address`.
    pub(super) async fn listen(address: SocketAddr) -> Result<Self, ListenError> {
        TcpListener::bind(address).await.map(Self).map_err(|source| ListenError { address, source })
    }

    /// Serves it from the current runtime until that ends.
    pub(super) fn serve(self, asker: Asker) {
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(asker);
        tokio::spawn(async move {
            if let Err(error) = axum::serve(self.0, router).await {
                tracing::error!(%error, "metrics are not served any more");
            }
        });
    }
}

async fn metrics(State(asker): State<Asker>) -> Response {
    let text = match asker.ask(Question::Metrics).await {
        Ok(collected) => encode(collected, asker.walks()).await.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

async fn healthz(State(asker): State<Asker>) -> Response {
    if asker.is_starting() {
        // It may wait long for its source: no reason to have it started anew.
        return probe(Ok(()));
    }
    probe(asker.ask(Question::Health).await.unwrap_or_else(|error| Err(error.to_string())))
}

async fn readyz(State(asker): State<Asker>) -> Response {
    probe(asker.ask(Question::Readiness).await.unwrap_or_else(|error| Err(error.to_string())))
}

fn probe(answer: Result<(), String>) -> Response {
    match answer {
        Ok(()) => "ok\n".into_response(),
        Err(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")).into_response(),
    }
}
