//! A packet outside of the UMEM: one that came in several frames, since it is longer than one, as on links with jumbo frames, or
//! one that is held. That is rare: programs forward the packets of established connections, whatever their length.

use crate::batch::{Frames, StackSender};
use crate::tag;

/// Bytes of the longest frame that the parser's offsets can name.
const LONGEST: usize = u16::MAX as usize;

/// The packet, and a batch of one for the pipeline. It allocates nothing after construction.
#[derive(Debug, Default)]
pub(crate) struct LongPacket {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl LongPacket {
    pub(super) fn new() -> Self {
        Self::with_capacity(LONGEST)
    }

    /// Room for a packet of so many bytes.
    pub(super) fn with_capacity(length: usize) -> Self {
        Self { bytes: Vec::with_capacity(length), is_cut: false }
    }

    /// Forgets the last packet.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.is_cut = false;
    }

    pub(super) fn push(&mut self, part: &[u8]) {
        let fits = part.len().min(LONGEST - self.bytes.len());
        self.bytes.extend_from_slice(&part[..fits]);
        self.is_cut |= fits < part.len();
    }

    /// A part is missing.
    pub(super) fn cut(&mut self) {
        self.is_cut = true;
    }

    pub(super) fn is_whole(&self) -> bool {
        !self.is_cut
    }
}

impl Frames for LongPacket {
    fn len(&self) -> usize {
        1
    }

    fn bytes(&mut self, _index: usize) -> &mut [u8] {
        &mut self.bytes
    }

    fn stack_sender(&mut self, _index: usize) -> StackSender {
        tag::stack_sender(&self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_put_together_up_to_the_longest_packet() {
        let mut packet = LongPacket::new();
        let capacity = packet.bytes.capacity();
        for (parts, whole) in [(&[1778, 1778, 5][..], true), (&[1792; 36], true), (&[1792; 37], false)] {
            packet.clear();
            parts.iter().for_each(|&length| packet.push(&vec![7; length]));
            let length = parts.iter().sum::<usize>().min(LONGEST);
            assert_eq!((packet.bytes(0).len(), packet.is_whole()), (length, whole), "{parts:?}");
        }
        packet.clear();
        packet.push(&[1]);
        packet.cut();
        assert!(!packet.is_whole() && packet.bytes.capacity() == capacity);
    }
}
