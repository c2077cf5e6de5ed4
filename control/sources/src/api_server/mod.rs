//! The API server as a source: lists and watches every kind.
//!
//! Its own thread follows all of them, so that large responses do not delay other work. Known objects stay known while
//! the server is unreachable.

mod access;
mod backoff;
mod cluster_policy;
mod converted;
mod events;
mod fail_closed;
mod follow;
mod outages;
mod request_error;
mod startup_taint;
mod store;

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::core::ApiResource;
use penstock_dataplane::drop_capabilities;
use penstock_policy::model::{Object, ObjectChange};
use tokio::runtime::Builder;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;

pub use access::{Access, AccessError};
pub use events::PodNotEnforced;
pub use startup_taint::StartupTaint;

use super::convert::ConversionSettings;
use super::health::Versions;
use super::{ObjectKind, SourceHealth};
use access::RenewableClient;
use follow::{KindFollower, ServedKind};
use outages::Outages;
use store::Store;

const GATHER: Duration = Duration::from_millis(3);
/// Interval of the log message about kinds not yet listed at start.
const LOG_AWAITED: Duration = Duration::from_secs(10);

/// ClusterNetworkPolicies; v1beta1 is announced with the same schema.
const CLUSTER_POLICIES: ServedKind =
    ServedKind { group: "policy.networking.k8s.io", versions: &["v1alpha2", "v1beta1"] };

/// Why an API server cannot be a source. An unreachable server is not an error: the source waits for it.
#[derive(Debug, thiserror::Error)]
pub enum ApiServerError {
    #[error(transparent)]
    Access(#[from] AccessError),
    #[error("API server: cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// A followed API server. Dropping it stops following.
#[derive(Debug)]
pub struct ApiServer {
    batches: mpsc::Receiver<Batch>,
    /// The versions of the last batch, on which its receiver works until it asks for the next.
    working_on: Option<Versions>,
    /// Those that were worked on last.
    worked_on: Versions,
    health: Arc<SourceHealth>,
    /// Dropping it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A node that also writes at the API server: Events about policies that are not fully understood, and about pods on which policy
/// is not enforced.
#[derive(Debug)]
pub struct NodeWriter {
    pub node: String,
    /// The taint that it removes from its Node object once it is ready.
    pub startup_taint: Option<StartupTaint>,
    /// Pods that get an Event ([`pods_not_enforced`]).
    pub not_enforced: mpsc::Receiver<PodNotEnforced>,
}

/// Tells of pods on which policy is not enforced. What does not fit is left out.
pub fn pods_not_enforced() -> (mpsc::Sender<PodNotEnforced>, mpsc::Receiver<PodNotEnforced>) {
    mpsc::channel(events::MOST_PODS)
}

/// Changes that are sent together.
#[derive(Debug)]
struct Batch {
    /// `None`: nothing but versions has changed.
    changes: Option<Vec<ObjectChange>>,
    /// Up to which versions these, and all before, are all changes; `None` if as before.
    versions: Option<Versions>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ApiServerTimeouts {
    pub page: Duration,
    pub watch_start: Duration,
    /// Between two objects of a streamed list. A server that does not support such lists never ends one.
    pub list_pause: Duration,
    /// A watch open this long is healthy, even without events.
    pub healthy_after: Duration,
    /// Between two signs of life of a watch. A server sends a bookmark about once a minute (KEP-956); a watch without is
    /// restarted from its position, which costs little.
    pub silence: Duration,
    /// Between two looks for a kind that the server does not serve.
    pub look_again: Duration,
}

impl Default for ApiServerTimeouts {
    fn default() -> Self {
        Self {
            page: Duration::from_secs(60),
            watch_start: Duration::from_secs(30),
            list_pause: Duration::from_secs(10),
            healthy_after: Duration::from_secs(5),
            silence: Duration::from_secs(150),
            look_again: Duration::from_secs(10),
        }
    }
}

struct Shared {
    timeouts: ApiServerTimeouts,
    client: RenewableClient,
    health: Arc<SourceHealth>,
    outages: Outages,
    store: Mutex<Store>,
    news: Notify,
}

impl Shared {
    fn new(client: RenewableClient, timeouts: ApiServerTimeouts, health: Arc<SourceHealth>) -> Self {
        let outages = Outages::new(Arc::clone(&health));
        let store = Mutex::new(Store::default());
        Self { timeouts, client, health, outages, store, news: Notify::new() }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_problem(&self) -> Option<events::Problem> {
        self.store().take_problem()
    }

    fn count(&self, kind: ObjectKind) {
        let (objects, invalid) = self.store().count(kind);
        self.health.count(kind, objects, invalid);
    }

    /// Records that a kind has another version, and nothing else of it has changed.
    fn unchanged(&self, kind: ObjectKind, before: u64, version: u64) {
        if !self.health.unchanged(kind, before, version) {
            // The versions go behind the changes that are on their way.
            self.news.notify_one();
        }
    }

    fn changed(&self, kind: ObjectKind) {
        self.count(kind);
        self.news.notify_one();
    }
}

impl ApiServer {
    /// Follows an API server, and does not wait for it. A `writer` also writes there. Of the settings, only
    /// that for domain names has a meaning here.
    pub async fn start(
        access: &Access,
        timeouts: ApiServerTimeouts,
        health: Arc<SourceHealth>,
        writer: Option<NodeWriter>,
        settings: ConversionSettings,
    ) -> Result<Self, ApiServerError> {
        let (sender, batches) = mpsc::channel(1);
        let (stop, stopped) = oneshot::channel();
        let (started, start) = oneshot::channel();
        let following = Following { access: access.clone(), timeouts, health: Arc::clone(&health), writer, settings };
        let thread = following.start(started, sender, stopped).map_err(ApiServerError::Thread)?;
        let server = Self {
            batches,
            working_on: None,
            worked_on: Versions::default(),
            health,
            stop: Some(stop),
            thread: Some(thread),
        };
        // Without an answer it has panicked; the next batch shows it.
        if let Ok(shared) = start.await {
            shared?;
        }
        Ok(server)
    }

    /// The next changes. Asking for them says that those before are worked on, which [`SourceHealth`] then shows by their
    /// versions. Cancel-safe: dropping the future loses none. `None` once the source has ended.
    pub async fn next(&mut self) -> Option<Vec<ObjectChange>> {
        loop {
            if let Some(versions) = self.working_on.take() {
                self.health.taken(&std::mem::replace(&mut self.worked_on, versions), &versions);
            }
            let Batch { changes, versions } = self.batches.recv().await?;
            self.working_on = versions;
            if changes.is_some() {
                return changes;
            }
        }
    }

    /// All objects, once every kind is listed: the first batch. Cancel-safe.
    pub async fn first(&mut self) -> Vec<Object> {
        let first = self.next().await.unwrap_or_default();
        let objects = first.into_iter().filter_map(|change| match change {
            ObjectChange::Set(object) => Some(object),
            ObjectChange::Delete(_) => None,
        });
        objects.collect()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been printed on standard error by then.
            let _ = thread.join();
        }
    }
}

/// The input of the thread that follows an API server.
struct Following {
    access: Access,
    timeouts: ApiServerTimeouts,
    health: Arc<SourceHealth>,
    writer: Option<NodeWriter>,
    settings: ConversionSettings,
}

impl Following {
    /// Starts the thread, which ends when `stopped` does. It says whether there is access.
    ///
    /// Not async: what an async function runs is compiled in each crate that awaits it.
    fn start(
        self,
        started: oneshot::Sender<Result<Arc<Shared>, AccessError>>,
        batches: mpsc::Sender<Batch>,
        stopped: oneshot::Receiver<()>,
    ) -> io::Result<JoinHandle<()>> {
        let Self { access, timeouts, health, writer, settings } = self;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let body = move || {
            drop_capabilities();
            runtime.block_on(async {
                // A client must be built in the runtime that uses it.
                let client = RenewableClient::new(&access).await;
                let shared = client.map(|client| Arc::new(Shared::new(client, timeouts, health)));
                let followed = shared.as_ref().ok().cloned();
                // Without an owner there is nothing to do: sending a batch fails then.
                let _ = started.send(shared);
                if let Some(shared) = followed {
                    run(shared, batches, stopped, writer, settings).await;
                }
            });
            // A pending name lookup must not delay shutdown.
            runtime.shutdown_background();
        };
        thread::Builder::new().name("api-server".to_owned()).spawn(body)
    }
}

/// Follows the kinds and sends changes until the owner is gone.
async fn run(
    shared: Arc<Shared>,
    batches: mpsc::Sender<Batch>,
    stopped: oneshot::Receiver<()>,
    writer: Option<NodeWriter>,
    settings: ConversionSettings,
) {
    let mut tasks = JoinSet::new();
    let follower = |kind| KindFollower::new(kind, Arc::clone(&shared));
    tasks.spawn(follower(ObjectKind::Namespace).run(erased::<core::Namespace>(), converted::namespace));
    tasks.spawn(follower(ObjectKind::Node).run(erased::<core::Node>(), converted::node));
    tasks.spawn(follower(ObjectKind::Pod).run(erased::<core::Pod>(), converted::pod));
    tasks.spawn(follower(ObjectKind::NetworkPolicy).run(erased::<NetworkPolicy>(), converted::network_policy));
    let cluster_policy = match settings.domain_names {
        true => converted::cluster_network_policy_with_names,
        false => converted::cluster_network_policy,
    };
    tasks.spawn(follower(ObjectKind::ClusterNetworkPolicy).run_while_served(CLUSTER_POLICIES, cluster_policy));
    tasks.spawn(follower(ObjectKind::Service).run_while_allowed(erased::<core::Service>(), converted::service));
    tasks.spawn(send_changes(Arc::clone(&shared), batches));
    let startup_taint = writer.and_then(|NodeWriter { node, startup_taint, not_enforced }| {
        tasks.spawn(events::write(Arc::clone(&shared), node.clone(), not_enforced));
        Some(startup_taint::remove(Arc::clone(&shared), node, startup_taint?))
    });
    // Not one of the tasks, since it ends.
    let startup_taint = startup_taint.map(tokio::spawn);
    let log = log_awaited(&shared);
    tokio::select! {
        _ = stopped => {}
        never = log => match never {},
        // They never return, so one has panicked; the owner sees the channel close.
        _ = tasks.join_next() => tracing::error!("API server: stopped following it after an internal error"),
    }
    // Dropping the tasks ends them, and the runtime's end the last one.
    drop(startup_taint);
}

/// Where the server has the objects of a type.
fn erased<K: kube::Resource<DynamicType = ()>>() -> ApiResource {
    ApiResource::erase::<K>(&())
}

/// Says from time to time which kinds are not listed yet. Never returns.
async fn log_awaited(shared: &Shared) -> Infallible {
    loop {
        tokio::time::sleep(LOG_AWAITED).await;
        let awaited: Vec<&str> = shared.store().awaited().iter().map(|kind| kind.resource()).collect();
        if awaited.is_empty() {
            return std::future::pending().await;
        }
        tracing::info!("API server: waiting for the first list of {}", awaited.join(", "));
    }
}

/// Sends changes. Accumulates them while the receiver is busy.
async fn send_changes(shared: Arc<Shared>, batches: mpsc::Sender<Batch>) {
    loop {
        shared.news.notified().await;
        tokio::time::sleep(GATHER).await;
        let Ok(place) = batches.reserve().await else { return };
        let (changes, versions) = {
            let mut store = shared.store();
            (store.take(), store.take_versions())
        };
        if changes.is_some() || versions.is_some() {
            place.send(Batch { changes, versions });
        }
    }
}
