//! How often each rule of a table decided.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of two cache lines, so that no two workers write to one.
const APART: usize = 16;

/// A row of counters for each worker, which alone writes to it. Without rows nothing is counted.
#[derive(Debug, Default)]
pub struct RuleHits {
    counters: Box<[AtomicU64]>,
    rules: usize,
    stride: usize,
}

impl RuleHits {
    /// Counters of this many rules for this many workers.
    pub(super) fn new(rules: usize, workers: usize) -> Self {
        let stride = rules.next_multiple_of(APART) + APART;
        Self { counters: (0..stride * workers).map(|_| AtomicU64::new(0)).collect(), rules, stride }
    }

    /// A rule decided. Only this worker may call it with its number.
    #[inline]
    pub(super) fn add(&self, worker: usize, rule: u32) {
        if let Some(counter) = self.counters.get(worker * self.stride + rule as usize) {
            // Not a locked instruction: nobody else stores to it.
            counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    /// How often each rule decided, in their order; nothing if it is not counted.
    pub fn totals(&self) -> Vec<u64> {
        let rows = || self.counters.chunks(self.stride.max(1));
        let of = |rule: usize| -> u64 { rows().map(|row: &[AtomicU64]| row[rule].load(Ordering::Relaxed)).sum() };
        if self.counters.is_empty() { Vec::new() } else { (0..self.rules).map(of).collect() }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn workers_count_every_hit_of_rules_that_have_a_row() {
        let hits = RuleHits::new(20, 3);
        thread::scope(|scope| {
            for worker in 0..3 {
                let hits = &hits;
                scope.spawn(move || (0..30_000).for_each(|n| hits.add(worker, n % 20)));
            }
        });
        assert_eq!(hits.totals(), [4_500; 20]);
        hits.add(3, 0);
        assert_eq!(hits.totals(), [4_500; 20], "there is no fourth worker");
        let off = RuleHits::default();
        off.add(0, 7);
        assert_eq!(off.totals(), [0; 0]);
        assert_eq!(RuleHits::new(0, 2).totals(), [0; 0]);
    }
}
