//! A batch of received frames, as input of the pipeline.

use xsk_rs::FrameDesc;

use super::Umem;
use crate::batch::{BATCH, Frames, StackSender};
use crate::prefetch::prefetch;
use crate::tag;

/// Frames received on one queue. They belong to the worker that received them until it passes them on.
#[derive(Debug)]
pub struct RxBatch<'a> {
    umem: &'a Umem,
    frames: &'a mut [FrameDesc],
}

impl<'a> RxBatch<'a> {
    /// # Safety
    ///
    /// The frames must belong to this UMEM, be distinct, have been taken from an RX ring, and not have been passed on
    /// since.
    pub(crate) unsafe fn new(umem: &'a Umem, frames: &'a mut [FrameDesc]) -> Self {
        // The sender wrote them on another core: without prefetching, the parser waits for each header in turn.
        for frame in &*frames {
            // SAFETY: the frame belongs to this UMEM, and none of its bytes are read.
            let headers = unsafe { umem.xsk().data(frame) };
            headers.contents().first().into_iter().for_each(prefetch);
        }
        Self { umem, frames }
    }

    /// The first `count` frames, and the others.
    pub(crate) fn split(self, count: usize) -> (RxBatch<'a>, RxBatch<'a>) {
        let (first, rest) = self.frames.split_at_mut(count);
        (RxBatch { umem: self.umem, frames: first }, RxBatch { umem: self.umem, frames: rest })
    }

    /// Sorts the frames by `keys`, of which there is one for each, and the keys with them; frames of equal keys keep
    /// their order.
    pub(crate) fn sort_by(&mut self, keys: &mut [u16]) {
        let mut order = [0_u32; BATCH];
        let order = &mut order[..self.frames.len()];
        for (index, (place, key)) in order.iter_mut().zip(keys.iter()).enumerate() {
            *place = u32::from(*key) << 16 | index as u32;
        }
        // With the index in it no two are equal. The stable sort would allocate.
        order.sort_unstable();
        let mut old = [FrameDesc::default(); BATCH];
        old[..self.frames.len()].copy_from_slice(self.frames);
        for ((frame, key), place) in self.frames.iter_mut().zip(keys).zip(order) {
            (*frame, *key) = (old[*place as usize & 0xffff], (*place >> 16) as u16);
        }
    }

    /// How many frames are followed by more of their packet.
    #[inline]
    pub(crate) fn parts(&self) -> usize {
        self.frames.iter().filter(|frame| frame.has_more_frames()).count()
    }

    /// How many packets at the start are in one frame each.
    pub(crate) fn whole_at_start(&self) -> usize {
        self.frames.iter().take_while(|frame| !frame.has_more_frames()).count()
    }

    /// Whether the next frame has more of the packet of the one at this index.
    pub(crate) fn continues(&self, index: usize) -> bool {
        self.frames[index].has_more_frames()
    }

    pub(crate) fn frame(&self, index: usize) -> FrameDesc {
        self.frames[index]
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.frames.iter().map(|frame| frame.lengths().data() as u64).sum()
    }
}

impl Frames for RxBatch<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.frames.len()
    }

    #[inline]
    fn bytes(&mut self, index: usize) -> &mut [u8] {
        // SAFETY: by the contract of `new` this is a frame of this UMEM that nobody else has. The borrow of `self`
        // prevents a second view of it while the result lives.
        unsafe { self.umem.bytes_mut(&mut self.frames[index]) }
    }

    #[inline]
    fn stack_sender(&mut self, index: usize) -> StackSender {
        tag::stack_sender(self.bytes(index))
    }
}
