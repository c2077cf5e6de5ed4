//! TCP segments that can be sent as one packet, joined like generic receive offload (`tcp_gro_receive` in
//! net/ipv4/tcp_offload.c).
//!
//! They belong to one connection and follow each other without a gap, all but the last have the same length, and they
//! differ in nothing that a receiver would see: segmenting the whole yields exactly these segments again.

use super::rewrite::LONG;
use super::{ETHERNET_LEN, Protocol, Sum, TcpFlags};
use crate::batch::BATCH;

/// Maximum bytes of the whole: no device accepts longer GSO packets (`GSO_LEGACY_MAX_SIZE` in linux/netdevice.h).
const MOST: usize = 65_535;
/// The shortest headers: Ethernet, IPv4, TCP; the longest: Ethernet, IPv6, and TCP with all options.
const HEADERS_LEAST: usize = ETHERNET_LEN + 20 + 20;
const HEADERS: usize = ETHERNET_LEN + 40 + 60;

/// A complete TCP segment in a frame, with a valid or partial checksum.
#[derive(Clone, Copy)]
struct Segment<'a> {
    frame: &'a [u8],
    /// Offsets of the TCP header and of the payload.
    tcp: usize,
    payload: usize,
}

impl<'a> Segment<'a> {
    /// A segment with at least this much payload. `None`: it cannot be joined with others.
    #[inline]
    fn of(frame: &'a [u8], least: u16) -> Option<Self> {
        if frame.len() < HEADERS_LEAST {
            return None;
        }
        let word = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        const IP: usize = ETHERNET_LEN;
        let (tcp, end, addresses) = match (word(12), frame[IP]) {
            // Five words of header; complete, and with DF set, so that the identification is meaningless (RFC 6864).
            (0x0800, 0x45) if word(IP + 6) == 0x4000 && frame[IP + 9] == Protocol::TCP.0 => {
                (IP + 20, IP + word(IP + 2), IP + 12)
            }
            (0x86dd, 0x60..=0x6f) if frame[IP + 6] == Protocol::TCP.0 => (IP + 40, IP + 40 + word(IP + 4), IP + 8),
            _ => return None,
        };
        if end != frame.len() || end < tcp + 20 {
            return None;
        }
        let payload = tcp + usize::from(frame[tcp + 12] >> 4) * 4;
        let flags = TcpFlags(frame[tcp + 13] & !TcpFlags::PSH.0);
        if payload < tcp + 20 || payload + usize::from(least) > end || flags != TcpFlags::ACK {
            return None;
        }
        let pseudo = Sum::default()
            .add_bytes(&frame[addresses..tcp])
            .add_word(u16::from(Protocol::TCP.0))
            .add_word((end - tcp) as u16);
        // A checksum left to the device was not on a wire, so it cannot be wrong.
        let is_open = word(tcp + 16) == usize::from(pseudo.folded());
        (is_open || pseudo.add_bytes(&frame[tcp..]).folded() == 0xffff).then_some(Self { frame, tcp, payload })
    }

    fn seq(&self) -> u32 {
        let at = self.tcp + 4;
        u32::from_be_bytes([self.frame[at], self.frame[at + 1], self.frame[at + 2], self.frame[at + 3]])
    }

    fn payload_len(&self) -> usize {
        self.frame.len() - self.payload
    }

    fn is_pushed(&self) -> bool {
        TcpFlags(self.frame[self.tcp + 13]).contains(TcpFlags::PSH)
    }

    /// Whether its headers are equal except for lengths, identification, sequence number, PSH and checksums.
    fn is_alike(&self, other: &Self) -> bool {
        let same = |from: usize, to: usize| self.frame[from..to] == other.frame[from..to];
        const IP: usize = ETHERNET_LEN;
        let network = match self.frame[IP] >> 4 {
            4 => same(IP, IP + 2) && same(IP + 8, IP + 10) && same(IP + 12, self.tcp),
            _ => same(IP, IP + 4) && same(IP + 6, self.tcp),
        };
        let tcp = self.tcp;
        // Flags differ at most in PSH: `of` accepts no others.
        (self.tcp, self.payload) == (other.tcp, other.payload)
            && same(0, IP)
            && network
            && same(tcp, tcp + 4)
            && same(tcp + 8, tcp + 13)
            && same(tcp + 14, tcp + 16)
            && same(tcp + 18, self.payload)
    }
}

/// Segments to be sent as one packet.
pub(crate) struct JoinedSegments {
    /// Number of segments, at least two.
    pub(crate) count: usize,
    /// Payload bytes of each segment; the last one may have fewer.
    pub(crate) segment: u16,
    /// Offset of the TCP header.
    pub(crate) tcp: u16,
    /// Offset of the payload in each frame.
    pub(crate) payload: usize,
    headers: [u8; HEADERS],
}

impl JoinedSegments {
    /// The joinable segments at the start of these frames. `None`: the first one must be sent alone.
    #[inline]
    pub(crate) fn at_start<'a>(mut frames: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        let first = Segment::of(frames.next()?, LONG)?;
        if first.is_pushed() {
            return None;
        }
        Self::begun_by(first, frames)
    }

    fn begun_by<'a>(first: Segment<'a>, frames: impl Iterator<Item = &'a [u8]>) -> Option<Self> {
        let segment = first.payload_len();
        let (mut count, mut length, mut pushed) = (1, first.frame.len(), false);
        for frame in frames.take(BATCH - 1) {
            let Some(next) = Segment::of(frame, 1) else { break };
            let expected = first.seq().wrapping_add((length - first.payload) as u32);
            let fits = next.payload_len() <= segment && length + next.payload_len() <= MOST;
            if !fits || next.seq() != expected || !next.is_alike(&first) {
                break;
            }
            (count, length, pushed) = (count + 1, length + next.payload_len(), next.is_pushed());
            if pushed || next.payload_len() < segment {
                break;
            }
        }
        (count > 1).then(|| Self {
            count,
            segment: segment as u16,
            tcp: first.tcp as u16,
            payload: first.payload,
            headers: headers(&first, length, pushed),
        })
    }

    /// Headers of the whole, starting with Ethernet; the TCP checksum is left to the device.
    pub(crate) fn headers(&self) -> &[u8] {
        &self.headers[..self.payload]
    }

    /// Whether it is IPv4; otherwise it is IPv6.
    pub(crate) fn is_v4(&self) -> bool {
        self.headers[ETHERNET_LEN] >> 4 == 4
    }
}

/// Headers of the whole, a frame of `length` bytes.
fn headers(first: &Segment<'_>, length: usize, pushed: bool) -> [u8; HEADERS] {
    const IP: usize = ETHERNET_LEN;
    let (tcp, mut headers) = (first.tcp, [0; HEADERS]);
    headers[..first.payload].copy_from_slice(&first.frame[..first.payload]);
    let addresses = if headers[IP] >> 4 == 4 {
        headers[IP + 2..IP + 4].copy_from_slice(&((length - IP) as u16).to_be_bytes());
        headers[IP + 10..IP + 12].fill(0);
        let checksum = !Sum::default().add_bytes(&headers[IP..tcp]).folded();
        headers[IP + 10..IP + 12].copy_from_slice(&checksum.to_be_bytes());
        IP + 12
    } else {
        headers[IP + 4..IP + 6].copy_from_slice(&((length - tcp) as u16).to_be_bytes());
        IP + 8
    };
    if pushed {
        headers[tcp + 13] |= TcpFlags::PSH.0;
    }
    let pseudo = Sum::default().add_bytes(&headers[addresses..tcp]).add_word(u16::from(Protocol::TCP.0));
    let partial = pseudo.add_word((length - tcp) as u16).folded();
    headers[tcp + 16..tcp + 18].copy_from_slice(&partial.to_be_bytes());
    headers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::finish_open;
    use etherparse::{IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder, TcpHeader, TcpOptionElement};
    use proptest::prelude::*;

    #[derive(Clone)]
    struct Sent {
        v6: bool,
        tos: u8,
        ttl: u8,
        dont_fragment: bool,
        tcp: TcpHeader,
        payload: Vec<u8>,
    }

    impl Sent {
        fn new(v6: bool, seq: u32, payload: Vec<u8>) -> Self {
            let mut tcp = TcpHeader::new(40_000, 5201, seq, 501);
            (tcp.ack, tcp.acknowledgment_number) = (true, 77);
            tcp.set_options(&[TcpOptionElement::Noop, TcpOptionElement::Noop, TcpOptionElement::Timestamp(9, 8)])
                .unwrap();
            Self { v6, tos: 0, ttl: 63, dont_fragment: true, tcp, payload }
        }

        fn frame(&self) -> Vec<u8> {
            let network = if self.v6 {
                let header = Ipv6Header {
                    traffic_class: self.tos,
                    hop_limit: self.ttl,
                    source: [1; 16],
                    destination: [2; 16],
                    ..Default::default()
                };
                IpHeaders::Ipv6(header, Default::default())
            } else {
                let header = Ipv4Header {
                    dscp: (self.tos >> 2).try_into().unwrap(),
                    ecn: (self.tos & 3).try_into().unwrap(),
                    identification: self.tcp.sequence_number as u16,
                    dont_fragment: self.dont_fragment,
                    time_to_live: self.ttl,
                    source: [10, 0, 0, 1],
                    destination: [10, 0, 0, 2],
                    ..Default::default()
                };
                IpHeaders::Ipv4(header, Default::default())
            };
            let builder = PacketBuilder::ethernet2([1; 6], [2; 6]).ip(network).tcp_header(self.tcp.clone());
            let mut frame = Vec::new();
            builder.write(&mut frame, &self.payload).unwrap();
            frame
        }
    }

    /// A stream split into segments, the last of which has PSH; the sequence numbers wrap.
    fn stream(v6: bool, segment: usize, bytes: usize) -> Vec<Sent> {
        let all: Vec<u8> = (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect();
        let seq = |index: usize| (u32::MAX - 700).wrapping_add((index * segment) as u32);
        let cut = all.chunks(segment).enumerate().map(|(index, part)| Sent::new(v6, seq(index), part.to_vec()));
        let mut sent: Vec<Sent> = cut.collect();
        sent.last_mut().unwrap().tcp.psh = true;
        sent
    }

    fn join(frames: &[Vec<u8>]) -> Option<JoinedSegments> {
        JoinedSegments::at_start(frames.iter().map(Vec::as_slice))
    }

    fn frames(sent: &[Sent]) -> Vec<Vec<u8>> {
        sent.iter().map(Sent::frame).collect()
    }

    /// The packet that is sent, with its checksum completed as by a device.
    fn whole(joined: &JoinedSegments, frames: &[Vec<u8>]) -> Vec<u8> {
        let payloads = frames[..joined.count].iter().flat_map(|frame| &frame[joined.payload..]);
        let mut whole: Vec<u8> = joined.headers().iter().chain(payloads).copied().collect();
        finish_open(&mut whole);
        whole
    }

    /// Leaves the checksum partial, as a pod's stack does.
    fn open(frame: &mut [u8], v6: bool) {
        let (tcp, addresses) = if v6 { (54, 22) } else { (34, 26) };
        let length = (frame.len() - tcp) as u16;
        let pseudo = Sum::default().add_bytes(&frame[addresses..tcp]).add_word(6).add_word(length);
        frame[tcp + 16..tcp + 18].copy_from_slice(&pseudo.folded().to_be_bytes());
    }

    #[test]
    fn segments_of_a_stream_join_to_the_original_packet() {
        for v6 in [false, true] {
            for (segment, bytes, count) in [
                (1448, 2896, 2),
                (1448, 3000, 3),
                (1448, 64_000, 45),
                (400, 2000, 5),
                (900, 900 * 64, 64),
                (3434, 3435, 2),
            ] {
                let sent = stream(v6, segment, bytes);
                for opened in [false, true] {
                    let mut frames = frames(&sent);
                    frames.iter_mut().filter(|_| opened).for_each(|frame| open(frame, v6));
                    let joined = join(&frames).unwrap();
                    assert_eq!((joined.count, usize::from(joined.segment)), (count, segment), "{v6} {bytes}");
                    assert_eq!((joined.is_v4(), usize::from(joined.tcp)), (!v6, if v6 { 54 } else { 34 }));
                    let mut meant = sent[0].clone();
                    meant.payload = sent.iter().flat_map(|sent| sent.payload.clone()).collect();
                    meant.tcp.psh = true;
                    assert!(whole(&joined, &frames) == meant.frame(), "{v6} {segment} {bytes} {opened}");
                }
            }
        }
    }

    #[test]
    fn joined_segments_fit_into_one_packet() {
        for v6 in [false, true] {
            let frames = frames(&stream(v6, 1448, 100_000));
            let joined = join(&frames).unwrap();
            assert_eq!(joined.count, 45);
            assert!((MOST - 1448..=MOST).contains(&whole(&joined, &frames).len()));
        }
    }

    #[test]
    fn visibly_different_segments_are_not_joined() {
        type Change = fn(&mut Sent);
        let changes: [(&str, Change); 15] = [
            ("a gap", |sent| sent.tcp.sequence_number = sent.tcp.sequence_number.wrapping_add(1)),
            ("sent again", |sent| sent.tcp.sequence_number = sent.tcp.sequence_number.wrapping_sub(1448)),
            ("another acknowledgement", |sent| sent.tcp.acknowledgment_number += 1),
            ("another window", |sent| sent.tcp.window_size += 1),
            ("another source port", |sent| sent.tcp.source_port += 1),
            ("another destination port", |sent| sent.tcp.destination_port += 1),
            ("FIN", |sent| sent.tcp.fin = true),
            ("RST", |sent| sent.tcp.rst = true),
            ("CWR", |sent| sent.tcp.cwr = true),
            ("URG", |sent| (sent.tcp.urg, sent.tcp.urgent_pointer) = (true, 1)),
            ("another time stamp", |sent| {
                let options = [TcpOptionElement::Noop, TcpOptionElement::Noop, TcpOptionElement::Timestamp(10, 8)];
                sent.tcp.set_options(&options).unwrap();
            }),
            ("no options", |sent| sent.tcp.set_options(&[]).unwrap()),
            ("another TTL", |sent| sent.ttl -= 1),
            ("congestion experienced", |sent| sent.tos = 3),
            ("longer than the first", |sent| sent.payload.push(0)),
        ];
        for v6 in [false, true] {
            for (what, change) in changes {
                let mut sent = stream(v6, 1448, 3 * 1448);
                change(&mut sent[1]);
                assert!(join(&frames(&sent)).is_none(), "{what}");
                let mut sent = stream(v6, 1448, 4 * 1448);
                change(&mut sent[2]);
                assert_eq!(join(&frames(&sent)).unwrap().count, 2, "{what}");
            }
        }
    }

    #[test]
    fn incomplete_corrupt_or_short_segments_are_not_joined() {
        let mut fragmentable = stream(false, 1448, 2896);
        fragmentable.iter_mut().for_each(|sent| sent.dont_fragment = false);
        assert!(join(&frames(&fragmentable)).is_none(), "its identification counts");
        for v6 in [false, true] {
            assert!(join(&frames(&stream(v6, 399, 2000))).is_none(), "short");
            assert!(join(&frames(&stream(v6, 1448, 1448))).is_none(), "alone");
            let mut pushed = stream(v6, 1448, 2896);
            pushed[0].tcp.psh = true;
            assert!(join(&frames(&pushed)).is_none(), "the first is to be read at once");
            for second in [0, 1] {
                let mut spoilt = frames(&stream(v6, 1448, 2896));
                *spoilt[second].last_mut().unwrap() ^= 1;
                assert!(join(&spoilt).is_none(), "a wrong checksum");
                let mut padded = frames(&stream(v6, 1448, 2896));
                padded[second].push(0);
                assert!(join(&padded).is_none(), "padding");
            }
        }
    }

    /// The segments that a whole is split into, without identification, checksums and PSH, which are the last one's or
    /// follow from the rest.
    fn cut(joined: &JoinedSegments, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let (whole, tcp) = (whole(joined, frames), usize::from(joined.tcp));
        let seq = u32::from_be_bytes(whole[tcp + 4..tcp + 8].try_into().unwrap());
        let parts = whole[joined.payload..].chunks(joined.segment.into()).enumerate().map(|(index, part)| {
            let mut segment = [&whole[..joined.payload], part].concat();
            let seq = seq.wrapping_add(index as u32 * u32::from(joined.segment));
            segment[tcp + 4..tcp + 8].copy_from_slice(&seq.to_be_bytes());
            let length = segment.len();
            match joined.is_v4() {
                true => segment[16..18].copy_from_slice(&((length - 14) as u16).to_be_bytes()),
                false => segment[18..20].copy_from_slice(&((length - 54) as u16).to_be_bytes()),
            }
            left_out(segment, joined)
        });
        parts.collect()
    }

    fn left_out(mut frame: Vec<u8>, joined: &JoinedSegments) -> Vec<u8> {
        let tcp = usize::from(joined.tcp);
        if joined.is_v4() {
            frame[18..20].fill(0);
            frame[24..26].fill(0);
        }
        frame[tcp + 13] &= !TcpFlags::PSH.0;
        frame[tcp + 16..tcp + 18].fill(0);
        frame
    }

    proptest! {
        #[test]
        fn joined_segments_split_into_the_originals(
            v6: bool,
            segment in 380_usize..1500,
            bytes in 1_usize..9000,
            opened: bool,
            spoilt in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..120, any::<u8>()), 0..3),
            shortened in prop::option::of((any::<prop::sample::Index>(), any::<prop::sample::Index>())),
        ) {
            let mut frames = frames(&stream(v6, segment, bytes));
            for (which, at, byte) in spoilt {
                let frame = which.get(&frames).clone();
                let index = which.index(frames.len());
                frames[index][at.min(frame.len() - 1)] = byte;
            }
            frames.iter_mut().filter(|frame| opened && frame.len() > 74).for_each(|frame| open(frame, v6));
            if let Some((which, length)) = shortened {
                let index = which.index(frames.len());
                let frame = &mut frames[index];
                frame.truncate(length.index(frame.len()));
            }
            if let Some(joined) = join(&frames) {
                let are: Vec<_> = frames[..joined.count].iter().map(|frame| left_out(frame.clone(), &joined)).collect();
                prop_assert!(cut(&joined, &frames) == are, "{}", joined.count);
                prop_assert!(frames[..joined.count - 1].iter().all(|frame| frame[usize::from(joined.tcp) + 13] & 8 == 0));
            }
        }
    }
}
