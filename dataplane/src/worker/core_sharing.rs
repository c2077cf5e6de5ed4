//! A real-time worker leaves its core to ordinary threads from time to time.
//!
//! Nobody else makes it. To threads that did not run for most of a second the kernel gives the core for 50 ms on end (the fair
//! server, `dl_server` in kernel/sched/deadline.c), which no queue outlasts.

use std::time::{Duration, Instant};

/// In each period of this length
const PERIOD: Duration = Duration::from_millis(4);
/// the worker sleeps for so long. A queue with 256 free places outlasts it at 600,000 packets/s.
const SHARE: Duration = Duration::from_micros(400);

#[derive(Debug)]
pub(super) struct CoreSharing {
    ends: Instant,
    asleep: Duration,
}

impl CoreSharing {
    pub(super) fn new(now: Instant) -> Self {
        Self { ends: now + PERIOD, asleep: Duration::ZERO }
    }

    #[inline]
    pub(super) fn due(&mut self, now: Instant) -> Option<Duration> {
        if now < self.ends {
            return None;
        }
        let due = SHARE.saturating_sub(self.asleep);
        *self = Self::new(now);
        (!due.is_zero()).then_some(due)
    }

    /// It slept so long for want of packets.
    pub(super) fn slept(&mut self, asleep: Duration) {
        self.asleep += asleep;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sleeps by the microsecond at which they begin, of a worker that wakes after each iteration of 100 µs and sleeps this long
    /// by itself after each.
    fn breaks(asleep: u64, iterations: u64) -> Vec<(u64, u64)> {
        let (start, mut at, mut taken) = (Instant::now(), 0, Vec::new());
        let mut sharing = CoreSharing::new(start);
        for _ in 0..iterations {
            at += 100;
            if let Some(due) = sharing.due(start + Duration::from_micros(at)) {
                taken.push((at, due.as_micros() as u64));
                at += due.as_micros() as u64;
            }
            sharing.slept(Duration::from_micros(asleep));
            at += asleep;
        }
        taken
    }

    #[test]
    fn a_worker_that_never_sleeps_leaves_its_core_each_period() {
        assert_eq!(breaks(0, 119), [(4000, 400), (8000, 400), (12_000, 400)]);
    }

    #[test]
    fn what_it_sleeps_by_itself_counts() {
        // A period is 40 iterations of 101 µs: after 39 sleeps 361 µs are left. What it sleeps afterwards is the next period's.
        assert_eq!(breaks(1, 79).first(), Some(&(4039, 361)));
        assert_eq!(breaks(20, 1000), [], "33 times 20 µs in a period");
    }
}
