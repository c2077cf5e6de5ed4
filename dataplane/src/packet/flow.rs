//! Flows as packets show them, and the connection key shared by both directions.

use std::fmt;

use super::Address;

/// An IP protocol number (IANA "Assigned Internet Protocol Numbers").
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Protocol(pub u8);

impl Protocol {
    /// Internet Control Message Protocol, RFC 792.
    pub const ICMP: Self = Self(1);
    /// Transmission Control Protocol, RFC 9293.
    pub const TCP: Self = Self(6);
    /// User Datagram Protocol, RFC 768.
    pub const UDP: Self = Self(17);
    /// ICMP for IPv6, RFC 4443.
    pub const ICMPV6: Self = Self(58);
    /// Stream Control Transmission Protocol, RFC 9260.
    pub const SCTP: Self = Self(132);

    /// Whether its header starts with source and destination ports (TCP, UDP, SCTP): the protocols that a NetworkPolicy
    /// port can name.
    #[inline]
    pub const fn has_ports(self) -> bool {
        matches!(self, Self::TCP | Self::UDP | Self::SCTP)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ICMP => f.write_str("ICMP"),
            Self::TCP => f.write_str("TCP"),
            Self::UDP => f.write_str("UDP"),
            Self::ICMPV6 => f.write_str("ICMPv6"),
            Self::SCTP => f.write_str("SCTP"),
            Self(number) => write!(f, "protocol {number}"),
        }
    }
}

impl fmt::Debug for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Addresses, protocol and ports of one packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Flow {
    pub src: Address,
    pub dst: Address,
    /// Transport protocol, behind any IPv6 extension headers.
    pub protocol: Protocol,
    /// Source port in host byte order; 0 if the protocol has no ports. ICMP queries have [a pair](Flow::identifier)
    /// that encodes their identifier and the querying end.
    pub src_port: u16,
    /// Destination port, like the source port.
    pub dst_port: u16,
}

impl Flow {
    #[inline]
    pub const fn reversed(self) -> Self {
        Self { src: self.dst, dst: self.src, protocol: self.protocol, src_port: self.dst_port, dst_port: self.src_port }
    }

    /// The ports for display: of ICMP queries the identifier on the querying side and 0 on the other.
    pub fn shown_ports(&self) -> (u16, u16) {
        match (self.protocol, self.identifier()) {
            (_, Some((identifier, QueryingEnd::Source))) => (identifier, 0),
            (_, Some((identifier, QueryingEnd::Destination))) => (0, identifier),
            (Protocol::ICMP | Protocol::ICMPV6, None) => (0, 0),
            (_, None) => (self.src_port, self.dst_port),
        }
    }

    /// The key shared by both directions, and the direction of this packet.
    #[inline]
    pub fn key(&self) -> (FlowKey, Orientation) {
        let (src, dst) = ((self.src, self.src_port), (self.dst, self.dst_port));
        let (low, high, orientation) =
            if src <= dst { (src, dst, Orientation::LowToHigh) } else { (dst, src, Orientation::HighToLow) };
        let key = FlowKey { low: low.0, high: high.0, low_port: low.1, high_port: high.1, protocol: self.protocol };
        (key, orientation)
    }
}

/// The querying end of an ICMP query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueryingEnd {
    /// The packet is a request.
    Source,
    /// The packet is a reply.
    Destination,
}

/// The key of a connection: its two ends in numeric order of (address, port), so that both directions have the same
/// key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct FlowKey {
    /// The end with the lower (address, port).
    pub low: Address,
    /// The end with the higher (address, port).
    pub high: Address,
    /// Port of the lower end, host byte order.
    pub low_port: u16,
    /// Port of the higher end, host byte order.
    pub high_port: u16,
    pub protocol: Protocol,
}

impl FlowKey {
    /// The flow of a packet of this connection in the given direction.
    #[inline]
    pub const fn flow(&self, orientation: Orientation) -> Flow {
        let low_to_high = Flow {
            src: self.low,
            dst: self.high,
            protocol: self.protocol,
            src_port: self.low_port,
            dst_port: self.high_port,
        };
        match orientation {
            Orientation::LowToHigh => low_to_high,
            Orientation::HighToLow => low_to_high.reversed(),
        }
    }
}

/// Direction of a packet relative to its [`FlowKey`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Orientation {
    /// From the key's lower end to its higher end.
    LowToHigh = 0,
    /// From the key's higher end to its lower end.
    HighToLow = 1,
}

impl Orientation {
    #[inline]
    pub const fn opposite(self) -> Self {
        match self {
            Self::LowToHigh => Self::HighToLow,
            Self::HighToLow => Self::LowToHigh,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        // Few distinct values, so that addresses and ports are often equal.
        fn any_flow()(src in 0u128..4, dst in 0u128..4, protocol in 0u8..3, src_port in 0u16..4, dst_port in 0u16..4) -> Flow {
            Flow { src: Address::from_bits(src), dst: Address::from_bits(dst), protocol: Protocol(protocol), src_port, dst_port }
        }
    }

    proptest! {
        #[test]
        fn both_directions_have_the_same_key(flow in any_flow()) {
            let (key, orientation) = flow.key();
            prop_assert_eq!(flow.reversed().key().0, key);
            prop_assert_eq!(key.flow(orientation), flow);
        }

        #[test]
        fn different_connections_have_different_keys(a in any_flow(), b in any_flow()) {
            prop_assert_eq!(a.key().0 == b.key().0, a == b || a == b.reversed());
        }
    }
}
