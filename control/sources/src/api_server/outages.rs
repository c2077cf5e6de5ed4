//! Log messages about outages: one at the start and one at the end, however many kinds and retries are affected.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::failure::Failure;
use crate::{Kind, SourceHealth};

/// The kinds that currently fail.
#[derive(Debug)]
pub(super) struct Outages {
    health: Arc<SourceHealth>,
    present: Mutex<Present>,
}

#[derive(Debug, Default)]
struct Present {
    /// The last reported failure of each kind.
    kinds: BTreeMap<Kind, String>,
    since: Option<Instant>,
    /// The lines logged since the outage began.
    told: Vec<String>,
}

/// Maximum log lines for one outage: one for each failure that needs an operator.
const MOST_LINES: usize = 8;

impl Outages {
    pub(super) fn new(health: Arc<SourceHealth>) -> Self {
        Self { health, present: Mutex::default() }
    }

    /// A kind fails.
    pub(super) fn lost(&self, kind: Kind, failure: &Failure) {
        let mut present = self.lock();
        let text = failure.to_string();
        let before = present.kinds.insert(kind, text.clone());
        if before.is_none() {
            self.health.lost(kind);
        }
        // A server that has just started rejects everyone until it has loaded its authorization rules: during an outage,
        // such a rejection counts only when it repeats.
        let insists = failure.needs_someone() && before.as_ref() == Some(&text) && !present.told.contains(&text);
        let news = present.told.is_empty() || insists;
        present.since.get_or_insert_with(Instant::now);
        if news && present.told.len() < MOST_LINES {
            tracing::warn!("API server, {}: {text}; known objects stay in force; retrying", kind.resource());
            present.told.push(text);
        } else {
            tracing::debug!("API server, {}: {text}", kind.resource());
        }
    }

    /// A kind is followed again.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_counts_once_per_kind_and_is_logged_when_it_lasts_or_needs_an_operator() {
        let health = Arc::new(SourceHealth::default());
        let outages = Outages::new(Arc::clone(&health));
        let told = || outages.lock().told.len();
        let refused = |kind: Kind| Failure::Forbidden { resource: kind.resource(), message: String::new() };
        let down = || Failure::Connection("refused".to_owned());
        for kind in Kind::ALL {
            outages.lost(kind, &down());
            outages.lost(kind, &down());
        }
        assert_eq!(told(), 1, "one line for all kinds and tries");
        outages.lost(Kind::Pod, &refused(Kind::Pod));
        assert_eq!(told(), 1, "it may be starting");
        outages.lost(Kind::Pod, &refused(Kind::Pod));
        outages.lost(Kind::Pod, &refused(Kind::Pod));
        assert_eq!(told(), 2, "it insists");
        Kind::ALL.into_iter().for_each(|kind| outages.well(kind));
        assert_eq!((told(), health.of(Kind::Pod).outages, health.of(Kind::Pod).connected), (0, 1, true));
        outages.lost(Kind::Node, &refused(Kind::Node));
        assert_eq!(told(), 1, "the first is told at once");
    }
}
