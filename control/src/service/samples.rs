//! The workers' counters now and a moment ago: what rates are made of.

use std::time::{Duration, Instant};

use penstock_dataplane::worker::{Dataplane, Statistics};

/// How often a sample is kept.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// How long a worker may go without a turn: it wakes up four times a second if there is nothing to do.
const STUCK: Duration = Duration::from_secs(3);

/// All counters at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    at: Instant,
    pub(super) statistics: Statistics,
}

impl Sample {
    pub(super) fn take(dataplane: &Dataplane) -> Self {
        Self { at: Instant::now(), statistics: dataplane.statistics() }
    }

    /// How long after `before` it was taken, in seconds; never zero.
    pub(super) fn seconds_since(&self, before: &Self) -> f64 {
        self.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3)
    }
}

/// The last two samples, and when each worker was last seen to move.
#[derive(Debug)]
pub(super) struct Samples {
    older: Sample,
    newer: Sample,
    moved: Vec<Instant>,
}

impl Samples {
    pub(super) fn new(dataplane: &Dataplane) -> Self {
        let first = Sample::take(dataplane);
        let moved = vec![first.at; first.statistics.workers.len()];
        Self { older: first.clone(), newer: first, moved }
    }

    /// Keeps one more; to be called every [`INTERVAL`].
    pub(super) fn keep(&mut self, dataplane: &Dataplane) {
        let fresh = Sample::take(dataplane);
        let workers = fresh.statistics.workers.iter().zip(&self.newer.statistics.workers);
        for (moved, (now, before)) in self.moved.iter_mut().zip(workers) {
            if now.rounds != before.rounds {
                *moved = fresh.at;
            }
        }
        self.older = std::mem::replace(&mut self.newer, fresh);
    }

    /// What to compare `now` with: one from one to two intervals before.
    pub(super) fn before(&self, now: &Sample) -> &Sample {
        if now.at.saturating_duration_since(self.newer.at) >= INTERVAL / 2 { &self.newer } else { &self.older }
    }

    /// A worker that does not move, and for how long it has not.
    pub(super) fn stuck(&self) -> Option<(usize, Duration)> {
        let ages = self.moved.iter().map(|moved| self.newer.at.saturating_duration_since(*moved)).enumerate();
        ages.filter(|(_, age)| *age > STUCK).max_by_key(|(_, age)| *age)
    }
}
