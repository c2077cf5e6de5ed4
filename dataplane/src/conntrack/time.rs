//! Time in the connection table.

use std::time::Duration;

/// A point on a monotonic clock, in milliseconds. The caller reads the clock once per batch.
///
/// A table in a file outlives its process, so its timestamps must too: use [`Timestamp::now`], which counts from boot.
/// A table in memory accepts any clock that does not run backwards (of a capture or a test).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The time this many milliseconds after the clock's zero.
    #[inline]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the clock's zero.
    #[inline]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Milliseconds since boot (`CLOCK_MONOTONIC`, which all processes share).
    pub fn now() -> Self {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
            .expect("every Linux kernel has CLOCK_MONOTONIC");
        Self(now.tv_sec() as u64 * 1000 + now.tv_nsec() as u64 / 1_000_000)
    }

    /// This time plus `duration`, truncated to whole milliseconds.
    #[inline]
    #[must_use]
    pub const fn plus(self, duration: Duration) -> Self {
        Self(self.0 + duration.as_millis() as u64)
    }

    #[inline]
    pub(super) const fn tick(self) -> Tick {
        Tick((self.0 >> TICK_SHIFT) as u32 & Tick::MASK)
    }
}

/// A tick is 512 ms.
const TICK_SHIFT: u32 = 9;

/// Coarse time: ticks of 512 ms, modulo 2²² (24.8 days). Coarse because it must fit into the control word, and because
/// a busy connection then writes its time twice a second rather than for each packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Tick(pub(super) u32);

impl Tick {
    /// Bits of a tick.
    pub(super) const BITS: u32 = 22;
    /// All bits of a tick.
    pub(super) const MASK: u32 = (1 << Self::BITS) - 1;
    /// An age in the last part of the range means a clock slightly ahead of the reader's (another worker's batch began
    /// later): 9.3 hours.
    const AHEAD: u32 = 1 << 16;

    /// Ticks from `self` to `now`; zero if `self` is slightly ahead of `now`.
    #[inline]
    pub(super) const fn age(self, now: Self) -> u32 {
        let age = now.0.wrapping_sub(self.0) & Self::MASK;
        if age > Self::MASK - Self::AHEAD { 0 } else { age }
    }
}

/// The number of ticks after which a timeout has certainly passed: rounded up.
pub(super) const fn ticks(timeout: Duration) -> u32 {
    let ticks = timeout.as_millis().div_ceil(1 << TICK_SHIFT);
    if ticks > MAX_TICKS as u128 { MAX_TICKS } else { ticks as u32 }
}

/// One tick in milliseconds: how much longer than its timeout a connection may exist before it counts as expired.
pub(super) const TICK: Duration = Duration::from_millis(1 << TICK_SHIFT);

const MAX_TICKS: u32 = Tick::MASK - 2 * Tick::AHEAD;

/// The longest timeout that ticks can measure, with slack for a late sweep: 23 days.
pub(super) const LONGEST_TIMEOUT: Duration = Duration::from_secs(23 * 86_400);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_right_across_the_wrap_and_a_clock_ahead() {
        let (early, late) = (Timestamp::from_millis(1_000_000), Timestamp::from_millis(1_000_000 + 60_000));
        assert_eq!(early.tick().age(late.tick()), 117);
        assert_eq!(late.tick().age(early.tick()), 0);
        let end = Timestamp::from_millis(u64::from(Tick::MASK) << TICK_SHIFT);
        assert_eq!(end.tick().age(end.plus(Duration::from_secs(512)).tick()), 1000);
    }

    #[test]
    fn the_longest_timeout_is_measurable() {
        assert!(ticks(LONGEST_TIMEOUT) < MAX_TICKS);
        assert_eq!(ticks(Duration::from_millis(1)), 1);
        assert_eq!(ticks(Duration::from_secs(1)), 2);
    }
}
