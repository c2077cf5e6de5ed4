//! The bindings of pods and interfaces, with the files that they come from and one of their own: what neighbours named first must not be
//! asked again by the next process.

use std::fs;
use std::os::unix::fs::MetadataExt;

use penstock_policy::model::{ObjectKey, Pod};

use crate::config::Config;
use crate::discovery::{Bindings, CniResults, FirstBinding, NetworkState, has_network_on};
use crate::state_file::{Identity, StateFile, StateFileError};

/// Suffix of the file, after the name of the connection table's file.
pub(crate) const SUFFIX: &str = ".interfaces";
const VERSION: u32 = 1;
/// Another one has other interfaces, as another boot has.
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// The bindings, up to date with the last [`PodBindings::follow`].
pub(super) struct PodBindings {
    bindings: Bindings,
    results: CniResults,
    node: String,
    file: Option<StateFile>,
    kept: Vec<FirstBinding>,
    /// A problem of the file was logged.
    is_failing: bool,
}

impl PodBindings {
    /// With what an earlier process has found, if there is a state directory. The calling thread is in the node's namespace.
    pub(super) fn open(config: &Config) -> Self {
        let node = config.node.as_str().to_owned();
        let file = Identity::of_boot().zip(fs::metadata(NAMESPACE).ok()).and_then(|(boot, namespace)| {
            let origin = format!("{boot}, network namespace {}", namespace.ino());
            let identity = Identity::new("pods' interfaces", VERSION, &node, origin);
            StateFile::beside(&config.conntrack.mapping, SUFFIX, identity)
        });
        let read = file.as_ref().map_or(Ok(None), StateFile::read_json::<Vec<FirstBinding>>);
        let kept = read.unwrap_or_else(|error| {
            match error {
                StateFileError::Other { .. } => tracing::info!("interfaces of the last run: {error}"),
                _ => tracing::warn!("interfaces of the last run: {error}"),
            }
            None
        });
        let kept = kept.unwrap_or_default();
        let (bindings, results) = (Bindings::of_earlier(kept.clone()), CniResults::new(&config.cni_results));
        Self { bindings, results, node, file, kept, is_failing: false }
    }

    /// Reads what has changed, and follows it.
    pub(super) fn follow<'a>(&mut self, netstate: &NetworkState, pods: impl IntoIterator<Item = &'a Pod>) -> &Bindings {
        let (pods, others): (Vec<&Pod>, Vec<&Pod>) = pods.into_iter().partition(|pod| has_network_on(pod, &self.node));
        self.bindings.update(self.results.read(), netstate, pods);
        let awaits_network = |pod: &&Pod| pod.node.as_deref() == Some(&self.node) && !pod.host_network && !pod.finished;
        self.bindings.note_awaited(others.iter().any(awaits_network));
        &self.bindings
    }

    /// As of the last [`PodBindings::follow`].
    pub(super) fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    /// `penstock-cni` was given these interfaces of a pod. Returns whether that is news.
    pub(super) fn told(&mut self, pod: &ObjectKey, interfaces: Vec<String>) -> bool {
        self.bindings.told(pod, interfaces)
    }

    /// Writes the file, if neighbours have named a pod's interface, or one is gone.
    pub(super) fn keep(&mut self) {
        let Some(file) = &self.file else { return };
        if self.bindings.first().eq(&self.kept) {
            return;
        }
        self.kept = self.bindings.first().cloned().collect();
        // Strings and numbers are always serializable.
        let content = serde_json::to_vec(&self.kept).unwrap_or_default();
        match file.write([&content[..]]) {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!("interfaces of pods on bridges are not kept for the next start: {error}");
                }
            }
        }
    }
}
