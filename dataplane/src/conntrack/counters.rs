//! Counters of the table's operations.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;

macro_rules! events {
    ($($(#[doc = $doc:literal])+ $variant:ident = $field:ident,)+) => {
        /// An operation that the table counts.
        #[derive(Clone, Copy)]
        pub(super) enum TableEvent { $($variant,)+ }

        /// Operations of the table since it was created. Each operation is counted once.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct ConnTableStatistics { $($(#[doc = $doc])+ pub $field: u64,)+ }

        const EVENTS: usize = [$(stringify!($field)),+].len();

        impl ConnTableStatistics {
            fn from_sums(sums: [u64; EVENTS]) -> Self {
                Self { $($field: sums[TableEvent::$variant as usize],)+ }
            }

            /// Each counter with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($field), self.$field)),+].into_iter()
            }
        }
    };
}

events! {
    /// Connections inserted.
    Created = created,
    /// Inserts that found the connection already present, from the other direction or by another worker.
    Raced = raced,
    /// Inserts that were retried because another insert of the same key was in progress.
    Retried = retried,
    /// Connections removed by their timeout.
    Expired = expired,
    /// Connections that had ended and were reopened by a new SYN or INIT, or by a datagram to the kernel's programs.
    Reopened = reopened,
    /// Connections removed by the caller because their pod was removed.
    Removed = removed,
    /// Closing connections evicted for a new one.
    EvictedClosing = evicted_closing,
    /// Connections evicted for a new one while only one side had sent.
    EvictedUnanswered = evicted_unanswered,
    /// Connections that were answered once, evicted for a new one.
    EvictedAnswered = evicted_answered,
    /// Connections evicted for another one of the same owner, which was at its quota.
    EvictedQuota = evicted_quota,
    /// New connections rejected because there was no room and nothing to evict.
    RefusedFull = refused_full,
    /// New connections rejected because their owner was at its quota and had nothing to evict.
    RefusedQuota = refused_quota,
    /// Packets that belong to no connection and cannot open one.
    RefusedCannotOpen = refused_cannot_open,
    /// Connections that the kernel's programs opened by a worker's answer; they are among those inserted.
    Repeated = repeated,
    /// The same, but too many for the worker that counts them: it has missed these.
    Unheard = unheard,
}

const STRIPES: usize = 16;

/// Counters that up to 16 workers increment without sharing cache lines.
pub(super) struct Counters([CachePadded<[AtomicU64; EVENTS]>; STRIPES]);

impl Counters {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0)))))
    }

    #[inline]
    pub(super) fn count(&self, event: TableEvent) {
        self.add(event, 1);
    }

    #[inline]
    pub(super) fn add(&self, event: TableEvent, times: u64) {
        self.0[stripe()][event as usize].fetch_add(times, Ordering::Relaxed);
    }

    pub(super) fn statistics(&self) -> ConnTableStatistics {
        let sum = |event: usize| self.0.iter().map(|stripe| stripe[event].load(Ordering::Relaxed)).sum();
        ConnTableStatistics::from_sums(std::array::from_fn(sum))
    }
}

/// Index of this thread's stripe.
#[inline]
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static STRIPE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
    STRIPE.with(|stripe| *stripe)
}
