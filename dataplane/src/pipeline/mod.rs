//! From a batch of frames to a verdict for each: the one path that workers, replay, benchmarks and the
//! fuzzer share. It needs no socket and no privilege.

mod cause;

pub use cause::Cause;

use crate::forward::PortId;

/// What becomes of a packet. There is no default but dropping: a verdict must be reached to pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Dropped and counted.
    Drop(Cause),
    /// Rewritten in place and to be sent out of this port.
    Forward(PortId),
}

/// The frames of one batch, all received on one port.
///
/// The pipeline asks for each frame's octets by index, from the Ethernet header to the last octet received.
pub trait Frames {
    /// How many frames the batch has; at most [`BATCH`].
    fn len(&self) -> usize;

    /// Whether the batch is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The octets of frame `index`, which is below [`Frames::len`].
    fn bytes(&mut self, index: usize) -> &mut [u8];
}

/// Most frames in one batch.
pub const BATCH: usize = 64;
