//! How many frames a queue keeps in its fill ring.
//!
//! A frame in a fill ring comes back only with a packet, so what a silent port keeps nobody else has. And a frame costs
//! more than its octets: for each port the kernel keeps 128 octets for every frame of the UMEM (`struct xdp_buff_xsk` in
//! include/net/xsk_buff_pool.h), which at 110 ports is seven times the frame itself. So there are few frames, and they
//! go where bursts come.
//!
//! What a queue may keep depends on what is free at the time, the dynamic threshold by which switches share a buffer
//! among their ports (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998): a
//! small share for whoever has had neither bursts nor many packets yet, a large one for who has. So some frames are always
//! free, however many queues want all.
//!
//! A worker may lose its core when it never did before: to a thread that the kernel lets run until its next tick, or to the
//! host of a virtual machine. So a queue wants room for what comes meanwhile at the pace of its packets, and does not wait
//! for the first loss to tell.

use std::time::{Duration, Instant};

use crate::pipeline::BATCH;

/// How many frames a queue wants in its fill ring, by the bursts that it had and the pace of its packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FillTarget {
    most: u32,
    /// Room for the bursts that it had, and for what comes while the worker is away.
    wanted: u32,
    /// Packets that came one batch upon the other, all but the last of them full: what was waiting.
    burst: u32,
    /// The longest burst since the last review.
    longest: u32,
    /// Packets until the next review, and when the last was.
    until_review: u32,
    reviewed: Option<Instant>,
}

impl FillTarget {
    /// What a queue may have in any case.
    pub(crate) const LEAST: u32 = BATCH as u32;
    /// Without bursts a queue keeps one frame of so many that are free.
    const IDLE_SHARE: u32 = 64;
    /// With bursts it may keep one of so many: if `n` queues have the longest, `n / (BURST_SHARE + n)` of the frames are
    /// theirs.
    const BURST_SHARE: u32 = 4;
    /// Packets from one review to the next.
    const REVIEW: u32 = 1024;
    /// How long a worker may be away and nothing be lost, as far as frames go: two ticks of a kernel with 250 a second, until
    /// the next of which another thread may keep its core.
    const AWAY: Duration = Duration::from_millis(8);

    /// That of a new queue, whose ring has `ring_size` entries, at least [`FillTarget::LEAST`].
    pub(crate) fn new(ring_size: u32) -> Self {
        Self { most: ring_size, wanted: Self::LEAST, burst: 0, longest: 0, until_review: Self::REVIEW, reviewed: None }
    }

    /// How many frames the queue is to have while so many are free.
    #[inline]
    pub(crate) fn allowed(&self, free: u32) -> u32 {
        let idle = (free / Self::IDLE_SHARE).max(Self::LEAST);
        self.wanted.min(free / Self::BURST_SHARE).max(idle).min(self.most)
    }

    /// Takes note of a batch that came; `now` may be the moment when the turn began.
    #[inline]
    pub(crate) fn note(&mut self, count: u32, now: Instant) {
        self.burst += count;
        self.longest = self.longest.max(self.burst);
        // Twice what was waiting: as much may come again before these are back.
        self.wanted = self.wanted.max((2 * self.burst).min(self.most));
        if count < BATCH as u32 {
            self.burst = 0;
        } else {
            // More would say nothing more.
            self.burst = self.burst.min(self.most);
        }
        self.until_review = self.until_review.saturating_sub(count);
        if self.until_review == 0 {
            self.review(now);
        }
    }

    /// Sees how quickly packets come, and gives up by and by what is no longer needed.
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

    /// Between two batches: so slowly that it is bursts that count.
    const SLOW: Duration = Duration::from_secs(1);

    /// A queue that has had this many bursts of so many packets, a batch each so often.
    fn after_at(mut target: FillTarget, bursts: u32, packets: u32, pause: Duration) -> FillTarget {
        let mut now = target.reviewed.unwrap_or_else(Instant::now);
        let mut note = |count| {
            now += pause;
            target.note(count, now);
        };
        for _ in 0..bursts {
            (0..packets / 64).for_each(|_| note(64));
            note(packets % 64);
        }
        target
    }

    fn after(target: FillTarget, bursts: u32, packets: u32) -> FillTarget {
        after_at(target, bursts, packets, SLOW)
    }

    #[test]
    fn a_queue_wants_room_for_twice_the_bursts_it_had_and_gives_up_what_it_does_without() {
        let new = FillTarget::new(1024);
        assert_eq!(after(new, 1000, 20).wanted, 64);
        assert_eq!(after(new, 1, 100).wanted, 200);
        assert_eq!(after(new, 1, 400).wanted, 800);
        let busy = after(new, 1, 100_000);
        assert_eq!(busy.wanted, 1024, "no more than its ring holds");
        // The review that the bursts were part of is to end first.
        assert_eq!(after(busy, 3 * 1024 / 32, 32).wanted, 784, "an eighth less each time");
        assert!((115..132).contains(&after(busy, 100_000, 32).wanted), "four times what comes");
        // What a burst in each review needs, it keeps.
        let mut bursts = busy;
        for _ in 0..100 {
            bursts = after(after(bursts, 20, 32), 1, 400);
        }
        assert_eq!(bursts.wanted, 1024);
    }

    #[test]
    fn a_queue_wants_room_for_what_comes_in_eight_milliseconds_before_it_ever_had_a_burst() {
        // Eight packets so often.
        for (pause, packets) in [(1000, 64), (400, 160), (100, 640), (64, 1000), (10, 1024)] {
            let pause = Duration::from_micros(pause);
            let steady = after_at(FillTarget::new(1024), 2 * 1024 / 8, 8, pause);
            assert_eq!(steady.wanted, packets, "{pause:?}");
            // And no more than that for long.
            let calm = after_at(steady, 20 * 1024 / 8, 8, Duration::from_millis(1));
            assert!(calm.wanted <= steady.wanted && calm.wanted < 100, "{pause:?}: {calm:?}");
        }
    }

    #[test]
    fn what_a_queue_may_have_depends_on_what_is_free() {
        let (silent, busy) = (FillTarget::new(1024), after(FillTarget::new(1024), 1, 2000));
        for (free, idle, burst) in
            [(PLENTY, 1024, 1024), (16_384, 256, 1024), (4096, 64, 1024), (2048, 64, 512), (100, 64, 64), (0, 64, 64)]
        {
            assert_eq!((silent.allowed(free), busy.allowed(free)), (idle, burst), "{free} free");
        }
    }

    #[test]
    fn however_many_queues_want_all_some_frames_stay_free() {
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
        fn a_queue_may_have_a_batch_at_least_and_its_ring_at_most(
            exponent in 6_u32..16,
            batches in prop::collection::vec((1_u32..=64, any::<u32>()), 0..2000),
        ) {
            let (mut target, mut now) = (FillTarget::new(1 << exponent), Instant::now());
            for (count, free) in batches {
                now += Duration::from_nanos(free.into());
                target.note(count, now);
                prop_assert!((FillTarget::LEAST..=1 << exponent).contains(&target.allowed(free)), "{target:?}");
            }
        }
    }
}
