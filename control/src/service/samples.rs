//! The workers' counters now and a moment ago: what rates are made of.

use std::time::{Duration, Instant};

use penstock_dataplane::worker::{Dataplane, DataplaneStatistics};

/// How often a sample is kept.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// How long a worker may go without a turn: it wakes up four times a second if there is nothing to do.
const STUCK: Duration = Duration::from_secs(3);

/// All counters at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    at: Instant,
    pub(super) statistics: DataplaneStatistics,
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
    pub(super) fn new(first: Sample) -> Self {
        let moved = vec![first.at; first.statistics.workers.len()];
        Self { older: first.clone(), newer: first, moved }
    }

    /// Keeps one more; to be called every [`INTERVAL`].
    pub(super) fn keep(&mut self, fresh: Sample) {
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

#[cfg(test)]
mod tests {
    use penstock_dataplane::worker::WorkerStatistics;

    use super::*;

    fn sample(at: Instant, rounds: [u64; 2]) -> Sample {
        let workers = rounds.map(|rounds| WorkerStatistics { rounds, ..WorkerStatistics::default() });
        Sample { at, statistics: DataplaneStatistics { workers: workers.into(), ..DataplaneStatistics::default() } }
    }

    #[test]
    fn a_worker_that_makes_no_turns_is_noticed_and_one_that_moves_again_forgotten() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut samples = Samples::new(sample(start, [5, 5]));
        for second in 1..=3 {
            samples.keep(sample(at(second), [5 + second, 5]));
            assert_eq!(samples.stuck(), None, "after {second} s");
        }
        samples.keep(sample(at(4), [9, 5]));
        assert_eq!(samples.stuck(), Some((1, Duration::from_secs(4))));
        samples.keep(sample(at(5), [9, 6]));
        assert_eq!(samples.stuck(), None);
    }

    #[test]
    fn rates_are_of_at_least_half_an_interval() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut samples = Samples::new(sample(start, [0, 0]));
        samples.keep(sample(at(1000), [1, 1]));
        let rounds = |now: &Sample| samples.before(now).statistics.workers[0].rounds;
        assert_eq!(rounds(&sample(at(1400), [2, 2])), 0, "too close to the last one");
        assert_eq!(rounds(&sample(at(1600), [2, 2])), 1);
        assert!((sample(at(1500), [0, 0]).seconds_since(&sample(start, [0, 0])) - 1.5).abs() < 1e-9);
        assert!(sample(start, [0, 0]).seconds_since(&sample(start, [0, 0])) > 0.0, "never divided by zero");
    }
}
