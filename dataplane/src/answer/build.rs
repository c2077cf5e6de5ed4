//! IP packets of the node's own making, with all their checksums. Each function writes a packet into `out`, from its IP
//! header on, and says how long it is.

use etherparse::{
    Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, IpNumber, Ipv4Header, Ipv6Header, TcpHeader, icmpv4, icmpv6,
};

use crate::packet::{Address, Flow, Protocol};

/// Most octets of an ICMP error in IPv4 (RFC 1812 section 4.3.2.3).
const LONGEST_V4: usize = 576;
/// Most octets of an ICMPv6 error: the least MTU (RFC 4443 section 2.4(c)).
pub(super) const LONGEST_V6: usize = 1280;
/// Octets of an ICMP header.
const ICMP_LEN: usize = 8;
/// TTL or hop limit of an answer: the default of Linux and others.
const TTL: u8 = 64;

/// What an ICMP error tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IcmpError {
    /// Policy does not let it pass (RFC 1812 section 5.2.7.1 code 13; RFC 4443 section 3.1 code 1).
    Prohibited,
    /// TTL or hop limit ran out on the way (RFC 792; RFC 4443 section 3.3).
    TtlExpired,
    /// It is longer than the next link takes: so many octets (RFC 1191; RFC 4443 section 3.2).
    TooBig {
        /// MTU of that link.
        mtu: u16,
    },
}

impl IcmpError {
    fn v4(self) -> Icmpv4Type {
        match self {
            Self::Prohibited => Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::FilterProhibited),
            Self::TtlExpired => Icmpv4Type::TimeExceeded(icmpv4::TimeExceededCode::TtlExceededInTransit),
            Self::TooBig { mtu } => {
                let next_hop_mtu = mtu;
                Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu })
            }
        }
    }

    fn v6(self) -> Icmpv6Type {
        match self {
            Self::Prohibited => Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Prohibited),
            Self::TtlExpired => Icmpv6Type::TimeExceeded(icmpv6::TimeExceededCode::HopLimitExceeded),
            Self::TooBig { mtu } => Icmpv6Type::PacketTooBig { mtu: mtu.into() },
        }
    }
}

/// An ICMP error about the packet `quoted`, of which it carries as much as there is room for.
pub(super) fn error(out: &mut [u8], error: IcmpError, src: Address, dst: Address, quoted: &[u8]) -> usize {
    let (longest, protocol) = if dst.is_v4() { (LONGEST_V4, Protocol::ICMP) } else { (LONGEST_V6, Protocol::ICMPV6) };
    let room = longest - ip_len(dst) - ICMP_LEN;
    let quoted = &quoted[..quoted.len().min(room)];
    let at = ip_header(out, src, dst, protocol, ICMP_LEN + quoted.len());
    let icmp = &mut out[at..];
    icmp[ICMP_LEN..ICMP_LEN + quoted.len()].copy_from_slice(quoted);
    if dst.is_v4() {
        icmp[..ICMP_LEN].copy_from_slice(&Icmpv4Header::with_checksum(error.v4(), quoted).to_bytes());
    } else {
        let (src, dst) = (src.bits().to_be_bytes(), dst.bits().to_be_bytes());
        let header = Icmpv6Header::with_checksum(error.v6(), src, dst, quoted).expect("shorter than 4 GiB");
        icmp[..ICMP_LEN].copy_from_slice(&header.to_bytes());
    }
    at + ICMP_LEN + quoted.len()
}

/// A TCP RST that travels as `flow` says.
pub(super) fn reset(out: &mut [u8], flow: &Flow, sequence: u32, acknowledged: Option<u32>) -> usize {
    let at = ip_header(out, flow.src, flow.dst, Protocol::TCP, TcpHeader::MIN_LEN);
    let mut header = TcpHeader::new(flow.src_port, flow.dst_port, sequence, 0);
    header.rst = true;
    header.ack = acknowledged.is_some();
    header.acknowledgment_number = acknowledged.unwrap_or(0);
    let checksum = match (flow.src.v4_octets(), flow.dst.v4_octets()) {
        (Some(src), Some(dst)) => header.calc_checksum_ipv4_raw(src, dst, &[]),
        _ => header.calc_checksum_ipv6_raw(flow.src.bits().to_be_bytes(), flow.dst.bits().to_be_bytes(), &[]),
    };
    header.checksum = checksum.expect("shorter than 64 KiB");
    out[at..at + TcpHeader::MIN_LEN].copy_from_slice(&header.to_bytes());
    at + TcpHeader::MIN_LEN
}

/// Octets of an IP header without options in the family of this address.
fn ip_len(address: Address) -> usize {
    if address.is_v4() { Ipv4Header::MIN_LEN } else { Ipv6Header::LEN }
}

/// Writes an IP header in front of so many octets; where they begin.
fn ip_header(out: &mut [u8], src: Address, dst: Address, protocol: Protocol, payload: usize) -> usize {
    let (length, protocol) = (payload as u16, IpNumber(protocol.0));
    match (src.v4_octets(), dst.v4_octets()) {
        (Some(src), Some(dst)) => {
            let mut header = Ipv4Header::new(length, TTL, protocol, src, dst).expect("shorter than 64 KiB");
            header.header_checksum = header.calc_header_checksum();
            out[..Ipv4Header::MIN_LEN].copy_from_slice(&header.to_bytes());
        }
        _ => {
            let header = Ipv6Header {
                payload_length: length,
                next_header: protocol,
                hop_limit: TTL,
                source: src.bits().to_be_bytes(),
                destination: dst.bits().to_be_bytes(),
                ..Ipv6Header::default()
            };
            out[..Ipv6Header::LEN].copy_from_slice(&header.to_bytes());
        }
    }
    ip_len(dst)
}
