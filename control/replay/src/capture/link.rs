//! Conversion of captured link layers to the Ethernet frames that the pipeline parses.

use super::error::Damage;

/// The link layer before the IP header of a captured packet (tcpdump.org's link-layer header types).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LinkType {
    /// LINKTYPE_ETHERNET, 1.
    Ethernet,
    /// LINKTYPE_LINUX_SLL, 113: 16 bytes.
    LinuxCooked,
    /// LINKTYPE_LINUX_SLL2, 276: 20 bytes.
    LinuxCooked2,
    /// LINKTYPE_RAW, 101, LINKTYPE_IPV4, 228, and LINKTYPE_IPV6, 229: no header.
    RawIp,
}

const ETHERNET: usize = 14;

impl LinkType {
    /// The link type of a number in a file. The upper half of pcap's field holds flags about the frame check sequence.
    /// Some systems write raw IP as their DLT_RAW, 12 or 14.
    pub(super) fn from_number(number: u32) -> Result<Self, Damage> {
        match number & 0xffff {
            1 => Ok(Self::Ethernet),
            113 => Ok(Self::LinuxCooked),
            276 => Ok(Self::LinuxCooked2),
            12 | 14 | 101 | 228 | 229 => Ok(Self::RawIp),
            other => Err(Damage::LinkType(other)),
        }
    }

    pub const fn header_len(self) -> usize {
        match self {
            Self::Ethernet => ETHERNET,
            Self::LinuxCooked => 16,
            Self::LinuxCooked2 => 20,
            Self::RawIp => 0,
        }
    }

    /// The length of a packet of this many bytes after conversion. Saturates: a file may claim any length.
    pub(super) fn ethernet_len(self, bytes: u32) -> u32 {
        match self {
            Self::Ethernet => bytes,
            _ => bytes.saturating_add(ETHERNET as u32).saturating_sub(self.header_len() as u32),
        }
    }

    /// Appends the packet as an Ethernet frame. Unknown MACs are zero; a truncated header gives a truncated frame.
    #[inline]
    pub(super) fn append_ethernet(self, packet: &[u8], frames: &mut Vec<u8>) {
        match self {
            Self::Ethernet => frames.extend_from_slice(packet),
            Self::LinuxCooked => match packet.split_first_chunk::<16>() {
                Some((header, payload)) => append(&header[6..12], [header[14], header[15]], payload, frames),
                None => frames.extend_from_slice(&[0; ETHERNET][..packet.len().min(ETHERNET - 1)]),
            },
            Self::LinuxCooked2 => match packet.split_first_chunk::<20>() {
                Some((header, payload)) => append(&header[12..18], [header[0], header[1]], payload, frames),
                None => frames.extend_from_slice(&[0; ETHERNET][..packet.len().min(ETHERNET - 1)]),
            },
            Self::RawIp => {
                let ethertype = match packet.first().map(|octet| octet >> 4) {
                    Some(4) => [0x08, 0x00],
                    Some(6) => [0x86, 0xdd],
                    // No EtherType: the payload's type is unknown.
                    _ => [0, 0],
                };
                append(&[0; 6], ethertype, packet, frames);
            }
        }
    }
}

fn append(source: &[u8], ethertype: [u8; 2], payload: &[u8], frames: &mut Vec<u8>) {
    frames.extend_from_slice(&[0; 6]);
    frames.extend_from_slice(source);
    frames.extend_from_slice(&ethertype);
    frames.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_type_is_converted_to_ethernet() {
        let ip = [0x45, 1, 2, 3];
        let cooked = [&[0, 4, 0, 1, 0, 6, 2, 0, 0, 0, 0, 9, 0, 0, 0x08, 0x00][..], &ip].concat();
        let cooked2 = [&[0x08, 0x00, 0, 0, 0, 0, 0, 3, 0, 1, 4, 6, 2, 0, 0, 0, 0, 9, 0, 0][..], &ip].concat();
        let plain = [&[1; 6][..], &[2; 6], &[0x08, 0x00], &ip].concat();
        let synthetic = |mac: [u8; 6]| [&[0; 6][..], &mac, &[0x08, 0x00], &ip].concat();
        for (number, packet, expected) in [
            (1, &plain, plain.clone()),
            (0xf400_0001, &plain, plain.clone()),
            (113, &cooked, synthetic([2, 0, 0, 0, 0, 9])),
            (276, &cooked2, synthetic([2, 0, 0, 0, 0, 9])),
            (101, &ip.to_vec(), synthetic([0; 6])),
            (228, &ip.to_vec(), synthetic([0; 6])),
            (113, &vec![0; 15], vec![0; 13]),
            (276, &vec![0; 5], vec![0; 5]),
        ] {
            let link = LinkType::from_number(number).unwrap();
            let mut frame = Vec::new();
            link.append_ethernet(packet, &mut frame);
            assert_eq!(frame, expected, "link type {number}");
            if packet.len() >= link.header_len() {
                assert_eq!(link.ethernet_len(packet.len() as u32) as usize, frame.len(), "link type {number}");
            }
        }
        assert!(matches!(LinkType::from_number(147), Err(Damage::LinkType(147))));
    }

    #[test]
    fn the_longest_possible_record_keeps_its_length() {
        for number in [1, 113, 276, 101] {
            let link = LinkType::from_number(number).unwrap();
            let least = u32::MAX - link.header_len() as u32;
            assert!((least..=u32::MAX).contains(&link.ethernet_len(u32::MAX)), "link type {number}");
        }
    }
}
