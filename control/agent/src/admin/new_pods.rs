//! The socket of the CNI plugin: `POST /v1/pods`, answered once the pod's policy is in effect, or the time is over.

use std::net::IpAddr;
use std::time::Duration;

use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{StatusCode, Uri};
use axum::routing::post;
use axum::{Json, Router};
use penstock_admin::types::{NewPod, NewPodState};
use penstock_policy::model::ObjectKey;
use tokio::net::UnixListener;
use tokio::time::{Instant, sleep};

use super::routes::HttpError;
use crate::query::{QueryHandle, StateQuery};

/// How often a pod that is not ready yet is asked for.
const INTERVAL: Duration = Duration::from_millis(5);

/// Serves this socket until the runtime ends.
pub(super) async fn serve(listener: UnixListener, handle: QueryHandle) {
    let router = Router::new()
        .route("/v1/pods", post(announce))
        .fallback(|uri: Uri| async move { HttpError(StatusCode::NOT_FOUND, format!("{uri}: not found; use /v1/pods")) })
        .with_state(handle);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the CNI plugin is no longer served");
    }
}

async fn announce(
    State(handle): State<QueryHandle>,
    pod: Result<Json<NewPod>, JsonRejection>,
) -> Result<Json<NewPodState>, HttpError> {
    let Json(pod) = pod.map_err(|refused| HttpError(refused.status(), refused.body_text()))?;
    check(&pod).map_err(HttpError::bad)?;
    let until = Instant::now() + Duration::from_millis(pod.wait_ms);
    let key = ObjectKey { namespace: pod.namespace, name: pod.name };
    loop {
        let (interfaces, addresses) = (pod.interfaces.clone(), pod.addresses.clone());
        let pod = key.clone();
        // While the daemon reads all objects there is no answer yet.
        let state = handle.query(|answer| StateQuery::NewPod { pod, addresses, interfaces, answer }).await;
        let awaits = match state {
            Ok(Ok(())) => return Ok(Json(NewPodState { awaits: None })),
            Ok(Err(awaits)) => awaits,
            Err(error) => error.to_string(),
        };
        if Instant::now() >= until {
            return Ok(Json(NewPodState { awaits: Some(awaits) }));
        }
        sleep(INTERVAL).await;
    }
}

fn check(pod: &NewPod) -> Result<(), String> {
    let unusable = |address: &IpAddr| address.is_unspecified() || address.is_loopback() || address.is_multicast();
    if let Some(address) = pod.addresses.iter().find(|address| unusable(address)) {
        return Err(format!("addresses: {address} is no address of a pod"));
    }
    if !(1..=NewPod::MOST_ADDRESSES).contains(&pod.addresses.len()) {
        return Err(format!("addresses: {}; give 1 to {}", pod.addresses.len(), NewPod::MOST_ADDRESSES));
    }
    if pod.interfaces.len() > NewPod::MOST_INTERFACES {
        return Err(format!("interfaces: {}; give at most {}", pod.interfaces.len(), NewPod::MOST_INTERFACES));
    }
    if pod.wait_ms > NewPod::LONGEST_WAIT {
        return Err(format!("wait_ms: {}; give at most {}", pod.wait_ms, NewPod::LONGEST_WAIT));
    }
    Ok(())
}
