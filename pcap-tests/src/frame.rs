//! Frames from the fields of a case: correct unless the case asks for an error.

use std::net::IpAddr;

/// The Internet checksum (RFC 1071), folded but not inverted.
pub fn sum(bytes: &[u8], start: u32) -> u32 {
    let words = bytes.chunks(2).map(|pair| (u32::from(pair[0]) << 8) | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut total = words.fold(start, |total, word| total.wrapping_add(word));
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    total
}

/// CRC-32c as used by SCTP (RFC 9260 appendix A), bit by bit.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 })
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChecksumSpec {
    #[default]
    Right,
    Bad,
    /// The sum of the pseudo-header only, as with checksum offload.
    Partial,
    Zero,
}

/// The IP layer of a packet, of either version.
#[derive(Clone, Debug)]
pub struct IpSpec {
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    pub protocol: u8,
    pub ttl: u8,
    /// IPv4 identification, or that of the IPv6 fragment header.
    pub id: u32,
    /// Fragment offset in bytes, and whether more fragments follow.
    pub fragment: Option<(u16, bool)>,
    /// IPv4 options, a multiple of four bytes.
    pub options: Vec<u8>,
    /// IPv6 extension headers: protocol number and content without the first byte, which is the next header's number.
    pub extensions: Vec<(u8, Vec<u8>)>,
    /// Extension headers behind the fragment header, in the same form.
    pub behind: Vec<(u8, Vec<u8>)>,
    /// IPv4 total length or IPv6 payload length, if not the correct one.
    pub length: Option<u16>,
    /// Version, if not the correct one.
    pub version: Option<u8>,
    /// IPv4 header length in words, if not the correct one.
    pub header_words: Option<u8>,
    pub checksum: ChecksumSpec,
}

impl IpSpec {
    /// From `src` to `dst`, unfragmented, without options.
    pub fn new(src: IpAddr, dst: IpAddr, protocol: u8) -> Self {
        Self {
            src,
            dst,
            protocol,
            ttl: 64,
            id: 0,
            fragment: None,
            options: Vec::new(),
            extensions: Vec::new(),
            behind: Vec::new(),
            length: None,
            version: None,
            header_words: None,
            checksum: ChecksumSpec::Right,
        }
    }

    /// The sum of the pseudo-header (RFC 9293 section 3.1, RFC 8200 section 8.1).
    pub fn pseudo_header(&self, length: usize) -> u32 {
        let addresses = match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => [src.octets(), dst.octets()].concat(),
            (src, dst) => [v6(src), v6(dst)].concat(),
        };
        sum(&addresses, u32::from(self.protocol) + length as u32)
    }

    /// EtherType and bytes of the packet.
    pub fn packet(&self, payload: &[u8]) -> ([u8; 2], Vec<u8>) {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => ([0x08, 0x00], self.v4(src.octets(), dst.octets(), payload)),
            (src, dst) => ([0x86, 0xdd], self.v6(v6(src), v6(dst), payload)),
        }
    }

    fn v4(&self, src: [u8; 4], dst: [u8; 4], payload: &[u8]) -> Vec<u8> {
        let words = self.header_words.unwrap_or((20 + self.options.len()) as u8 / 4);
        let length = self.length.unwrap_or((20 + self.options.len() + payload.len()) as u16);
        let (offset, more) = self.fragment.unwrap_or_default();
        let fragment = (offset / 8) | (u16::from(more) << 13);
        let mut header = vec![(self.version.unwrap_or(4) << 4) | words, 0];
        header.extend(length.to_be_bytes());
        header.extend((self.id as u16).to_be_bytes());
        header.extend(fragment.to_be_bytes());
        header.extend([self.ttl, self.protocol, 0, 0]);
        header.extend(src);
        header.extend(dst);
        header.extend(&self.options);
        let checksum = match self.checksum {
            ChecksumSpec::Right | ChecksumSpec::Partial => !sum(&header, 0) as u16,
            ChecksumSpec::Bad => !sum(&header, 1) as u16,
            ChecksumSpec::Zero => 0,
        };
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        header.extend(payload);
        header
    }

    fn v6(&self, src: [u8; 16], dst: [u8; 16], payload: &[u8]) -> Vec<u8> {
        let mut extensions = self.extensions.clone();
        if let Some((offset, more)) = self.fragment {
            let word = (offset & !7) | u16::from(more);
            extensions.push((44, [&[0][..], &word.to_be_bytes(), &self.id.to_be_bytes()].concat()));
        }
        extensions.extend(self.behind.iter().cloned());
        let numbers: Vec<u8> = extensions.iter().map(|extension| extension.0).chain([self.protocol]).collect();
        let mut chain = Vec::new();
        for (place, (_, bytes)) in extensions.iter().enumerate() {
            chain.push(numbers[place + 1]);
            chain.extend(bytes);
        }
        let length = self.length.unwrap_or((chain.len() + payload.len()) as u16);
        let mut packet = vec![self.version.unwrap_or(6) << 4, 0, 0, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([numbers[0], self.ttl]);
        packet.extend(src);
        packet.extend(dst);
        packet.extend(chain);
        packet.extend(payload);
        packet
    }
}

fn v6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Writes a checksum into a transport header and payload.
pub fn write_checksum(ip: &IpSpec, bytes: &mut [u8], field: usize, checksum: ChecksumSpec) {
    bytes[field..field + 2].fill(0);
    let pseudo = ip.pseudo_header(bytes.len());
    let right = match !sum(bytes, pseudo) as u16 {
        // RFC 768: a sum of zero is sent as all ones, since zero means none.
        0 if ip.protocol == 17 => 0xffff,
        right => right,
    };
    let value = match checksum {
        ChecksumSpec::Right => right,
        ChecksumSpec::Bad => right ^ 0x5555,
        ChecksumSpec::Partial => pseudo as u16,
        ChecksumSpec::Zero => 0,
    };
    bytes[field..field + 2].copy_from_slice(&value.to_be_bytes());
}
