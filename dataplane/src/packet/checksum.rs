//! The Internet checksum (RFC 1071) and its maintenance by forwarding.
//!
//! A sum here is a plain one's-complement sum of 16-bit words in network order, folded to 16 bits and *not*
//! complemented; a checksum field holds its complement.

use super::{Address, Protocol};

/// A running one's-complement sum.
///
/// Words are added in native byte order, which does not affect the sum (RFC 1071 section 2B), and swapped once at the
/// end.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes that start at an even offset of the summed data.
    #[inline]
    pub fn add_bytes(self, bytes: &[u8]) -> Self {
        // Four lanes of 32-bit words in 64-bit accumulators: no carry can be lost below 16 GiB of data, and the
        // compiler vectorises the loop.
        let mut lanes = [0u64; 4];
        let mut chunks = bytes.chunks_exact(16);
        for chunk in &mut chunks {
            for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(4)) {
                *lane += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
            }
        }
        let mut sum = self.0 + lanes.iter().sum::<u64>();
        let mut pairs = chunks.remainder().chunks_exact(2);
        for pair in &mut pairs {
            sum += u64::from(u16::from_ne_bytes([pair[0], pair[1]]));
        }
        if let [last] = pairs.remainder() {
            sum += u64::from(u16::from_ne_bytes([*last, 0]));
        }
        Self(sum)
    }

    /// Adds an IPv4 header, a multiple of four bytes and at least twenty. It nearly always has twenty; a general loop
    /// takes longer than the sum.
    #[inline]
    pub(super) fn add_ipv4_header(self, header: &[u8]) -> Self {
        let add = |sum: u64, word: &[u8]| sum + u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
        match header.split_first_chunk::<20>() {
            Some((fixed, options)) => {
                let sum = Self(fixed.chunks_exact(4).fold(self.0, add));
                if options.is_empty() { sum } else { sum.add_bytes(options) }
            }
            None => self.add_bytes(header),
        }
    }

    /// Adds a 16-bit word given in host byte order.
    #[inline]
    pub fn add_word(self, word: u16) -> Self {
        Self(self.0 + u64::from(word.to_be()))
    }

    /// The pseudo-header of TCP and UDP: RFC 9293 section 3.1 for IPv4, RFC 8200 section 8.1 for IPv6. `length` is that
    /// of transport header and payload in bytes.
    #[inline]
    pub fn pseudo_header(src: Address, dst: Address, protocol: Protocol, length: u16) -> Self {
        // Both are of one family: the parser ensures it.
        let sum = if src.is_v4() {
            let word = |address: Address| u64::from((address.bits() as u32).to_be());
            Self(word(src) + word(dst))
        } else {
            Self::default().add_bytes(&src.bits().to_be_bytes()).add_bytes(&dst.bits().to_be_bytes())
        };
        sum.add_word(u16::from(protocol.0)).add_word(length)
    }

    /// The sum folded to 16 bits, host byte order, not complemented.
    #[inline]
    pub fn folded(self) -> u16 {
        // Two rounds on 32-bit halves leave at most 32 bits, two on 16-bit halves at most 16.
        let sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        let sum = (sum as u32).wrapping_add((sum >> 32) as u32);
        let sum = (sum & 0xffff) + (sum >> 16);
        u16::from_be(((sum & 0xffff) + (sum >> 16)) as u16)
    }
}

/// The header checksum field after a 16-bit word of the header changed (RFC 1624 equation 3). All values are in host
/// byte order.
#[inline]
pub(super) fn updated(field: u16, before: u16, after: u16) -> u16 {
    let sum = u32::from(!field) + u32::from(!before) + u32::from(after);
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum + (sum >> 16)) as u16)
}

/// Completes the checksum of a TCP or UDP packet whose sender left it to the device.
///
/// A pod's stack sends with `CHECKSUM_PARTIAL` (Linux `include/linux/skbuff.h`): the field then contains only the
/// folded pseudo-header sum. `transport` is header and payload, `field_at` the field's offset in it. A packet whose
/// field is anything else is unchanged. Returns whether the checksum was completed.
#[inline]
pub(super) fn finish_partial(transport: &mut [u8], field_at: usize, pseudo: Sum, protocol: Protocol) -> bool {
    let Some(&[high, low]) = transport.get(field_at..field_at + 2) else { return false };
    if u16::from_be_bytes([high, low]) != pseudo.folded() {
        return false;
    }
    // The field already contains the pseudo-header's sum, so the sum of the bytes is complete.
    let checksum = match !Sum::default().add_bytes(transport).folded() {
        // RFC 768: zero would mean that there is no checksum.
        0 if protocol == Protocol::UDP => 0xffff,
        checksum => checksum,
    };
    transport[field_at..field_at + 2].copy_from_slice(&checksum.to_be_bytes());
    true
}

/// Completes the CRC32c of an SCTP packet (RFC 9260 section 6.8) that left its pod as zero for the device. Returns
/// whether it was completed.
pub(super) fn finish_sctp(transport: &mut [u8]) -> bool {
    if transport.get(8..12) != Some(&[0; 4]) {
        return false;
    }
    let crc = crc32c::crc32c(transport);
    transport[8..12].copy_from_slice(&crc.to_le_bytes());
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use etherparse::{TcpHeader, UdpHeader};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sums_agree_with_a_word_by_word_sum(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut expected = 0u32;
            for pair in bytes.chunks(2) {
                expected += u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]));
            }
            while expected > 0xffff {
                expected = (expected & 0xffff) + (expected >> 16);
            }
            prop_assert_eq!(u32::from(Sum::default().add_bytes(&bytes).folded()), expected);
        }

        #[test]
        fn an_incremental_update_equals_a_new_sum(mut words in prop::collection::vec(any::<u16>(), 2..20), after: u16) {
            let sum = |words: &[u16]| !words.iter().fold(Sum::default(), |sum, &word| sum.add_word(word)).folded();
            // A header is never all zero, so the two representations of zero cannot be confused.
            words[1] |= 1;
            let field = sum(&words);
            let before = std::mem::replace(&mut words[0], after);
            prop_assert_eq!(updated(field, before, after), sum(&words));
        }

        #[test]
        fn a_partial_checksum_is_completed(
            v6: bool, src: [u8; 16], dst: [u8; 16], ports: (u16, u16), payload in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            let (src4, dst4) = ([10, src[1], src[2], src[3]], [10, dst[1], dst[2], dst[3]]);
            let (from, to) = if v6 {
                (Address::from_v6_bytes(src), Address::from_v6_bytes(dst))
            } else {
                (Address::from_v4_bytes(src4), Address::from_v4_bytes(dst4))
            };
            prop_assume!(from.is_v4() == to.is_v4());

            let tcp = TcpHeader::new(ports.0, ports.1, 7, 8);
            let expected = if v6 { tcp.calc_checksum_ipv6_raw(src, dst, &payload) } else { tcp.calc_checksum_ipv4_raw(src4, dst4, &payload) };
            let mut segment = tcp.to_bytes().to_vec();
            segment.extend(&payload);
            let pseudo = Sum::pseudo_header(from, to, Protocol::TCP, segment.len() as u16);
            segment[16..18].copy_from_slice(&pseudo.folded().to_be_bytes());
            prop_assert!(finish_partial(&mut segment, 16, pseudo, Protocol::TCP));
            prop_assert_eq!(u16::from_be_bytes([segment[16], segment[17]]), expected.unwrap());

            let udp = UdpHeader { source_port: ports.0, destination_port: ports.1, length: 8 + payload.len() as u16, checksum: 0 };
            let expected = if v6 { udp.calc_checksum_ipv6_raw(src, dst, &payload) } else { udp.calc_checksum_ipv4_raw(src4, dst4, &payload) };
            let mut datagram = udp.to_bytes().to_vec();
            datagram.extend(&payload);
            let pseudo = Sum::pseudo_header(from, to, Protocol::UDP, datagram.len() as u16);
            datagram[6..8].copy_from_slice(&pseudo.folded().to_be_bytes());
            prop_assert!(finish_partial(&mut datagram, 6, pseudo, Protocol::UDP));
            prop_assert_eq!(u16::from_be_bytes([datagram[6], datagram[7]]), expected.unwrap());
        }
    }

    #[test]
    fn a_complete_checksum_is_unchanged() {
        let (src, dst) = (Address::from_v4_bytes([10, 0, 0, 1]), Address::from_v4_bytes([10, 0, 0, 2]));
        let mut tcp = TcpHeader::new(1, 2, 3, 4);
        tcp.checksum = tcp.calc_checksum_ipv4_raw([10, 0, 0, 1], [10, 0, 0, 2], &[]).unwrap();
        let mut segment = tcp.to_bytes().to_vec();
        let before = segment.clone();
        let pseudo = Sum::pseudo_header(src, dst, Protocol::TCP, segment.len() as u16);
        assert!(!finish_partial(&mut segment, 16, pseudo, Protocol::TCP));
        assert_eq!(segment, before);
        assert!(!finish_partial(&mut segment[..10], 16, pseudo, Protocol::TCP), "a field behind the end");
    }

    #[test]
    fn sctp_crc_is_completed_in_wire_order() {
        // INIT chunk header after the common header; the CRC was computed bit by bit with the polynomial 0x82f63b78.
        let mut packet = vec![0x00, 0x50, 0x1f, 0x90, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 4];
        let mut crc = !0u32;
        for &byte in &packet {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1));
            }
        }
        assert!(finish_sctp(&mut packet));
        assert_eq!(packet[8..12], (!crc).to_le_bytes());
        assert!(!finish_sctp(&mut packet), "finished once only");
    }
}
