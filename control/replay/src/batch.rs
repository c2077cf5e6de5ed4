//! Packets that one port receives at one time, processed together.

use std::ops::Range;

use penstock_dataplane::pipeline::{BATCH, Frames};

use super::capture::Record;

#[derive(Clone, Debug)]
pub struct BatchedPacket {
    /// Its number in the capture, from 1.
    pub number: u64,
    pub record: Record,
    /// Its frame's range in the batch's bytes; longer than what was captured if the frame was padded.
    pub range: Range<usize>,
}

/// Frames stored back to back in a buffer that every batch reuses.
#[derive(Debug, Default)]
pub struct PacketBatch {
    bytes: Vec<u8>,
    packets: Vec<BatchedPacket>,
}

impl PacketBatch {
    /// The buffer to which the next frame is appended.
    #[inline]
    pub fn space(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.packets.len() == BATCH
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Adds what was appended to [`PacketBatch::space`] from `start` on as the next packet.
    #[inline]
    pub fn push(&mut self, number: u64, record: Record, start: usize) {
        let range = start..self.bytes.len();
        self.packets.push(BatchedPacket { number, record, range });
    }

    #[inline]
    pub fn packets(&self) -> &[BatchedPacket] {
        &self.packets
    }

    #[inline]
    pub fn frame(&self, packet: &BatchedPacket) -> &[u8] {
        &self.bytes[packet.range.clone()]
    }

    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn single(&self, packet: &BatchedPacket) -> Self {
        let bytes = self.frame(packet).to_vec();
        Self { packets: vec![BatchedPacket { range: 0..bytes.len(), ..*packet }], bytes }
    }

    /// Copies the frames of another batch, to keep them as they were before processing.
    pub fn copy_from(&mut self, other: &Self) {
        self.bytes.clear();
        self.bytes.extend_from_slice(&other.bytes);
        self.packets.clear();
        self.packets.extend_from_slice(&other.packets);
    }

    /// Removes its packets but keeps what was appended behind them. Returns where that starts now.
    #[inline]
    pub fn clear(&mut self) {
        let end = self.packets.last().map_or(0, |packet| packet.range.end);
        let rest = self.bytes.len() - end;
        self.bytes.copy_within(end.., 0);
        self.bytes.truncate(rest);
        self.packets.clear();
    }
}

impl Frames for PacketBatch {
    #[inline]
    fn len(&self) -> usize {
        self.packets.len()
    }

    #[inline]
    fn bytes(&mut self, index: usize) -> &mut [u8] {
        &mut self.bytes[self.packets[index].range.clone()]
    }
}
