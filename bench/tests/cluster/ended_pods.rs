//! Pods whose containers have ended, and whose objects a kubelet of Kubernetes 1.20 leaves in place.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell::output;

/// A kubelet of 1.20 deletes the object of a pod only after its garbage collection, which runs once a minute, has removed the pod's
/// sandbox (kubernetes/kubernetes#97288; `PodResourcesAreReclaimed` in pkg/kubelet/kubelet_pods.go). Until then a DaemonSet starts no
/// other pod on that node. This deletes such an object within a second, by force; no other version needs it. Dropping it ends that.
pub(crate) struct EndedPods {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl EndedPods {
    /// `kubectl` makes a `kubectl` with full rights.
    pub(crate) fn let_go(kubectl: impl Fn() -> Command + Send + 'static) -> Result<Self> {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let body = move || {
            while !seen.load(Ordering::Relaxed) {
                // The API server may be away, and the kubelet may have been quicker: there is a next time.
                drop(delete_ended(&kubectl));
                thread::sleep(Duration::from_secs(1));
            }
        };
        let thread = thread::Builder::new().name("ended-pods".into()).spawn(body).context("no thread")?;
        Ok(Self { ends, thread: Some(thread) })
    }
}

impl Drop for EndedPods {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn delete_ended(kubectl: &impl Fn() -> Command) -> Result<()> {
    let pods: Value = serde_json::from_str(&output(kubectl().args(["get", "pods", "-A", "-o", "json"]))?)?;
    for pod in pods["items"].as_array().into_iter().flatten().filter(|pod| has_ended(pod)) {
        let [namespace, name] = ["namespace", "name"].map(|key| pod["metadata"][key].as_str().unwrap_or_default());
        output(kubectl().args([
            "delete",
            "pod",
            "-n",
            namespace,
            name,
            "--force",
            "--grace-period=0",
            "--wait=false",
        ]))?;
    }
    Ok(())
}

/// Whether it is being deleted, and no container of it runs: that of one which is removed already is shown as waiting.
fn has_ended(pod: &Value) -> bool {
    let is_deleted = pod["metadata"]["deletionTimestamp"].is_string();
    let mut containers = pod["status"]["containerStatuses"].as_array().into_iter().flatten().peekable();
    is_deleted && containers.peek().is_some() && containers.all(|one| one["state"]["running"].is_null())
}
