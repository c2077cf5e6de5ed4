//! DNS over TCP: messages that are cut into segments, each behind its length (RFC 1035 section 4.2.2, RFC 7766).
//!
//! Segments are read as they pass, and none is held back. So they may come again, or later than the next ones.

use std::collections::VecDeque;

use super::questions::DnsTalk;

/// Connections of a pod to resolvers that are read at the same time. The oldest make room.
const MOST: usize = 32;
/// Segments that may come before one that is missing, and their bytes.
const MOST_LATER: usize = 64;
const MOST_BYTES: usize = 1 << 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    Pod,
    Resolver,
}

/// A segment: its number, whether it opens its direction, and its data.
#[derive(Clone, Copy, Debug)]
pub struct DnsSegment<'a> {
    /// The number of its first byte.
    pub seq: u32,
    /// Whether it is a SYN, or a SYN-ACK.
    pub opens: bool,
    pub data: &'a [u8],
}

#[derive(Debug, Default)]
pub(super) struct Streams(VecDeque<(DnsTalk, [Direction; 2])>);

#[derive(Debug, Default)]
struct Direction {
    /// The number of the next byte; `None`: not known, so that nothing is read.
    next: Option<u32>,
    /// The part of a message that has come.
    begun: Vec<u8>,
    later: Vec<(u32, Box<[u8]>)>,
}

impl Streams {
    /// Reads a segment, and calls `each` with every message that it completes.
    pub(super) fn read(&mut self, talk: DnsTalk, side: Side, segment: DnsSegment<'_>, each: impl FnMut(&[u8])) {
        let known = self.0.iter().position(|(known, _)| *known == talk);
        let is_first = segment.opens && side == Side::Pod;
        if is_first {
            known.map(|index| self.0.remove(index));
            if self.0.len() == MOST {
                self.0.pop_front();
            }
            self.0.push_back((talk, Default::default()));
        }
        let index = if is_first { Some(self.0.len() - 1) } else { known };
        let Some((_, directions)) = index.and_then(|index| self.0.get_mut(index)) else { return };
        let direction = &mut directions[side as usize];
        if segment.opens {
            *direction = Direction { next: Some(segment.seq.wrapping_add(1)), ..Direction::default() };
        } else {
            direction.read(segment.seq, segment.data, each);
        }
    }
}

impl Direction {
    fn read(&mut self, seq: u32, data: &[u8], mut each: impl FnMut(&[u8])) {
        let Some(next) = self.next else { return };
        if seq.wrapping_sub(next) as i32 > 0 {
            let kept: usize = self.later.iter().map(|(_, data)| data.len()).sum();
            if self.later.len() < MOST_LATER && kept + data.len() <= MOST_BYTES {
                self.later.push((seq, data.into()));
            }
            return;
        }
        self.append(next, seq, data);
        while let Some(next) = self.next
            && let Some(index) = self.later.iter().position(|(seq, _)| seq.wrapping_sub(next) as i32 <= 0)
        {
            let (seq, data) = self.later.swap_remove(index);
            self.append(next, seq, &data);
        }
        while let Some((length, rest)) = self.begun.split_first_chunk::<2>() {
            let length = usize::from(u16::from_be_bytes(*length));
            let Some(message) = rest.get(..length) else { break };
            each(message);
            self.begun.drain(..2 + length);
        }
    }

    /// Appends what of the data is new.
    fn append(&mut self, next: u32, seq: u32, data: &[u8]) {
        if let Some(new) = data.get(next.wrapping_sub(seq) as usize..) {
            self.begun.extend_from_slice(new);
            self.next = Some(next.wrapping_add(new.len() as u32));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::packet::Address;

    fn talk(port: u16) -> DnsTalk {
        let [resolver, pod] = [53, 1].map(|last| Address::from_v4_bytes([10, 0, 0, last]));
        DnsTalk { resolver, pod, port, is_stream: true }
    }

    fn opened(first: u32) -> Streams {
        let mut streams = Streams::default();
        for side in [Side::Pod, Side::Resolver] {
            let segment = DnsSegment { seq: first, opens: true, data: &[] };
            streams.read(talk(1), side, segment, |_| panic!("no message"));
        }
        streams
    }

    fn messages() -> impl Strategy<Value = Vec<Vec<u8>>> {
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..6)
    }

    proptest! {
        #[test]
        fn messages_are_read_however_they_are_cut_and_come(
            messages in messages(),
            first: u32,
            cuts in prop::collection::vec(0..1500_usize, 0..8),
            order in prop::collection::vec((0..12_usize, 0..12_usize), 0..20),
        ) {
            let bytes: Vec<u8> = messages.iter()
                .flat_map(|message| (message.len() as u16).to_be_bytes().into_iter().chain(message.iter().copied()))
                .collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % bytes.len()).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let mut segments: Vec<_> =
                cuts.windows(2).map(|ends| (first.wrapping_add(1 + ends[0] as u32), &bytes[ends[0]..ends[1]])).collect();
            for (a, b) in order {
                let count = segments.len();
                segments.swap(a % count, b % count);
                // And one comes again.
                segments.push(segments[a % count]);
            }
            let (mut streams, mut read) = (opened(first), Vec::new());
            for (seq, data) in segments {
                let segment = DnsSegment { seq, opens: false, data };
                streams.read(talk(1), Side::Resolver, segment, |message| read.push(message.to_vec()));
            }
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn no_segments_panic_or_take_more_memory_than_that(
            segments in prop::collection::vec((any::<u32>(), any::<bool>(), any::<bool>(), 0..2000_usize), 0..200)
        ) {
            let mut streams = opened(7);
            let data = vec![0xff; 2000];
            for (seq, opens, is_pods, length) in segments {
                let side = if is_pods { Side::Pod } else { Side::Resolver };
                streams.read(talk(1), side, DnsSegment { seq, opens, data: &data[..length] }, |_| {});
                for direction in streams.0.iter().flat_map(|(_, directions)| directions) {
                    prop_assert!(direction.begun.len() <= 2 * MOST_BYTES + 2000 && direction.later.len() <= MOST_LATER);
                }
            }
        }
    }

    #[test]
    fn streams_begin_when_seen_and_the_oldest_make_room() {
        let mut streams = Streams::default();
        let opens = DnsSegment { seq: 0, opens: true, data: &[] };
        let whole = DnsSegment { seq: 1, opens: false, data: &[0, 1, 7] };
        let mut read = 0;
        streams.read(talk(1), Side::Resolver, opens, |_| read += 1);
        streams.read(talk(1), Side::Resolver, whole, |_| read += 1);
        assert_eq!(read, 0);
        for port in 0..=MOST as u16 {
            streams.read(talk(port), Side::Pod, opens, |_| read += 1);
        }
        for port in 0..=MOST as u16 {
            streams.read(talk(port), Side::Pod, whole, |message| read += message.len());
        }
        assert_eq!(read, MOST);
    }
}
