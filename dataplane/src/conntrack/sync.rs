//! The atomics of the connection table: the real ones, or loom's when interleavings are explored.

#[cfg(not(all(test, feature = "loom")))]
pub(super) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(test, feature = "loom"))]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
