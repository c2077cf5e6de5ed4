//! Finds the highest rate at which no more than a given share of the packets is lost.
//!
//! As in MLRsearch, short trials narrow an interval and a longer trial confirms its lower end. If that fails, the
//! search continues below.

use std::time::Duration;

use anyhow::Result;

#[derive(Clone, Copy, Debug)]
pub struct RateSearch {
    /// Accepted share of lost packets: 0 for the no-drop rate.
    pub may_lose: f64,
    /// Highest rate to try, in packets a second.
    pub highest: f64,
    pub short: Duration,
    pub long: Duration,
    /// Width of the interval at which narrowing ends, as a share of its upper end.
    pub width: f64,
    pub trials: u32,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RateSearchResult {
    /// Highest rate that a long trial confirmed, in packets a second; zero if none did.
    pub rate: f64,
    pub trials: u32,
}

impl RateSearch {
    /// Runs the search. `trial` sends at a rate for a time and returns the share of packets lost.
    pub fn run(&self, mut trial: impl FnMut(f64, Duration) -> Result<f64>) -> Result<RateSearchResult> {
        let (mut low, mut high) = (0.0, self.highest);
        let mut rate = high;
        let mut narrows_by = self.short;
        let (mut step, mut confirmed) = (FIRST_STEP, 0.0_f64);
        for trials in 1..=self.trials {
            // Use the last trial to confirm what short trials passed, not to narrow further.
            let is_last = trials == self.trials && low > 0.0;
            let confirms = is_last || high - low <= self.width * high;
            let (at, length) = if confirms { (low, self.long) } else { (rate, narrows_by) };
            let passes = trial(at, length)? <= self.may_lose;
            if passes && length == self.long {
                confirmed = confirmed.max(at);
            }
            match (confirms, passes) {
                (true, true) => return Ok(RateSearchResult { rate: at, trials }),
                // A long trial fails where short trials passed: only long trials count from here on.
                (true, false) => {
                    // A long trial that passed at this rate before no longer counts either.
                    confirmed = if confirmed < at { confirmed } else { 0.0 };
                    (low, high, narrows_by) = (confirmed, at, self.long);
                }
                (false, true) => low = at,
                (false, false) => high = at,
            }
            rate = if low > 0.0 {
                low.midpoint(high)
            } else {
                // Most searches end near the highest rate; the others must reach low rates before the trials are used
                // up.
                let lower = high * (1.0 - step);
                step = (2.0 * step).min(LAST_STEP);
                lower
            };
        }
        Ok(RateSearchResult { rate: confirmed, trials: self.trials })
    }
}

/// First step down while nothing has passed, as a share of the rate; it doubles each time.
const FIRST_STEP: f64 = 0.1;
/// Largest step down.
const LAST_STEP: f64 = 0.5;

#[cfg(test)]
mod tests {
    use super::*;

    fn search(may_lose: f64) -> RateSearch {
        let (short, long) = (Duration::from_millis(1), Duration::from_millis(5));
        RateSearch { may_lose, highest: 1000.0, short, long, width: 0.02, trials: 40 }
    }

    #[test]
    fn search_finds_the_highest_rate_below_the_loss() {
        for capacity in [999.0, 700.0, 333.0, 50.0] {
            for may_lose in [0.0, 0.005] {
                let loss = |rate: f64, _| Ok(((rate - capacity) / rate).max(0.0));
                let found = search(may_lose).run(loss).unwrap();
                let exact = capacity / (1.0 - may_lose);
                assert!(found.rate <= exact && found.rate > exact * 0.96, "{found:?} for {capacity}, {may_lose}");
            }
        }
    }

    #[test]
    fn a_lossless_highest_rate_is_confirmed() {
        let found = search(0.0).run(|_, _| Ok(0.0)).unwrap();
        assert_eq!(found.rate, 1000.0);
        assert_eq!(found.trials, 2);
    }

    #[test]
    fn a_rate_that_only_short_trials_pass_is_not_reported() {
        let loss =
            |rate: f64, length: Duration| Ok(if length > Duration::from_millis(1) && rate > 400.0 { 0.1 } else { 0.0 });
        let found = search(0.0).run(loss).unwrap();
        assert!(found.rate <= 400.0 && found.rate > 330.0, "{found:?}");
        assert_eq!(search(0.0).run(|_, _| Ok(1.0)).unwrap().rate, 0.0);
    }

    #[test]
    fn a_rate_that_a_later_long_trial_fails_is_not_reported() {
        let (mut above_300, long) = (0, Duration::from_millis(5));
        let loss = |rate: f64, length: Duration| {
            let passes = if rate > 300.0 && rate <= 400.0 && length == long {
                above_300 += 1;
                above_300 == 2
            } else {
                rate <= 300.0 || length < long
            };
            Ok(if passes { 0.0 } else { 0.1 })
        };
        let found = search(0.0).run(loss).unwrap();
        assert!(above_300 > 2 && found.rate <= 300.0 && found.rate > 100.0, "{found:?}, {above_300}");
    }

    #[test]
    fn ten_trials_find_a_low_rate_despite_random_failures() {
        for capacity in [600.0, 200.0, 30.0] {
            let mut number = 0;
            let loss = |rate: f64, _| {
                number += 1;
                Ok(if rate > capacity || number == 3 { 0.1 } else { 0.0 })
            };
            let found = RateSearch { trials: 10, ..search(0.0) }.run(loss).unwrap();
            assert!(found.rate <= capacity && found.rate > 0.1 * capacity, "{found:?} for {capacity}");
        }
    }
}
