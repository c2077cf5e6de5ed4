//! Changes of a frame by forwarding: MACs, TTL or hop limit, and partial checksums.

use super::checksum::{finish_partial, finish_sctp, updated};
use super::{Address, ETHERNET_LEN, Packet, Protocol, Sum, Transport, parse};
use crate::packet::Mac;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NextHop {
    /// Destination MAC.
    pub peer: Mac,
    /// Source MAC.
    pub own: Mac,
    /// Who has counted the hop.
    pub ttl: TtlChange,
    /// Who completes the checksum of a long TCP segment.
    pub open: OpenChecksum,
}

/// The change of a packet's TTL or hop limit when it is forwarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TtlChange {
    /// Nothing: the node's own stack decrements that of a packet which crosses the host port, before or after; between neighbours on a bridge nobody
    /// does.
    #[default]
    Keep,
    /// One less, as the node's hop. It is at least 2.
    Decrement,
    /// One more, since the node's stack takes it off again: between neighbours on a bridge, of whose packets it is asked. It is less than 255.
    Increment,
}

/// Who completes a checksum that the sender of a long TCP segment left to its device. A GSO packet has a single
/// checksum, and the kernel knows whether its receiver needs it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OpenChecksum {
    /// Forwarding.
    #[default]
    Finish,
    /// The sender of the frame, with [`finish_open`].
    Leave,
}

/// Payload bytes from which on a TCP segment is long; joining shorter ones gains little.
pub(super) const LONG: u16 = 400;
/// Minimum bytes of a frame that can be joined with others.
pub(crate) const LEAST: usize = ETHERNET_LEN + 40 + LONG as usize;

/// Prepares a frame, parsed by [`parse`](fn@super::parse) as `packet`, for sending to `hop`.
///
/// The caller has checked that the TTL can change so.
#[inline(always)]
pub fn rewrite(frame: &mut [u8], packet: &Packet, hop: NextHop) {
    // Read before the frame is written: the compiler cannot know that the packet is not in it, and would read them again.
    let ends = (packet.flow.src, packet.flow.dst);
    frame[..6].copy_from_slice(&hop.peer.0);
    frame[6..12].copy_from_slice(&hop.own.0);
    match hop.ttl {
        TtlChange::Keep => {}
        TtlChange::Decrement => add_to_ttl(frame, packet, ends.0, -1),
        TtlChange::Increment => increment_ttl(frame, packet),
    }
    let is_left = hop.open == OpenChecksum::Leave
        && matches!(&packet.transport, Transport::Tcp(segment) if segment.payload_len >= LONG);
    if !is_left {
        finish_checksum(frame, packet, ends);
    }
}

/// Completes the checksum of a frame prepared by [`rewrite`], if it was left partial.
#[inline]
pub fn finish_open(frame: &mut [u8]) {
    const V4: [u8; 2] = [0x08, 0x00];
    // Frames that are not TCP over IPv4 are recognised without parsing.
    if frame.len() < LEAST || (frame[12..14] == V4 && frame[ETHERNET_LEN + 9] != Protocol::TCP.0) {
        return;
    }
    if let Ok(packet) = parse(frame)
        && matches!(packet.transport, Transport::Tcp(_))
    {
        finish_checksum(frame, &packet, (packet.flow.src, packet.flow.dst));
    }
}

/// Changes the TTL, and with it the header checksum of IPv4 (RFC 1624).
#[inline(always)]
fn add_to_ttl(frame: &mut [u8], packet: &Packet, src: Address, hops: i8) {
    let network = usize::from(packet.layout.network);
    if !src.is_v4() {
        frame[network + 7] = frame[network + 7].wrapping_add_signed(hops);
        return;
    }
    let header = &mut frame[network..network + 20];
    let before = u16::from_be_bytes([header[8], header[9]]);
    let after = before.wrapping_add_signed(i16::from(hops) << 8);
    let field = u16::from_be_bytes([header[10], header[11]]);
    header[8] = (after >> 8) as u8;
    header[10..12].copy_from_slice(&updated(field, before, after).to_be_bytes());
}

/// Apart from what most packets need.
#[cold]
#[inline(never)]
fn increment_ttl(frame: &mut [u8], packet: &Packet) {
    add_to_ttl(frame, packet, packet.flow.src, 1);
}

/// Completes a checksum that the sending stack left to its device. Fragments never have partial checksums: a stack
/// completes the checksum before it fragments.
#[inline(always)]
fn finish_checksum(frame: &mut [u8], packet: &Packet, (src, dst): (Address, Address)) {
    if packet.fragment.is_some() {
        return;
    }
    let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
    let transport = &mut frame[start..end];
    let field_at = if let Transport::Udp = packet.transport {
        6
    } else if let Transport::Tcp(_) = packet.transport {
        16
    } else {
        if let Transport::Sctp { .. } = packet.transport {
            finish_sctp(transport);
        }
        return;
    };
    let protocol: Protocol = packet.flow.protocol;
    let pseudo = Sum::pseudo_header(src, dst, protocol, (end - start) as u16);
    finish_partial(transport, field_at, pseudo, protocol);
}

const _: () = assert!(ETHERNET_LEN == 14, "the MACs are written at bytes 0 to 12");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::parse;
    use etherparse::{PacketBuilder, SlicedPacket};

    const HOP: NextHop = NextHop {
        peer: Mac([2, 0, 0, 0, 0, 2]),
        own: Mac([2, 0, 0, 0, 0, 1]),
        ttl: TtlChange::Decrement,
        open: OpenChecksum::Finish,
    };

    fn frames() -> Vec<(&'static str, Vec<u8>)> {
        let payload = [7u8; 33];
        let ethernet = || PacketBuilder::ethernet2([1; 6], [9; 6]);
        let mut frames = Vec::new();
        let mut add = |name, write: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = Vec::new();
            write(&mut frame);
            frames.push((name, frame));
        };
        add("TCP over IPv4", &|out| {
            ethernet().ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).tcp(1000, 80, 5, 100).write(out, &payload).unwrap()
        });
        add("UDP over IPv4", &|out| {
            ethernet().ipv4([10, 0, 0, 1], [10, 0, 0, 2], 2).udp(1000, 53).write(out, &payload).unwrap()
        });
        add("TCP over IPv6", &|out| {
            ethernet().ipv6([0xfd; 16], [0xfc; 16], 64).tcp(1000, 80, 5, 100).write(out, &payload).unwrap()
        });
        add("UDP over IPv6", &|out| {
            ethernet().ipv6([0xfd; 16], [0xfc; 16], 255).udp(1000, 53).write(out, &payload).unwrap()
        });
        frames
    }

    #[test]
    fn a_forwarded_frame_changes_in_macs_ttl_and_checksum_alone() {
        for (name, before) in frames() {
            let mut after = before.clone();
            let packet = parse(&before).unwrap();
            rewrite(&mut after, &packet, HOP);
            let reparsed = parse(&after).unwrap_or_else(|reason| panic!("{name}: {reason}"));
            assert_eq!(after[..12], [HOP.peer.0, HOP.own.0].concat(), "{name}");
            assert_eq!(reparsed.ttl, packet.ttl - 1, "{name}");
            assert_eq!((reparsed.flow, reparsed.transport), (packet.flow, packet.transport), "{name}");
            assert_eq!(
                after[34 + if packet.flow.src.is_v4() { 0 } else { 20 }..],
                before[34 + if packet.flow.src.is_v4() { 0 } else { 20 }..],
                "{name}"
            );
            rewrite(&mut after, &reparsed, NextHop { ttl: TtlChange::Increment, ..HOP });
            assert_eq!(after[12..], before[12..], "{name}: one more undoes one less");
        }
    }

    #[test]
    fn a_partial_checksum_is_completed_by_forwarding() {
        for (name, whole) in frames() {
            let packet = parse(&whole).unwrap();
            let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
            let field = start + if packet.flow.protocol == Protocol::TCP { 16 } else { 6 };
            let pseudo =
                Sum::pseudo_header(packet.flow.src, packet.flow.dst, packet.flow.protocol, (end - start) as u16);
            let mut partial = whole.clone();
            partial[field..field + 2].copy_from_slice(&pseudo.folded().to_be_bytes());
            rewrite(&mut partial, &packet, HOP);
            assert_eq!(partial[field..field + 2], whole[field..field + 2], "{name}");
            assert!(SlicedPacket::from_ethernet(&partial).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_checksum_left_partial_is_completed_by_the_sender() {
        let leave = NextHop { open: OpenChecksum::Leave, ..HOP };
        for (length, is_left) in [(399, false), (400, true), (1400, true)] {
            let payload = vec![5; length];
            for v6 in [false, true] {
                let ethernet = PacketBuilder::ethernet2([1; 6], [9; 6]);
                let builder = match v6 {
                    false => ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64).tcp(1000, 80, 5, 100),
                    true => ethernet.ipv6([0xfd; 16], [0xfc; 16], 64).tcp(1000, 80, 5, 100),
                };
                let mut whole = Vec::new();
                builder.write(&mut whole, &payload).unwrap();
                let packet = parse(&whole).unwrap();
                let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
                let pseudo = Sum::pseudo_header(packet.flow.src, packet.flow.dst, Protocol::TCP, (end - start) as u16);
                let mut open = whole.clone();
                open[start + 16..start + 18].copy_from_slice(&pseudo.folded().to_be_bytes());
                for frame in [&mut whole, &mut open] {
                    rewrite(frame, &packet, leave);
                }
                assert_eq!(open != whole, is_left, "{length} {v6}");
                for frame in [&mut whole, &mut open] {
                    let before = frame.clone();
                    finish_open(frame);
                    assert!(*frame == before || is_left, "{length} {v6}");
                }
                assert!(open == whole, "{length} {v6}");
            }
        }
    }

    #[test]
    fn the_ttl_is_unchanged_for_another_hop() {
        for (name, before) in frames() {
            let mut after = before.clone();
            rewrite(&mut after, &parse(&before).unwrap(), NextHop { ttl: TtlChange::Keep, ..HOP });
            assert_eq!(after[12..], before[12..], "{name}");
        }
    }

    #[test]
    fn padding_is_not_included_in_the_checksum() {
        let (_, mut frame) = frames().swap_remove(1);
        let whole = frame.clone();
        frame.extend([0xaa; 20]);
        let packet = parse(&frame).unwrap();
        let pseudo = Sum::pseudo_header(packet.flow.src, packet.flow.dst, Protocol::UDP, 8 + 33);
        frame[40..42].copy_from_slice(&pseudo.folded().to_be_bytes());
        rewrite(&mut frame, &packet, HOP);
        assert_eq!(frame[40..42], whole[40..42]);
        assert_eq!(frame[whole.len()..], [0xaa; 20]);
    }
}
