//! How a source does: shared with whoever shows it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The kinds of objects that every source gives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// Namespaces.
    Namespace,
    /// Nodes.
    Node,
    /// Pods.
    Pod,
    /// NetworkPolicies.
    NetworkPolicy,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Namespace, Self::Node, Self::Pod, Self::NetworkPolicy];

    /// As a manifest's `kind` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::NetworkPolicy => "NetworkPolicy",
        }
    }

    /// As paths and roles of the API have it.
    pub fn resource(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::Node => "nodes",
            Self::Pod => "pods",
            Self::NetworkPolicy => "networkpolicies",
        }
    }
}

/// How a source does, by kind. Written by the source, read by anyone at any time.
#[derive(Debug)]
pub struct SourceHealth {
    start: Instant,
    kinds: [Counters; Kind::ALL.len()],
}

#[derive(Debug, Default)]
struct Counters {
    synced: AtomicBool,
    connected: AtomicBool,
    /// Milliseconds from the start to the last sign of life, plus one; 0 is never.
    last_sign: AtomicU64,
    events: AtomicU64,
    outages: AtomicU64,
    lists: AtomicU64,
    objects: AtomicU64,
    invalid: AtomicU64,
}

/// How a source does with one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KindHealth {
    /// All objects of the kind have been read at least once. It stays so in an outage: what was read stays in force.
    pub synced: bool,
    /// Changes are told as they happen. `false` before the first list, and in an outage.
    pub connected: bool,
    /// How long ago something last came: a list, an event, or a bookmark.
    pub last_sign: Option<Duration>,
    /// Events that came, bookmarks not counted.
    pub events: u64,
    /// How often the source was lost.
    pub outages: u64,
    /// How often all objects were read; each time but the first was a resync.
    pub lists: u64,
    /// Objects there are.
    pub objects: u64,
    /// Objects among them that are not understood, or not wholly. What that means for each is in the log.
    pub invalid: u64,
}

impl Default for SourceHealth {
    fn default() -> Self {
        Self { start: Instant::now(), kinds: Default::default() }
    }
}

impl SourceHealth {
    /// How it does with a kind now.
    pub fn of(&self, kind: Kind) -> KindHealth {
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
        }
    }

    /// Whether all kinds have been read at least once.
    pub fn is_synced(&self) -> bool {
        self.kinds.iter().all(|counters| counters.synced.load(Ordering::Relaxed))
    }

    /// Something came.
    pub(super) fn sign(&self, kind: Kind) {
        let milliseconds = self.start.elapsed().as_millis() as u64;
        self.kinds[kind as usize].last_sign.store(milliseconds + 1, Ordering::Relaxed);
    }

    /// An event came.
    pub(super) fn event(&self, kind: Kind) {
        self.sign(kind);
        self.kinds[kind as usize].events.fetch_add(1, Ordering::Relaxed);
    }

    /// All objects of a kind have been read.
    pub(super) fn listed(&self, kind: Kind) {
        self.sign(kind);
        let counters = &self.kinds[kind as usize];
        counters.lists.fetch_add(1, Ordering::Relaxed);
        counters.synced.store(true, Ordering::Relaxed);
    }

    /// Changes are told from now on.
    pub(super) fn connected(&self, kind: Kind) {
        self.kinds[kind as usize].connected.store(true, Ordering::Relaxed);
    }

    /// The source is lost.
    pub(super) fn lost(&self, kind: Kind) {
        let counters = &self.kinds[kind as usize];
        counters.connected.store(false, Ordering::Relaxed);
        counters.outages.fetch_add(1, Ordering::Relaxed);
    }

    /// How many objects there are, and how many of them are not understood.
    pub(super) fn count(&self, kind: Kind, objects: usize, invalid: usize) {
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
        assert_eq!(health.of(Kind::Pod), KindHealth::default());
        health.listed(Kind::Pod);
        health.connected(Kind::Pod);
        health.event(Kind::Pod);
        health.count(Kind::Pod, 7, 1);
        health.lost(Kind::Pod);
        let pods = health.of(Kind::Pod);
        assert!(pods.synced && !pods.connected && pods.last_sign.unwrap() < Duration::from_secs(60), "{pods:?}");
        assert_eq!((pods.events, pods.outages, pods.lists, pods.objects, pods.invalid), (1, 1, 1, 7, 1));
        assert!(!health.is_synced(), "three kinds are missing");
        Kind::ALL.into_iter().for_each(|kind| health.listed(kind));
        assert!(health.is_synced());
    }
}
