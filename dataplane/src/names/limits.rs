//! Limits and counters that all pods share.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Bounds of what is kept. A *name* is one that was given for one address. Over a limit, what expires first is evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameLimits {
    pub per_pod: usize,
    pub per_address: usize,
    /// Names of all pods. Over it, each pod evicts its own only: no pod takes from another.
    pub total: usize,
    /// Names that a pod may have also when all pods have that many.
    pub reserved: usize,
    /// An answer counts for at least this long, also if its TTL is shorter: its pod has to get to its first packet.
    pub least: Duration,
}

impl Default for NameLimits {
    /// Some 16 MB at most, and as much again for a node of a thousand such pods.
    fn default() -> Self {
        Self { per_pod: 8192, per_address: 64, total: 131_072, reserved: 512, least: Duration::from_secs(1) }
    }
}

/// Limits and counters of all pods.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) limits: NameLimits,
    pub(super) names: AtomicU64,
    pub(super) learnt: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) not_understood: AtomicU64,
    pub(super) unasked: AtomicU64,
    /// Rises with every change.
    pub(super) changes: AtomicU64,
}

impl Shared {
    pub(super) fn evicted(&self) {
        self.evicted.fetch_add(1, Relaxed);
        self.names.fetch_sub(1, Relaxed);
    }
}
