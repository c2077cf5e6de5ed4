//! Translated packets against packets that were built with the other flow.

use etherparse::{Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpNumber, PacketBuilder, icmpv4, icmpv6};
use proptest::prelude::*;

use super::*;
use crate::packet::{Mac, NextHop, OpenChecksum, TtlChange, parse, rewrite};

fn address(v6: bool, number: u32) -> Address {
    if v6 {
        Address::from_bits((0xfd00 << 112) | (u128::from(number) * 0x1_0001_0001))
    } else {
        Address::from_v4_bytes((10 << 24 | number & 0xff_ffff).to_be_bytes())
    }
}

fn frame(flow: &Flow, payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    let ip = match (flow.src.v4_bytes(), flow.dst.v4_bytes()) {
        (Some(src), Some(dst)) => ethernet.ipv4(src, dst, 64),
        _ => ethernet.ipv6(flow.src.bits().to_be_bytes(), flow.dst.bits().to_be_bytes(), 64),
    };
    match flow.protocol {
        Protocol::TCP => ip.tcp(flow.src_port, flow.dst_port, 5, 100).write(&mut frame, payload).unwrap(),
        Protocol::UDP => ip.udp(flow.src_port, flow.dst_port).write(&mut frame, payload).unwrap(),
        _ => {
            let mut sctp = [flow.src_port.to_be_bytes(), flow.dst_port.to_be_bytes(), [0, 7], [0, 8]].concat();
            sctp.extend([0; 4]);
            sctp.extend([1, 0, 0, 4]);
            let crc = crc32c::crc32c(&sctp).to_le_bytes();
            sctp[8..12].copy_from_slice(&crc);
            ip.write(&mut frame, IpNumber::SCTP, &sctp).unwrap();
        }
    }
    frame
}

/// The flow in which each packet of the first one leaves.
fn flows() -> impl Strategy<Value = (Flow, Flow)> {
    let end = || (any::<u32>(), 1u16..);
    let protocol = prop::sample::select(vec![Protocol::TCP, Protocol::UDP, Protocol::SCTP]);
    (any::<bool>(), protocol, end(), end(), end(), end()).prop_map(|(v6, protocol, a, b, c, d)| {
        let flow = |from: (u32, u16), to: (u32, u16)| Flow {
            src: address(v6, from.0),
            dst: address(v6, to.0),
            protocol,
            src_port: from.1,
            dst_port: to.1,
        };
        (flow(a, b), flow(c, d))
    })
}

/// The ICMP error of `sender` that quotes the first bytes of `quoted`, a frame.
fn error(flow: &Flow, quoted: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    match (flow.src.v4_bytes(), flow.dst.v4_bytes()) {
        (Some(src), Some(dst)) => {
            let header = icmpv4::DestUnreachableHeader::Port;
            let message = Icmpv4Header::with_checksum(Icmpv4Type::DestinationUnreachable(header), quoted);
            let bytes = [&message.to_bytes()[..], quoted].concat();
            ethernet.ipv4(src, dst, 64).write(&mut frame, IpNumber::ICMP, &bytes).unwrap();
        }
        _ => {
            let (src, dst) = (flow.src.bits().to_be_bytes(), flow.dst.bits().to_be_bytes());
            let kind = Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port);
            let message = Icmpv6Header::with_checksum(kind, src, dst, quoted).unwrap();
            let bytes = [&message.to_bytes()[..], quoted].concat();
            ethernet.ipv6(src, dst, 64).write(&mut frame, IpNumber::IPV6_ICMP, &bytes).unwrap();
        }
    }
    frame
}

/// Equal but for checksums of which one is the other form of zero.
fn assert_same(found: &[u8], expected: &[u8]) -> Result<(), TestCaseError> {
    prop_assert_eq!(found.len(), expected.len());
    for (found, expected) in found.chunks(2).zip(expected.chunks(2)) {
        let zero = [[0, 0], [0xff, 0xff]];
        let both_zero = zero.iter().any(|it| it == found) && zero.iter().any(|it| it == expected);
        prop_assert!(found == expected || both_zero, "{:?} {:?}", found, expected);
    }
    Ok(())
}

/// Whether a whole checksum happens to be that of the pseudo-header, as one in 65,536 is. Such a packet is taken for one whose
/// checksum is left to the device, and the last stage completes it.
fn looks_open(frame: &[u8]) -> bool {
    let packet = parse(frame).unwrap();
    let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
    checksum_at(packet.flow.protocol).is_some_and(|at| {
        let pseudo =
            Sum::pseudo_header(packet.flow.src, packet.flow.dst, packet.flow.protocol, (end - start) as u16).folded();
        frame[start + at..start + at + 2] == pseudo.to_be_bytes()
    })
}

proptest! {
    #[test]
    fn a_translated_packet_is_as_its_sender_would_have_sent_it(
        (flow, other) in flows(), payload in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        prop_assume!(![&flow, &other].into_iter().any(|flow| looks_open(&frame(flow, &payload))));
        let mut found = frame(&flow, &payload);
        let packet = parse(&found).unwrap();
        translate(&mut found, &packet, &other, None);
        prop_assert_eq!(parse(&found).unwrap().flow, other);
        assert_same(&found, &frame(&other, &payload))?;
        // And back again.
        let packet = parse(&found).unwrap();
        translate(&mut found, &packet, &flow, None);
        assert_same(&found, &frame(&flow, &payload))?;
    }

    #[test]
    fn a_checksum_left_to_the_device_is_still_left_to_it(
        (flow, other) in flows(), payload in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        prop_assume!(flow.protocol != Protocol::SCTP);
        let mut open = frame(&flow, &payload);
        let packet = parse(&open).unwrap();
        let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
        let at = start + checksum_at(flow.protocol).unwrap();
        let pseudo = Sum::pseudo_header(flow.src, flow.dst, flow.protocol, (end - start) as u16).folded();
        open[at..at + 2].copy_from_slice(&pseudo.to_be_bytes());
        translate(&mut open, &packet, &other, None);
        // As the last stage does.
        let hop = NextHop { peer: Mac([2; 6]), own: Mac([1; 6]), ttl: TtlChange::Keep, open: OpenChecksum::Finish };
        let packet = parse(&open).unwrap();
        rewrite(&mut open, &packet, hop);
        assert_same(&open, &frame(&other, &payload))?;
    }

    #[test]
    fn an_error_and_its_quote_are_those_about_the_other_flow(
        (flow, other) in flows(), router in any::<u32>(), whole in any::<bool>(),
    ) {
        let (quoted, wanted) = (frame(&flow, b"payload!"), frame(&other, b"payload!"));
        let of = |frame: &[u8]| {
            let header = if flow.src.is_v4() { 20 } else { 40 };
            frame[14..if whole { frame.len() } else { 14 + header + 8 }].to_vec()
        };
        let from = address(!flow.src.is_v4(), router);
        let protocol = if from.is_v4() { Protocol::ICMP } else { Protocol::ICMPV6 };
        let outer = |of: &Flow| Flow { src: from, dst: of.src, protocol, src_port: 0, dst_port: 0 };
        let mut found = error(&outer(&flow), &of(&quoted));
        let packet = parse(&found).unwrap();
        translate(&mut found, &packet, &outer(&other), Some(&other));
        let mut expected = error(&outer(&other), &of(&wanted));
        if flow.protocol == Protocol::SCTP {
            // The CRC of a quoted packet stays: its receiver has the original.
            let quote = expected.len() - of(&wanted).len() + if flow.src.is_v4() { 20 } else { 40 };
            if whole {
                expected[quote + 8..quote + 12].copy_from_slice(&found[quote + 8..quote + 12]);
                return Ok(());
            }
        }
        assert_same(&found, &expected)?;
    }
}

#[test]
fn a_datagram_without_a_checksum_stays_without_one() {
    let flow = |number| Flow {
        src: address(false, number),
        dst: address(false, 9),
        protocol: Protocol::UDP,
        src_port: 1,
        dst_port: 2,
    };
    let mut found = frame(&flow(1), b"payload");
    found[40..42].fill(0);
    let packet = parse(&found).unwrap();
    translate(&mut found, &packet, &flow(2), None);
    assert_eq!((&found[40..42], parse(&found).unwrap().flow), (&[0, 0][..], flow(2)));
}

#[test]
fn a_wrong_checksum_stays_wrong() {
    for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
        let flow =
            |number| Flow { src: address(false, number), dst: address(false, 9), protocol, src_port: 1, dst_port: 2 };
        let mut found = frame(&flow(1), b"payload!");
        let last = found.len() - 1;
        found[last] ^= 0x55;
        let packet = parse(&found).unwrap();
        translate(&mut found, &packet, &Flow { dst_port: 7, ..flow(2) }, None);
        found[last] ^= 0x55;
        let expected = frame(&Flow { dst_port: 7, ..flow(2) }, b"payload!");
        if protocol == Protocol::SCTP {
            assert_ne!(found, expected);
        } else {
            assert_eq!(found, expected, "with the payload's damage undone it is right again");
        }
    }
}
