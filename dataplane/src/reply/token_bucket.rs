//! A token bucket: a rate with a burst.

use crate::conntrack::Timestamp;

/// A token bucket, in thousandths of a token so that a millisecond's share is a whole number.
pub(super) struct TokenBucket {
    per_second: u64,
    most: u64,
    left: u64,
    filled: Option<Timestamp>,
}

impl TokenBucket {
    /// A full bucket.
    pub(super) fn new(per_second: u32, at_once: u32) -> Self {
        let most = u64::from(at_once) * 1000;
        Self { per_second: per_second.into(), most, left: most, filled: None }
    }

    /// Adds the tokens accrued since the last call.
    #[inline]
    pub(super) fn refill(&mut self, now: Timestamp) {
        let since = self.filled.map_or(0, |filled| now.as_millis().saturating_sub(filled.as_millis()));
        self.left = self.left.saturating_add(since.saturating_mul(self.per_second)).min(self.most);
        self.filled = Some(now);
    }

    /// Takes one token, if there is one.
    pub(super) fn spend(&mut self) -> bool {
        let left = self.left.checked_sub(1000);
        self.left = left.unwrap_or(self.left);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_burst_are_limited() {
        let mut token_bucket = TokenBucket::new(100, 10);
        let mut spent = |at: u64| {
            token_bucket.refill(Timestamp::from_millis(at));
            (0..1000).take_while(|_| token_bucket.spend()).count()
        };
        assert_eq!(spent(5_000), 10, "full at first");
        assert_eq!(spent(5_000), 0);
        assert_eq!((spent(5_009), spent(5_010)), (0, 1), "one every ten milliseconds");
        assert_eq!(spent(5_060), 5);
        assert_eq!(spent(99_000), 10, "no more than at first");
        assert_eq!(spent(98_000), 0, "a clock that ran backwards gives nothing");
    }
}
