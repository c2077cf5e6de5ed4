//! The fields that programs read of a packet's headers: a packet of an established connection passes only if each allows it, and then as
//! a worker would send it on.

use super::*;

/// Where the IP header begins.
const IP: usize = 14;

/// Whether the checksum of an IPv4 header is right (RFC 1071).
pub(crate) fn is_sound(frame: &[u8]) -> bool {
    checksum(&frame[IP..IP + 20]) == 0
}

fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let sum: u32 = words.sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// Makes the checksum of an IPv4 header right.
pub(crate) fn seal(frame: &mut [u8]) {
    frame[IP + 10..IP + 12].fill(0);
    let sum = checksum(&frame[IP..IP + 20]);
    frame[IP + 10..IP + 12].copy_from_slice(&sum.to_be_bytes());
}

fn add(frame: &mut [u8], at: usize, change: u16) {
    let word = u16::from_be_bytes([frame[at], frame[at + 1]]).wrapping_add(change);
    frame[at..at + 2].copy_from_slice(&word.to_be_bytes());
}

type Change = fn(&mut Vec<u8>);
type Row = (&'static str, Change, bool);

/// Changes of an IPv4 header, whose checksum is made right again, and whether the packet passes.
const IPV4: &[Row] = &[
    ("as it is", |_| (), true),
    ("options", |frame| frame[IP] = 0x46, false),
    ("a header that is too short", |frame| frame[IP] = 0x44, false),
    ("IP version 5", |frame| frame[IP] = 0x55, false),
    ("IP version 6 in an IPv4 frame", |frame| frame[IP] = 0x65, false),
    ("a type of service", |frame| frame[IP + 1] = 0xb8, true),
    ("longer than its frame", |frame| add(frame, IP + 2, 1), false),
    ("shorter than its header", |frame| frame[IP + 2..IP + 4].copy_from_slice(&[0, 19]), false),
    ("its header alone", |frame| frame[IP + 2..IP + 4].copy_from_slice(&[0, 20]), false),
    ("a frame with a trailer", |frame| frame.extend([0; 7]), true),
    ("do not fragment", |frame| frame[IP + 6] ^= 0x40, true),
    ("the first fragment", |frame| frame[IP + 6] |= 0x20, false),
    ("a later fragment", |frame| frame[IP + 7] = 1, false),
    ("a much later fragment", |frame| frame[IP + 6] |= 0x10, false),
    ("two hops left", |frame| frame[IP + 8] = 2, true),
    ("SCTP", |frame| frame[IP + 9] = 132, false),
    ("ICMP", |frame| frame[IP + 9] = 1, false),
    ("from another address", |frame| frame[IP + 15] ^= 1, false),
    ("to another address", |frame| frame[IP + 19] ^= 1, false),
    ("from another port", |frame| frame[IP + 21] ^= 1, false),
    ("to another port", |frame| frame[IP + 23] ^= 1, false),
];

const IPV6: &[Row] = &[
    ("as it is", |_| (), true),
    ("IP version 4 in an IPv6 frame", |frame| frame[IP] = 0x40, false),
    ("IP version 7", |frame| frame[IP] = 0x70, false),
    ("a traffic class and a flow label", |frame| frame[IP..IP + 4].copy_from_slice(&[0x6b, 0x81, 2, 3]), true),
    ("longer than its frame", |frame| add(frame, IP + 4, 1), false),
    ("its header alone", |frame| frame[IP + 4..IP + 6].fill(0), false),
    ("a frame with a trailer", |frame| frame.extend([0; 7]), true),
    ("hop-by-hop options", |frame| frame[IP + 6] = 0, false),
    ("a fragment header", |frame| frame[IP + 6] = 44, false),
    ("a routing header", |frame| frame[IP + 6] = 43, false),
    ("ICMPv6", |frame| frame[IP + 6] = 58, false),
    ("two hops left", |frame| frame[IP + 7] = 2, true),
    ("from another address", |frame| frame[IP + 8] ^= 1, false),
    ("from another host of its network", |frame| frame[IP + 23] ^= 1, false),
    ("to another address", |frame| frame[IP + 24] ^= 1, false),
    ("to another host of its network", |frame| frame[IP + 39] ^= 1, false),
    ("from another port", |frame| frame[IP + 41] ^= 1, false),
    ("to another port", |frame| frame[IP + 43] ^= 1, false),
];

/// Changes of what is behind the IP header, by its offset.
type TransportRow = (&'static str, fn(&mut [u8]), bool);

/// Changes to a segment with ten bytes.
const TCP: &[TransportRow] = &[
    ("a header that is too short", |tcp| tcp[12] = 0x40, false),
    ("options", |tcp| tcp[12] = 0x60, true),
    ("options up to its end", |tcp| tcp[12] = 0x70, true),
    ("options behind its end", |tcp| tcp[12] = 0x80, false),
    ("PSH", |tcp| tcp[13] = 0x18, true),
    ("URG", |tcp| tcp[13] = 0x30, true),
    ("ECE and CWR", |tcp| tcp[13] = 0xd0, true),
    ("no flag", |tcp| tcp[13] = 0, false),
    ("PSH without ACK", |tcp| tcp[13] = 8, false),
    ("SYN", |tcp| tcp[13] = 2, false),
    ("SYN and ACK", |tcp| tcp[13] = 0x12, false),
    ("RST", |tcp| tcp[13] = 4, false),
    ("RST and ACK", |tcp| tcp[13] = 0x14, false),
    ("FIN without ACK", |tcp| tcp[13] = 1, false),
    ("all flags", |tcp| tcp[13] = 0xff, false),
];

/// Changes to a datagram with ten bytes.
const UDP: &[TransportRow] = &[
    ("shorter than its header", |udp| udp[4..6].copy_from_slice(&[0, 7]), false),
    ("without data", |udp| udp[4..6].copy_from_slice(&[0, 8]), true),
    ("longer than its packet", |udp| udp[4..6].copy_from_slice(&[0, 19]), false),
    ("length 0", |udp| udp[4..6].copy_from_slice(&[0, 0]), false),
];

#[test]
fn a_packet_passes_only_if_each_field_of_its_headers_allows_it() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (a, b) in [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)] {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..sent(a, b, tcp, ACK) };
                open(&mut node, there, now);
                for packet in [there, there.back()] {
                    let mut check = |what: &str, mut frame: Vec<u8>, passes: bool| {
                        if v4 {
                            seal(&mut frame);
                        }
                        let done = node.program(packet.from, packet.to, &frame, 0);
                        assert_eq!(done.is_some(), passes, "{what}: {packet:?}");
                        if let Some(done) = done {
                            assert_alike(&mut node, packet, &frame, &done, now);
                        }
                    };
                    for (what, change, passes) in if v4 { IPV4 } else { IPV6 } {
                        let mut frame = packet.frame();
                        change(&mut frame);
                        check(what, frame, *passes);
                    }
                    for (what, change, passes) in if tcp { TCP } else { UDP } {
                        let mut frame = packet.frame();
                        change(&mut frame[if v4 { 34 } else { 54 }..]);
                        check(what, frame, *passes);
                    }
                }
            }
        }
    });
}

#[test]
fn a_last_hop_or_a_wrong_checksum_meets_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (a, b) in [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)] {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..sent(a, b, tcp, ACK) };
                open(&mut node, there, now);
                for packet in [there, there.back()] {
                    for ttl in [0, 1] {
                        let frame = Sent { ttl, ..packet }.frame();
                        // The node's stack counts its own hops.
                        let passes = packet.from == End::Outside || packet.to == End::Outside;
                        assert_eq!(
                            node.program(packet.from, packet.to, &frame, 0).is_some(),
                            passes,
                            "{ttl}: {packet:?}"
                        );
                    }
                    if v4 {
                        let mut frame = packet.frame();
                        frame[IP + 11] ^= 1;
                        assert!(node.program(packet.from, packet.to, &frame, 0).is_none(), "{packet:?}");
                    }
                }
            }
        }
    });
}

/// An IPv6 packet with mapped addresses has the key of the IPv4 connection.
#[test]
fn mapped_ipv6_addresses_are_not_of_the_ipv4_connection() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for tcp in [true, false] {
            let there = sent(End::A, End::B, tcp, ACK);
            open(&mut node, there, now);
            for packet in [there, there.back()] {
                let v4 = packet.frame();
                let mut v6 = Sent { v4: false, ..packet }.frame();
                for (to, from) in [(IP + 8, IP + 12), (IP + 24, IP + 16)] {
                    v6[to..to + 10].fill(0);
                    v6[to + 10..to + 12].fill(0xff);
                    v6[to + 12..to + 16].copy_from_slice(&v4[from..from + 4]);
                }
                assert!(node.program(packet.from, packet.to, &v4, 0).is_some());
                assert!(node.program(packet.from, packet.to, &v6, 0).is_none(), "{packet:?}");
                assert!(matches!(node.worker(packet.from, &v6, now).0, Verdict::Drop(_)), "{packet:?}");
            }
        }
    });
}

#[test]
fn segments_too_long_for_a_pod_meet_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (a, b) in [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)] {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..sent(a, b, tcp, ACK) };
                open(&mut node, there, now);
                let room = usize::from(MTU) - if v4 { 20 } else { 40 } - if tcp { 20 } else { 8 };
                for packet in [there, there.back()] {
                    // On the way out of the node its stack knows the limit.
                    let is_limited = packet.to != End::Outside;
                    for (payload, segment, fits) in
                        [(room, 0, true), (room + 1, 0, false), (3000, room, true), (3000, room + 1, false)]
                    {
                        let frame = Sent { payload, ..packet }.frame();
                        let done = node.program(packet.from, packet.to, &frame, segment as u32);
                        assert_eq!(done.is_some(), fits || !is_limited, "{payload}, {segment}: {packet:?}");
                    }
                }
            }
        }
    });
}
