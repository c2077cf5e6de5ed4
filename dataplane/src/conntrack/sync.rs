//! Atomics of the connection table: the standard ones, or loom's for exploring interleavings.

#[cfg(not(all(test, feature = "loom")))]
pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(all(test, feature = "loom"))]
pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Ordering for exchanging a word whose order relative to other words does not matter. Loom only knows which of two
/// writes is later if one has seen the other, so it needs acquire and release.
pub(super) const EXCHANGE: Ordering =
    if cfg!(all(test, feature = "loom")) { Ordering::AcqRel } else { Ordering::Relaxed };

/// A relaxed or releasing store to a word that other threads may exchange concurrently.
#[inline]
pub(super) fn overwrite(word: &AtomicU64, value: u64, ordering: Ordering) {
    if cfg!(all(test, feature = "loom")) {
        word.swap(value, EXCHANGE);
    } else {
        word.store(value, ordering);
    }
}
