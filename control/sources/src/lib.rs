//! Sources of objects: a directory of manifests, or the API server.
//!
//! Every source provides validated objects of [`penstock_policy::model`] and changes to them. [`convert`] converts
//! Kubernetes' types, [`manifest`] reads files, [`directory`] watches a directory of files, [`api_server`] lists and watches
//! a cluster. [`Source`] is one of the last two.
//!
//! The crate does not evaluate policies. `penstock-agent`, `penstock-replay` and the `penstock` command use its objects.

pub mod api_server;
pub mod convert;
pub mod directory;
mod health;
pub mod manifest;
mod typed;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use penstock_policy::model::{Object, ObjectChange, ObjectRef};
use rustc_hash::FxHashSet;

pub use health::{KindHealth, ObjectKind, SourceHealth};

use api_server::{Access, ApiServer, ApiServerTimeouts, NodeWriter};
use convert::ConversionSettings;
use directory::{DirectoryChanges, ManifestDirectory};
use manifest::ManifestError;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Location {
    Manifests(PathBuf),
    ApiServer(Access),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manifests(path) => write!(f, "manifests in {}", path.display()),
            Self::ApiServer(Access::Kubeconfig { path, context: None }) => {
                write!(f, "API server of {}", path.display())
            }
            Self::ApiServer(Access::Kubeconfig { path, context: Some(context) }) => {
                write!(f, "API server of {}, context {context}", path.display())
            }
            Self::ApiServer(Access::InCluster) => f.write_str("API server of this cluster"),
        }
    }
}

/// A source: all objects first, then changes.
#[derive(Debug)]
pub struct Source {
    backend: Backend,
    health: Arc<SourceHealth>,
}

#[derive(Debug)]
enum Backend {
    Manifests {
        directory: ManifestDirectory,
        /// Its first objects, until they are asked for.
        first: Vec<Object>,
        count: ObjectCount,
    },
    ApiServer(ApiServer),
}

#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// There is no manifest directory, or it can't be watched.
    #[error(transparent)]
    Manifests(#[from] directory::DirectoryError),
    #[error(transparent)]
    ApiServer(#[from] api_server::ApiServerError),
}

impl Source {
    /// Opens a source without waiting for an API server. `last` are the objects of the last run, which stand for
    /// what refused files had; without them pods that these may be about are closed. A `writer` also writes at the API server.
    ///
    /// # Errors
    /// The manifest directory is missing, or there is no access to the API server.
    pub async fn start(
        location: &Location,
        writer: Option<NodeWriter>,
        settings: ConversionSettings,
        last: &dyn Fn() -> Option<Vec<Object>>,
    ) -> Result<Self, SourceError> {
        let health = Arc::new(SourceHealth::default());
        let backend = match location {
            Location::Manifests(path) => {
                let (directory, objects) = ManifestDirectory::open_after(path, settings, last)?;
                health.refuse_files(directory.refused());
                ObjectKind::ALL.into_iter().for_each(|kind| {
                    health.listed(kind);
                    health.connected(kind);
                });
                health.set_unreadable(directory.unreadable().map(str::to_owned));
                let mut count = ObjectCount::default();
                objects.iter().for_each(|object| count.set(object.reference()));
                count.report(&health);
                Backend::Manifests { directory, first: objects, count }
            }
            Location::ApiServer(access) => {
                let timeouts = ApiServerTimeouts::default();
                Backend::ApiServer(ApiServer::start(access, timeouts, Arc::clone(&health), writer, settings).await?)
            }
        };
        Ok(Self { backend, health })
    }

    /// All objects, once every kind is listed: the first call's answer. Partial state is never reported. Waits for
    /// an API server, for any time; [`SourceHealth::awaited`] says why. Cancel-safe. If it is not called, an API server's
    /// objects are the first changes.
    pub async fn first(&mut self) -> Vec<Object> {
        match &mut self.backend {
            Backend::Manifests { first, .. } => std::mem::take(first),
            Backend::ApiServer(server) => server.first().await,
        }
    }

    /// The next changes; related changes arrive together. Cancel-safe: dropping the future loses none. `None` once the
    /// source has ended.
    pub async fn next(&mut self) -> Option<Vec<ObjectChange>> {
        match &mut self.backend {
            Backend::ApiServer(server) => server.next().await,
            Backend::Manifests { directory, count, .. } => {
                let DirectoryChanges { changes, refused, unreadable, .. } = directory.next().await?;
                self.health.refuse_files(refused);
                self.health.set_unreadable(unreadable);
                changes.iter().for_each(|change| {
                    count.apply(change);
                    kind_of(change).into_iter().for_each(|kind| self.health.event(kind));
                });
                count.report(&self.health);
                Some(changes)
            }
        }
    }

    /// Manifests that were not applied when it was opened: the objects of the last run stand for them, or pods are closed.
    pub fn problems(&self) -> &[ManifestError] {
        match &self.backend {
            Backend::Manifests { directory, .. } => directory.problems(),
            Backend::ApiServer(_) => &[],
        }
    }

    /// Files of the manifest directory that are not read, for their extension.
    pub fn unread_files(&self) -> &[PathBuf] {
        match &self.backend {
            Backend::Manifests { directory, .. } => directory.unread_files(),
            Backend::ApiServer(_) => &[],
        }
    }

    pub fn health(&self) -> Arc<SourceHealth> {
        Arc::clone(&self.health)
    }
}

#[derive(Debug, Default)]
struct ObjectCount(FxHashSet<ObjectRef>);

impl ObjectCount {
    fn set(&mut self, reference: ObjectRef) {
        self.0.insert(reference);
    }

    fn apply(&mut self, change: &ObjectChange) {
        match change {
            ObjectChange::Set(object) => self.set(object.reference()),
            ObjectChange::Delete(reference) => {
                self.0.remove(reference);
            }
        }
    }

    fn report(&self, health: &SourceHealth) {
        for kind in ObjectKind::ALL {
            // An object with an error is not counted: its file keeps the valid ones.
            health.count(kind, self.0.iter().filter(|reference| kind_of_reference(reference) == Some(kind)).count(), 0);
        }
    }
}

fn kind_of(change: &ObjectChange) -> Option<ObjectKind> {
    match change {
        ObjectChange::Set(object) => kind_of_reference(&object.reference()),
        ObjectChange::Delete(reference) => kind_of_reference(reference),
    }
}

/// The kind of an object; `None` for an EndpointSlice, which only commands read.
fn kind_of_reference(reference: &ObjectRef) -> Option<ObjectKind> {
    Some(match reference {
        ObjectRef::Namespace(_) => ObjectKind::Namespace,
        ObjectRef::Node(_) => ObjectKind::Node,
        ObjectRef::Pod(_) => ObjectKind::Pod,
        ObjectRef::NetworkPolicy(_) => ObjectKind::NetworkPolicy,
        ObjectRef::ClusterNetworkPolicy(_) => ObjectKind::ClusterNetworkPolicy,
        ObjectRef::Service(_) => ObjectKind::Service,
        ObjectRef::EndpointSlice(_) => return None,
    })
}
