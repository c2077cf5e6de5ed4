//! Fewer wake-ups of a worker that shares its core with those who send.
//!
//! Such a worker is woken by the first packet, and takes the core from the sender, who then sends the second: each packet pays for two
//! context switches and some system calls. NICs have interrupt coalescing against that (`ethtool -C rx-usecs`). A worker does
//! the same: while it is woken again and again right after it fell asleep, it sleeps for a fixed time instead, whatever arrives.

use std::time::Duration;

/// A sleep that a packet ends within this time is a short one.
const SHORT: Duration = Duration::from_micros(40);
/// So many packets when it wakes have come while it waited for its core: its sleep was a short one, too.
const GATHERED: u32 = 32;
/// So many short sleeps in a row begin the moderation; after a nap that was not worth it, twice as many as before, up to a limit.
const MANY: u32 = 16;
const MOST: u32 = 1 << 14;
/// A nap: what a packet may wait for it.
const NAP: Duration = Duration::from_micros(50);
/// Fewer packets than this during a nap end the moderation. Of transactions that are opened 32 at once, two or three fall into one.
const WORTH: u32 = 6;

#[derive(Clone, Copy, Debug)]
pub(super) struct Moderation {
    short_sleeps: u32,
    /// How many of them begin naps.
    many: u32,
    /// How long the last sleep was; `None`: packets have come since.
    slept: Option<Duration>,
    /// Packets received since the last nap began; `None`: it sleeps until there is a packet.
    since_nap: Option<u32>,
}

impl Default for Moderation {
    fn default() -> Self {
        Self { short_sleeps: 0, many: MANY, slept: None, since_nap: None }
    }
}

impl Moderation {
    #[inline]
    pub(super) fn received(&mut self, packets: u32) {
        if let Some(since_nap) = &mut self.since_nap {
            *since_nap = since_nap.saturating_add(packets);
        } else if let Some(asleep) = self.slept.take() {
            self.short_sleeps = if asleep < SHORT || packets >= GATHERED { self.short_sleeps + 1 } else { 0 };
        }
    }

    /// How long it is to sleep regardless of packets; `None`: until there is one.
    pub(super) fn nap(&mut self) -> Option<Duration> {
        match self.since_nap {
            Some(packets) if packets < WORTH => {
                *self = Self { many: (self.many * 2).min(MOST), ..Self::default() };
            }
            Some(_) => self.many = MANY,
            None => {}
        }
        if self.short_sleeps < self.many {
            return None;
        }
        self.since_nap = Some(0);
        Some(NAP)
    }

    /// It slept, or napped, so long.
    pub(super) fn slept(&mut self, asleep: Duration) {
        if self.since_nap.is_none() {
            self.slept = Some(asleep);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Moderation after so many sleeps of this length.
    fn after(sleeps: u32, microseconds: u64) -> Moderation {
        let mut moderation = Moderation::default();
        for _ in 0..sleeps {
            assert_eq!(moderation.nap(), None);
            moderation.slept(Duration::from_micros(microseconds));
            moderation.received(1);
        }
        moderation
    }

    #[test]
    fn a_worker_naps_after_many_short_sleeps_in_a_row() {
        assert_eq!(after(MANY, 5).nap(), Some(NAP));
        assert_eq!(after(MANY - 1, 5).nap(), None);
        assert_eq!(after(1000, 40).nap(), None, "one packet in each 40 µs needs no moderation");
        let mut interrupted = after(MANY - 1, 5);
        for microseconds in [1000, 5] {
            interrupted.slept(Duration::from_micros(microseconds));
            interrupted.received(1);
            assert_eq!(interrupted.nap(), None, "the row begins anew");
        }
    }

    #[test]
    fn a_sleep_after_which_many_packets_wait_was_a_short_one() {
        for (gathered, expected) in [(GATHERED, Some(NAP)), (GATHERED - 1, None)] {
            let mut moderation = Moderation::default();
            for _ in 0..MANY {
                assert_eq!(moderation.nap(), None);
                moderation.slept(Duration::from_millis(3));
                moderation.received(gathered);
                // The rest of what waits.
                moderation.received(1);
            }
            assert_eq!(moderation.nap(), expected, "{gathered} packets");
        }
    }

    #[test]
    fn it_naps_while_naps_gather_packets_then_sleeps() {
        let mut moderation = after(MANY, 5);
        for batches in [&[WORTH][..], &[WORTH / 2, WORTH / 2], &[64, 64]] {
            assert_eq!(moderation.nap(), Some(NAP));
            moderation.slept(2 * NAP);
            batches.iter().for_each(|packets| moderation.received(*packets));
        }
        assert_eq!(moderation.nap(), Some(NAP));
        moderation.received(WORTH - 1);
        assert_eq!(moderation.nap(), None);
        moderation.slept(Duration::from_micros(5));
        assert_eq!(moderation.nap(), None, "it is woken many times again before it naps");
    }

    #[test]
    fn naps_get_rare_until_one_is_worth_it() {
        let mut moderation = after(MANY, 5);
        let mut short_sleeps_until_nap = |packets: u32| {
            let mut sleeps = 0;
            while moderation.nap().is_none() {
                moderation.slept(Duration::from_micros(5));
                moderation.received(1);
                sleeps += 1;
            }
            moderation.slept(NAP);
            moderation.received(packets);
            sleeps
        };
        let rows: Vec<u32> = (0..14).map(|_| short_sleeps_until_nap(1)).collect();
        assert_eq!(rows[..4], [0, 2 * MANY, 4 * MANY, 8 * MANY]);
        assert_eq!(rows[10..], [MOST; 4]);
        assert_eq!(short_sleeps_until_nap(WORTH), MOST);
        assert_eq!((short_sleeps_until_nap(1), short_sleeps_until_nap(1)), (0, 2 * MANY));
    }
}
