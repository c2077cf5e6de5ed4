//! Network address translation: writes another flow into a packet, and keeps its checksums as right or wrong as they are.

use super::checksum::Sum;
use super::parse::quoted;
use super::{Address, Flow, Packet, Protocol, Transport};

/// The sum of changes to 16-bit words, for checksums that cover them (RFC 1624 equation 3).
#[derive(Clone, Copy, Default)]
struct Change(u32);

impl Change {
    /// Writes `after` over the bytes at `at`, and notes the change. Both have an even length, and `at` is even relative to
    /// what a checksum covers.
    fn write(&mut self, frame: &mut [u8], at: usize, after: &[u8]) {
        let field = &mut frame[at..at + after.len()];
        for (before, after) in field.chunks_exact(2).zip(after.chunks_exact(2)) {
            self.note(u16::from_be_bytes([before[0], before[1]]), u16::from_be_bytes([after[0], after[1]]));
        }
        field.copy_from_slice(after);
    }

    fn note(&mut self, before: u16, after: u16) {
        let sum = self.0 + u32::from(!before) + u32::from(after);
        self.0 = (sum & 0xffff) + (sum >> 16);
    }

    fn and(self, other: Self) -> Self {
        let sum = self.0 + other.0;
        Self((sum & 0xffff) + (sum >> 16))
    }

    /// Updates the checksum at `at`, and returns its own change.
    fn apply(self, frame: &mut [u8], at: usize) -> Self {
        let before = u16::from_be_bytes([frame[at], frame[at + 1]]);
        let sum = u32::from(!before) + self.0;
        let sum = (sum & 0xffff) + (sum >> 16);
        let after = !((sum + (sum >> 16)) as u16);
        frame[at..at + 2].copy_from_slice(&after.to_be_bytes());
        let mut change = Self::default();
        change.note(before, after);
        change
    }
}

const SOURCE_V4: usize = 12;
const SOURCE_V6: usize = 8;
const CHECKSUM_V4: usize = 10;

/// Writes the addresses of `flow` into the IP header at `at`, with its checksum. Returns the change of the addresses, which
/// a pseudo-header has, and of all bytes of the header.
fn write_addresses(frame: &mut [u8], at: usize, flow: &Flow) -> (Change, Change) {
    let mut change = Change::default();
    let bytes = |address: Address| address.bits().to_be_bytes();
    match (flow.src.v4_bytes(), flow.dst.v4_bytes()) {
        (Some(src), Some(dst)) => {
            change.write(frame, at + SOURCE_V4, &src);
            change.write(frame, at + SOURCE_V4 + 4, &dst);
            let own = change.apply(frame, at + CHECKSUM_V4);
            (change, change.and(own))
        }
        _ => {
            change.write(frame, at + SOURCE_V6, &bytes(flow.src));
            change.write(frame, at + SOURCE_V6 + 16, &bytes(flow.dst));
            (change, change)
        }
    }
}

/// Offset of a protocol's checksum in its header, if it is one of 16-bit words.
const fn checksum_at(protocol: Protocol) -> Option<usize> {
    match protocol {
        Protocol::TCP => Some(16),
        Protocol::UDP => Some(6),
        _ => None,
    }
}

/// Whether [`translate`] can write `flow` into this packet. The CRC of an SCTP packet covers all of its fragments, so that
/// it cannot be kept from one of them if a port changes.
pub(crate) fn can_translate(packet: &Packet, flow: &Flow) -> bool {
    packet.flow.protocol != Protocol::SCTP
        || packet.fragment.is_none()
        || (packet.flow.src_port, packet.flow.dst_port) == (flow.src_port, flow.dst_port)
}

/// Writes `flow` into a frame, parsed as `packet`; of an ICMP error only its addresses, and `quote` into the packet that it
/// quotes. Flow and quote have the packet's family. A checksum that the sender left to its device stays so.
pub fn translate(frame: &mut [u8], packet: &Packet, flow: &Flow, quote: Option<&Flow>) {
    let (network, start, end) =
        (usize::from(packet.layout.network), usize::from(packet.layout.transport), usize::from(packet.layout.end));
    if let Transport::IcmpError { quoted_at } = packet.transport {
        translate_error(frame, packet, flow, (quoted_at, quote));
        return;
    }
    let (addresses, _) = write_addresses(frame, network, flow);
    if packet.transport == Transport::LaterFragment {
        return;
    }
    match checksum_at(packet.flow.protocol) {
        Some(at) => translate_transport(frame, packet, flow, (start + at, addresses)),
        None if packet.flow.protocol == Protocol::SCTP => translate_sctp(&mut frame[start..end], flow),
        None => {}
    }
}

/// TCP and UDP: ports, and the checksum at `at`.
fn translate_transport(frame: &mut [u8], packet: &Packet, flow: &Flow, (at, addresses): (usize, Change)) {
    let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
    let protocol = packet.flow.protocol;
    let pseudo = |flow: &Flow| Sum::pseudo_header(flow.src, flow.dst, protocol, (end - start) as u16).folded();
    let field = u16::from_be_bytes([frame[at], frame[at + 1]]);
    let mut change = addresses;
    change.write(frame, start, &flow.src_port.to_be_bytes());
    change.write(frame, start + 2, &flow.dst_port.to_be_bytes());
    if protocol == Protocol::UDP && field == 0 {
        // RFC 768: the sender computed none.
    } else if packet.fragment.is_none() && field == pseudo(&packet.flow) {
        frame[at..at + 2].copy_from_slice(&pseudo(flow).to_be_bytes());
    } else {
        change.apply(frame, at);
        if protocol == Protocol::UDP && frame[at..at + 2] == [0, 0] {
            frame[at..at + 2].fill(0xff);
        }
    }
}

/// SCTP: ports, and the CRC32c over the packet, unless it is left to the device (zero) or wrong.
fn translate_sctp(packet: &mut [u8], flow: &Flow) {
    let crc = |packet: &[u8]| {
        let header = crc32c::crc32c_append(crc32c::crc32c(&packet[..8]), &[0; 4]);
        crc32c::crc32c_append(header, &packet[12..]).to_le_bytes()
    };
    let is_right = packet.len() >= 12 && packet[8..12] == crc(packet);
    packet[..2].copy_from_slice(&flow.src_port.to_be_bytes());
    packet[2..4].copy_from_slice(&flow.dst_port.to_be_bytes());
    if is_right {
        let crc = crc(packet);
        packet[8..12].copy_from_slice(&crc);
    }
}

/// An ICMP error: its addresses, and the packet that it quotes.
fn translate_error(frame: &mut [u8], packet: &Packet, flow: &Flow, (quoted_at, quote): (u16, Option<&Flow>)) {
    let found = quoted(frame, packet, quoted_at);
    let (addresses, _) = write_addresses(frame, usize::from(packet.layout.network), flow);
    let mut change = Change::default();
    if let (Some(quote), Some((before, at))) = (quote, found) {
        let (quoted_addresses, header) = write_addresses(frame, usize::from(quoted_at), quote);
        let mut ports = Change::default();
        ports.write(frame, at, &quote.src_port.to_be_bytes());
        ports.write(frame, at + 2, &quote.dst_port.to_be_bytes());
        change = header.and(ports);
        // The quoted packet may have only eight bytes behind its IP header.
        if let Some(field) = checksum_at(before.protocol).map(|field| at + field)
            && field + 2 <= usize::from(packet.layout.end)
            && !(before.protocol == Protocol::UDP && frame[field..field + 2] == [0, 0])
        {
            change = change.and(quoted_addresses.and(ports).apply(frame, field));
        }
    }
    if !flow.src.is_v4() {
        change = change.and(addresses);
    }
    change.apply(frame, usize::from(packet.layout.transport) + 2);
}

#[cfg(test)]
mod tests;
