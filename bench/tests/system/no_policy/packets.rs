//! Packets between three ends, as bytes, and what is to arrive of them.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    Icmpv4Type, IpFragOffset, IpHeaders, IpNumber, Ipv4Header, PacketBuilder, PacketBuilderStep, TcpHeader,
};

pub(super) const PODS: [&str; 2] = ["10.244.1.10", "10.244.1.11"];
pub(super) const PODS_V6: [&str; 2] = ["fd00:10:244:1::10", "fd00:10:244:1::11"];
const OUTSIDE: &str = "198.51.100.2";
const OUTSIDE_V6: &str = "fd00:51:100::2";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(in crate::system) enum End {
    Pod0,
    Pod1,
    Outside,
}

impl End {
    pub(in crate::system) fn address(self, v6: bool) -> IpAddr {
        let text = match (self, v6) {
            (Self::Pod0, false) => PODS[0],
            (Self::Pod1, false) => PODS[1],
            (Self::Outside, false) => OUTSIDE,
            (Self::Pod0, true) => PODS_V6[0],
            (Self::Pod1, true) => PODS_V6[1],
            (Self::Outside, true) => OUTSIDE_V6,
        };
        text.parse().unwrap()
    }

    pub(in crate::system) fn at(self, v6: bool, port: u16) -> SocketAddr {
        SocketAddr::new(self.address(v6), port)
    }
}

/// The change of a node just before a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    Nothing,
    /// Everything pauses for longer than all timeouts.
    Pause,
    /// The daemon ends, and another one starts.
    Restart,
}

/// How a packet is known where it arrives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    /// By all its bytes but those that routers change.
    Exactly(Vec<u8>),
    /// By these last bytes: the node chooses its source.
    Ending(Vec<u8>),
}

/// An IP packet from one end to another, and whether a node with Penstock may keep it back.
pub(super) struct Case {
    pub(super) name: String,
    pub(super) from: End,
    pub(super) to: End,
    pub(super) packet: Vec<u8>,
    pub(super) arrival: Arrival,
    pub(super) exception: Option<&'static str>,
    pub(super) before: Before,
}

impl Case {
    /// A packet that arrives as it was sent.
    pub(super) fn new(what: impl std::fmt::Display, from: End, to: End, packet: Vec<u8>) -> Self {
        let name = format!("{from:?} to {to:?}: {what}");
        let arrival = Arrival::Exactly(packet.clone());
        Self { name, from, to, packet, arrival, exception: None, before: Before::Nothing }
    }
}

pub(super) fn v4(from: End, to: End, protocol: u8, payload: &[u8], edit: impl FnOnce(&mut Ipv4Header)) -> Vec<u8> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (from.address(false), to.address(false)) else { unreachable!() };
    let mut header = Ipv4Header::new(payload.len() as u16, 64, IpNumber(protocol), src.octets(), dst.octets()).unwrap();
    header.dont_fragment = false;
    edit(&mut header);
    header.set_payload_len(payload.len()).unwrap();
    header.header_checksum = header.calc_header_checksum();
    [&header.to_bytes()[..], payload].concat()
}

/// A packet of a builder, without its Ethernet header.
fn built(from: IpAddr, to: IpAddr, finish: impl FnOnce(PacketBuilderStep<IpHeaders>, &mut Vec<u8>)) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip = match (from, to) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ethernet.ipv4(src.octets(), dst.octets(), 64),
        (IpAddr::V6(src), IpAddr::V6(dst)) => ethernet.ipv6(src.octets(), dst.octets(), 64),
        _ => unreachable!(),
    };
    let mut frame = Vec::new();
    finish(ip, &mut frame);
    frame.split_off(14)
}

pub(super) fn udp(from: End, to: End, v6: bool, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    datagram(from.at(v6, ports.0), to.at(v6, ports.1), payload)
}

/// A UDP datagram between any addresses.
pub(super) fn datagram(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    built(from.ip(), to.ip(), |ip, frame| ip.udp(from.port(), to.port()).write(frame, payload).unwrap())
}

/// A segment with these flags: a letter each.
pub(super) fn tcp(from: End, to: End, v6: bool, ports: (u16, u16), flags: &str, seq: u32) -> Vec<u8> {
    segment(from.at(v6, ports.0), to.at(v6, ports.1), flags, (seq, seq ^ 0x5555), b"x")
}

/// The same between any addresses, with this number and acknowledgement.
pub(super) fn segment(from: SocketAddr, to: SocketAddr, flags: &str, numbers: (u32, u32), payload: &[u8]) -> Vec<u8> {
    let has = |flag| flags.contains(flag);
    let mut header = TcpHeader::new(from.port(), to.port(), numbers.0, 4096);
    (header.syn, header.ack, header.fin, header.rst) = (has('S'), has('A'), has('F'), has('R'));
    (header.psh, header.urg) = (has('P'), has('U'));
    header.acknowledgment_number = numbers.1;
    built(from.ip(), to.ip(), |ip, frame| ip.tcp_header(header).write(frame, payload).unwrap())
}

/// An SCTP packet with one chunk of this type (RFC 9260); nobody checks its checksum on the way.
pub(super) fn sctp(from: End, to: End, ports: (u16, u16), tag: u32, chunk: u8) -> Vec<u8> {
    let mut packet = [ports.0.to_be_bytes(), ports.1.to_be_bytes()].concat();
    packet.extend(tag.to_be_bytes());
    // Not 0, which a sender leaves for others to complete.
    packet.extend([1, 2, 3, 4]);
    packet.extend([chunk, 0, 0, 20]);
    packet.extend([1; 16]);
    v4(from, to, 132, &packet, |_| {})
}

pub(super) fn icmp(from: End, to: End, kind: Icmpv4Type, payload: &[u8]) -> Vec<u8> {
    built(from.address(false), to.address(false), |ip, frame| ip.icmpv4(kind).write(frame, payload).unwrap())
}

/// A fragment of a datagram, at this offset in units of eight bytes.
pub(super) fn fragment(from: End, to: End, id: u16, units: u16, more: bool, length: usize) -> Vec<u8> {
    let mut payload = udp(from, to, false, (5000 + id, 7000), &[id as u8; 64]).split_off(20);
    payload.resize(72, 0);
    let at = usize::from(units) * 8;
    v4(from, to, 17, &payload[at..at + length], |header| {
        header.identification = id;
        header.more_fragments = more;
        header.fragment_offset = IpFragOffset::try_new(units).unwrap();
    })
}

/// A fragment of an IPv6 datagram (RFC 8200 section 4.5).
pub(super) fn fragment_v6(from: End, to: End, id: u32, units: u16, more: bool) -> Vec<u8> {
    let whole = udp(from, to, true, (5000, 7001), &[6; 40]);
    let at = 40 + usize::from(units) * 8;
    let mut packet = whole[..40].to_vec();
    packet[4..6].copy_from_slice(&(8 + 24_u16).to_be_bytes());
    packet[6] = 44;
    packet.extend([17, 0]);
    packet.extend((units << 3 | u16::from(more)).to_be_bytes());
    packet.extend(id.to_be_bytes());
    packet.extend(&whole[at..at + 24]);
    packet
}

/// A packet as it is at its receiver, whatever routers have counted: without TTL or hop limit, and without the checksum over it.
pub(super) fn as_received(packet: &[u8]) -> Option<Vec<u8>> {
    let (length, fields): (usize, &[usize]) = match packet.first()? >> 4 {
        4 => (u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]).into(), &[8, 10, 11]),
        6 => (40 + usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?])), &[7]),
        _ => return None,
    };
    let mut packet = packet.get(..length)?.to_vec();
    fields.iter().for_each(|at| packet[*at] = 0);
    Some(packet)
}
