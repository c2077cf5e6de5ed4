//! How long to wait before the next try.

use std::time::Duration;

use rand::Rng;

/// The first wait at most …
const FIRST: Duration = Duration::from_millis(250);
/// … doubled each time up to this.
const LONGEST: Duration = Duration::from_secs(30);
/// While there is nobody to connect to, it is doubled so many times alone: knocking costs a server that is down nothing,
/// and once it is back what has changed meanwhile must not wait.
const DOUBLINGS_UNREACHABLE: u32 = 2;
/// What a server asks for is taken up to this: it must not silence us for good.
const LONGEST_ASKED: Duration = Duration::from_secs(120);

/// Waits that grow from one failure to the next. They differ between nodes: a server that comes back is not to meet
/// all of them at once.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// How long to wait after there was nobody to connect to.
    pub(super) fn next_unreachable(&mut self) -> Duration {
        self.failures = self.failures.min(DOUBLINGS_UNREACHABLE);
        self.next(None)
    }

    /// Between half and all of the present step, which then doubles. What the server asked for is kept to, and
    /// stretched by up to a quarter.
    pub(super) fn next(&mut self, asked: Option<Duration>) -> Duration {
        let step = FIRST.saturating_mul(1 << self.failures.min(20)).min(LONGEST);
        self.failures += 1;
        let mut random = rand::rng();
        let own = step.mul_f64(random.random_range(0.5..=1.0));
        let asked = asked.map(|asked| asked.min(LONGEST_ASKED).mul_f64(random.random_range(1.0..=1.25)));
        own.max(asked.unwrap_or_default())
    }

    /// All is well again.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// How many failures there were since all was well.
    pub(super) fn failures(&self) -> u32 {
        self.failures
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
        assert_eq!((step, backoff.failures()), (LONGEST, 100));
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
        let asked = |seconds| Backoff::default().next(Some(Duration::from_secs(seconds)));
        assert!((Duration::from_secs(7)..=Duration::from_secs(9)).contains(&asked(7)));
        assert!(asked(1_000_000) <= LONGEST_ASKED.mul_f64(1.25));
    }
}
