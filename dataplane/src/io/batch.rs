//! A batch of received frames, as input of the pipeline.

use xsk_rs::FrameDesc;

use super::Umem;
use crate::batch::Frames;
use crate::prefetch::prefetch;

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

    /// Total bytes of all frames.
    pub(crate) fn bytes(&self) -> u64 {
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
}
