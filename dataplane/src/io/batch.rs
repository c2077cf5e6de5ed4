//! A batch of received frames, as the pipeline sees it.

use xsk_rs::FrameDesc;

use super::Umem;
use crate::pipeline::Frames;
use crate::prefetch::prefetch;

/// Frames received on one queue, which belong to the worker that received them until it passes them on.
#[derive(Debug)]
pub struct RxBatch<'a> {
    umem: &'a Umem,
    frames: &'a mut [FrameDesc],
}

impl<'a> RxBatch<'a> {
    /// # Safety
    ///
    /// The frames must be frames of this UMEM, all different, taken from an RX ring and not passed on since.
    pub(crate) unsafe fn new(umem: &'a Umem, frames: &'a mut [FrameDesc]) -> Self {
        // Whoever sent them wrote them on another core: without this the parser waits for one header after the other.
        for frame in &*frames {
            // SAFETY: the frame is of this UMEM, and no octet of it is read.
            let headers = unsafe { umem.xsk().data(frame) };
            headers.contents().first().into_iter().for_each(prefetch);
        }
        Self { umem, frames }
    }

    /// The octets of all frames together.
    pub(crate) fn octets(&self) -> u64 {
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
        // SAFETY: by the contract of `new` this is a frame of this UMEM that nobody else has, and the borrow of `self` keeps
        // it from being viewed a second time while the result lives.
        unsafe { self.umem.octets_mut(&mut self.frames[index]) }
    }
}
