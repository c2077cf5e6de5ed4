//! What the table has done, by outcome.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;

macro_rules! events {
    ($($(#[doc = $doc:literal])+ $variant:ident = $field:ident,)+) => {
        /// Something that the table counts.
        #[derive(Clone, Copy)]
        pub(super) enum Event { $($variant,)+ }

        /// What the table has done since it was made. Each outcome is counted once, under one name.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct Statistics { $($(#[doc = $doc])+ pub $field: u64,)+ }

        const EVENTS: usize = [$(stringify!($field)),+].len();

        impl Statistics {
            fn from_sums(sums: [u64; EVENTS]) -> Self {
                Self { $($field: sums[Event::$variant as usize],)+ }
            }

            /// Each count with its name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$((stringify!($field), self.$field)),+].into_iter()
            }
        }
    };
}

events! {
    /// Connections entered.
    Created = created,
    /// Inserts that found their connection already there: the other direction, or another worker, was first.
    Raced = raced,
    /// Inserts that began again because another one of the same key was under way.
    Retried = retried,
    /// Connections whose timeout passed.
    Expired = expired,
    /// Connections that ended and were opened again by a new SYN or INIT.
    Reopened = reopened,
    /// Connections removed by the caller: cut by policy, or their pod went.
    Removed = removed,
    /// Connections that were ending, evicted for a new one.
    EvictedClosing = evicted_closing,
    /// Connections of which one side alone was heard, evicted for a new one.
    EvictedUnanswered = evicted_unanswered,
    /// Connections that were answered once, evicted for a new one.
    EvictedAnswered = evicted_answered,
    /// Connections evicted for another one of the same owner, which was at its quota.
    EvictedQuota = evicted_quota,
    /// New connections refused because there was no room and nothing to evict.
    RefusedFull = refused_full,
    /// New connections refused because their owner was at its quota and had nothing to evict.
    RefusedQuota = refused_quota,
    /// Packets that belong to no connection and cannot open one.
    RefusedCannotOpen = refused_cannot_open,
}

const STRIPES: usize = 16;

/// Counters that workers add to without sharing cache lines, as long as there are at most 16 of them.
pub(super) struct Counters([CachePadded<[AtomicU64; EVENTS]>; STRIPES]);

impl Counters {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0)))))
    }

    #[inline]
    pub(super) fn count(&self, event: Event) {
        self.add(event, 1);
    }

    #[inline]
    pub(super) fn add(&self, event: Event, times: u64) {
        self.0[stripe()][event as usize].fetch_add(times, Ordering::Relaxed);
    }

    pub(super) fn statistics(&self) -> Statistics {
        let sum = |event: usize| self.0.iter().map(|stripe| stripe[event].load(Ordering::Relaxed)).sum();
        Statistics::from_sums(std::array::from_fn(sum))
    }
}

/// This thread's stripe.
#[inline]
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static STRIPE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
    STRIPE.with(|stripe| *stripe)
}
