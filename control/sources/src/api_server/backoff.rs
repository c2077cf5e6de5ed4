//! Delays between retries: backon's exponential ones, a lower limit while the server is unreachable, and Retry-After.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use rand::Rng;

/// The longest first delay …
const FIRST: Duration = Duration::from_millis(250);
/// … doubled on each failure up to this.
const LONGEST: Duration = Duration::from_secs(30);
/// While no connection can be made, the delay doubles only this often: attempts cost a server that is down nothing, and
/// changes must not wait once it is back.
const DOUBLINGS_UNREACHABLE: usize = 2;
/// Upper limit for Retry-After, so that a server cannot silence us for good.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(120);

/// Exponential backoff with jitter, so that nodes do not all reconnect to a recovering server at once.
#[derive(Debug)]
pub(super) struct Backoff {
    delays: ExponentialBackoff,
    /// Delays since the last success; fewer while the server is unreachable.
    failures: usize,
}

impl Default for Backoff {
    fn default() -> Self {
        // Jitter adds up to the delay itself: each is between half and all of a step.
        let half_steps = ExponentialBuilder::new().with_min_delay(FIRST / 2).with_max_delay(LONGEST / 2);
        Self { delays: half_steps.with_jitter().without_max_times().build(), failures: 0 }
    }
}

impl Backoff {
    pub(super) fn next_unreachable(&mut self) -> Duration {
        if self.failures > DOUBLINGS_UNREACHABLE {
            self.reset();
            (0..DOUBLINGS_UNREACHABLE).for_each(|_| _ = self.step());
        }
        self.step()
    }

    /// The next delay. Honours Retry-After, plus up to a quarter.
    pub(super) fn next(&mut self, retry_after: Option<Duration>) -> Duration {
        let requested =
            retry_after.map(|time| time.min(LONGEST_RETRY_AFTER).mul_f64(rand::rng().random_range(1.0..=1.25)));
        self.step().max(requested.unwrap_or_default())
    }

    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether there was no failure since the last success.
    pub(super) fn is_reset(&self) -> bool {
        self.failures == 0
    }

    fn step(&mut self) -> Duration {
        self.failures += 1;
        self.delays.next().unwrap_or(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_a_limit_with_jitter() {
        let mut backoff = Backoff::default();
        let mut step = FIRST;
        for _ in 0..100 {
            let wait = backoff.next(None);
            assert!(wait >= step / 2 && wait <= step, "{wait:?} of {step:?}");
            step = (2 * step).min(LONGEST);
        }
        assert!(step == LONGEST && !backoff.is_reset());
        backoff.reset();
        assert!(backoff.next(None) <= FIRST);
        let waits: Vec<Duration> = (0..8).map(|_| Backoff::default().next(None)).collect();
        assert!(waits.iter().any(|wait| *wait != waits[0]), "{waits:?}");
    }

    #[test]
    fn an_unreachable_server_is_retried_every_second() {
        let mut backoff = Backoff::default();
        let waits: Vec<Duration> = (0..20).map(|_| backoff.next_unreachable()).collect();
        let second = Duration::from_secs(1);
        assert!(waits[0] <= FIRST && waits.iter().all(|wait| *wait <= second), "{waits:?}");
        assert!(waits[2..].iter().all(|wait| *wait >= second / 2), "{waits:?}");
    }

    #[test]
    fn retry_after_is_honoured_up_to_a_limit() {
        let delay = |seconds| Backoff::default().next(Some(Duration::from_secs(seconds)));
        assert!((Duration::from_secs(7)..=Duration::from_secs(9)).contains(&delay(7)));
        assert!(delay(1_000_000) <= LONGEST_RETRY_AFTER.mul_f64(1.25));
    }
}
