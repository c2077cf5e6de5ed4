//! Packets of one port and one moment, judged together.

use std::ops::Range;

use penstock_dataplane::pipeline::{BATCH, Frames};

use super::capture::Record;

/// A packet of a batch.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its number in the capture, from 1.
    pub number: u64,
    /// What the capture says of it.
    pub record: Record,
    /// Where its frame lies in [`Batch::octets`]; longer than what was captured where that was padded.
    pub range: Range<usize>,
}

/// Frames one after the other in one stretch of memory that is used again for every batch.
#[derive(Debug, Default)]
pub struct Batch {
    octets: Vec<u8>,
    members: Vec<Member>,
}

impl Batch {
    /// Where the next frame is to be appended.
    #[inline]
    pub fn space(&mut self) -> &mut Vec<u8> {
        &mut self.octets
    }

    /// Whether no other packet fits.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.members.len() == BATCH
    }

    /// Whether it has no packets.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Makes what was appended to [`Batch::space`] from `start` on the next packet.
    #[inline]
    pub fn push(&mut self, number: u64, record: Record, start: usize) {
        let range = start..self.octets.len();
        self.members.push(Member { number, record, range });
    }

    /// Its packets.
    #[inline]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// A frame's octets.
    #[inline]
    pub fn frame(&self, member: &Member) -> &[u8] {
        &self.octets[member.range.clone()]
    }

    /// All frames' octets.
    #[inline]
    pub fn octets(&self) -> &[u8] {
        &self.octets
    }

    /// Takes over frames as they were before they were judged.
    pub fn copy_from(&mut self, other: &Self) {
        self.octets.clear();
        self.octets.extend_from_slice(&other.octets);
        self.members.clear();
        self.members.extend_from_slice(&other.members);
    }

    /// Forgets its packets, but keeps what was appended behind them. Gives where that begins now.
    #[inline]
    pub fn clear(&mut self) {
        let end = self.members.last().map_or(0, |member| member.range.end);
        let rest = self.octets.len() - end;
        self.octets.copy_within(end.., 0);
        self.octets.truncate(rest);
        self.members.clear();
    }
}

impl Frames for Batch {
    #[inline]
    fn len(&self) -> usize {
        self.members.len()
    }

    #[inline]
    fn bytes(&mut self, index: usize) -> &mut [u8] {
        &mut self.octets[self.members[index].range.clone()]
    }
}
