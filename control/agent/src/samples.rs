//! The last two samples of the workers' counters, from which rates are computed.

use std::time::{Duration, Instant};

use penstock_dataplane::worker::{Dataplane, DataplaneStatistics};

use super::ports::OpenPorts;

pub(super) const INTERVAL: Duration = Duration::from_secs(1);
/// How long a worker may go without a poll iteration: an idle worker wakes up four times a second.
const STUCK: Duration = Duration::from_secs(3);

#[derive(Clone, Debug)]
pub(super) struct CounterSample {
    at: Instant,
    pub(super) statistics: DataplaneStatistics,
}

impl CounterSample {
    /// Before there are ports.
    pub(super) fn first(dataplane: &Dataplane) -> Self {
        Self { at: Instant::now(), statistics: dataplane.statistics() }
    }

    pub(super) fn take(dataplane: &Dataplane, ports: &OpenPorts) -> Self {
        let mut statistics = dataplane.statistics();
        ports.add_offloaded(&mut statistics);
        Self { at: Instant::now(), statistics }
    }

    /// Seconds since `before` was taken; never zero.
    pub(super) fn seconds_since(&self, before: &Self) -> f64 {
        self.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3)
    }
}

/// The last two samples, and when each worker last completed a poll iteration.
#[derive(Debug)]
pub(super) struct CounterSamples {
    older: CounterSample,
    newer: CounterSample,
    last_moved: Vec<Instant>,
}

impl CounterSamples {
    pub(super) fn new(first: CounterSample) -> Self {
        let last_moved = vec![first.at; first.statistics.workers.len()];
        Self { older: first.clone(), newer: first, last_moved }
    }

    /// Keeps one more sample; call it every [`INTERVAL`].
    pub(super) fn keep(&mut self, fresh: CounterSample) {
        let workers = fresh.statistics.workers.iter().zip(&self.newer.statistics.workers);
        for (last_moved, (now, before)) in self.last_moved.iter_mut().zip(workers) {
            if now.rounds != before.rounds {
                *last_moved = fresh.at;
            }
        }
        self.older = std::mem::replace(&mut self.newer, fresh);
    }

    /// The sample to compare `now` with: one to two intervals older.
    pub(super) fn before(&self, now: &CounterSample) -> &CounterSample {
        if now.at.saturating_duration_since(self.newer.at) >= INTERVAL / 2 { &self.newer } else { &self.older }
    }

    /// A worker that completes no poll iterations, and for how long.
    pub(super) fn stuck(&self) -> Option<(usize, Duration)> {
        let ages =
            self.last_moved.iter().map(|last_moved| self.newer.at.saturating_duration_since(*last_moved)).enumerate();
        ages.filter(|(_, age)| *age > STUCK).max_by_key(|(_, age)| *age)
    }
}

#[cfg(test)]
mod tests {
    use penstock_dataplane::worker::WorkerStatistics;

    use super::*;

    fn sample(at: Instant, rounds: [u64; 2]) -> CounterSample {
        let workers = rounds.map(|rounds| WorkerStatistics { rounds, ..WorkerStatistics::default() });
        CounterSample {
            at,
            statistics: DataplaneStatistics { workers: workers.into(), ..DataplaneStatistics::default() },
        }
    }

    #[test]
    fn a_worker_that_does_not_poll_is_stuck_until_it_does() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut samples = CounterSamples::new(sample(start, [5, 5]));
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
        let mut samples = CounterSamples::new(sample(start, [0, 0]));
        samples.keep(sample(at(1000), [1, 1]));
        let rounds = |now: &CounterSample| samples.before(now).statistics.workers[0].rounds;
        assert_eq!(rounds(&sample(at(1400), [2, 2])), 0, "too close to the last one");
        assert_eq!(rounds(&sample(at(1600), [2, 2])), 1);
        assert!((sample(at(1500), [0, 0]).seconds_since(&sample(start, [0, 0])) - 1.5).abs() < 1e-9);
        assert!(sample(start, [0, 0]).seconds_since(&sample(start, [0, 0])) > 0.0, "never divided by zero");
    }
}
