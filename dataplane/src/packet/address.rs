//! One address type for both families.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IP address of the packet path: 128 bits in numeric order, IPv4 as IPv4-mapped IPv6 (`::ffff:a.b.c.d`, RFC 4291
/// section 2.5.5.2).
///
/// One width means one flow key, one hash and one table for both families. The parser rejects packets whose IPv6 header
/// itself contains a mapped address, so the two ranges never overlap.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Address(u128);

/// `::ffff:0:0/96`.
const MAPPED: u128 = 0xffff_0000_0000;

impl Address {
    /// From the four bytes of an IPv4 header, in network order.
    #[inline]
    pub const fn from_v4_bytes(bytes: [u8; 4]) -> Self {
        Self(MAPPED | u32::from_be_bytes(bytes) as u128)
    }

    /// From the sixteen bytes of an IPv6 header, in network order.
    #[inline]
    pub const fn from_v6_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// From the numeric value returned by [`Address::bits`].
    #[inline]
    pub const fn from_bits(bits: u128) -> Self {
        Self(bits)
    }

    /// The numeric value; the first byte on the wire is the most significant.
    #[inline]
    pub const fn bits(self) -> u128 {
        self.0
    }

    #[inline]
    pub const fn is_v4(self) -> bool {
        // In halves: a comparison of shifted 128-bit values takes twice the instructions.
        (self.0 >> 64) as u64 == 0 && self.0 as u64 >> 32 == MAPPED as u64 >> 32
    }

    /// The IPv4 address as a number, or `None` for IPv6.
    #[inline]
    pub const fn v4_bits(self) -> Option<u32> {
        if self.is_v4() { Some(self.0 as u32) } else { None }
    }

    /// The four bytes of an IPv4 address in network order, or `None` for IPv6.
    #[inline]
    pub const fn v4_bytes(self) -> Option<[u8; 4]> {
        match self.v4_bits() {
            Some(bits) => Some(bits.to_be_bytes()),
            None => None,
        }
    }

    /// Whether these ends of a packet, which are of one family, are IPv4 addresses whose first bytes alone show that their
    /// [`scope`](Self::scope) is [`AddressScope::Routable`]: a fast check that is true for nearly all of them.
    #[inline]
    pub(crate) const fn are_plainly_routable(src: Self, dst: Self) -> bool {
        src.is_v4()
            && matches!(
                (V4_SCOPES[src.first_v4_byte()], V4_SCOPES[dst.first_v4_byte()]),
                (AddressScope::Routable, AddressScope::Routable)
            )
    }

    #[inline]
    const fn first_v4_byte(self) -> usize {
        (self.0 as u32 >> 24) as usize
    }

    /// How far packets with this source or destination address may travel.
    #[inline]
    pub const fn scope(self) -> AddressScope {
        match self.v4_bits() {
            // One comparison for nearly all addresses: two checks per packet.
            Some(v4) => match V4_SCOPES[(v4 >> 24) as usize] {
                AddressScope::Routable => AddressScope::Routable,
                AddressScope::Link if v4 >> 16 != 0xa9fe => AddressScope::Routable,
                AddressScope::Multicast if v4 >> 28 != 0xe && v4 != u32::MAX => AddressScope::Routable,
                scope => scope,
            },
            None if self.0 >> 120 == 0xff => AddressScope::Multicast,
            None if self.0 >> 118 == 0xfe80 >> 6 => AddressScope::Link,
            None if self.0 <= 1 => AddressScope::Host,
            None => AddressScope::Routable,
        }
    }
}

/// By the first byte of an IPv4 address, the scope that it has or may have.
const V4_SCOPES: [AddressScope; 256] = {
    let mut scopes = [AddressScope::Routable; 256];
    (scopes[0], scopes[127], scopes[169], scopes[255]) =
        (AddressScope::Host, AddressScope::Host, AddressScope::Link, AddressScope::Multicast);
    let mut byte = 224;
    while byte < 240 {
        scopes[byte] = AddressScope::Multicast;
        byte += 1;
    }
    scopes
};

/// How far packets with an address as source or destination may travel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressScope {
    /// Routers may forward them.
    Routable,
    /// Multicast in either family, or the IPv4 limited broadcast address.
    Multicast,
    /// Link-local unicast: `169.254.0.0/16` (RFC 3927) or `fe80::/10` (RFC 4291).
    Link,
    /// Loopback or unspecified: never a valid address on a link.
    Host,
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self::from_v4_bytes(v4.octets()),
            IpAddr::V6(v6) => Self::from_v6_bytes(v6.octets()),
        }
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        match address.v4_bits() {
            Some(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4)),
            None => IpAddr::V6(Ipv6Addr::from_bits(address.0)),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        IpAddr::from(*self).fmt(f)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_round_trip() {
        for text in ["10.1.2.3", "255.255.255.255", "0.0.0.0", "::1", "fd00::1", "fe80::1", "ff02::1"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Address::from(ip)), ip);
            assert_eq!(Address::from(ip).to_string(), text);
            assert_eq!(Address::from(ip).is_v4(), ip.is_ipv4());
        }
    }

    #[test]
    fn scopes_are_distinguished() {
        for (text, scope) in [
            ("10.0.0.1", AddressScope::Routable),
            ("224.0.0.1", AddressScope::Multicast),
            ("239.255.255.255", AddressScope::Multicast),
            ("240.0.0.1", AddressScope::Routable),
            ("255.255.255.255", AddressScope::Multicast),
            ("169.254.1.1", AddressScope::Link),
            ("169.253.1.1", AddressScope::Routable),
            ("127.0.0.1", AddressScope::Host),
            ("0.0.0.0", AddressScope::Host),
            ("fe80::1", AddressScope::Link),
            ("febf::1", AddressScope::Link),
            ("fec0::1", AddressScope::Routable),
            ("ff02::1", AddressScope::Multicast),
            ("::", AddressScope::Host),
            ("::1", AddressScope::Host),
            ("fd00::1", AddressScope::Routable),
        ] {
            assert_eq!(Address::from(text.parse::<IpAddr>().unwrap()).scope(), scope, "{text}");
        }
    }
}
