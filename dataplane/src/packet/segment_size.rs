//! The largest segment that a TCP end announces, where a worker's frame holds less than the end's link.

use super::checksum::updated;
use super::{Packet, TcpFlags, Transport};

/// Bytes of a TCP header without options.
const HEADER: u16 = 20;
/// Where its checksum is.
const CHECKSUM_AT: usize = 16;

/// Lowers the segment size in a SYN, parsed as `packet`, so that the segments that it asks for are packets of `longest` bytes at most
/// (RFC 9293 section 3.7.1, the option of kind 2). Leaves any other frame, and a smaller size, as it is. The checksum must be complete.
#[cold]
pub(crate) fn limit_segment_size(frame: &mut [u8], packet: &Packet, longest: u16) {
    let Transport::Tcp(segment) = packet.transport else { return };
    if !segment.flags.contains(TcpFlags::SYN) {
        return;
    }
    let network: u16 = if packet.flow.src.is_v4() { 20 } else { 40 };
    let most = longest.saturating_sub(network + HEADER);
    let Some(tcp) = frame.get_mut(usize::from(packet.layout.transport)..usize::from(packet.layout.end)) else { return };
    let Some(at) = segment_size_at(tcp) else { return };
    let before = u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    if before <= most {
        return;
    }
    tcp[at..at + 2].copy_from_slice(&most.to_be_bytes());
    let field = u16::from_be_bytes([tcp[CHECKSUM_AT], tcp[CHECKSUM_AT + 1]]);
    // At an odd place its bytes are in two of the words that the checksum adds up.
    let (before, after) = if at % 2 == 0 { (before, most) } else { (before.swap_bytes(), most.swap_bytes()) };
    tcp[CHECKSUM_AT..CHECKSUM_AT + 2].copy_from_slice(&updated(field, before, after).to_be_bytes());
}

fn segment_size_at(tcp: &[u8]) -> Option<usize> {
    let end = usize::from(tcp.get(12)? >> 4) * 4;
    let options = tcp.get(..end)?;
    let mut at = usize::from(HEADER);
    loop {
        at += match *options.get(at..)? {
            [] | [0, ..] => return None,
            [1, ..] => 1,
            [2, 4, _, _, ..] => return Some(at + 2),
            [_, length, ..] if length >= 2 => usize::from(length),
            _ => return None,
        };
    }
}

#[cfg(test)]
mod tests {
    use etherparse::{PacketBuilder, TcpHeader, TcpHeaderSlice, TcpOptionElement as Option};

    use super::*;
    use crate::packet::parse;

    fn syn(v4: bool, options: &[Option], raw: &[u8]) -> Vec<u8> {
        let mut header = TcpHeader::new(1000, 80, 7, 4096);
        header.syn = true;
        match raw {
            [] => header.set_options(options).unwrap(),
            raw => header.set_options_raw(raw).unwrap(),
        }
        let (mut frame, ethernet) = (Vec::new(), PacketBuilder::ethernet2([1; 6], [2; 6]));
        let ip = if v4 {
            ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        } else {
            ethernet.ipv6([0xfd; 16], [0xfc; 16], 64)
        };
        ip.tcp_header(header).write(&mut frame, b"").unwrap();
        frame
    }

    #[test]
    fn a_syn_asks_for_segments_that_a_frame_holds() {
        for (v4, options, raw, expected) in [
            (true, &[Option::MaximumSegmentSize(8961)][..], &[][..], Some(1738)),
            (false, &[Option::WindowScale(7), Option::MaximumSegmentSize(8941)], &[], Some(1718)),
            (
                true,
                &[Option::SelectiveAcknowledgementPermitted, Option::Noop, Option::MaximumSegmentSize(9000)],
                &[],
                Some(1738),
            ),
            (true, &[Option::MaximumSegmentSize(1460)], &[], Some(1460)),
            (true, &[Option::WindowScale(7)], &[], None),
            // An end of options before it, one of no length, and one cut short.
            (true, &[], &[0, 2, 4, 35, 40, 0, 0, 0], None),
            (true, &[], &[9, 0, 2, 4, 35, 40, 0, 0], None),
            (true, &[], &[1, 1, 1, 1, 1, 1, 2, 4], None),
        ] {
            let mut frame = syn(v4, options, raw);
            let packet = parse(&frame).unwrap();
            limit_segment_size(&mut frame, &packet, 1778);
            let start = usize::from(packet.layout.transport);
            let tcp = TcpHeaderSlice::from_slice(&frame[start..]).unwrap();
            let found = tcp.options_iterator().filter_map(Result::ok).find_map(|option| match option {
                Option::MaximumSegmentSize(size) => Some(size),
                _ => None,
            });
            assert_eq!(found, expected, "{options:?} {raw:?}");
            let header = tcp.to_header();
            let sum = match v4 {
                true => header.calc_checksum_ipv4_raw([10, 0, 0, 1], [10, 0, 0, 2], &[]).unwrap(),
                false => header.calc_checksum_ipv6_raw([0xfd; 16], [0xfc; 16], &[]).unwrap(),
            };
            assert_eq!(tcp.checksum(), sum, "{options:?} {raw:?}");
        }
    }
}
