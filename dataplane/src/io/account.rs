//! Frame accounting: the pool of free frames, and the account of where all frames are.
//!
//! The [`FrameAccount`] is derived from ring positions. In addition every frame has an owner in [`FramePool`]. That
//! allows reclaiming the frames that the kernel still holds when a socket closes: those in its fill, RX, TX and
//! completion rings and in its own cache alike.

use std::sync::atomic::{AtomicU16, Ordering};

use crossbeam::queue::ArrayQueue;
use xsk_rs::FrameDesc;

/// Number of frames in each place at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameAccount {
    /// All frames of the UMEM.
    pub total: u32,
    /// In the pool or in a worker's cache.
    pub free: u32,
    /// In a fill ring, or received and not yet read.
    pub fill: u32,
    /// With a worker, or being sent.
    pub in_flight: u32,
}

impl FrameAccount {
    /// Whether no frame is missing and none is counted twice. Holds whenever no packet moves.
    pub fn is_balanced(&self) -> bool {
        self.free + self.fill + self.in_flight == self.total
    }
}

/// Number of an open queue, which marks its frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct QueueSlot(u16);

impl QueueSlot {
    pub(crate) const COUNT: u16 = 0x4000;

    /// The slot with this number, which must be below [`QueueSlot::COUNT`].
    pub(crate) fn new(number: u16) -> Self {
        assert!(number < Self::COUNT, "slot {number} is out of range");
        Self(number)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FrameOwner {
    /// None: it is in the pool or in a worker's cache.
    Free,
    /// A worker that took it from its cache. Only debug builds mark it; a received frame stays marked as the queue's
    /// until it is passed on, so that it is found when the queue closes.
    Worker,
    /// A queue, for receiving.
    Fill(QueueSlot),
    /// A queue, for sending.
    Transmit(QueueSlot),
}

const FILL: u16 = 0x4000;
const TRANSMIT: u16 = 0x8000;

impl FrameOwner {
    const fn encode(self) -> u16 {
        match self {
            Self::Free => 0,
            Self::Worker => 1,
            Self::Fill(slot) => FILL | slot.0,
            Self::Transmit(slot) => TRANSMIT | slot.0,
        }
    }

    const fn decode(number: u16) -> Self {
        match number {
            0 => Self::Free,
            1 => Self::Worker,
            held if held & FILL != 0 => Self::Fill(QueueSlot(held & !FILL)),
            held => Self::Transmit(QueueSlot(held & !TRANSMIT)),
        }
    }

    /// Whether a frame of this owner may go to that one. A frame that was freed or sent goes nowhere else: whoever
    /// passes it on uses it after it was passed on before.
    const fn may_pass_to(self, next: Self) -> bool {
        match next {
            Self::Free => !matches!(self, Self::Free),
            Self::Worker => matches!(self, Self::Free),
            Self::Fill(_) => matches!(self, Self::Free | Self::Worker),
            Self::Transmit(_) => matches!(self, Self::Fill(_) | Self::Worker),
        }
    }
}

/// The free frames that are in no worker's cache, and the owner of every frame.
///
/// A frame's owner is written before the frame is passed on, by the thread that passes it on. So stores for one frame
/// are ordered by the queue or ring that it passes through, and relaxed stores suffice.
#[derive(Debug)]
pub(crate) struct FramePool {
    frames: Box<[FrameDesc]>,
    owners: Box<[AtomicU16]>,
    free: ArrayQueue<u32>,
    shift: u32,
}

impl FramePool {
    /// A pool in which all of these frames are free. They are sorted by address, `frame_size` bytes each.
    pub(crate) fn new(frames: Vec<FrameDesc>, frame_size: u32) -> Self {
        let free = ArrayQueue::new(frames.len().max(1));
        for index in 0..frames.len() as u32 {
            free.push(index).expect("the pool has room for every frame");
        }
        let owners = frames.iter().map(|_| AtomicU16::new(FrameOwner::Free.encode())).collect();
        Self { frames: frames.into(), owners, free, shift: frame_size.trailing_zeros() }
    }

    pub(crate) fn total(&self) -> u32 {
        self.frames.len() as u32
    }

    /// Number of free frames that are in no worker's cache.
    pub(crate) fn available(&self) -> u32 {
        self.free.len() as u32
    }

    #[inline]
    fn index(&self, frame: &FrameDesc) -> usize {
        frame.addr() >> self.shift
    }

    /// Sets the owner of this frame.
    ///
    /// # Panics
    /// In debug builds, if the frame cannot come from its owner so far: it was freed twice, or passed on after it was
    /// freed or passed on.
    #[inline]
    pub(crate) fn mark(&self, frame: &FrameDesc, owner: FrameOwner) {
        let index = self.index(frame);
        if cfg!(debug_assertions) {
            let before = FrameOwner::decode(self.owners[index].swap(owner.encode(), Ordering::Relaxed));
            assert!(before.may_pass_to(owner), "frame {index} of {before:?} was passed to {owner:?}");
        } else {
            self.owners[index].store(owner.encode(), Ordering::Relaxed);
        }
    }

    fn take(&self) -> Option<FrameDesc> {
        self.free.pop().map(|index| self.frames[index as usize])
    }

    /// Returns a frame that is already marked free.
    fn give_back(&self, frame: &FrameDesc) {
        self.free.push(self.index(frame) as u32).expect("a frame was given back twice");
    }

    /// Takes a frame for a queue's fill ring.
    pub(crate) fn take_for(&self, slot: QueueSlot) -> Option<FrameDesc> {
        let frame = self.take()?;
        self.mark(&frame, FrameOwner::Fill(slot));
        Some(frame)
    }

    pub(crate) fn release(&self, frame: &FrameDesc) {
        self.mark(frame, FrameOwner::Free);
        self.give_back(frame);
    }

    /// Frees all frames of a queue; its socket must be closed, and no worker may use the queue any more. Returns how
    /// many there were.
    pub(crate) fn reclaim(&self, slot: QueueSlot) -> u32 {
        let (fill, transmit) = (FrameOwner::Fill(slot).encode(), FrameOwner::Transmit(slot).encode());
        let mut found = 0;
        for (index, owner) in self.owners.iter().enumerate() {
            let held = owner.load(Ordering::Relaxed);
            if held == fill || held == transmit {
                owner.store(FrameOwner::Free.encode(), Ordering::Relaxed);
                self.free.push(index as u32).expect("a frame was held and free at once");
                found += 1;
            }
        }
        found
    }

    /// The account by owners, to verify the [`FrameAccount`] that is derived from the rings.
    pub(crate) fn census(&self) -> FrameAccount {
        let mut account = FrameAccount { total: self.total(), ..FrameAccount::default() };
        for owner in &self.owners {
            match FrameOwner::decode(owner.load(Ordering::Relaxed)) {
                FrameOwner::Free => account.free += 1,
                FrameOwner::Fill(_) => account.fill += 1,
                FrameOwner::Worker | FrameOwner::Transmit(_) => account.in_flight += 1,
            }
        }
        account
    }
}

/// A worker's cache of free frames, so that it rarely uses the pool.
#[derive(Debug)]
pub(crate) struct FrameCache {
    frames: Vec<FrameDesc>,
}

impl FrameCache {
    const CAPACITY: usize = 512;
    const REFILL: usize = 128;

    pub(crate) fn new() -> Self {
        Self { frames: Vec::with_capacity(Self::CAPACITY) }
    }

    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Takes a free frame, from the pool if the cache is empty. Mark its owner when it is passed on.
    #[inline]
    pub(crate) fn take(&mut self, pool: &FramePool) -> Option<FrameDesc> {
        if self.frames.is_empty() {
            while self.frames.len() < Self::REFILL {
                match pool.take() {
                    Some(frame) => self.frames.push(frame),
                    None => break,
                }
            }
        }
        let frame = self.frames.pop()?;
        if cfg!(debug_assertions) {
            pool.mark(&frame, FrameOwner::Worker);
        }
        Some(frame)
    }

    #[inline]
    pub(crate) fn free(&mut self, frame: FrameDesc, pool: &FramePool) {
        pool.mark(&frame, FrameOwner::Free);
        if self.frames.len() == Self::CAPACITY {
            for spilled in self.frames.drain(Self::CAPACITY / 2..) {
                pool.give_back(&spilled);
            }
        }
        self.frames.push(frame);
    }

    pub(crate) fn empty_into(&mut self, pool: &FramePool) {
        for frame in self.frames.drain(..) {
            pool.give_back(&frame);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Frames without a UMEM: a pool never accesses their content, but all have address zero.
    fn one_frame() -> FramePool {
        FramePool::new(vec![FrameDesc::default()], 2048)
    }

    #[test]
    fn a_frame_has_one_owner_at_a_time() {
        let (pool, slot) = (one_frame(), QueueSlot::new(7));
        let free = FrameAccount { total: 1, free: 1, fill: 0, in_flight: 0 };
        assert_eq!((pool.census(), pool.available()), (free, 1));
        let frame = pool.take_for(slot).unwrap();
        assert_eq!(pool.census(), FrameAccount { free: 0, fill: 1, ..free });
        assert!(pool.take_for(slot).is_none());
        pool.mark(&frame, FrameOwner::Transmit(slot));
        assert_eq!(pool.census(), FrameAccount { free: 0, in_flight: 1, ..free });
        pool.release(&frame);
        assert_eq!((pool.census(), pool.available()), (free, 1));
    }

    #[test]
    fn a_closed_queue_returns_only_its_own_frames() {
        let (pool, mine, other) = (one_frame(), QueueSlot::new(1), QueueSlot::new(2));
        for (owner, found) in [
            (FrameOwner::Fill(mine), 1),
            (FrameOwner::Transmit(mine), 1),
            (FrameOwner::Fill(other), 0),
            (FrameOwner::Transmit(other), 0),
            (FrameOwner::Worker, 0),
        ] {
            let frame = FrameCache::new().take(&pool).unwrap();
            if owner != FrameOwner::Worker {
                pool.mark(&frame, owner);
            }
            assert_eq!(pool.reclaim(mine), found, "{owner:?}");
            if found == 0 {
                pool.release(&frame);
            }
            assert_eq!(pool.available(), 1);
        }
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "frame 0 of Free was passed to Free"))]
    #[cfg_attr(not(debug_assertions), should_panic(expected = "given back twice"))]
    fn a_double_free_is_detected() {
        one_frame().release(&FrameDesc::default());
    }

    /// The pool has room for more frames, so only the owner tells.
    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "frame 0 of Free was passed to Free")]
    fn a_frame_freed_twice_into_a_cache_is_detected() {
        let (pool, mut cache) = (one_frame(), FrameCache::new());
        let frame = cache.take(&pool).unwrap();
        cache.free(frame, &pool);
        cache.free(frame, &pool);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_frame_used_after_it_was_passed_on_is_detected() {
        let (pool, slot, other) = (one_frame(), QueueSlot::new(1), QueueSlot::new(2));
        let frame = pool.take_for(slot).unwrap();
        let is_detected = |owner| {
            let before = FrameOwner::decode(pool.owners[0].load(Ordering::Relaxed));
            let mark = std::panic::AssertUnwindSafe(|| pool.mark(&frame, owner));
            let detected = std::panic::catch_unwind(mark).is_err();
            pool.owners[0].store(before.encode(), Ordering::Relaxed);
            detected
        };
        let (sent, again) = (FrameOwner::Transmit(slot), FrameOwner::Transmit(other));
        assert!(!is_detected(sent) && is_detected(FrameOwner::Fill(other)), "received");
        pool.mark(&frame, sent);
        assert!(is_detected(again) && is_detected(FrameOwner::Fill(slot)), "sent");
        pool.release(&frame);
        assert!(is_detected(sent) && is_detected(FrameOwner::Free), "free");
    }

    proptest! {
        #[test]
        fn every_frame_owner_has_a_unique_number(one in 0..QueueSlot::COUNT, two in 0..QueueSlot::COUNT) {
            let owners = |slot| [FrameOwner::Free, FrameOwner::Worker, FrameOwner::Fill(slot), FrameOwner::Transmit(slot)];
            for a in owners(QueueSlot::new(one)) {
                for b in owners(QueueSlot::new(two)) {
                    prop_assert_eq!(a.encode() == b.encode(), a == b);
                    prop_assert_eq!(FrameOwner::decode(a.encode()), a);
                }
            }
        }
    }
}
