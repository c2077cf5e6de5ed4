//! What is told of failures: an outage once, and its end once, however many kinds and tries it touches.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::failure::Failure;
use crate::source::{Kind, SourceHealth};

/// The kinds that cannot be followed at present.
#[derive(Debug)]
pub(super) struct Outages {
    health: Arc<SourceHealth>,
    present: Mutex<Present>,
}

#[derive(Debug, Default)]
struct Present {
    /// What was told of each kind last.
    kinds: BTreeMap<Kind, String>,
    since: Option<Instant>,
    /// What was said in the log since all was well.
    told: Vec<String>,
}

/// How many lines one outage has at most: one each for what only someone can mend.
const MOST_LINES: usize = 8;

impl Outages {
    pub(super) fn new(health: Arc<SourceHealth>) -> Self {
        Self { health, present: Mutex::default() }
    }

    /// A kind cannot be followed.
    pub(super) fn lost(&self, kind: Kind, failure: &Failure) {
        let mut present = self.lock();
        let text = failure.to_string();
        let is_first = present.told.is_empty();
        let news = is_first || failure.needs_someone() && !present.told.contains(&text);
        if present.kinds.insert(kind, text.clone()).is_none() {
            self.health.lost(kind);
        }
        present.since.get_or_insert_with(Instant::now);
        if news && present.told.len() < MOST_LINES {
            tracing::warn!("API server, {}: {text}; what is known of it stays in force; trying again", kind.resource());
            present.told.push(text);
        } else {
            tracing::debug!("API server, {}: {text}", kind.resource());
        }
    }

    /// A kind is followed.
    pub(super) fn well(&self, kind: Kind) {
        self.health.connected(kind);
        let mut present = self.lock();
        if present.kinds.remove(&kind).is_none() || !present.kinds.is_empty() {
            return;
        }
        let seconds = present.since.take().map(|since| since.elapsed().as_secs_f64()).unwrap_or_default();
        present.told.clear();
        tracing::info!("API server: followed again after {seconds:.1} s");
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
