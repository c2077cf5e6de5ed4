//! The API server of a cluster as a source: every kind listed, then watched, for as long as it takes.
//!
//! A thread of its own follows the four kinds: what they send can be much, and is read there, so that no one else waits
//! for it. What was known stays known while the server cannot be reached.

mod access;
mod backoff;
mod failure;
mod follow;
mod narrow;
mod outages;
mod read;
mod store;

use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Api;
use kube::core::ApiResource;
use penstock_policy::model::{Change, Object};
use penstock_privileges as privileges;
use tokio::runtime::Builder;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;

pub use access::{Access, AccessError};

use super::{Kind, SourceHealth};
use access::Connection;
use follow::Follower;
use outages::Outages;
use store::Store;

/// Changes that come within this time are told together.
const GATHER: Duration = Duration::from_millis(3);
/// How often it is said what is still waited for at the start.
const SAY_AWAITED: Duration = Duration::from_secs(10);

/// Why an API server cannot be a source. That it does not answer is none: it is waited for.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no way to it.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// There is no thread to be had.
    #[error("API server: no thread can be started: {0}")]
    Thread(std::io::Error),
}

/// An API server that is followed. Dropped, it is left.
#[derive(Debug)]
pub struct ApiServer {
    batches: mpsc::Receiver<Vec<Change>>,
    /// Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// How long an API server may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// One page of a list.
    pub page: Duration,
    /// The beginning of a watch.
    pub begin: Duration,
    /// Between two objects of a streamed list. A server that does not know of such lists never ends one.
    pub list_pause: Duration,
    /// A watch that stood this long was one, though nothing has come.
    pub stood: Duration,
    /// Between two signs of life of a watch. A server sends a bookmark about once a minute (KEP-956); one that sends
    /// none is asked again from where it was, which costs little.
    pub silence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            page: Duration::from_secs(60),
            begin: Duration::from_secs(30),
            list_pause: Duration::from_secs(10),
            stood: Duration::from_secs(5),
            silence: Duration::from_secs(150),
        }
    }
}

/// What the followers of all kinds share.
struct Shared {
    timing: Timing,
    connection: Connection,
    health: Arc<SourceHealth>,
    outages: Outages,
    store: Mutex<Store>,
    /// There may be something to tell.
    news: Notify,
}

impl Shared {
    fn new(connection: Connection, timing: Timing, health: Arc<SourceHealth>) -> Self {
        let outages = Outages::new(Arc::clone(&health));
        Self { timing, connection, health, outages, store: Mutex::default(), news: Notify::new() }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The store has news of a kind.
    fn changed(&self, kind: Kind) {
        let (objects, invalid) = self.store().count(kind);
        self.health.count(kind, objects, invalid);
        self.news.notify_one();
    }
}

impl ApiServer {
    /// Follows an API server, and waits until all kinds have been listed.
    pub async fn open(
        access: &Access,
        timing: Timing,
        health: Arc<SourceHealth>,
    ) -> Result<(Self, Vec<Object>), OpenError> {
        let (sender, batches) = mpsc::channel(1);
        let (stop, stopped) = oneshot::channel();
        let (say_begun, begun) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build().map_err(OpenError::Thread)?;
        let access = access.clone();
        let body = move || {
            privileges::drop_all();
            runtime.block_on(async {
                // A client lives in the runtime that it is made in.
                let shared = Connection::new(&access).await.map(|connection| Shared::new(connection, timing, health));
                let told = shared.map(Arc::new);
                let shared = told.as_ref().ok().cloned();
                // Without an owner there is nothing to do: the sender of batches sees it.
                let _ = say_begun.send(told);
                if let Some(shared) = shared {
                    run(shared, sender, stopped).await;
                }
            });
            // A look-up of a name that does not answer must not keep the end waiting.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("api-server".to_owned()).spawn(body).map_err(OpenError::Thread)?;
        let mut server = Self { batches, stop: Some(stop), thread: Some(thread) };
        let first = match begun.await {
            Ok(shared) => server.first(&*shared?).await,
            // It has panicked, which is seen at the next batch.
            Err(_) => Vec::new(),
        };
        let objects = first.into_iter().filter_map(|change| match change {
            Change::Set(object) => Some(object),
            Change::Delete(_) => None,
        });
        Ok((server, objects.collect()))
    }

    /// The next changes, as soon as there are any. It may be dropped while it waits without losing any. `None` once
    /// nothing can come any more.
    pub async fn next(&mut self) -> Option<Vec<Change>> {
        self.batches.recv().await
    }

    /// All that there is, once all of it has been listed.
    async fn first(&mut self, shared: &Shared) -> Vec<Change> {
        let mut say = tokio::time::interval(SAY_AWAITED);
        say.tick().await;
        loop {
            tokio::select! {
                batch = self.batches.recv() => return batch.unwrap_or_default(),
                _ = say.tick() => {
                    let awaited: Vec<&str> = shared.store().awaited().iter().map(|kind| kind.resource()).collect();
                    tracing::info!("API server: waiting for the first list of {}", awaited.join(", "));
                }
            }
        }
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been told on standard error by then.
            let _ = thread.join();
        }
    }
}

/// Follows all kinds and tells what changes, until the owner is gone.
async fn run(shared: Arc<Shared>, batches: mpsc::Sender<Vec<Change>>, stopped: oneshot::Receiver<()>) {
    let mut tasks = JoinSet::new();
    let follower = |kind| Follower::new(kind, Arc::clone(&shared));
    tasks.spawn(follower(Kind::Namespace).run(Api::all, read::namespace));
    tasks.spawn(follower(Kind::Node).run(Api::all, read::node));
    tasks.spawn(follower(Kind::Pod).run(Api::all, read::pod));
    let policies = ApiResource::erase::<NetworkPolicy>(&());
    tasks
        .spawn(follower(Kind::NetworkPolicy).run(move |client| Api::all_with(client, &policies), read::network_policy));
    tasks.spawn(tell(Arc::clone(&shared), batches));
    tokio::select! {
        _ = stopped => {}
        // None of them ends by itself, so one has panicked; the owner sees the end of the batches.
        _ = tasks.join_next() => tracing::error!("API server: it is not followed any more"),
    }
    // Dropping the tasks ends them.
}

/// Sends what is new. While nobody takes it, it is gathered further.
async fn tell(shared: Arc<Shared>, batches: mpsc::Sender<Vec<Change>>) {
    loop {
        shared.news.notified().await;
        tokio::time::sleep(GATHER).await;
        let Ok(place) = batches.reserve().await else { return };
        let batch = shared.store().take();
        if let Some(batch) = batch {
            place.send(batch);
        }
    }
}

/// An error with all of its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Many repeat their cause.
        if !text.contains(&cause_text) {
            // Writing to a string does not fail.
            let _ = write!(text, ": {cause_text}");
        }
        source = cause.source();
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
