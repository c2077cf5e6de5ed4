//! The capture socket: `GET /v1/capture`, answered with a stream of packets ([`penstock_admin::capture`]).

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse;
use axum::routing::get;
use futures_util::stream;
use penstock_admin::capture::CaptureQuery;
use tokio::net::UnixListener;

use super::routes::HttpError;
use crate::query::{QueryHandle, StateQuery};

/// Serves this socket until the runtime ends.
pub(super) async fn serve(listener: UnixListener, handle: QueryHandle) {
    let router = Router::new()
        .route("/v1/capture", get(capture))
        .fallback(
            |uri: Uri| async move { HttpError(StatusCode::NOT_FOUND, format!("{uri}: not found; use /v1/capture")) },
        )
        .with_state(handle);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "captures are no longer served");
    }
}

/// The stream ends with the capture. If the client disconnects, it is dropped, which ends the capture.
async fn capture(
    State(handle): State<QueryHandle>,
    Query(query): Query<CaptureQuery>,
) -> Result<impl IntoResponse, HttpError> {
    let query = Box::new(query);
    let started = handle.query(|answer| StateQuery::Capture { query, answer }).await?;
    let chunks = started.map_err(HttpError::bad)?;
    Ok(Body::from_stream(stream::unfold(chunks, |mut chunks| async {
        let chunk = chunks.recv().await?;
        Some((Ok::<_, Infallible>(chunk), chunks))
    })))
}
