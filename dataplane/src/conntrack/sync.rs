//! The atomics of the connection table: the real ones, or loom's when interleavings are explored.

#[cfg(not(all(test, feature = "loom")))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(test, feature = "loom"))]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// How a word is exchanged whose order with other words does not matter. Loom knows which of two writes came later
/// only if one has seen the other, so there both must acquire and release.
pub(super) const EXCHANGE: Ordering =
    if cfg!(all(test, feature = "loom")) { Ordering::AcqRel } else { Ordering::Relaxed };

/// A relaxed store to a word that other threads may be exchanging.
#[inline]
pub(super) fn overwrite(word: &AtomicU64, value: u64) {
    if cfg!(all(test, feature = "loom")) {
        word.swap(value, EXCHANGE);
    } else {
        word.store(value, Ordering::Relaxed);
    }
}
