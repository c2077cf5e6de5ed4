//! A batch of frames: what the pipeline gets and what sockets and memory provide.

/// Maximum frames in one batch.
pub const BATCH: usize = 64;

/// The frames of one batch, all received on one port.
///
/// The pipeline accesses each frame's bytes by index, from the Ethernet header to the last byte received.
pub trait Frames {
    /// Number of frames in the batch; at most [`BATCH`].
    fn len(&self) -> usize;

    /// Whether the batch is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of frame `index`, which is below [`Frames::len`].
    fn bytes(&mut self, index: usize) -> &mut [u8];
}
