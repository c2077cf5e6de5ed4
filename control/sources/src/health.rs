//! The health of a source, shared with those who report it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The kinds of objects that a source may provide.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ObjectKind {
    Namespace,
    Node,
    Pod,
    NetworkPolicy,
    /// ClusterNetworkPolicies. A cluster that does not serve them has none.
    ClusterNetworkPolicy,
    Service,
}

impl ObjectKind {
    pub const ALL: [Self; 6] =
        [Self::Namespace, Self::Node, Self::Pod, Self::NetworkPolicy, Self::ClusterNetworkPolicy, Self::Service];

    /// The `kind` in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::ClusterNetworkPolicy => "ClusterNetworkPolicy",
            Self::Service => "Service",
        }
    }

    /// The resource name in API paths and roles.
    pub fn resource(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::Node => "nodes",
            Self::Pod => "pods",
            Self::NetworkPolicy => "networkpolicies",
            Self::ClusterNetworkPolicy => "clusternetworkpolicies",
            Self::Service => "services",
        }
    }
}

/// The resourceVersions up to which changes are known, by [`ObjectKind`]; 0 if none is known.
pub(super) type Versions = [u64; ObjectKind::ALL.len()];

/// A source's health by kind. The source writes it; any thread may read it.
#[derive(Debug)]
pub struct SourceHealth {
    start: Instant,
    kinds: [KindCounters; ObjectKind::ALL.len()],
    /// Manifests that are not applied.
    refused_files: AtomicU64,
    /// Why the manifest directory can't be read.
    unreadable: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct KindCounters {
    synced: AtomicBool,
    connected: AtomicBool,
    /// Milliseconds from start to the last sign of life, plus one; 0 for never.
    last_sign: AtomicU64,
    events: AtomicU64,
    outages: AtomicU64,
    lists: AtomicU64,
    objects: AtomicU64,
    invalid: AtomicU64,
    /// The resourceVersion up to which all changes have been taken; 0 if none is known.
    version: AtomicU64,
    /// Why its last request failed; `None` while the kind is followed.
    failure: Mutex<Option<String>>,
}

impl KindCounters {
    fn failure(&self) -> MutexGuard<'_, Option<String>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KindHealth {
    /// All objects of the kind were read at least once. Stays true in an outage: known objects stay in effect.
    pub synced: bool,
    /// Changes arrive as they happen. `false` before the first list and in an outage.
    pub connected: bool,
    /// Time since the last list, event or bookmark.
    pub last_sign: Option<Duration>,
    /// Events received, without bookmarks.
    pub events: u64,
    pub outages: u64,
    /// Number of complete lists; each but the first is a resync.
    pub lists: u64,
    pub objects: u64,
    /// Number of objects not fully understood. The log has the details of each.
    pub invalid: u64,
    /// The API server's resourceVersion up to which the receiver of the changes has worked on all of them; `None` if the source
    /// has none, or they are not numbers.
    pub version: Option<u64>,
}

impl Default for SourceHealth {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            kinds: Default::default(),
            refused_files: AtomicU64::new(0),
            unreadable: Mutex::default(),
        }
    }
}

impl SourceHealth {
    /// The kinds that have not been read yet, each with the reason why its last request failed, if one did.
    pub fn awaited(&self) -> Vec<(ObjectKind, Option<String>)> {
        let unread = ObjectKind::ALL.into_iter().filter(|&kind| !self.of(kind).synced);
        unread.map(|kind| (kind, self.kinds[kind as usize].failure().clone())).collect()
    }

    pub fn of(&self, kind: ObjectKind) -> KindHealth {
        let counters = &self.kinds[kind as usize];
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let sign = count(&counters.last_sign).checked_sub(1).map(Duration::from_millis);
        KindHealth {
            synced: counters.synced.load(Ordering::Relaxed),
            connected: counters.connected.load(Ordering::Relaxed),
            last_sign: sign.map(|sign| self.start.elapsed().saturating_sub(sign)),
            events: count(&counters.events),
            outages: count(&counters.outages),
            lists: count(&counters.lists),
            objects: count(&counters.objects),
            invalid: count(&counters.invalid),
            // Behind what the receiver has published, by another thread.
            version: Some(counters.version.load(Ordering::Acquire)).filter(|&version| version > 0),
        }
    }

    /// Whether all kinds were read at least once.
    pub fn is_synced(&self) -> bool {
        ObjectKind::ALL.into_iter().all(|kind| self.kinds[kind as usize].synced.load(Ordering::Relaxed))
    }

    /// How many manifests are not applied; their last valid objects stay in effect.
    pub fn refused_files(&self) -> u64 {
        self.refused_files.load(Ordering::Relaxed)
    }

    pub(super) fn refuse_files(&self, count: usize) {
        self.refused_files.store(count as u64, Ordering::Relaxed);
    }

    /// Why the manifest directory can't be read, while it can't: the last good objects stay in effect.
    pub fn unreadable(&self) -> Option<String> {
        self.unreadable.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_unreadable(&self, reason: Option<String>) {
        let before =
            std::mem::replace(&mut *self.unreadable.lock().unwrap_or_else(PoisonError::into_inner), reason.clone());
        for kind in ObjectKind::ALL.into_iter() {
            match &reason {
                Some(reason) => {
                    if before.is_none() {
                        self.lost(kind);
                    }
                    self.failed(kind, reason);
                }
                None if before.is_some() => self.connected(kind),
                None => {}
            }
        }
    }

    pub(super) fn sign(&self, kind: ObjectKind) {
        let milliseconds = self.start.elapsed().as_millis() as u64;
        self.kinds[kind as usize].last_sign.store(milliseconds + 1, Ordering::Relaxed);
    }

    pub(super) fn event(&self, kind: ObjectKind) {
        self.sign(kind);
        self.kinds[kind as usize].events.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn listed(&self, kind: ObjectKind) {
        self.sign(kind);
        let counters = &self.kinds[kind as usize];
        counters.lists.fetch_add(1, Ordering::Relaxed);
        counters.synced.store(true, Ordering::Relaxed);
    }

    pub(super) fn connected(&self, kind: ObjectKind) {
        let counters = &self.kinds[kind as usize];
        counters.connected.store(true, Ordering::Relaxed);
        *counters.failure() = None;
    }

    pub(super) fn failed(&self, kind: ObjectKind, reason: &str) {
        *self.kinds[kind as usize].failure() = Some(reason.to_owned());
    }

    pub(super) fn lost(&self, kind: ObjectKind) {
        let counters = &self.kinds[kind as usize];
        counters.connected.store(false, Ordering::Relaxed);
        counters.outages.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the receiver has worked on all changes of these versions; `before` are those of the call before. What has
    /// stayed among them may have advanced without changes since.
    pub(super) fn taken(&self, before: &Versions, versions: &Versions) {
        for (counters, (before, version)) in self.kinds.iter().zip(before.iter().zip(versions)) {
            if before != version {
                counters.version.store(*version, Ordering::Release);
            }
        }
    }

    /// Records that nothing has changed from one version to another. `false`: the first is not known to be worked on yet.
    pub(super) fn unchanged(&self, kind: ObjectKind, from: u64, to: u64) -> bool {
        let version = &self.kinds[kind as usize].version;
        version.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// Records the number of objects, and of those not fully understood.
    pub(super) fn count(&self, kind: ObjectKind, objects: usize, invalid: usize) {
        let counters = &self.kinds[kind as usize];
        counters.objects.store(objects as u64, Ordering::Relaxed);
        counters.invalid.store(invalid as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_visible_and_keeps_the_source_synced() {
        let health = SourceHealth::default();
        assert_eq!(health.of(ObjectKind::Pod), KindHealth::default());
        health.listed(ObjectKind::Pod);
        health.connected(ObjectKind::Pod);
        health.event(ObjectKind::Pod);
        health.count(ObjectKind::Pod, 7, 1);
        health.lost(ObjectKind::Pod);
        let pods = health.of(ObjectKind::Pod);
        assert!(pods.synced && !pods.connected && pods.last_sign.unwrap() < Duration::from_secs(60), "{pods:?}");
        assert_eq!((pods.events, pods.outages, pods.lists, pods.objects, pods.invalid), (1, 1, 1, 7, 1));
        assert!(!health.is_synced(), "the other kinds are missing");
        ObjectKind::ALL.into_iter().for_each(|kind| health.listed(kind));
        assert!(health.is_synced());
    }

    #[test]
    fn a_version_without_changes_waits_for_those_before_it() {
        let health = SourceHealth::default();
        let version = |kind| health.of(kind).version;
        assert_eq!(version(ObjectKind::Pod), None);
        assert!(!health.unchanged(ObjectKind::Pod, 5, 6), "5 is on its way");
        assert_eq!(version(ObjectKind::Pod), None);
        let mut versions = Versions::default();
        versions[ObjectKind::Pod as usize] = 5;
        health.taken(&Versions::default(), &versions);
        assert!(health.unchanged(ObjectKind::Pod, 5, 6));
        assert_eq!((version(ObjectKind::Pod), version(ObjectKind::Node)), (Some(6), None));
        // Changes of another kind that were on their way meanwhile.
        let before = versions;
        versions[ObjectKind::Node as usize] = 7;
        health.taken(&before, &versions);
        assert_eq!((version(ObjectKind::Pod), version(ObjectKind::Node)), (Some(6), Some(7)));
    }

    #[test]
    fn the_reason_of_a_failure_is_known_until_the_kind_is_followed() {
        let health = SourceHealth::default();
        let reason = |health: &SourceHealth| health.awaited().into_iter().find_map(|(_, reason)| reason);
        health.failed(ObjectKind::Service, "403 Forbidden");
        assert_eq!(reason(&health).as_deref(), Some("403 Forbidden"));
        health.connected(ObjectKind::Service);
        assert_eq!(reason(&health), None);
    }
}
