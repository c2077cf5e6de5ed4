//! Fill ring sizing: how many frames a queue keeps for receiving.
//!
//! A frame in a fill ring returns only with a packet, so the frames of a silent port are unavailable to others. And a
//! frame costs more than its bytes: for each port the kernel keeps 128 bytes for every frame of the UMEM (`struct
//! xdp_buff_xsk` in include/net/xsk_buff_pool.h), which with 110 ports is seven times the frame itself. So there are
//! few frames, and they are given to ports with bursts.
//!
//! A queue's maximum depends on the number of free frames, like the dynamic threshold by which switches share a buffer
//! among their ports (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998):
//! a small share for queues with neither bursts nor many packets, a large one for others. So some frames are always
//! free, however many queues want more.
//!
//! A worker may lose its core at any time: to a thread that the kernel runs until its next tick, or to the hypervisor.
//! So a queue wants room for the packets that arrive meanwhile at its packet rate, without waiting for a first loss.

use std::time::{Duration, Instant};

use crate::batch::BATCH;

/// Number of frames that a queue wants in its fill ring, based on its bursts and its packet rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FillTarget {
    most: u32,
    /// Room for past bursts, and for the packets that arrive while the worker is not running.
    wanted: u32,
    /// Packets of consecutive batches, all but the last of them full: packets that were waiting.
    burst: u32,
    /// The longest burst since the last review.
    longest: u32,
    /// Packets until the next review, and the time of the last one.
    until_review: u32,
    reviewed: Option<Instant>,
}

impl FillTarget {
    /// Minimum of a queue.
    pub(crate) const LEAST: u32 = BATCH as u32;
    /// A queue without bursts gets one of this many free frames.
    const IDLE_SHARE: u32 = 64;
    /// A queue with bursts gets one of this many: if `n` queues use their maximum, `n / (BURST_SHARE + n)` of the
    /// frames are theirs.
    const BURST_SHARE: u32 = 4;
    const REVIEW: u32 = 1024;
    /// Time without running that a worker's frames must cover: two ticks of a kernel with 250 Hz, until the next of
    /// which another thread may keep its core.
    const AWAY: Duration = Duration::from_millis(8);

    /// For a new queue whose ring has `ring_size` entries, at least [`FillTarget::LEAST`].
    pub(crate) fn new(ring_size: u32) -> Self {
        Self { most: ring_size, wanted: Self::LEAST, burst: 0, longest: 0, until_review: Self::REVIEW, reviewed: None }
    }

    /// Number of frames for the queue while this many are free.
    #[inline]
    pub(crate) fn allowed(&self, free: u32) -> u32 {
        let idle = (free / Self::IDLE_SHARE).max(Self::LEAST);
        self.wanted.min(free / Self::BURST_SHARE).max(idle).min(self.most)
    }

    /// Records a received batch; `now` may be the start of the poll iteration.
    #[inline]
    pub(crate) fn record(&mut self, count: u32, now: Instant) {
        self.burst += count;
        self.longest = self.longest.max(self.burst);
        // Twice what was waiting: as much may arrive again before these frames are back.
        self.wanted = self.wanted.max((2 * self.burst).min(self.most));
        if count < BATCH as u32 {
            self.burst = 0;
        } else {
            // Longer bursts make no difference.
            self.burst = self.burst.min(self.most);
        }
        self.until_review = self.until_review.saturating_sub(count);
        if self.until_review == 0 {
            self.review(now);
        }
    }

    /// Measures the packet rate, and gradually gives up frames that are no longer needed.
    #[inline(never)]
    fn review(&mut self, now: Instant) {
        let needed = self.reviewed.map_or(0, |before| {
            let pace = u128::from(Self::REVIEW) * Self::AWAY.as_nanos();
            let packets = pace / now.saturating_duration_since(before).as_nanos().max(1);
            packets.min(self.most.into()) as u32
        });
        if self.longest < self.wanted / 4 {
            self.wanted = (self.wanted - self.wanted / 8).max(Self::LEAST);
        }
        self.wanted = self.wanted.max(needed);
        (self.longest, self.until_review, self.reviewed) = (0, Self::REVIEW, Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Many more than any queue wants.
    const PLENTY: u32 = 1 << 20;

    /// Interval between batches: so slow that only bursts count.
    const SLOW: Duration = Duration::from_secs(1);

    /// A queue after this many bursts of so many packets, with this pause between batches.
    fn after_at(mut target: FillTarget, bursts: u32, packets: u32, pause: Duration) -> FillTarget {
        let mut now = target.reviewed.unwrap_or_else(Instant::now);
        let mut record = |count| {
            now += pause;
            target.record(count, now);
        };
        for _ in 0..bursts {
            (0..packets / 64).for_each(|_| record(64));
            record(packets % 64);
        }
        target
    }

    fn after(target: FillTarget, bursts: u32, packets: u32) -> FillTarget {
        after_at(target, bursts, packets, SLOW)
    }

    #[test]
    fn the_target_is_twice_the_bursts_and_shrinks_without_them() {
        let new = FillTarget::new(1024);
        assert_eq!(after(new, 1000, 20).wanted, 64);
        assert_eq!(after(new, 1, 100).wanted, 200);
        assert_eq!(after(new, 1, 400).wanted, 800);
        let busy = after(new, 1, 100_000);
        assert_eq!(busy.wanted, 1024, "no more than its ring holds");
        // The review that includes the bursts has to end first.
        assert_eq!(after(busy, 3 * 1024 / 32, 32).wanted, 784, "an eighth less each time");
        assert!((115..132).contains(&after(busy, 100_000, 32).wanted), "four times what comes");
        // It keeps what a burst in each review needs.
        let mut bursts = busy;
        for _ in 0..100 {
            bursts = after(after(bursts, 20, 32), 1, 400);
        }
        assert_eq!(bursts.wanted, 1024);
    }

    #[test]
    fn without_bursts_the_target_covers_eight_milliseconds() {
        // Eight packets per pause.
        for (pause, packets) in [(1000, 64), (400, 160), (100, 640), (64, 1000), (10, 1024)] {
            let pause = Duration::from_micros(pause);
            let steady = after_at(FillTarget::new(1024), 2 * 1024 / 8, 8, pause);
            assert_eq!(steady.wanted, packets, "{pause:?}");
            // The extra room is given up when the rate falls.
            let calm = after_at(steady, 20 * 1024 / 8, 8, Duration::from_millis(1));
            assert!(calm.wanted <= steady.wanted && calm.wanted < 100, "{pause:?}: {calm:?}");
        }
    }

    #[test]
    fn the_limit_depends_on_free_frames() {
        let (silent, busy) = (FillTarget::new(1024), after(FillTarget::new(1024), 1, 2000));
        for (free, idle, burst) in
            [(PLENTY, 1024, 1024), (16_384, 256, 1024), (4096, 64, 1024), (2048, 64, 512), (100, 64, 64), (0, 64, 64)]
        {
            assert_eq!((silent.allowed(free), busy.allowed(free)), (idle, burst), "{free} free");
        }
    }

    #[test]
    fn some_frames_stay_free_however_many_queues_want_more() {
        for queues in [1, 8, 112] {
            let busy = after(FillTarget::new(1024), 1, 2000);
            let (mut free, mut kept) = (16_384_u32, vec![0; queues]);
            for _ in 0..1000 {
                for kept in &mut kept {
                    let more = busy.allowed(free).saturating_sub(*kept).min(64);
                    (free, *kept) = (free - more, *kept + more);
                }
            }
            assert!(free > 450 && kept.iter().all(|&kept| kept >= 64), "{queues}: {free} free, {kept:?}");
        }
    }

    proptest! {
        #[test]
        fn the_limit_is_between_a_batch_and_the_ring_size(
            exponent in 6_u32..16,
            batches in prop::collection::vec((1_u32..=64, any::<u32>()), 0..2000),
        ) {
            let (mut target, mut now) = (FillTarget::new(1 << exponent), Instant::now());
            for (count, free) in batches {
                now += Duration::from_nanos(free.into());
                target.record(count, now);
                prop_assert!((FillTarget::LEAST..=1 << exponent).contains(&target.allowed(free)), "{target:?}");
            }
        }
    }
}
