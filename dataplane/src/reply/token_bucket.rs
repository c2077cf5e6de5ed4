//! A token bucket: a rate with a burst.

use crate::conntrack::Timestamp;

/// A token bucket of so many tokens per second and at once. The default is a full one.
#[derive(Clone, Default)]
pub(super) struct TokenBucket<const PER_SECOND: u64, const AT_ONCE: u64> {
    /// In thousandths of a token, so that a millisecond's share is a whole number.
    spent: u64,
    /// When it was last asked, in milliseconds.
    asked: u64,
}

impl<const PER_SECOND: u64, const AT_ONCE: u64> TokenBucket<PER_SECOND, AT_ONCE> {
    pub(super) fn spend(&mut self, now: Timestamp) -> bool {
        let since = now.as_millis().saturating_sub(self.asked);
        self.asked = self.asked.max(now.as_millis());
        self.spent = self.spent.saturating_sub(since.saturating_mul(PER_SECOND));
        let is_left = self.spent + 1000 <= AT_ONCE * 1000;
        self.spent += if is_left { 1000 } else { 0 };
        is_left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_burst_are_limited() {
        let mut token_bucket = TokenBucket::<100, 10>::default();
        let mut spent = |at: u64| (0..1000).take_while(|_| token_bucket.spend(Timestamp::from_millis(at))).count();
        assert_eq!(spent(5_000), 10, "full at first");
        assert_eq!(spent(5_000), 0);
        assert_eq!((spent(5_009), spent(5_010)), (0, 1), "one every ten milliseconds");
        assert_eq!(spent(5_060), 5);
        assert_eq!(spent(99_000), 10, "no more than at first");
        assert_eq!(spent(98_000), 0, "a clock that ran backwards gives nothing");
    }
}
