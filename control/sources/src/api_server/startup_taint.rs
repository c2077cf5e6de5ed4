//! A taint that keeps pods off a node until policy is in effect there. Whoever registers the node sets it; the daemon removes it.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Taint};
use kube::Api;
use kube::api::{Patch, PatchParams};
use penstock_admin::printable::with_causes;
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::Shared;
use super::backoff::Backoff;

/// For one request.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct StartupTaint {
    /// Its key; the effect may be any.
    pub key: String,
    /// Sent once the node is ready. If the sender is dropped, the taint stays.
    pub ready: oneshot::Receiver<()>,
}

#[derive(Debug, thiserror::Error)]
enum RemoveError {
    #[error("{0}: the account needs the verbs get and patch on nodes; apply configs/kubernetes/startup-taint")]
    Forbidden(String),
    #[error("{0}")]
    Other(String),
    #[error("no answer within {} s", LIMIT.as_secs())]
    Slow,
}

impl From<kube::Error> for RemoveError {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) if status.code == 403 => Self::Forbidden(status.message),
            error => Self::Other(with_causes(&error)),
        }
    }
}

/// Waits until the node is ready, and removes the taint. A failure is logged once and tried again.
pub(super) async fn remove(shared: Arc<Shared>, node: String, taint: StartupTaint) {
    if taint.ready.await.is_err() {
        return;
    }
    let (mut backoff, mut is_failing) = (Backoff::default(), false);
    loop {
        let client = shared.client.get();
        let removed = timeout(LIMIT, remove_once(&Api::all(client.client.clone()), &node, &taint.key)).await;
        match removed.unwrap_or(Err(RemoveError::Slow)) {
            Ok(true) => return tracing::info!(taint = taint.key, "the node is ready, and its taint is removed"),
            Ok(false) => return,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(
                        taint = taint.key,
                        "cannot remove the taint of this node, which keeps pods off it: {error}"
                    );
                }
            }
        }
        // Tokens and certificates change.
        let _ = shared.client.renew(&client).await;
        sleep(backoff.next_unreachable()).await;
    }
}

/// Removes all taints with this key. False if there is none, or no such node.
async fn remove_once(nodes: &Api<Node>, name: &str, key: &str) -> Result<bool, RemoveError> {
    let Some(node) = nodes.get_opt(name).await? else { return Ok(false) };
    let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
    let kept: Vec<&Taint> = taints.iter().filter(|taint| taint.key != key).collect();
    if kept.len() == taints.len() {
        return Ok(false);
    }
    // A merge replaces a list as a whole (RFC 7386). With the version it fails if another one was faster.
    let patch =
        json!({ "metadata": { "resourceVersion": node.metadata.resource_version }, "spec": { "taints": kept } });
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(true)
}
