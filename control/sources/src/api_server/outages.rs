//! Log messages about outages: one at the start and one at the end, however many kinds and retries are affected.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::request_error::RequestError;
use crate::{ObjectKind, SourceHealth};

#[derive(Debug)]
pub(super) struct Outages {
    health: Arc<SourceHealth>,
    outage: Mutex<CurrentOutage>,
}

#[derive(Debug, Default)]
struct CurrentOutage {
    kinds: BTreeMap<ObjectKind, String>,
    since: Option<Instant>,
    logged: Vec<String>,
}

/// Maximum log lines for one outage: one for each failure that needs an operator.
const MOST_LINES: usize = 8;

impl Outages {
    pub(super) fn new(health: Arc<SourceHealth>) -> Self {
        Self { health, outage: Mutex::default() }
    }

    pub(super) fn failed(&self, kind: ObjectKind, failure: &RequestError) {
        let mut outage = self.lock();
        let text = failure.to_string();
        self.health.failed(kind, &text);
        let before = outage.kinds.insert(kind, text.clone());
        if before.is_none() {
            self.health.lost(kind);
        }
        // A server that has just started rejects everyone until it has loaded its authorization rules: during an outage,
        // such a rejection counts only when it repeats.
        let repeats = failure.needs_operator() && before.as_ref() == Some(&text) && !outage.logged.contains(&text);
        let must_log = outage.logged.is_empty() || repeats;
        outage.since.get_or_insert_with(Instant::now);
        if must_log && outage.logged.len() < MOST_LINES {
            tracing::warn!("API server, {}: {text}; known objects stay in effect; retrying", kind.resource());
            outage.logged.push(text);
        } else {
            tracing::debug!("API server, {}: {text}", kind.resource());
        }
    }

    pub(super) fn recovered(&self, kind: ObjectKind) {
        self.health.connected(kind);
        let mut outage = self.lock();
        if outage.kinds.remove(&kind).is_none() || !outage.kinds.is_empty() {
            return;
        }
        let seconds = outage.since.take().map(|since| since.elapsed().as_secs_f64()).unwrap_or_default();
        outage.logged.clear();
        tracing::info!("API server: followed again after {seconds:.1} s");
    }

    fn lock(&self) -> MutexGuard<'_, CurrentOutage> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_counts_once_per_kind_and_is_logged_if_it_lasts() {
        let health = Arc::new(SourceHealth::default());
        let outages = Outages::new(Arc::clone(&health));
        let logged = || outages.lock().logged.len();
        let refused = |kind: ObjectKind| RequestError::Forbidden { resource: kind.resource(), message: String::new() };
        let down = || RequestError::Connection("refused".to_owned());
        for kind in ObjectKind::ALL {
            outages.failed(kind, &down());
            outages.failed(kind, &down());
        }
        assert_eq!(logged(), 1, "one line for all kinds and attempts");
        outages.failed(ObjectKind::Pod, &refused(ObjectKind::Pod));
        assert_eq!(logged(), 1, "it may be starting");
        outages.failed(ObjectKind::Pod, &refused(ObjectKind::Pod));
        outages.failed(ObjectKind::Pod, &refused(ObjectKind::Pod));
        assert_eq!(logged(), 2, "it repeats");
        ObjectKind::ALL.into_iter().for_each(|kind| outages.recovered(kind));
        assert_eq!((logged(), health.of(ObjectKind::Pod).outages, health.of(ObjectKind::Pod).connected), (0, 1, true));
        outages.failed(ObjectKind::Node, &refused(ObjectKind::Node));
        assert_eq!(logged(), 1, "the first is logged at once");
    }
}
