//! Packets byte by byte, with whatever is asked for in them.

use std::net::IpAddr;

use super::evaluator::{ICMP, ICMPV6, TCP, UDP};

/// The sum of RFC 1071, not complemented.
fn sum(parts: &[&[u8]]) -> u16 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u64 = words.map(|word| u64::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The pseudo-header of a transport protocol's checksum (RFC 768, RFC 8200 section 8.1).
fn pseudo(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> Vec<u8> {
    let end = [&(length as u32).to_be_bytes()[..], &[0, 0, 0, protocol]].concat();
    [octets(from), octets(to), end].concat()
}

/// Offset of the checksum in a transport header.
pub(super) fn checksum_offset(protocol: u8) -> Option<usize> {
    match protocol {
        TCP => Some(16),
        UDP => Some(6),
        ICMP | ICMPV6 => Some(2),
        _ => None,
    }
}

/// Writes the checksum of a transport header and what follows it: whole, or that of the pseudo-header alone, as the kernel wants it where it
/// is to do the rest.
pub(super) fn fill_checksum(transport: &mut [u8], (from, to): (IpAddr, IpAddr), protocol: u8, is_open: bool) {
    let Some(at) = checksum_offset(protocol).filter(|at| at + 2 <= transport.len()) else { return };
    transport[at..at + 2].fill(0);
    let header = if protocol == ICMP { Vec::new() } else { pseudo(from, to, protocol, transport.len()) };
    let checksum = if is_open { sum(&[&header]) } else { !sum(&[&header, transport]) };
    // Zero means none for UDP.
    let checksum = if protocol == UDP && checksum == 0 { 0xffff } else { checksum };
    transport[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// Fields that differ between the pieces of a datagram.
#[derive(Clone, Default)]
pub(super) struct Piece {
    /// IPv6: extension headers with their own next headers to be filled in, and the first one's number; IPv4: options.
    pub(super) chain: Vec<(u8, Vec<u8>)>,
    pub(super) options: Vec<u8>,
    /// Offset in bytes, and whether more follow.
    pub(super) fragment: Option<(usize, bool)>,
    pub(super) body: Vec<u8>,
}

/// Fields that all pieces of a datagram have in common.
#[derive(Clone, Copy)]
pub(super) struct Datagram {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) hops: u8,
    pub(super) protocol: u8,
    pub(super) identification: u32,
}

impl Datagram {
    /// The IP packet of a piece.
    pub(super) fn packet(&self, piece: &Piece) -> Vec<u8> {
        if self.from.is_ipv4() { self.v4(piece) } else { self.v6(piece) }
    }

    fn v4(&self, piece: &Piece) -> Vec<u8> {
        let length = 20 + piece.options.len();
        let (offset, more) = piece.fragment.unwrap_or_default();
        let fragment = (offset / 8) as u16 | u16::from(more) << 13;
        let total = (length + piece.body.len()).min(0xffff) as u16;
        let mut header = vec![0x40 | (length / 4) as u8, 0];
        header.extend(total.to_be_bytes());
        header.extend((self.identification as u16).to_be_bytes());
        header.extend(fragment.to_be_bytes());
        header.extend([self.hops, self.protocol, 0, 0]);
        header.extend(octets(self.from));
        header.extend(octets(self.to));
        header.extend(&piece.options);
        let checksum = !sum(&[&header]);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        header.extend(&piece.body);
        header
    }

    fn v6(&self, piece: &Piece) -> Vec<u8> {
        let mut chain = piece.chain.clone();
        if let Some((offset, more)) = piece.fragment {
            let place = (offset as u16 & 0xfff8) | u16::from(more);
            let rest = [&[0, 0][..], &place.to_be_bytes(), &self.identification.to_be_bytes()].concat();
            chain.push((44, rest));
        }
        // Each header names the next one in its first byte.
        let numbers: Vec<u8> = chain.iter().map(|(number, _)| *number).chain([self.protocol]).collect();
        let mut rest = Vec::new();
        for ((_, header), next) in chain.iter().zip(&numbers[1..]) {
            rest.push(*next);
            rest.extend(&header[1..]);
        }
        rest.extend(&piece.body);
        let mut packet = vec![0x60, 0, 0, 0];
        packet.extend((rest.len().min(0xffff) as u16).to_be_bytes());
        packet.extend([numbers[0], self.hops]);
        packet.extend(octets(self.from));
        packet.extend(octets(self.to));
        packet.extend(rest);
        packet
    }
}

/// An IPv6 options header (hop-by-hop, destination) of padding, of 8 bytes and `more` times 8; its first byte is filled in later.
pub(super) fn padding(more: u8) -> Vec<u8> {
    let bytes = usize::from(more) * 8 + 8;
    let mut header = vec![0, more, 1, (bytes - 4) as u8];
    header.resize(bytes, 0);
    header
}

#[test]
fn packets_are_as_another_library_reads_them() {
    for v6 in [false, true] {
        let [from, to]: [IpAddr; 2] = if v6 {
            ["fd00::1".parse().unwrap(), "fd00::2".parse().unwrap()]
        } else {
            ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()]
        };
        let mut body = vec![0, 53, 0, 54, 0, 12, 0, 0, 1, 2, 3, 4];
        fill_checksum(&mut body, (from, to), UDP, false);
        let datagram = Datagram { from, to, hops: 9, protocol: UDP, identification: 77 };
        let chain = vec![(0, padding(0)), (60, padding(2))];
        let packet = datagram.packet(&Piece { chain, options: vec![1; 4], fragment: None, body });
        let read = etherparse::PacketHeaders::from_ip_slice(&packet).unwrap();
        let udp = read.transport.unwrap().udp().unwrap();
        assert_eq!((udp.source_port, udp.destination_port, udp.length), (53, 54, 12));
        let expected = match read.net.unwrap() {
            etherparse::NetHeaders::Ipv4(ip, _) => {
                assert_eq!(ip.header_checksum, ip.calc_header_checksum());
                udp.calc_checksum_ipv4(&ip, &[1, 2, 3, 4]).unwrap()
            }
            etherparse::NetHeaders::Ipv6(ip, _) => udp.calc_checksum_ipv6(&ip, &[1, 2, 3, 4]).unwrap(),
            other => panic!("{other:?}"),
        };
        assert_eq!(udp.checksum, expected);
    }
}
