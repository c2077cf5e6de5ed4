//! Follows one kind of objects: list, then watch, with retries.
//!
//! `kube::runtime::watcher` (5.0) does this too. It is not used because it
//! - begins a watch that ended at once again without a pause: a proxy that ends every watch is asked in a tight loop;
//! - begins a streamed list at version 0, which a server may answer from a cache older than what is in force;
//! - cannot begin at a known version: each new client (renewed certificate, moved server) would list everything again;
//! - keeps a version that the server refused with HTTP status 410, and asks again for streamed lists where there are none;
//! - does not hand on bookmarks, which show that a watch without events is alive.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::{Api, Client, Resource, ResourceExt};
use rand::Rng;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::access::Connected;
use super::backoff::Backoff;
use super::failure::Failure;
use super::read::Reader;
use super::{Shared, Timing};
use crate::Kind;

/// Objects in a page, the same as other clients use.
const PAGE: u32 = 500;
/// Range of the watch timeout sent to the server, in seconds; random, so that connections spread over servers.
const WATCH_TIME: std::ops::Range<u32> = 240..480;
/// Pause after a short watch.
const PAUSE: Duration = Duration::from_millis(200);
/// The annotation of the bookmark that ends a streamed list (KEP-3157).
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// The trait bounds of the client's object types.
pub(super) trait Sent: Resource + Clone + DeserializeOwned + Debug + Send + 'static {}
impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> Sent for K {}

/// Follows one kind.
pub(super) struct Follower {
    kind: Kind,
    shared: Arc<Shared>,
    backoff: Backoff,
    /// Whether to request streamed lists.
    streams: bool,
    /// Whether to request lists in pages. Off after the server expired a list's continuation token.
    pages: bool,
    /// The resourceVersion up to which all changes are known.
    position: Option<String>,
    /// Whether the last watch was healthy.
    proven: bool,
}

impl Follower {
    pub(super) fn new(kind: Kind, shared: Arc<Shared>) -> Self {
        Self { kind, shared, backoff: Backoff::default(), streams: true, pages: true, position: None, proven: false }
    }

    /// Follows the kind forever.
    pub(super) async fn run<K: Sent>(mut self, api: impl Fn(Client) -> Api<K> + Send, read: Reader<K>) {
        loop {
            let connected = self.shared.connection.get();
            let api = api(connected.client.clone());
            let (began, watches) = (Instant::now(), self.position.is_some());
            let end = match self.position.clone() {
                Some(position) => self.watch(&api, &position, read).await,
                None if self.streams => self.stream(&api, read).await,
                None => self.list(&api, read).await,
            };
            match end {
                Err(failure) => self.fail(failure, &connected).await,
                // It delivered something, but a server that ends each watch quickly must not be asked without a pause.
                Ok(()) if watches && began.elapsed() < self.timing().stood => tokio::time::sleep(PAUSE).await,
                Ok(()) => {}
            }
        }
    }

    /// Lists in pages.
    async fn list<K: Sent>(&mut self, api: &Api<K>, read: Reader<K>) -> Result<(), Failure> {
        self.shared.store().begin_list(self.kind);
        let mut params = ListParams { limit: self.pages.then_some(PAGE), ..ListParams::default() };
        let version = loop {
            let page = within(self.timing().page, api.list(&params)).await?;
            let page = match page.map_err(|error| Failure::of(&error, self.kind)) {
                Ok(page) => page,
                Err(failure) => {
                    let forgotten = params.continue_token.is_some() && matches!(failure, Failure::Gone(_));
                    self.pages &= !forgotten;
                    return Err(failure);
                }
            };
            self.shared.health.sign(self.kind);
            for object in page.items {
                let read = read(object);
                self.shared.store().list(self.kind, read);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => break page.metadata.resource_version,
            }
        };
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| Failure::Malformed("a list without resourceVersion".to_owned()))?;
        self.listed(version);
        Ok(())
    }

    /// Lists by a stream that continues as a watch. Falls back to pages if the server does not support it.
    async fn stream<K: Sent>(&mut self, api: &Api<K>, read: Reader<K>) -> Result<(), Failure> {
        let mut params = watch_params();
        params.send_initial_events = true;
        // No version: the list must be as recent as the request.
        match within(self.timing().begin, api.watch(&params, "")).await? {
            Ok(events) => {
                self.shared.store().begin_list(self.kind);
                self.consume(events, read, true).await
            }
            Err(error) => match Failure::of(&error, self.kind) {
                Failure::Refused { code, message } => {
                    tracing::debug!("API server, {}: no streamed lists ({code}: {message})", self.kind.resource());
                    self.streams = false;
                    Ok(())
                }
                failure => Err(failure),
            },
        }
    }

    /// Watches from a version until the watch ends.
    async fn watch<K: Sent>(&mut self, api: &Api<K>, version: &str, read: Reader<K>) -> Result<(), Failure> {
        let begun = within(self.timing().begin, api.watch(&watch_params(), version)).await?;
        let events = begun.map_err(|error| Failure::of(&error, self.kind))?;
        if self.backoff.is_reset() {
            self.shared.outages.well(self.kind);
        }
        self.consume(events, read, false).await
    }

    /// Processes events until the stream ends; `listing` until the initial list of a stream is complete.
    async fn consume<K: Sent>(
        &mut self,
        events: impl Stream<Item = kube::Result<WatchEvent<K>>>,
        read: Reader<K>,
        mut listing: bool,
    ) -> Result<(), Failure> {
        let mut events = pin!(events);
        self.proven = false;
        loop {
            let limit = match (listing, self.proven) {
                (true, _) => self.timing().list_pause,
                (false, false) => self.timing().stood,
                (false, true) => self.timing().silence,
            };
            let event = match timeout(limit, events.next()).await {
                Ok(Some(event)) => event.map_err(|error| Failure::of(&error, self.kind))?,
                Ok(None) if listing => return Err(Failure::Connection("it broke within a list".to_owned())),
                Ok(None) if self.proven => return Ok(()),
                Ok(None) => return Err(Failure::Closed),
                Err(_) if listing => {
                    self.streams = false;
                    return Ok(());
                }
                Err(_) if self.proven => {
                    tracing::debug!("API server, {}: the watch is silent; restarting it", self.kind.resource());
                    return Ok(());
                }
                Err(_) => {
                    self.prove();
                    continue;
                }
            };
            self.take(event, read, &mut listing)?;
            if !listing && !self.proven {
                self.prove();
            }
        }
    }

    /// Processes one event.
    fn take<K: Sent>(&mut self, event: WatchEvent<K>, read: Reader<K>, listing: &mut bool) -> Result<(), Failure> {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) if *listing => {
                self.shared.health.sign(self.kind);
                self.shared.store().list(self.kind, read(object));
            }
            WatchEvent::Deleted(_) if *listing => {
                return Err(Failure::Malformed("a deletion within a list".to_owned()));
            }
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                let position = object.resource_version();
                let read = read(object);
                let is_news = self.shared.store().set(self.kind, read);
                self.event(position, is_news);
            }
            WatchEvent::Deleted(object) => {
                let position = object.resource_version();
                let read = read(object);
                let is_news = self.shared.store().delete(self.kind, read.reference, read.version);
                self.event(position, is_news);
            }
            WatchEvent::Bookmark(bookmark) => {
                self.shared.health.sign(self.kind);
                let version = bookmark.metadata.resource_version;
                if *listing && bookmark.metadata.annotations.contains_key(END_OF_LIST) {
                    *listing = false;
                    self.listed(version);
                } else if !*listing {
                    self.advance(version);
                }
            }
            WatchEvent::Error(status) => return Err(Failure::of_status(&status, self.kind)),
        }
        Ok(())
    }

    /// Completes a list.
    fn listed(&mut self, version: String) {
        let is_first = self.shared.store().end_list(self.kind);
        if !is_first {
            tracing::info!("API server: listed all {} again", self.kind.resource());
        }
        self.position = Some(version);
        self.shared.health.listed(self.kind);
        self.shared.changed(self.kind);
    }

    /// Records an event.
    fn event(&mut self, position: Option<String>, is_news: bool) {
        self.shared.health.event(self.kind);
        position.into_iter().for_each(|version| self.advance(version));
        if is_news {
            self.shared.changed(self.kind);
        }
    }

    /// Advances the known version; never moves back.
    fn advance(&mut self, version: String) {
        let number = |version: &str| version.parse::<u64>().ok();
        let known = self.position.as_deref().and_then(number);
        if !matches!((number(&version), known), (Some(version), Some(known)) if version < known) {
            self.position = Some(version).filter(|version| !version.is_empty());
        }
    }

    /// Marks the watch as healthy.
    fn prove(&mut self) {
        self.proven = true;
        self.backoff.reset();
        self.shared.outages.well(self.kind);
    }

    /// Reports a failure and waits.
    async fn fail(&mut self, failure: Failure, connected: &Connected) {
        let after_good = std::mem::take(&mut self.proven) && self.backoff.is_reset();
        if failure.forgets_position() {
            self.position = None;
        }
        // A first failure may be a server restart or a replaced token: retry once before reporting it.
        let is_gone = matches!(failure, Failure::Gone(_));
        if !(is_gone && self.backoff.is_reset() || after_good && !matches!(failure, Failure::Forbidden { .. })) {
            self.shared.outages.lost(self.kind, &failure);
        } else {
            tracing::debug!("API server, {}: {failure}", self.kind.resource());
        }
        if failure.asks_for_new_client()
            && let Err(error) = self.shared.connection.renew(connected).await
        {
            self.shared.outages.lost(self.kind, &Failure::Access(error));
        }
        let asked = matches!(failure, Failure::Server { .. })
            .then(|| failure.retry_after().max(self.shared.connection.retry_after()))
            .flatten();
        let wait = if failure.is_unreachable() { self.backoff.next_unreachable() } else { self.backoff.next(asked) };
        tokio::time::sleep(wait).await;
    }

    fn timing(&self) -> Timing {
        self.shared.timing
    }
}

fn watch_params() -> WatchParams {
    WatchParams { timeout: Some(rand::rng().random_range(WATCH_TIME)), ..WatchParams::default() }
}

/// The result of a future, or a timeout.
async fn within<F: Future>(limit: Duration, future: F) -> Result<F::Output, Failure> {
    timeout(limit, future).await.map_err(|_| Failure::Slow(limit))
}
