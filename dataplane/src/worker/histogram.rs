//! Duration histograms with one writer and any number of readers.
//!
//! The buckets are hdrhistogram's; the memory is our own: that library's histogram is read by its writer or passed
//! through a queue that allocates, and a worker does neither.

use std::time::Duration;

use super::counter::Counter;

/// Buckets per power of two: a value is known to within an eighth.
const STEPS: u32 = 8;
/// Values below 2 to this power of nanoseconds share the first bucket.
const LEAST: u32 = 7;
/// Values from 2 to this power of nanoseconds on (a second) share the last bucket.
const MOST: u32 = 30;
/// One bucket for shorter values, one for longer ones, and those between.
const BUCKETS: usize = ((MOST - LEAST) * STEPS) as usize + 2;

/// Durations in logarithmic buckets, as in HDR histograms.
#[derive(Debug)]
pub(crate) struct Durations {
    buckets: [Counter; BUCKETS],
    nanoseconds: Counter,
}

impl Default for Durations {
    fn default() -> Self {
        Self { buckets: [const { Counter::new() }; BUCKETS], nanoseconds: Counter::new() }
    }
}

impl Durations {
    /// Adds a value: two additions without locked instructions.
    #[inline]
    pub(crate) fn record(&self, duration: Duration) {
        // Half a millennium fits.
        let nanoseconds = duration.as_nanos() as u64;
        self.buckets[bucket(nanoseconds)].add(1);
        self.nanoseconds.add(nanoseconds);
    }

    pub(crate) fn read(&self) -> Histogram {
        let counts: Vec<u64> = self.buckets.iter().map(Counter::get).collect();
        Histogram { counts, sum: Duration::from_nanos(self.nanoseconds.get()) }
    }
}

#[inline]
fn bucket(nanoseconds: u64) -> usize {
    let octave = nanoseconds.max(1).ilog2();
    if octave < LEAST {
        0
    } else if octave >= MOST {
        BUCKETS - 1
    } else {
        let step = (nanoseconds >> (octave - STEPS.ilog2())) as u32 % STEPS;
        ((octave - LEAST) * STEPS + step + 1) as usize
    }
}

/// Exclusive upper bound of this bucket in nanoseconds; `None` for the last one.
fn bound(bucket: usize) -> Option<u64> {
    let index = u32::try_from(bucket).ok().filter(|_| bucket < BUCKETS - 1)?;
    let (octave, step) = (LEAST + index / STEPS, index % STEPS);
    Some(u64::from(STEPS + step) << (octave - STEPS.ilog2()))
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    sum: Duration,
}

impl Histogram {
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// Number of values below each of these ascending limits: exact at powers of two of a nanosecond; otherwise the
    /// bucket that contains the limit is not counted.
    pub fn shorter_than(&self, limits: &[Duration]) -> Vec<u64> {
        let below = |limit: Duration| {
            let limit = limit.as_nanos();
            let whole = |&(bucket, _): &(usize, &u64)| bound(bucket).is_some_and(|bound| u128::from(bound) <= limit);
            self.counts.iter().enumerate().take_while(whole).map(|(_, count)| count).sum()
        };
        limits.iter().map(|&limit| below(limit)).collect()
    }

    /// The value that this share (0 to 1) of the values does not exceed, to within an eighth; `None` if there are none,
    /// or if it is longer than a second.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = (share.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bound(found?).map(Duration::from_nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_value_is_in_the_bucket_with_its_bounds(nanoseconds in 0u64..1 << 34) {
            let found = bucket(nanoseconds);
            prop_assert!(found < BUCKETS);
            prop_assert!(bound(found).is_none_or(|bound| nanoseconds < bound));
            prop_assert!(found == 0 || bound(found - 1).is_some_and(|bound| nanoseconds >= bound));
        }
    }

    #[test]
    fn quantiles_and_counts_agree_with_a_sorted_list() {
        let durations = Durations::default();
        let values: Vec<u64> = (1..=2000).map(|n| n * 773).collect();
        values.iter().for_each(|&value| durations.record(Duration::from_nanos(value)));
        let read = durations.read();
        assert_eq!(read.count(), 2000);
        assert_eq!(read.sum(), Duration::from_nanos(values.iter().sum()));
        for share in [0.01, 0.5, 0.99, 1.0] {
            let exact = values[(share * 2000.0) as usize - 1] as f64;
            let measured = read.quantile(share).unwrap().as_nanos() as f64;
            assert!(measured > exact && measured <= exact * 1.13, "{share}: {measured} for {exact}");
        }
        let limits = [1024, 65_536, 1 << 20].map(Duration::from_nanos);
        let exact =
            |limit: Duration| values.iter().filter(|&&value| u128::from(value) < limit.as_nanos()).count() as u64;
        assert_eq!(read.shorter_than(&limits), limits.map(exact));
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    #[test]
    fn values_beyond_a_second_are_counted() {
        let durations = Durations::default();
        durations.record(Duration::from_secs(7));
        assert_eq!((durations.read().count(), durations.read().quantile(0.5)), (1, None));
    }
}
