//! The parser accepts valid packets, reports the drop reason of invalid ones, and never reads past the end.

use etherparse::{IpNumber, Ipv4Header, Ipv4Options, PacketBuilder};
use penstock_dataplane::packet::{
    Address, Flow, Fragment, Packet, Protocol, SctpChunk, TcpFlags, Transport, parse, quoted_flow,
};
use penstock_dataplane::pipeline::DropReason;
use proptest::prelude::*;

const A4: [u8; 4] = [10, 0, 0, 1];
const B4: [u8; 4] = [10, 0, 0, 2];
const A6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const B6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];

fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &ethertype.to_be_bytes(), payload].concat()
}

/// An IPv4 packet with the given transport bytes; `edit` may change the header before its checksum is set.
fn v4(protocol: u8, transport: &[u8], edit: impl FnOnce(&mut Ipv4Header)) -> Vec<u8> {
    let mut header = Ipv4Header::new(transport.len() as u16, 64, IpNumber(protocol), A4, B4).unwrap();
    edit(&mut header);
    header.set_payload_len(transport.len()).unwrap();
    header.header_checksum = header.calc_header_checksum();
    ethernet(0x0800, &[&header.to_bytes()[..], transport].concat())
}

fn v6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0x60, 0, 0, 0];
    header.extend((payload.len() as u16).to_be_bytes());
    header.extend([next, 64]);
    ethernet(0x86dd, &[&header[..], &A6, &B6, payload].concat())
}

fn udp(src: u16, dst: u16) -> Vec<u8> {
    [src.to_be_bytes(), dst.to_be_bytes(), 8u16.to_be_bytes(), [0, 0]].concat()
}

fn tcp(flags: u8, options: &[u8]) -> Vec<u8> {
    let mut bytes =
        [&1000u16.to_be_bytes()[..], &80u16.to_be_bytes(), &7u32.to_be_bytes(), &9u32.to_be_bytes()].concat();
    bytes.extend([((20 + options.len()) as u8 / 4) << 4, flags, 0x12, 0x34, 0, 0, 0, 0]);
    bytes.extend(options);
    bytes
}

fn flow4(protocol: Protocol, ports: (u16, u16)) -> Flow {
    let (src, dst) = (Address::from_v4_bytes(A4), Address::from_v4_bytes(B4));
    Flow { src, dst, protocol, src_port: ports.0, dst_port: ports.1 }
}

fn flow6(protocol: Protocol, ports: (u16, u16)) -> Flow {
    let (src, dst) = (Address::from_v6_bytes(A6), Address::from_v6_bytes(B6));
    Flow { src, dst, protocol, src_port: ports.0, dst_port: ports.1 }
}

#[test]
fn tcp_segments_show_their_ports_numbers_flags_and_window_scale() {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(A4, B4, 33)
        .tcp(1000, 80, 5, 4096)
        .syn()
        .options_raw(&[1, 3, 3, 20, 0, 0, 0, 0])
        .unwrap()
        .write(&mut frame, b"hello")
        .unwrap();
    let packet = parse(&frame).unwrap();
    assert_eq!(packet.flow, flow4(Protocol::TCP, (1000, 80)));
    assert_eq!((packet.ttl, packet.fragment, usize::from(packet.layout.end)), (33, None, frame.len()));
    let Transport::Tcp(segment) = packet.transport else { panic!("{packet:?}") };
    assert_eq!((segment.seq, segment.window, segment.flags), (5, 4096, TcpFlags::SYN));
    assert_eq!((segment.payload_len, segment.window_scale), (5, Some(14)), "a shift above 14 counts as 14");
}

#[test]
fn the_window_scale_is_parsed_on_syn_segments_alone() {
    for (name, flags, options, expected) in [
        ("none", 0x02, &[][..], None),
        ("alone", 0x02, &[3, 3, 7, 0][..], Some(7)),
        ("behind MSS and padding", 0x12, &[2, 4, 5, 0xb4, 1, 3, 3, 9][..], Some(9)),
        ("not a SYN", 0x10, &[3, 3, 7, 0][..], None),
        ("behind the end of options", 0x02, &[0, 3, 3, 7][..], None),
        ("behind an option of length 0", 0x02, &[2, 0, 3, 3, 7, 0, 0, 0][..], None),
        ("cut off", 0x02, &[1, 1, 3, 3][..], None),
    ] {
        let packet = parse(&v4(6, &tcp(flags, options), |_| {})).unwrap();
        let Transport::Tcp(segment) = packet.transport else { panic!("{name}") };
        assert_eq!(segment.window_scale, expected, "{name}");
    }
}

#[test]
fn every_kind_of_packet_gets_its_flow_and_type() {
    let sctp = |kind: u8| {
        [&5000u16.to_be_bytes()[..], &80u16.to_be_bytes(), &[0, 0, 0, 9, 0, 0, 0, 0, kind, 0, 0, 4]].concat()
    };
    let echo = |kind: u8| [kind, 0, 0, 0, 0x12, 0x34, 0, 1];
    let (icmp, icmp6) = (Protocol::ICMP, Protocol::ICMPV6);
    for (name, frame, flow, transport) in [
        ("UDP", v4(17, &udp(1, 2), |_| {}), flow4(Protocol::UDP, (1, 2)), Transport::Udp),
        ("UDP over IPv6", v6(17, &udp(1, 2)), flow6(Protocol::UDP, (1, 2)), Transport::Udp),
        (
            "SCTP INIT",
            v4(132, &sctp(1), |_| {}),
            flow4(Protocol::SCTP, (5000, 80)),
            Transport::Sctp { chunk: SctpChunk::Init, tag: 9 },
        ),
        (
            "SCTP abort",
            v6(132, &sctp(6)),
            flow6(Protocol::SCTP, (5000, 80)),
            Transport::Sctp { chunk: SctpChunk::Abort, tag: 9 },
        ),
        ("echo request", v4(1, &echo(8), |_| {}), flow4(icmp, (0x1234, 0x1235)), Transport::EchoRequest),
        ("echo reply", v4(1, &echo(0), |_| {}), flow4(icmp, (0x1235, 0x1234)), Transport::EchoReply),
        ("echo request over IPv6", v6(58, &echo(128)), flow6(icmp6, (0x1234, 0x1235)), Transport::EchoRequest),
        ("echo reply over IPv6", v6(58, &echo(129)), flow6(icmp6, (0x1235, 0x1234)), Transport::EchoReply),
        ("ICMP error", v4(1, &echo(3), |_| {}), flow4(icmp, (0, 0)), Transport::IcmpError { quoted_at: 42 }),
        ("ICMPv6 error", v6(58, &echo(2)), flow6(icmp6, (0, 0)), Transport::IcmpError { quoted_at: 62 }),
        ("timestamp request", v4(1, &echo(13), |_| {}), flow4(icmp, (0x1234, 0x1236)), Transport::EchoRequest),
        ("timestamp reply", v4(1, &echo(14), |_| {}), flow4(icmp, (0x1236, 0x1234)), Transport::EchoReply),
        ("extended echo request", v6(58, &echo(160)), flow6(icmp6, (0x1234, 0x1237)), Transport::EchoRequest),
        ("extended echo reply", v4(1, &echo(43), |_| {}), flow4(icmp, (0x1237, 0x1234)), Transport::EchoReply),
        ("a query that has gone out of use", v4(1, &echo(17), |_| {}), flow4(icmp, (0, 0)), Transport::Other),
        ("ICMP's numbers are not ICMPv6's", v6(58, &echo(8)), flow6(icmp6, (0, 0)), Transport::Other),
        ("GRE", v4(47, &[0; 4], |_| {}), flow4(Protocol(47), (0, 0)), Transport::Other),
        ("ICMPv6 over IPv4 is no ICMP", v4(58, &echo(128), |_| {}), flow4(icmp6, (0, 0)), Transport::Other),
        ("no next header", v6(59, &[]), flow6(Protocol(59), (0, 0)), Transport::Other),
    ] {
        let packet = parse(&frame).unwrap_or_else(|reason| panic!("{name}: {reason}"));
        assert_eq!((packet.flow, packet.transport), (flow, transport), "{name}");
        assert_eq!(usize::from(packet.layout.end), frame.len(), "{name}");
    }
}

#[test]
fn invalid_packets_are_rejected_with_their_reason() {
    let good = v4(17, &udp(1, 2), |_| {});
    let edit = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    let options = |bytes: &[u8]| v4(17, &udp(1, 2), |header| header.options = Ipv4Options::try_from(bytes).unwrap());
    let mapped = {
        let mut frame = v6(17, &udp(1, 2));
        frame[22..38].copy_from_slice(&Address::from_v4_bytes(A4).bits().to_be_bytes());
        frame
    };
    let long_chain = [&[60, 0, 0, 0, 0, 0, 0, 0].repeat(6)[..], &[17, 0, 0, 0, 0, 0, 0, 0], &udp(1, 2)].concat();
    for (name, frame, reason) in [
        ("empty", vec![], DropReason::Truncated),
        ("ARP", ethernet(0x0806, &[0; 28]), DropReason::NotIp),
        ("VLAN tag", ethernet(0x8100, &good[12..]), DropReason::VlanTag),
        ("provider VLAN tag", ethernet(0x88a8, &good[12..]), DropReason::VlanTag),
        ("version 5", edit(14, 0x55), DropReason::Malformed),
        ("header length 4", edit(14, 0x44), DropReason::Malformed),
        ("header checksum", edit(22, 63), DropReason::HeaderChecksum),
        ("total length below the header", edit(17, 19), DropReason::Malformed),
        ("total length past the end", edit(17, 200), DropReason::Truncated),
        ("loose source route", options(&[131, 7, 4, 10, 0, 0, 3, 0]), DropReason::SourceRoute),
        ("strict source route", options(&[1, 137, 7, 4, 10, 0, 0, 3]), DropReason::SourceRoute),
        ("option of length 1", options(&[7, 1, 0, 0]), DropReason::Malformed),
        ("option past the end", options(&[7, 9, 0, 0]), DropReason::Malformed),
        ("option without length", options(&[1, 1, 1, 7]), DropReason::Malformed),
        ("UDP length 7", v4(17, &[0, 1, 0, 2, 0, 7, 0, 0], |_| {}), DropReason::Malformed),
        ("UDP length past the end", v4(17, &[0, 1, 0, 2, 0, 9, 0, 0], |_| {}), DropReason::Truncated),
        (
            "TCP header length 16",
            v4(
                6,
                &{
                    let mut bytes = tcp(2, &[]);
                    bytes[12] = 0x40;
                    bytes
                },
                |_| {},
            ),
            DropReason::Malformed,
        ),
        (
            "TCP options past the end",
            v4(
                6,
                &{
                    let mut bytes = tcp(2, &[]);
                    bytes[12] = 0x60;
                    bytes
                },
                |_| {},
            ),
            DropReason::Truncated,
        ),
        ("SCTP without a chunk", v4(132, &[0; 12], |_| {}), DropReason::Truncated),
        ("redirect", v4(1, &[5, 0, 0, 0, 0, 0, 0, 0], |_| {}), DropReason::Redirect),
        ("redirect over IPv6", v6(58, &[137, 0, 0, 0, 0, 0, 0, 0]), DropReason::Redirect),
        ("router advertisement", v6(58, &[134, 0, 0, 0, 0, 0, 0, 0]), DropReason::InvalidDiscovery),
        ("mapped address in an IPv6 header", mapped, DropReason::Malformed),
        (
            "hop-by-hop that is not first",
            v6(60, &[&[0, 0, 0, 0, 0, 0, 0, 0][..], &[17, 0, 0, 0, 0, 0, 0, 0], &udp(1, 2)].concat()),
            DropReason::ExtensionHeaders,
        ),
        ("too many extension headers", v6(60, &long_chain), DropReason::ExtensionHeaders),
        (
            "two fragment headers",
            v6(44, &[&[44, 0, 0, 1, 0, 0, 0, 1][..], &[17, 0, 0, 1, 0, 0, 0, 1], &udp(1, 2)].concat()),
            DropReason::ExtensionHeaders,
        ),
        (
            "a fragment header behind that of an atomic fragment",
            v6(44, &[&[44, 0, 0, 0, 0, 0, 0, 1][..], &[17, 0, 0, 1, 0, 0, 0, 1], &udp(1, 2)].concat()),
            DropReason::ExtensionHeaders,
        ),
        (
            "routing header with segments left",
            v6(43, &[&[17, 2, 0, 1, 0, 0, 0, 0][..], &[0; 16], &udp(1, 2)].concat()),
            DropReason::SourceRoute,
        ),
        ("extension header past the end", v6(60, &[17, 9, 0, 0, 0, 0, 0, 0]), DropReason::Truncated),
    ] {
        assert_eq!(parse(&frame), Err(reason), "{name}");
    }
}

#[test]
fn extension_headers_and_options_lead_to_the_transport_header() {
    let options = v4(17, &udp(1, 2), |header| header.options = Ipv4Options::try_from(&[148, 4, 0, 0][..]).unwrap());
    assert_eq!(parse(&options).unwrap().layout.transport, 38, "router alert");
    for (name, next, chain) in [
        ("hop-by-hop", 0, &[17, 0, 1, 4, 0, 0, 0, 0][..]),
        ("destination options of 16 bytes", 60, &[17, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("hop-by-hop, then destination", 0, &[60, 0, 1, 4, 0, 0, 0, 0, 17, 0, 1, 4, 0, 0, 0, 0]),
        ("spent routing header", 43, &[17, 0, 0, 0, 0, 0, 0, 0]),
        ("authentication of 12 bytes", 51, &[17, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]),
        ("atomic fragment", 44, &[17, 0, 0, 0, 0, 0, 0, 1]),
    ] {
        let packet =
            parse(&v6(next, &[chain, &udp(1, 2)].concat())).unwrap_or_else(|reason| panic!("{name}: {reason}"));
        assert_eq!((packet.flow, packet.fragment), (flow6(Protocol::UDP, (1, 2)), None), "{name}");
        assert_eq!(usize::from(packet.layout.transport), 54 + chain.len(), "{name}");
    }
}

#[test]
fn fragments_are_told_apart_in_both_families() {
    let fragment = |offset: u16, more: bool| Fragment::new(77, offset, more, 8);
    let of_v4 = |units: u16, more: bool| {
        v4(17, &udp(1, 2), |header| {
            header.identification = 77;
            header.more_fragments = more;
            header.fragment_offset = units.try_into().unwrap();
        })
    };
    let of_v6 = |units: u16, more: bool| {
        let word = (units << 3 | u16::from(more)).to_be_bytes();
        v6(44, &[&[17, 0, word[0], word[1], 0, 0, 0, 77][..], &udp(1, 2)].concat())
    };
    for (family, flow, build) in [
        ("IPv4", flow4 as fn(Protocol, (u16, u16)) -> Flow, &of_v4 as &dyn Fn(u16, bool) -> Vec<u8>),
        ("IPv6", flow6, &of_v6),
    ] {
        let first = parse(&build(0, true)).unwrap();
        assert_eq!((first.flow, first.transport), (flow(Protocol::UDP, (1, 2)), Transport::Udp), "{family}");
        assert_eq!(first.fragment, fragment(0, true), "{family}");
        for (units, more) in [(3, true), (3, false), (8190, false)] {
            let later = parse(&build(units, more)).unwrap();
            assert_eq!(
                (later.flow, later.transport),
                (flow(Protocol::UDP, (0, 0)), Transport::LaterFragment),
                "{family}"
            );
            assert_eq!(later.fragment, fragment(units * 8, more), "{family}");
        }
    }
    for (units, more, extra) in [(0, true, 4), (3, true, 4), (8191, false, 0)] {
        let transport = [&udp(1, 2)[..], &vec![0; extra]].concat();
        let of_v4 = v4(17, &transport, |header| {
            header.more_fragments = more;
            header.fragment_offset = units.try_into().unwrap();
        });
        let word = (units << 3 | u16::from(more)).to_be_bytes();
        let of_v6 = v6(44, &[&[17, 0, word[0], word[1], 0, 0, 0, 77][..], &transport].concat());
        for frame in [of_v4, of_v6] {
            assert_eq!(parse(&frame), Err(DropReason::Malformed), "{units} units, {extra} bytes too many");
        }
    }
    // Extension headers behind the Fragment header are of the datagram's payload, those before it are not.
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let behind = v6(44, &[&[60, 0, 0, 1, 0, 0, 0, 77][..], &options, &udp(1, 2)].concat());
    let before = v6(60, &[&[44, 0, 1, 4, 0, 0, 0, 0][..], &[17, 0, 0, 1, 0, 0, 0, 77], &udp(1, 2)].concat());
    for (frame, len) in [(behind, 16), (before, 8)] {
        let packet = parse(&frame).unwrap();
        assert_eq!((packet.layout.transport, packet.fragment.unwrap().len()), (70, len));
    }
    // The first fragment of a datagram may be shorter than its UDP length says.
    let mut long = udp(1, 2);
    long[4..6].copy_from_slice(&2000u16.to_be_bytes());
    assert!(parse(&v4(17, &long, |header| header.more_fragments = true)).is_ok());
}

#[test]
fn an_icmp_error_gives_the_quoted_flow() {
    let quoted = |frame: &[u8]| {
        let packet = parse(frame).unwrap();
        let Transport::IcmpError { quoted_at } = packet.transport else { panic!("{packet:?}") };
        quoted_flow(frame, &packet, quoted_at)
    };
    let error = |kind: u8, inner: &[u8]| [&[kind, 0, 0, 0, 0, 0, 0, 0][..], inner].concat();
    let (tcp4, udp6) = (v4(6, &tcp(2, &[]), |_| {}), v6(17, &udp(1, 2)));
    let ping = v4(1, &[8, 0, 0, 0, 0x12, 0x34, 0, 1], |_| {});
    assert_eq!(quoted(&v4(1, &error(3, &tcp4[14..]), |_| {})), Some(flow4(Protocol::TCP, (1000, 80))));
    assert_eq!(
        quoted(&v4(1, &error(11, &tcp4[14..42]), |_| {})),
        Some(flow4(Protocol::TCP, (1000, 80))),
        "eight bytes do"
    );
    assert_eq!(quoted(&v4(1, &error(3, &tcp4[14..41]), |_| {})), None, "seven do not");
    assert_eq!(quoted(&v4(1, &error(3, &ping[14..]), |_| {})), Some(flow4(Protocol::ICMP, (0x1234, 0x1235))));
    assert_eq!(quoted(&v6(58, &error(2, &udp6[14..]))), Some(flow6(Protocol::UDP, (1, 2))));
    assert_eq!(quoted(&v6(58, &error(2, &tcp4[14..]))), None, "the other family");
    let later = v4(17, &udp(1, 2), |header| header.fragment_offset = 3u16.try_into().unwrap());
    assert_eq!(quoted(&v4(1, &error(11, &later[14..]), |_| {})), None, "a later fragment has no ports");
}

/// Invariants of every accepted packet.
fn check(frame: &[u8], packet: &Packet) {
    let layout = packet.layout;
    assert!(
        layout.network <= layout.transport && layout.transport <= layout.end && usize::from(layout.end) <= frame.len()
    );
    assert_eq!(packet.flow.src.is_v4(), packet.flow.dst.is_v4());
    if let Transport::IcmpError { quoted_at } = packet.transport {
        quoted_flow(frame, packet, quoted_at);
    }
}

#[test]
fn a_truncated_packet_is_rejected_and_never_read_past_its_end() {
    let mut whole = vec![v4(6, &tcp(2, &[3, 3, 7, 0]), |_| {}), v6(17, &udp(1, 2)), v4(132, &[0; 16], |_| {})];
    whole.push(v6(0, &[&[44, 0, 1, 4, 0, 0, 0, 0][..], &[17, 0, 0, 1, 0, 0, 0, 1], &udp(1, 2)].concat()));
    whole.push(v6(58, &[&[2, 0, 0, 0, 0, 0, 5, 0][..], &v6(17, &udp(1, 2))[14..]].concat()));
    for frame in &whole {
        check(frame, &parse(frame).unwrap());
        for length in 0..frame.len() {
            assert_eq!(parse(&frame[..length]), Err(DropReason::Truncated), "{length} of {} bytes", frame.len());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn random_bytes_never_break_the_parser(v6: bool, mut frame in prop::collection::vec(any::<u8>(), 14..120)) {
        frame[12..14].copy_from_slice(if v6 { &[0x86, 0xdd] } else { &[0x08, 0x00] });
        if let Some(version) = frame.get_mut(14) {
            *version = if v6 { 0x60 } else { 0x45 };
        }
        if let Ok(packet) = parse(&frame) {
            check(&frame, &packet);
        }
    }

    #[test]
    fn mutated_packets_never_break_the_parser(edits in prop::collection::vec((0usize..120, any::<u8>()), 1..6), which in 0usize..4) {
        let mut frame = [
            v4(6, &tcp(2, &[3, 3, 7, 0]), |_| {}),
            v6(0, &[&[44, 0, 1, 4, 0, 0, 0, 0][..], &[17, 0, 0, 1, 0, 0, 0, 1], &udp(1, 2)].concat()),
            v6(58, &[&[2, 0, 0, 0, 0, 0, 5, 0][..], &v6(17, &udp(1, 2))[14..]].concat()),
            v4(1, &[&[3, 0, 0, 0, 0, 0, 0, 0][..], &v4(6, &tcp(2, &[]), |_| {})[14..]].concat(), |_| {}),
        ][which].clone();
        for (at, value) in edits {
            let at = at % frame.len();
            frame[at] = value;
        }
        if let Ok(packet) = parse(&frame) {
            check(&frame, &packet);
        }
    }
}
