//! Follows one kind of objects: list, then watch, with retries.
//!
//! `kube::runtime::watcher` (5.0) does this too. It is not used because it
//! - begins a watch that ended at once again without a pause: a proxy that ends every watch is asked in a tight loop;
//! - begins a streamed list at version 0, which a server may answer from a cache older than what is in effect;
//! - cannot begin at a known version: each new client (renewed certificate, moved server) would list everything again;
//! - keeps a version that the server refused with HTTP status 410, and asks again for streamed lists where there are none;
//! - does not hand on bookmarks, which show that a watch without events is alive.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, ResourceExt};
use rand::Rng;
use tokio::time::timeout;

use super::access::CurrentClient;
use super::backoff::Backoff;
use super::converted::Converter;
use super::request_error::{ROLE, RequestError};
use super::{ApiServerTimeouts, Shared};
use crate::ObjectKind;

/// Objects in a page, the same as other clients use.
const PAGE: u32 = 500;
/// Range of the watch timeout sent to the server, in seconds; random, so that connections spread over servers.
const WATCH_TIME: std::ops::Range<u32> = 240..480;
/// How often in a row a server must say that it does not serve a kind before its known objects are dropped.
const ABSENT: u32 = 3;
const PAUSE: Duration = Duration::from_millis(200);
/// The annotation of the bookmark that ends a streamed list (KEP-3157).
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// The objects of one kind at the server. They have no type of the client's: one that cannot be read must not hide the others
/// of its page, and the code that follows a kind is compiled once.
type Objects = Api<DynamicObject>;

pub(super) struct KindFollower {
    kind: ObjectKind,
    shared: Arc<Shared>,
    backoff: Backoff,
    /// Whether to request streamed lists.
    streams: bool,
    /// Whether to request lists in pages. Off after the server expired a list's continuation token.
    pages: bool,
    /// The resourceVersion up to which all changes are known.
    resource_version: Option<String>,
    /// Whether the watch stayed open long enough, or delivered something.
    is_healthy: bool,
    /// For a [`ServedKind`], the version that is followed.
    served: Option<ApiResource>,
    /// For a [`ServedKind`], how often in a row the server said that it does not serve it.
    absent: u32,
}

/// A kind of which servers serve different versions, or none: then there are no objects of it.
pub(super) struct ServedKind {
    pub(super) group: &'static str,
    /// Its versions, the preferred one first.
    pub(super) versions: &'static [&'static str],
}

impl KindFollower {
    pub(super) fn new(kind: ObjectKind, shared: Arc<Shared>) -> Self {
        Self {
            kind,
            shared,
            backoff: Backoff::default(),
            streams: true,
            pages: true,
            resource_version: None,
            is_healthy: false,
            served: None,
            absent: 0,
        }
    }

    pub(super) async fn run(mut self, resource: ApiResource, convert: Converter) {
        loop {
            let client = self.shared.client.get();
            if let Err(failure) = self.follow(&Api::all_with(client.client.clone(), &resource), convert).await {
                self.fail(failure, &client).await;
            }
        }
    }

    /// Follows a kind forever, while there is a right to read it. Without one there are no objects.
    pub(super) async fn run_while_allowed(mut self, resource: ApiResource, convert: Converter) {
        loop {
            let client = self.shared.client.get();
            match self.follow(&Api::all_with(client.client.clone(), &resource), convert).await {
                Ok(()) => {}
                Err(RequestError::Forbidden { resource, message }) => {
                    if self.absent == 0 {
                        tracing::warn!(
                            "API server: 403 Forbidden: {message}: without the verbs get, list and watch on {resource} egress policy is for a Service's address, not for what answers; bind the account to {ROLE}"
                        );
                    }
                    self.resource_version = None;
                    self.has_none().await;
                }
                Err(failure) => self.fail(failure, &client).await,
            }
        }
    }

    /// Follows a kind forever, while the server serves it in one of these versions.
    pub(super) async fn run_while_served(mut self, kind: ServedKind, convert: Converter) {
        loop {
            let client = self.shared.client.get();
            let end = match self.served_version(&kind, &client).await {
                Ok(Some(resource)) => {
                    self.absent = 0;
                    self.follow(&Api::all_with(client.client.clone(), &resource), convert).await
                }
                Ok(None) => {
                    self.not_served(&kind).await;
                    Ok(())
                }
                Err(failure) => Err(failure),
            };
            match end {
                // The definition has gone, or its version: ask which there are.
                Err(RequestError::Refused { code: 404, .. }) => (self.served, self.resource_version) = (None, None),
                Err(failure) => self.fail(failure, &client).await,
                Ok(()) => {}
            }
        }
    }

    /// The version to follow: the one followed so far, or the first that the server serves.
    async fn served_version(
        &mut self,
        kind: &ServedKind,
        client: &CurrentClient,
    ) -> Result<Option<ApiResource>, RequestError> {
        for version in kind.versions.iter().filter(|_| self.served.is_none()) {
            let group_version = format!("{}/{version}", kind.group);
            let asked = client.client.list_api_group_resources(&group_version);
            let answer = within(self.timeouts().page, asked).await?;
            match answer.map_err(|error| RequestError::of(&error, self.kind)) {
                Ok(resources) if resources.resources.iter().any(|found| found.name == self.kind.resource()) => {
                    let kind = GroupVersionKind::gvk(kind.group, version, self.kind.name());
                    tracing::info!("API server: following {} of {group_version}", self.kind.resource());
                    self.served = Some(ApiResource::from_gvk_with_plural(&kind, self.kind.resource()));
                    break;
                }
                Ok(_) | Err(RequestError::Refused { code: 404, .. }) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(self.served.clone())
    }

    /// The server does not serve the kind, so there are no objects of it. A server that has just started may not have
    /// loaded its definitions yet: known objects stay until it has said so several times.
    async fn not_served(&mut self, kind: &ServedKind) {
        if self.absent == 0 {
            tracing::info!("API server: it does not serve {} of {}", self.kind.resource(), kind.group);
        }
        self.has_none().await;
    }

    async fn has_none(&mut self) {
        self.mark_healthy();
        self.absent += 1;
        let is_known = self.shared.health.of(self.kind).synced;
        if !is_known || self.absent == ABSENT {
            self.shared.store().begin_list(self.kind);
            self.shared.store().end_list(self.kind);
            self.shared.health.listed(self.kind);
            self.shared.changed(self.kind);
        }
        tokio::time::sleep(self.timeouts().look_again).await;
    }

    async fn follow(&mut self, api: &Objects, convert: Converter) -> Result<(), RequestError> {
        let (start, watches) = (Instant::now(), self.resource_version.is_some());
        match self.resource_version.clone() {
            Some(version) => self.watch(api, &version, convert).await?,
            None if self.streams => self.stream(api, convert).await?,
            None => self.list(api, convert).await?,
        }
        // It delivered something, but a server that ends each watch quickly must not be asked without a pause.
        if watches && start.elapsed() < self.timeouts().healthy_after {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Lists in pages.
    async fn list(&mut self, api: &Objects, convert: Converter) -> Result<(), RequestError> {
        self.shared.store().begin_list(self.kind);
        let mut params = ListParams { limit: self.pages.then_some(PAGE), ..ListParams::default() };
        let version = loop {
            let page = within(self.timeouts().page, api.list(&params)).await?;
            let page = match page.map_err(|error| RequestError::of(&error, self.kind)) {
                Ok(page) => page,
                Err(failure) => {
                    let expired = params.continue_token.is_some() && matches!(failure, RequestError::Gone(_));
                    self.pages &= !expired;
                    return Err(failure);
                }
            };
            self.shared.health.sign(self.kind);
            for object in page.items {
                let object = convert(object);
                self.shared.store().list(self.kind, object);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => break page.metadata.resource_version,
            }
        };
        let version = version.filter(|version| !version.is_empty());
        let version = version.ok_or_else(|| RequestError::Malformed("a list without resourceVersion".to_owned()))?;
        self.listed(version);
        Ok(())
    }

    /// Lists by a stream that continues as a watch. Falls back to pages if the server does not support it, as client-go does
    /// (tools/cache/reflector.go): an older server refuses the request, and a newer one with an etcd that is too old sends an
    /// error with code 500 as the first event.
    async fn stream(&mut self, api: &Objects, convert: Converter) -> Result<(), RequestError> {
        let mut params = watch_params();
        params.send_initial_events = true;
        // No version: the list must be as recent as the request.
        let outcome = match within(self.timeouts().watch_start, api.watch(&params, "")).await? {
            Ok(events) => {
                self.shared.store().begin_list(self.kind);
                self.consume(events, convert, true).await
            }
            Err(error) => Err(RequestError::of(&error, self.kind)),
        };
        match outcome {
            Err(RequestError::Refused { code, message } | RequestError::Server { code: code @ 500, message, .. })
                if self.resource_version.is_none() =>
            {
                tracing::debug!("API server, {}: no streamed lists ({code}: {message})", self.kind.resource());
                self.streams = false;
                Ok(())
            }
            outcome => outcome,
        }
    }

    async fn watch(&mut self, api: &Objects, version: &str, convert: Converter) -> Result<(), RequestError> {
        let started = within(self.timeouts().watch_start, api.watch(&watch_params(), version)).await?;
        let events = started.map_err(|error| RequestError::of(&error, self.kind))?;
        if self.backoff.is_reset() {
            self.shared.outages.recovered(self.kind);
        }
        self.consume(events, convert, false).await
    }

    /// Processes events until the stream ends; `listing` until the initial list of a stream is complete.
    async fn consume(
        &mut self,
        events: impl Stream<Item = kube::Result<WatchEvent<DynamicObject>>>,
        convert: Converter,
        mut listing: bool,
    ) -> Result<(), RequestError> {
        let mut events = pin!(events);
        self.is_healthy = false;
        loop {
            let limit = match (listing, self.is_healthy) {
                (true, _) => self.timeouts().list_pause,
                (false, false) => self.timeouts().healthy_after,
                (false, true) => self.timeouts().silence,
            };
            let event = match timeout(limit, events.next()).await {
                Ok(Some(event)) => event.map_err(|error| RequestError::of(&error, self.kind))?,
                Ok(None) if listing => return Err(RequestError::Connection("it broke within a list".to_owned())),
                Ok(None) if self.is_healthy => return Ok(()),
                Ok(None) => return Err(RequestError::Closed),
                Err(_) if listing => {
                    self.streams = false;
                    return Ok(());
                }
                Err(_) if self.is_healthy => {
                    tracing::debug!("API server, {}: the watch is silent; restarting it", self.kind.resource());
                    return Ok(());
                }
                Err(_) => {
                    self.mark_healthy();
                    continue;
                }
            };
            self.take(event, convert, &mut listing)?;
            if !listing && !self.is_healthy {
                self.mark_healthy();
            }
        }
    }

    fn take(
        &mut self,
        event: WatchEvent<DynamicObject>,
        convert: Converter,
        listing: &mut bool,
    ) -> Result<(), RequestError> {
        match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) if *listing => {
                self.shared.health.sign(self.kind);
                self.shared.store().list(self.kind, convert(object));
            }
            WatchEvent::Deleted(_) if *listing => {
                return Err(RequestError::Malformed("a deletion within a list".to_owned()));
            }
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                let version = object.resource_version();
                let object = convert(object);
                let is_news = self.shared.store().set(self.kind, object);
                self.event(version, is_news);
            }
            WatchEvent::Deleted(object) => {
                let version = object.resource_version();
                let object = convert(object);
                let is_news = self.shared.store().delete(self.kind, object.reference, object.version);
                self.event(version, is_news);
            }
            WatchEvent::Bookmark(bookmark) => {
                self.shared.health.sign(self.kind);
                let version = bookmark.metadata.resource_version;
                if *listing && bookmark.metadata.annotations.contains_key(END_OF_LIST) {
                    *listing = false;
                    self.listed(version);
                } else if !*listing {
                    self.advance_unchanged(version);
                }
            }
            WatchEvent::Error(status) => return Err(RequestError::of_status(&status, self.kind)),
        }
        Ok(())
    }

    fn listed(&mut self, version: String) {
        let number = version.parse().unwrap_or(0);
        let is_first = {
            let mut store = self.shared.store();
            store.advance(self.kind, number);
            store.end_list(self.kind)
        };
        if !is_first {
            tracing::info!("API server: listed all {} again", self.kind.resource());
        }
        self.resource_version = Some(version);
        self.shared.health.listed(self.kind);
        self.shared.changed(self.kind);
    }

    fn event(&mut self, version: Option<String>, is_news: bool) {
        self.shared.health.event(self.kind);
        match is_news {
            true => {
                version.into_iter().for_each(|version| _ = self.advance(version));
                self.shared.changed(self.kind);
            }
            // How much of an object is understood may have changed, and not its meaning.
            false => {
                self.shared.count(self.kind);
                version.into_iter().for_each(|version| self.advance_unchanged(version));
            }
        }
    }

    /// Advances the known version by one that changes nothing.
    fn advance_unchanged(&mut self, version: String) {
        if let Some((before, version)) = self.advance(version) {
            self.shared.unchanged(self.kind, before, version);
        }
    }

    /// Advances the known version; never moves back. Returns the one before and the one after, if it has moved.
    fn advance(&mut self, version: String) -> Option<(u64, u64)> {
        let number = |version: &str| version.parse::<u64>().ok();
        let known = self.resource_version.as_deref().and_then(number);
        let next = number(&version);
        if matches!((next, known), (Some(version), Some(known)) if version < known) {
            return None;
        }
        self.resource_version = Some(version).filter(|version| !version.is_empty());
        Some((self.shared.store().advance(self.kind, next.unwrap_or(0)), next.unwrap_or(0)))
    }

    fn mark_healthy(&mut self) {
        self.is_healthy = true;
        self.backoff.reset();
        self.shared.outages.recovered(self.kind);
    }

    async fn fail(&mut self, failure: RequestError, client: &CurrentClient) {
        let was_healthy = std::mem::take(&mut self.is_healthy) && self.backoff.is_reset();
        if failure.discards_version() {
            self.resource_version = None;
        }
        // A first failure may be a server restart or a replaced token: retry once before reporting it.
        let is_gone = matches!(failure, RequestError::Gone(_));
        if !(is_gone && self.backoff.is_reset() || was_healthy && !matches!(failure, RequestError::Forbidden { .. })) {
            self.shared.outages.failed(self.kind, &failure);
        } else {
            tracing::debug!("API server, {}: {failure}", self.kind.resource());
        }
        if failure.needs_new_client()
            && let Err(error) = self.shared.client.renew(client).await
        {
            self.shared.outages.failed(self.kind, &RequestError::Access(error));
        }
        let retry_after = matches!(failure, RequestError::Server { .. })
            .then(|| failure.retry_after().max(self.shared.client.retry_after()))
            .flatten();
        let wait =
            if failure.is_unreachable() { self.backoff.next_unreachable() } else { self.backoff.next(retry_after) };
        tokio::time::sleep(wait).await;
    }

    fn timeouts(&self) -> ApiServerTimeouts {
        self.shared.timeouts
    }
}

fn watch_params() -> WatchParams {
    WatchParams { timeout: Some(rand::rng().random_range(WATCH_TIME)), ..WatchParams::default() }
}

async fn within<F: Future>(limit: Duration, future: F) -> Result<F::Output, RequestError> {
    timeout(limit, future).await.map_err(|_| RequestError::Slow(limit))
}
