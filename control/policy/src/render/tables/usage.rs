//! How often rules decided, by their source: sums over tables, also over those that are replaced.

use std::sync::Arc;

use penstock_dataplane::policy::{EndpointPolicy, RuleHits};
use rustc_hash::FxHashMap;

use crate::compile::{EffectiveRule, RuleSource};

#[derive(Clone, Debug)]
pub struct RuleUse {
    /// The rule, of the policy as it was when it was compiled.
    pub source: RuleSource,
    pub hits: u64,
}

#[derive(Debug, Default)]
pub(super) struct UsageCounts {
    workers: usize,
    /// By table, what was read of its counters.
    read: FxHashMap<u32, Vec<u64>>,
    /// Tables that were replaced. A worker may still count in one.
    retired: Vec<RetiredTable>,
}

#[derive(Debug)]
struct RetiredTable {
    sources: Vec<RuleSource>,
    hits: Arc<RuleHits>,
    read: Vec<u64>,
}

impl UsageCounts {
    pub(super) fn new(workers: usize) -> Self {
        Self { workers, ..Self::default() }
    }

    pub(super) fn workers(&self) -> usize {
        self.workers
    }

    /// Call before the table of this number is replaced or removed.
    pub(super) fn retire(&mut self, number: u32, rules: &[EffectiveRule], table: &EndpointPolicy) {
        let read = self.read.remove(&number).unwrap_or_default();
        if let Some(table) = table.table().filter(|_| self.workers > 0 && !rules.is_empty()) {
            let sources = rules.iter().map(|rule| rule.source.clone()).collect();
            self.retired.push(RetiredTable { sources, hits: Arc::clone(table.hits()), read });
        }
    }

    /// Counts since the last call, with the tables that are in use.
    pub(super) fn take<'a>(
        &mut self,
        live: impl Iterator<Item = (u32, &'a [EffectiveRule], &'a EndpointPolicy)>,
    ) -> Vec<RuleUse> {
        let mut uses = Vec::new();
        self.retired.retain_mut(|retired| {
            // Asked before the counters are read: if this is their last holder, no worker adds to them any more.
            let is_last = Arc::strong_count(&retired.hits) == 1;
            let now = retired.hits.totals();
            let sources = retired.sources.iter();
            uses.extend(since(&retired.read, &now).zip(sources).filter_map(|(hits, source)| used(source, hits)));
            retired.read = now;
            !is_last
        });
        for (number, rules, table) in live.filter(|_| self.workers > 0) {
            let Some(table) = table.table() else { continue };
            let now = table.hits().totals();
            let read = self.read.entry(number).or_default();
            uses.extend(since(read, &now).zip(rules).filter_map(|(hits, rule)| used(&rule.source, hits)));
            *read = now;
        }
        uses
    }
}

fn since<'a>(read: &'a [u64], now: &'a [u64]) -> impl Iterator<Item = u64> + 'a {
    let read = read.iter().chain(std::iter::repeat(&0));
    now.iter().zip(read).map(|(now, read)| now.saturating_sub(*read))
}

fn used(source: &RuleSource, hits: u64) -> Option<RuleUse> {
    (hits > 0).then(|| RuleUse { source: source.clone(), hits })
}
