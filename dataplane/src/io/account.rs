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
    /// Being sent, or in transit to another worker.
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
pub(crate) struct Slot(u16);

impl Slot {
    /// Number of possible slots.
    pub(crate) const COUNT: u16 = 0x4000;

    /// The slot with this number, which must be below [`Slot::COUNT`].
    pub(crate) fn new(number: u16) -> Self {
        assert!(number < Self::COUNT, "slot {number} is out of range");
        Self(number)
    }
}

/// Owner of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holder {
    /// None: it is in the pool or in a worker's cache.
    Free,
    /// In transit from one worker to another.
    HandOver,
    /// A queue, for receiving.
    Fill(Slot),
    /// A queue, for sending.
    Transmit(Slot),
}

const FILL: u16 = 0x4000;
const TRANSMIT: u16 = 0x8000;

impl Holder {
    const fn encode(self) -> u16 {
        match self {
            Self::Free => 0,
            Self::HandOver => 1,
            Self::Fill(slot) => FILL | slot.0,
            Self::Transmit(slot) => TRANSMIT | slot.0,
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
    holders: Box<[AtomicU16]>,
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
        let holders = frames.iter().map(|_| AtomicU16::new(Holder::Free.encode())).collect();
        Self { frames: frames.into(), holders, free, shift: frame_size.trailing_zeros() }
    }

    /// Number of frames.
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
    #[inline]
    pub(crate) fn mark(&self, frame: &FrameDesc, holder: Holder) {
        self.holders[self.index(frame)].store(holder.encode(), Ordering::Relaxed);
    }

    fn take(&self) -> Option<FrameDesc> {
        self.free.pop().map(|index| self.frames[index as usize])
    }

    /// Returns a frame that is already marked free.
    fn give_back(&self, frame: &FrameDesc) {
        self.free.push(self.index(frame) as u32).expect("a frame was given back twice");
    }

    /// Takes a frame for a queue's fill ring.
    pub(crate) fn take_for(&self, slot: Slot) -> Option<FrameDesc> {
        let frame = self.take()?;
        self.mark(&frame, Holder::Fill(slot));
        Some(frame)
    }

    /// Frees a frame.
    pub(crate) fn release(&self, frame: &FrameDesc) {
        self.mark(frame, Holder::Free);
        self.give_back(frame);
    }

    /// Frees all frames of a queue; its socket must be closed, and no worker may use the queue any more. Returns how
    /// many there were.
    pub(crate) fn reclaim(&self, slot: Slot) -> u32 {
        let (fill, transmit) = (Holder::Fill(slot).encode(), Holder::Transmit(slot).encode());
        let mut found = 0;
        for (index, holder) in self.holders.iter().enumerate() {
            let held = holder.load(Ordering::Relaxed);
            if held == fill || held == transmit {
                holder.store(Holder::Free.encode(), Ordering::Relaxed);
                self.free.push(index as u32).expect("a frame was held and free at once");
                found += 1;
            }
        }
        found
    }

    /// The account by owners, to verify the [`FrameAccount`] that is derived from the rings.
    pub(crate) fn census(&self) -> FrameAccount {
        let mut account = FrameAccount { total: self.total(), ..FrameAccount::default() };
        for holder in &self.holders {
            match holder.load(Ordering::Relaxed) {
                0 => account.free += 1,
                held if held & FILL != 0 => account.fill += 1,
                _ => account.in_flight += 1,
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

    /// Takes a free frame, from the pool if the cache is empty. It is still marked free.
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
        self.frames.pop()
    }

    /// Frees a frame.
    #[inline]
    pub(crate) fn give(&mut self, frame: FrameDesc, pool: &FramePool) {
        pool.mark(&frame, Holder::Free);
        if self.frames.len() == Self::CAPACITY {
            for spilled in self.frames.drain(Self::CAPACITY / 2..) {
                pool.give_back(&spilled);
            }
        }
        self.frames.push(frame);
    }

    /// Returns all frames to the pool.
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
    fn a_frame_is_in_one_place_at_a_time() {
        let (pool, slot) = (one_frame(), Slot::new(7));
        let free = FrameAccount { total: 1, free: 1, fill: 0, in_flight: 0 };
        assert_eq!((pool.census(), pool.available()), (free, 1));
        let frame = pool.take_for(slot).unwrap();
        assert_eq!(pool.census(), FrameAccount { free: 0, fill: 1, ..free });
        assert!(pool.take_for(slot).is_none());
        for holder in [Holder::HandOver, Holder::Transmit(slot)] {
            pool.mark(&frame, holder);
            assert_eq!(pool.census(), FrameAccount { free: 0, in_flight: 1, ..free });
        }
        pool.release(&frame);
        assert_eq!((pool.census(), pool.available()), (free, 1));
    }

    #[test]
    fn a_closed_queue_gives_back_its_own_frames_only() {
        let (pool, mine, other) = (one_frame(), Slot::new(1), Slot::new(2));
        for (holder, found) in [
            (Holder::Fill(mine), 1),
            (Holder::Transmit(mine), 1),
            (Holder::Fill(other), 0),
            (Holder::Transmit(other), 0),
            (Holder::HandOver, 0),
            (Holder::Free, 0),
        ] {
            let frame = pool.take().unwrap();
            pool.mark(&frame, holder);
            assert_eq!(pool.reclaim(mine), found, "{holder:?}");
            if found == 0 {
                pool.release(&frame);
            }
            assert_eq!(pool.available(), 1);
        }
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_frame_that_is_freed_twice_is_noticed() {
        one_frame().release(&FrameDesc::default());
    }

    proptest! {
        #[test]
        fn every_holder_has_a_number_of_its_own(one in 0..Slot::COUNT, two in 0..Slot::COUNT) {
            let holders = |slot| [Holder::Free, Holder::HandOver, Holder::Fill(slot), Holder::Transmit(slot)];
            for a in holders(Slot::new(one)) {
                for b in holders(Slot::new(two)) {
                    prop_assert_eq!(a.encode() == b.encode(), a == b);
                }
            }
        }
    }
}
