//! Packets as bytes, right or wrong ones, and what of them is the same wherever they arrive.

use std::net::IpAddr;

pub(super) const ICMP: u8 = 1;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const ICMPV6: u8 = 58;
pub(super) const SCTP: u8 = 132;

/// Fields of an IP header. The number is IPv4's identification or IPv6's flow label: no router changes it, so that it says which packet
/// of a history this is.
#[derive(Clone, Debug)]
pub(super) struct Ip {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    pub(super) number: u16,
    pub(super) ttl: u8,
    /// DSCP and ECN.
    pub(super) class: u8,
    pub(super) dont_fragment: bool,
    /// IPv4 options, a multiple of four bytes.
    pub(super) options: Vec<u8>,
    /// The number of a fragment's first unit of eight bytes, and whether more follow.
    pub(super) fragment: Option<(u16, bool)>,
}

/// The Internet checksum (RFC 1071) of some parts, each but the last of an even length.
pub(super) fn checksum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

impl Ip {
    pub(super) fn is_v6(&self) -> bool {
        self.from.is_ipv6()
    }

    /// The packet. An IPv6 fragment gets its header; other extension headers are part of the payload.
    pub(super) fn packet(&self, payload: &[u8]) -> Vec<u8> {
        let (from, to) = (octets(self.from), octets(self.to));
        if !self.is_v6() {
            let length = (20 + self.options.len() + payload.len()) as u16;
            let (offset, more) = self.fragment.unwrap_or_default();
            let place = u16::from(self.dont_fragment && self.fragment.is_none()) << 14 | u16::from(more) << 13 | offset;
            let mut header = vec![0x45 + (self.options.len() / 4) as u8, self.class];
            header.extend([length, self.number, place].map(u16::to_be_bytes).as_flattened());
            header.extend([self.ttl, self.protocol, 0, 0]);
            header.extend([&from[..], &to, &self.options].concat());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            return [&header, payload].concat();
        }
        let own = self.fragment.map(|(offset, more)| {
            let place = (offset << 3 | u16::from(more)).to_be_bytes();
            [&[self.protocol, 0][..], &place, &u32::from(self.number).to_be_bytes()].concat()
        });
        let (next, own) = own.map_or((self.protocol, Vec::new()), |own| (44, own));
        let first = 6 << 28 | u32::from(self.class) << 20 | u32::from(self.number);
        let length = (own.len() + payload.len()) as u16;
        let head = [&first.to_be_bytes()[..], &length.to_be_bytes(), &[next, self.ttl]].concat();
        [&head[..], &from, &to, &own, payload].concat()
    }

    /// The sum over what a transport checksum covers of this header.
    fn pseudo_header(&self, length: usize) -> Vec<u8> {
        let length = (length as u32).to_be_bytes();
        [&octets(self.from)[..], &octets(self.to), &length, &[0, 0, 0, self.protocol]].concat()
    }

    /// A transport header and payload with the checksum at this place; open, that is of the pseudo header alone, if its sender leaves
    /// it to the device.
    pub(super) fn summed(&self, mut payload: Vec<u8>, at: usize, is_open: bool) -> Vec<u8> {
        payload[at..at + 2].fill(0);
        let pseudo = self.pseudo_header(payload.len());
        let sum = if is_open { !checksum(&[&pseudo]) } else { checksum(&[&pseudo, &payload]) };
        payload[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        payload
    }
}

/// A TCP segment without its checksum.
pub(super) fn tcp(
    ports: [u16; 2],
    numbers: [u32; 2],
    flags: u8,
    window: u16,
    options: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let mut bytes = ports.map(u16::to_be_bytes).concat();
    bytes.extend(numbers.map(u32::to_be_bytes).as_flattened());
    bytes.extend([(5 + options.len() as u8 / 4) << 4, flags]);
    bytes.extend(window.to_be_bytes());
    bytes.extend([0; 4]);
    [&bytes[..], options, payload].concat()
}

/// A UDP datagram without its checksum.
pub(super) fn udp(ports: [u16; 2], payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len() as u16;
    [&[ports[0], ports[1], length, 0].map(u16::to_be_bytes).concat()[..], payload].concat()
}

/// An SCTP packet (RFC 9260). Nobody on the way checks its sum.
pub(super) fn sctp(ports: [u16; 2], tag: u32, chunks: &[(u8, &[u8])]) -> Vec<u8> {
    let mut bytes = ports.map(u16::to_be_bytes).concat();
    bytes.extend(tag.to_be_bytes());
    bytes.extend([1, 2, 3, 4]);
    for (kind, value) in chunks {
        bytes.extend([*kind, 0]);
        bytes.extend((4 + value.len() as u16).to_be_bytes());
        bytes.extend(*value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// An ICMP message of IPv4 with its checksum.
pub(super) fn icmp(kind: u8, code: u8, rest: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let mut bytes = [&[kind, code, 0, 0][..], &rest, payload].concat();
    let sum = checksum(&[&bytes]);
    bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// Where a packet's transport header begins, its protocol, and whether it is a later fragment; IPv6's usual extension headers are
/// passed over.
fn transport(packet: &[u8]) -> Option<(usize, u8, bool)> {
    if packet[0] >> 4 == 4 {
        let is_later = u16::from_be_bytes([packet[6], packet[7]]) & 0x1fff != 0;
        return Some((usize::from(packet[0] & 15) * 4, packet[9], is_later));
    }
    let (mut at, mut next, mut is_later) = (40, packet[6], false);
    while matches!(next, 0 | 43 | 44 | 60) && !is_later {
        let header = packet.get(at..at + 8)?;
        is_later = next == 44 && u16::from_be_bytes([header[2], header[3]]) > 7;
        at += if next == 44 { 8 } else { 8 * (1 + usize::from(header[1])) };
        next = header[0];
    }
    Some((at, next, is_later))
}

/// The place of a fragment in its datagram, in bytes, and what it has of it.
pub(super) fn fragment(packet: &[u8]) -> Option<(usize, &[u8])> {
    let (place, from) = match packet[0] >> 4 {
        4 => (u16::from_be_bytes([packet[6], packet[7]]) << 3, usize::from(packet[0] & 15) * 4),
        _ if packet[6] == 44 => (u16::from_be_bytes([packet[42], packet[43]]), 48),
        _ => return None,
    };
    let more = if packet[0] >> 4 == 4 { packet[6] & 0x20 != 0 } else { place & 1 == 1 };
    let place = usize::from(place & !7);
    (more || place > 0).then(|| (place, &packet[from..]))
}

/// A packet's part of its datagram, and the place of that.
pub(super) fn piece(packet: &[u8]) -> (usize, &[u8]) {
    let header = if packet[0] >> 4 == 4 { usize::from(packet[0] & 15) * 4 } else { 40 };
    fragment(packet).unwrap_or((0, &packet[header.min(packet.len())..]))
}

pub(super) fn is_fragment(packet: &[u8]) -> bool {
    fragment(packet).is_some()
}

/// Whether a packet of this protocol may belong to a connection that others have opened before, or be about one.
pub(super) fn is_of_connection(protocol: u8) -> bool {
    matches!(protocol, TCP | SCTP | ICMP | ICMPV6)
}

/// The IP packet of a frame, without padding; none for what stacks say to each other about neighbours and groups.
pub(super) fn of_frame(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = frame.get(14..)?;
    let length: usize = match (frame[12], frame[13]) {
        (8, 0) => u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]).into(),
        (0x86, 0xdd) => 40 + usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?])),
        _ => return None,
    };
    let packet = packet.get(..length)?;
    let (at, protocol, _) = transport(packet)?;
    let kind = packet.get(at).copied().unwrap_or_default();
    let is_chatter = protocol == ICMPV6 && (kind == 143 || (130..=137).contains(&kind));
    (!is_chatter && protocol != 2).then(|| packet.to_vec())
}

/// The number of a packet as it was sent.
pub(super) fn number(packet: &[u8]) -> u16 {
    let at = if packet[0] >> 4 == 4 { 4 } else { 2 };
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

fn is_error(protocol: u8, kind: u8) -> bool {
    protocol == ICMP && [3, 4, 5, 11, 12].contains(&kind) || protocol == ICMPV6 && kind < 128
}

/// A packet without what its way may change by right: of what the node itself sends or masquerades (`is_of_node`) the numbers that it
/// chooses, and of one whose checksum was left open that. Returns what is left, and which packet of the history it is about.
pub(super) fn without_choices(mut packet: Vec<u8>, is_of_node: bool, is_open: impl Fn(u16) -> bool) -> (Vec<u8>, u16) {
    let mut about = number(&packet);
    let Some((at, protocol, is_later)) = transport(&packet) else { return (packet, about) };
    let is_v4 = packet[0] >> 4 == 4;
    let clear = |packet: &mut Vec<u8>, from: usize, count: usize| {
        let end = packet.len().min(from + count);
        packet[from.min(end)..end].fill(0);
    };
    let clear_ip = |packet: &mut Vec<u8>| {
        if is_v4 {
            // Class, which an error takes from its cause, identification, and the checksum.
            for (from, count) in [(1, 1), (4, 2), (6, 2), (8, 1), (10, 2)] {
                clear(packet, from, count);
            }
        } else {
            clear(packet, 0, 4);
            clear(packet, 7, 1);
        }
    };
    let kind = packet.get(at).copied().unwrap_or_default();
    if is_of_node && !is_later && is_error(protocol, kind) && packet.len() > at + 8 {
        // The cause as the node had it: its addresses may be translated, so that the number alone counts.
        about = number(&packet[at + 8..]);
        packet.truncate(at + 8);
        clear(&mut packet, at + 2, 2);
        clear(&mut packet, 2, 2);
        if !is_v4 {
            clear(&mut packet, 4, 2);
        }
        clear_ip(&mut packet);
    } else if is_of_node && !is_later {
        match protocol {
            TCP | UDP => {
                // The port of a masquerade, and its address: that of the way out, which with XDP is another one.
                clear(&mut packet, at, 2);
                clear(&mut packet, if is_v4 { 12 } else { 8 }, if is_v4 { 4 } else { 16 });
                clear(&mut packet, 10, if is_v4 { 2 } else { 0 });
                clear(&mut packet, at + if protocol == TCP { 16 } else { 6 }, 2);
                let is_reset = protocol == TCP && packet.get(at + 13).is_some_and(|flags| flags & 4 != 0);
                if is_reset {
                    clear_ip(&mut packet);
                }
            }
            ICMP | ICMPV6 => {
                // An identifier of a masquerade, or the node's own answer, whose number means nothing.
                if [0, 129].contains(&kind) {
                    about = 0;
                }
                for from in [at + 2, at + 4] {
                    clear(&mut packet, from, 2);
                }
                clear_ip(&mut packet);
            }
            _ => {}
        }
    }
    if is_open(about) && !is_later {
        match protocol {
            TCP => clear(&mut packet, at + 16, 2),
            UDP => clear(&mut packet, at + 6, 2),
            _ => {}
        }
    }
    (packet, about)
}
