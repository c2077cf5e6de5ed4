//! From bytes to a validated view: every length is checked here once, and nowhere after.

use std::num::NonZeroU16;

use etherparse::{EtherType, Ipv4HeaderSlice, Ipv6HeaderSlice};

use super::transport::{SctpChunk, TcpFlags, TcpSegment, Transport};
use super::{Address, Flow, Protocol, Sum, icmp};
use crate::DropReason;

pub const ETHERNET_LEN: usize = 14;
/// Maximum number of IPv6 extension headers; legitimate senders do not need more.
const MAX_EXTENSION_HEADERS: usize = 6;

/// Position of a fragment in its datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment {
    id: u32,
    /// The offset, which is a multiple of eight, and in bit 0 whether more fragments follow. It is never zero, so that
    /// `Option<Fragment>` takes eight bytes of every [`Packet`].
    place: NonZeroU16,
    len: u16,
}

impl Fragment {
    /// The fragment of the datagram with this identification (16 bits in IPv4, 32 in IPv6) at an offset in bytes, whose
    /// low three bits are ignored, with `len` bytes of payload. `None` for a whole packet, including an IPv6 packet
    /// with a Fragment header of its own (an atomic fragment, RFC 6946).
    pub fn new(id: u32, offset: u16, more: bool, len: u16) -> Option<Self> {
        let place = NonZeroU16::new(offset & !7 | u16::from(more))?;
        Some(Self { id, place, len })
    }

    /// The identification of its datagram.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Offset of its payload in the datagram, in bytes.
    #[inline]
    pub const fn offset(&self) -> u16 {
        self.place.get() & !7
    }

    /// Whether it is the first of its datagram: it has the transport header.
    #[inline]
    pub const fn is_first(&self) -> bool {
        self.offset() == 0
    }

    /// Bytes of the datagram's payload in it. They begin behind the IPv4 header or the IPv6 Fragment header: offsets count
    /// from there, whatever extension headers follow (RFC 8200 section 4.5).
    pub const fn len(&self) -> u16 {
        self.len
    }

    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub const fn more(&self) -> bool {
        self.place.get() & 1 == 1
    }

    /// End of its payload in the datagram, in bytes.
    #[inline]
    pub const fn end(&self) -> u16 {
        self.offset().saturating_add(self.len)
    }

    /// Rejects fragments that no stack sends: one that is not the last but whose end is not a multiple of eight bytes,
    /// and one that exceeds the longest datagram (RFC 791 section 3.2, RFC 8200 section 4.5). Receivers treat both
    /// differently.
    fn check(&self) -> Result<(), DropReason> {
        let is_whole = !self.more() || self.len.is_multiple_of(8);
        let fits = self.offset().checked_add(self.len).is_some();
        if is_whole && fits { Ok(()) } else { Err(DropReason::Malformed) }
    }
}

const _: () = assert!(size_of::<Option<Fragment>>() == 8);

/// Offsets of a packet's parts in its frame, in bytes from the start of the frame. They are in order and within it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Start of the IP header.
    pub network: u16,
    /// Start of the transport header, behind IPv4 options and IPv6 extension headers.
    pub transport: u16,
    /// End of the IP packet; what follows in the frame is padding.
    pub end: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Packet {
    /// Addresses, protocol and ports. For an ICMP error the outer packet's addresses, without ports.
    pub flow: Flow,
    pub transport: Transport,
    pub layout: Layout,
    /// TTL or hop limit as received.
    pub ttl: u8,
    /// Set on all fragments, the first one included.
    pub fragment: Option<Fragment>,
}

impl Packet {
    #[inline]
    pub fn ip_len(&self) -> u16 {
        self.layout.end - self.layout.network
    }
}

/// Parses a frame, starting with its Ethernet header.
///
/// # Errors
/// The reason to drop a packet that cannot be parsed.
#[inline]
pub fn parse(frame: &[u8]) -> Result<Packet, DropReason> {
    let mut packet = Packet::default();
    parse_into(frame, &mut packet)?;
    Ok(packet)
}

/// [`parse`](fn@parse) into an existing packet, which is too large to be passed between functions. After an error its
/// content is meaningless, unless its transport is [`Transport::Unreadable`]: then the rest was read.
#[inline(always)]
pub(crate) fn parse_into(frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    if plain(frame, packet).is_some() {
        return Ok(());
    }
    parse_any(frame, packet)
}

/// Fast path of [`parse_into`] for nearly every packet: TCP without SYN, or UDP, unfragmented, over IPv4 without
/// options. `None` for everything else, invalid packets included, which [`parse_any`] then handles. Where both accept a
/// packet, they agree.
///
/// A single comparison of the frame's length covers all accesses.
#[inline(always)]
fn plain(frame: &[u8], packet: &mut Packet) -> Option<()> {
    const IP: usize = ETHERNET_LEN;
    const TRANSPORT: usize = IP + 20;
    let head = frame.first_chunk::<{ TRANSPORT + 20 }>()?;
    let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let long = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    // Version 4 and five words of header; no offset and no more fragments.
    let is_plain = word(12) == EtherType::IPV4.0 && head[IP] == 0x45 && word(IP + 6) & 0x3fff == 0;
    let end = usize::from(word(IP + 2).checked_add(IP as u16)?);
    let header = &head[IP..TRANSPORT];
    if !is_plain || end > frame.len() || Sum::default().add_ipv4_header(header).folded() != 0xffff {
        return None;
    }
    let protocol = Protocol(head[IP + 9]);
    packet.transport = match protocol {
        Protocol::TCP => {
            let (header_len, flags) = (usize::from(head[TRANSPORT + 12] >> 4) * 4, TcpFlags(head[TRANSPORT + 13]));
            let payload_len = end.checked_sub(TRANSPORT + header_len)?;
            if header_len < 20 || flags.contains(TcpFlags::SYN) {
                return None;
            }
            Transport::Tcp(TcpSegment {
                seq: long(TRANSPORT + 4),
                ack: long(TRANSPORT + 8),
                window: word(TRANSPORT + 14),
                flags,
                payload_len: payload_len as u16,
                window_scale: None,
            })
        }
        Protocol::UDP if (8..=end.checked_sub(TRANSPORT)?).contains(&usize::from(word(TRANSPORT + 4))) => {
            Transport::Udp
        }
        _ => return None,
    };
    packet.flow = Flow {
        src: Address::from_v4_bytes([head[IP + 12], head[IP + 13], head[IP + 14], head[IP + 15]]),
        dst: Address::from_v4_bytes([head[IP + 16], head[IP + 17], head[IP + 18], head[IP + 19]]),
        protocol,
        src_port: word(TRANSPORT),
        dst_port: word(TRANSPORT + 2),
    };
    packet.layout = Layout { network: IP as u16, transport: TRANSPORT as u16, end: end as u16 };
    packet.ttl = head[IP + 8];
    packet.fragment = None;
    Some(())
}

/// [`parse_into`] for every packet.
#[inline(never)]
fn parse_any(frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    packet.transport = Transport::Other;
    let Some(ethertype) = frame.get(12..ETHERNET_LEN) else { return Err(DropReason::Truncated) };
    match EtherType(u16::from_be_bytes([ethertype[0], ethertype[1]])) {
        EtherType::IPV4 => ipv4(frame, ETHERNET_LEN, packet),
        EtherType::IPV6 => ipv6(frame, ETHERNET_LEN, packet),
        EtherType::VLAN_TAGGED_FRAME | EtherType::PROVIDER_BRIDGING => Err(DropReason::VlanTag),
        _ => Err(DropReason::NotIp),
    }
}

fn ipv4(frame: &[u8], at: usize, packet: &mut Packet) -> Result<(), DropReason> {
    let bytes = &frame[at..];
    let header = ipv4_header(bytes)?;
    let total = usize::from(header.total_len());
    if total < header.slice().len() {
        return Err(DropReason::Malformed);
    }
    if total > bytes.len() {
        return Err(DropReason::Truncated);
    }
    if Sum::default().add_ipv4_header(header.slice()).folded() != 0xffff {
        return Err(DropReason::HeaderChecksum);
    }
    let options = &header.slice()[20..];
    if !options.is_empty() {
        check_ipv4_options(options)?;
    }
    packet.flow.src = Address::from_v4_bytes(header.source());
    packet.flow.dst = Address::from_v4_bytes(header.destination());
    packet.flow.protocol = Protocol(header.protocol().0);
    let transport = at + header.slice().len();
    packet.layout = Layout { network: at as u16, transport: transport as u16, end: to_offset(at + total)? };
    packet.ttl = header.ttl();
    let offset = header.fragments_offset().value() * 8;
    let len = packet.layout.end - packet.layout.transport;
    packet.fragment = Fragment::new(u32::from(header.identification()), offset, header.more_fragments(), len);
    if let Some(fragment) = packet.fragment {
        fragment.check()?;
    }
    transport_into(frame, packet)
}

#[inline]
fn ipv4_header(bytes: &[u8]) -> Result<Ipv4HeaderSlice<'_>, DropReason> {
    use etherparse::err::ipv4::HeaderSliceError;
    Ipv4HeaderSlice::from_slice(bytes).map_err(|error| match error {
        HeaderSliceError::Len(_) => DropReason::Truncated,
        HeaderSliceError::Content(_) => DropReason::Malformed,
    })
}

/// Checks the options: their lengths must fit, and source routes are rejected (RFC 7126 section 4.3: a later router
/// would forward the packet past the destination that policy evaluated).
fn check_ipv4_options(mut options: &[u8]) -> Result<(), DropReason> {
    const END: u8 = 0;
    const NO_OPERATION: u8 = 1;
    const LOOSE_SOURCE_ROUTE: u8 = 131;
    const STRICT_SOURCE_ROUTE: u8 = 137;
    loop {
        options = match *options {
            [] | [END, ..] => return Ok(()),
            [NO_OPERATION, ref rest @ ..] => rest,
            [LOOSE_SOURCE_ROUTE | STRICT_SOURCE_ROUTE, ..] => return Err(DropReason::SourceRoute),
            [_, length, ..] => match options.get(usize::from(length)..) {
                Some(rest) if length >= 2 => rest,
                _ => return Err(DropReason::Malformed),
            },
            [_] => return Err(DropReason::Malformed),
        };
    }
}

fn ipv6(frame: &[u8], at: usize, packet: &mut Packet) -> Result<(), DropReason> {
    let bytes = &frame[at..];
    let header = ipv6_header(bytes)?;
    let end = at + 40 + usize::from(header.payload_length());
    if end > frame.len() {
        return Err(DropReason::Truncated);
    }
    let (src, dst) = (Address::from_v6_bytes(header.source()), Address::from_v6_bytes(header.destination()));
    if src.is_v4() || dst.is_v4() {
        // RFC 4942 section 2.2: mapped addresses must not appear on the wire.
        return Err(DropReason::Malformed);
    }
    let chain = extension_headers(&frame[..end], at + 40, header.next_header().0)?;
    (packet.flow.src, packet.flow.dst, packet.flow.protocol) = (src, dst, Protocol(chain.protocol));
    packet.layout = Layout { network: at as u16, transport: to_offset(chain.at)?, end: to_offset(end)? };
    packet.ttl = header.hop_limit();
    packet.fragment = chain.fragment;
    if let Some(fragment) = packet.fragment {
        fragment.check()?;
    }
    transport_into(frame, packet)
}

fn ipv6_header(bytes: &[u8]) -> Result<Ipv6HeaderSlice<'_>, DropReason> {
    use etherparse::err::ipv6::HeaderSliceError;
    Ipv6HeaderSlice::from_slice(bytes).map_err(|error| match error {
        HeaderSliceError::Len(_) => DropReason::Truncated,
        HeaderSliceError::Content(_) => DropReason::Malformed,
    })
}

/// The end of a chain of IPv6 extension headers.
struct ExtensionChain {
    protocol: u8,
    at: usize,
    fragment: Option<Fragment>,
}

/// Follows IPv6 extension headers (RFC 8200 section 4) to the transport header. An incomplete chain is rejected, in a
/// first fragment too (RFC 7112 section 5).
fn extension_headers(packet: &[u8], mut at: usize, mut next: u8) -> Result<ExtensionChain, DropReason> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const DESTINATION: u8 = 60;
    const AUTHENTICATION: u8 = 51;
    let mut fragment = None;
    let mut has_fragment_header = false;
    for count in 0..=MAX_EXTENSION_HEADERS {
        if !matches!(next, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION | AUTHENTICATION) {
            return Ok(ExtensionChain { protocol: next, at, fragment });
        }
        if next == HOP_BY_HOP && count > 0 {
            return Err(DropReason::ExtensionHeaders);
        }
        let Some(&[following, length, a, b, c, d, e, f]) = packet.get(at..at + 8) else {
            return Err(DropReason::Truncated);
        };
        let bytes = match next {
            // Also behind an atomic fragment's header: no sender fragments a datagram twice.
            FRAGMENT if has_fragment_header => return Err(DropReason::ExtensionHeaders),
            FRAGMENT => {
                has_fragment_header = true;
                let word = u16::from_be_bytes([a, b]);
                // No frame is longer than 16 bits can count.
                let len = (packet.len() - (at + 8)) as u16;
                fragment = Fragment::new(u32::from_be_bytes([c, d, e, f]), word, word & 1 == 1, len);
                8
            }
            // RFC 5095 and RFC 8754: a router named by the source would forward it past the evaluated destination.
            ROUTING if b > 0 => return Err(DropReason::SourceRoute),
            AUTHENTICATION => (usize::from(length) + 2) * 4,
            _ => (usize::from(length) + 1) * 8,
        };
        at += bytes;
        if at > packet.len() {
            return Err(DropReason::Truncated);
        }
        next = following;
        if fragment.is_some_and(|fragment| !fragment.is_first()) {
            return Ok(ExtensionChain { protocol: next, at, fragment });
        }
    }
    Err(DropReason::ExtensionHeaders)
}

/// Offsets have 16 bits; no frame is that long.
fn to_offset(offset: usize) -> Result<u16, DropReason> {
    u16::try_from(offset).map_err(|_| DropReason::TooBig)
}

/// Parses the transport header after the other headers.
#[inline(always)]
fn transport_into(frame: &[u8], packet: &mut Packet) -> Result<(), DropReason> {
    let (flow, layout) = (&mut packet.flow, packet.layout);
    (flow.src_port, flow.dst_port) = (0, 0);
    if packet.fragment.is_some_and(|fragment| !fragment.is_first()) {
        packet.transport = Transport::LaterFragment;
        return Ok(());
    }
    let bytes = &frame[usize::from(layout.transport)..usize::from(layout.end)];
    let read = match flow.protocol {
        Protocol::TCP => tcp(bytes, flow),
        Protocol::UDP => udp(bytes, flow, packet.fragment.is_some()),
        Protocol::SCTP => sctp(bytes, flow),
        Protocol::ICMP if flow.src.is_v4() => icmp::v4(bytes, flow, layout.transport),
        Protocol::ICMPV6 if !flow.src.is_v4() => icmp::v6(bytes, flow, layout.transport),
        _ => Ok(Transport::Other),
    };
    match read {
        Ok(transport) => packet.transport = transport,
        Err(reason @ (DropReason::Truncated | DropReason::Malformed)) => {
            (flow.src_port, flow.dst_port) = (0, 0);
            packet.transport = Transport::Unreadable;
            return Err(reason);
        }
        Err(reason) => return Err(reason),
    }
    Ok(())
}

#[inline]
fn set_ports(bytes: &[u8], flow: &mut Flow) -> Result<(), DropReason> {
    let Some(&[a, b, c, d]) = bytes.get(..4) else { return Err(DropReason::Truncated) };
    (flow.src_port, flow.dst_port) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    Ok(())
}

#[inline(always)]
fn tcp(bytes: &[u8], flow: &mut Flow) -> Result<Transport, DropReason> {
    let Some(fixed) = bytes.first_chunk::<20>() else { return Err(DropReason::Truncated) };
    set_ports(fixed, flow)?;
    let header_len = usize::from(fixed[12] >> 4) * 4;
    if header_len < 20 {
        return Err(DropReason::Malformed);
    }
    let Some(options) = bytes.get(20..header_len) else { return Err(DropReason::Truncated) };
    let flags = TcpFlags(fixed[13]);
    Ok(Transport::Tcp(TcpSegment {
        seq: u32::from_be_bytes([fixed[4], fixed[5], fixed[6], fixed[7]]),
        ack: u32::from_be_bytes([fixed[8], fixed[9], fixed[10], fixed[11]]),
        window: u16::from_be_bytes([fixed[14], fixed[15]]),
        flags,
        payload_len: (bytes.len() - header_len) as u16,
        window_scale: if flags.contains(TcpFlags::SYN) { window_scale(options) } else { None },
    }))
}

/// The shift of the window-scale option, at most 14 (RFC 7323 section 2.3).
fn window_scale(mut options: &[u8]) -> Option<u8> {
    loop {
        options = match *options {
            [] | [0, ..] => return None,
            [1, ref rest @ ..] => rest,
            [3, 3, shift, ..] => return Some(shift.min(14)),
            [_, length, ..] if length >= 2 => options.get(usize::from(length)..)?,
            _ => return None,
        };
    }
}

#[inline]
fn udp(bytes: &[u8], flow: &mut Flow, first_fragment: bool) -> Result<Transport, DropReason> {
    let Some(header) = bytes.first_chunk::<8>() else { return Err(DropReason::Truncated) };
    set_ports(header, flow)?;
    let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
    if length < 8 {
        return Err(DropReason::Malformed);
    }
    if length > bytes.len() && !first_fragment {
        return Err(DropReason::Truncated);
    }
    Ok(Transport::Udp)
}

#[inline(never)]
fn sctp(bytes: &[u8], flow: &mut Flow) -> Result<Transport, DropReason> {
    // Common header and the first chunk's type; a packet without a chunk is invalid (RFC 9260 section 3).
    let Some(header) = bytes.first_chunk::<16>() else { return Err(DropReason::Truncated) };
    set_ports(header, flow)?;
    let chunk = match header[12] {
        1 => SctpChunk::Init,
        2 => SctpChunk::InitAck,
        6 => SctpChunk::Abort,
        7 => SctpChunk::Shutdown,
        8 => SctpChunk::ShutdownAck,
        10 => SctpChunk::CookieEcho,
        11 => SctpChunk::CookieAck,
        14 => SctpChunk::ShutdownComplete,
        _ => SctpChunk::Other,
    };
    let tag = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
    Ok(Transport::Sctp { chunk, tag })
}

/// The flow of the packet quoted by an ICMP error, or `None` if too little of it is present.
///
/// `quoted_at` is the offset of the quoted IP header. RFC 792 only guarantees eight bytes behind it: ports and echo
/// identifiers, but not a whole header, so nothing else is parsed.
pub fn quoted_flow(frame: &[u8], packet: &Packet, quoted_at: u16) -> Option<Flow> {
    quoted(frame, packet, quoted_at).map(|(flow, _)| flow)
}

/// Source and destination of the packet quoted by an ICMP error, however little of it follows.
pub(crate) fn quoted_ends(frame: &[u8], packet: &Packet, quoted_at: u16) -> Option<(Address, Address)> {
    let quoted = frame.get(usize::from(quoted_at)..usize::from(packet.layout.end))?;
    if packet.flow.src.is_v4() {
        let header = quoted.first_chunk::<20>().filter(|header| header[0] >> 4 == 4)?;
        let address = |at: usize| Address::from_v4_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        Some((address(12), address(16)))
    } else {
        let header = ipv6_header(quoted).ok()?;
        Some((Address::from_v6_bytes(header.source()), Address::from_v6_bytes(header.destination())))
    }
}

/// [`quoted_flow`], and where in the frame the quoted transport header starts.
pub(super) fn quoted(frame: &[u8], packet: &Packet, quoted_at: u16) -> Option<(Flow, usize)> {
    let frame = frame.get(..usize::from(packet.layout.end))?;
    let at = usize::from(quoted_at);
    let quoted = frame.get(at..)?;
    let (src, dst, protocol, transport) = if packet.flow.src.is_v4() {
        let header = ipv4_header(quoted).ok()?;
        if header.fragments_offset().value() > 0 {
            return None;
        }
        let (src, dst) = (Address::from_v4_bytes(header.source()), Address::from_v4_bytes(header.destination()));
        (src, dst, header.protocol().0, at + header.slice().len())
    } else {
        let header = ipv6_header(quoted).ok()?;
        let (src, dst) = (Address::from_v6_bytes(header.source()), Address::from_v6_bytes(header.destination()));
        let chain = extension_headers(frame, at + 40, header.next_header().0).ok()?;
        if chain.fragment.is_some_and(|fragment| !fragment.is_first()) {
            return None;
        }
        (src, dst, chain.protocol, chain.at)
    };
    let mut flow = Flow { src, dst, protocol: Protocol(protocol), src_port: 0, dst_port: 0 };
    let bytes = frame.get(transport..)?.first_chunk::<8>()?;
    match flow.protocol {
        protocol if protocol.has_ports() => set_ports(bytes, &mut flow).ok()?,
        Protocol::ICMP | Protocol::ICMPV6 => _ = icmp::query(bytes, &mut flow),
        _ => {}
    }
    Some((flow, transport))
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;
    use proptest::prelude::*;

    use super::*;

    /// A frame of TCP or UDP over IPv4, padded, with some bytes changed and a valid header checksum.
    fn any_frame() -> impl Strategy<Value = Vec<u8>> {
        let change = (12usize..60, any::<u8>());
        let changes = prop::collection::vec(change, 0..3);
        (any::<bool>(), 0usize..40, 0usize..70, changes, any::<bool>()).prop_map(
            |(tcp, payload, length, changes, mend)| {
                let builder = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
                let mut frame = Vec::new();
                let payload = vec![7; payload];
                if tcp {
                    builder.tcp(1000, 80, 5, 100).ack(9).write(&mut frame, &payload).unwrap();
                } else {
                    builder.udp(1000, 53).write(&mut frame, &payload).unwrap();
                }
                frame.resize(frame.len().max(60) + length / 10, 0);
                for (at, byte) in changes {
                    frame[at] = byte;
                }
                if mend {
                    frame[24..26].fill(0);
                    let checksum = !Sum::default().add_bytes(&frame[14..34]).folded();
                    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
                }
                if length < 8 {
                    frame.truncate(frame.len() - 10);
                }
                frame
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]
        #[test]
        fn the_fast_path_agrees_with_the_full_parser(frame in any_frame()) {
            let (mut short, mut long) = (Packet::default(), Packet::default());
            if plain(&frame, &mut short).is_some() {
                prop_assert_eq!(parse_any(&frame, &mut long), Ok(()));
                prop_assert_eq!(short, long);
            } else if parse_any(&frame, &mut long) == Ok(()) {
                let (at, tcp) = (usize::from(long.layout.transport), matches!(long.transport, Transport::Tcp(_)));
                let rare = at != 34 || long.fragment.is_some() || frame.len() < 54 || !(tcp || long.transport == Transport::Udp);
                prop_assert!(rare || (tcp && frame[47] & 2 != 0), "left to the longer way: {long:?}");
            }
        }
    }

    #[test]
    fn plain_packets_take_the_fast_path() {
        for tcp in [true, false] {
            let builder = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
            let mut frame = Vec::new();
            if tcp {
                builder.tcp(1, 2, 3, 4).ack(5).write(&mut frame, &[]).unwrap();
            } else {
                builder.udp(1, 2).write(&mut frame, &[0; 12]).unwrap();
            }
            assert_eq!(plain(&frame, &mut Packet::default()), Some(()));
            assert_eq!(plain(&frame[..53], &mut Packet::default()), None, "shorter than what it looks at");
        }
    }
}
