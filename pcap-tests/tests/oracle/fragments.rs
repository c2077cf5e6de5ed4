//! Fragments, parsed by hand: the position of each fragment, and which of them a node lets through.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use super::connections::Network;
use super::policy::Flow;

/// A fragment of a datagram.
pub(crate) struct Fragment {
    name: DatagramKey,
    ttl: u8,
    /// Protocol number of the first header in the datagram's payload; meaningless in later fragments.
    first: u8,
    pub(crate) offset: usize,
    more: bool,
    bytes: Vec<u8>,
}

/// The fields that identify a datagram; the protocol in IPv4 only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct DatagramKey {
    src: IpAddr,
    dst: IpAddr,
    id: u32,
    protocol: u8,
}

impl Fragment {
    /// The fragment in a frame; `None` if it is not a fragment or the IP header is invalid.
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        match frame.get(12..14)? {
            [0x08, 0x00] => Self::of_v4(&frame[14..]),
            [0x86, 0xdd] => Self::of_v6(&frame[14..]),
            _ => None,
        }
    }

    fn of_v4(packet: &[u8]) -> Option<Self> {
        let address = |at: usize| Some(IpAddr::from(*packet.get(at..)?.first_chunk::<4>()?));
        let name = DatagramKey {
            src: address(12)?,
            dst: address(16)?,
            id: word(packet, 4)?.into(),
            protocol: *packet.get(9)?,
        };
        let (header, length, cut) = (usize::from(packet[0] & 0xf) * 4, word(packet, 2)?, word(packet, 6)?);
        let bytes = packet.get(header..length.into())?.to_vec();
        let (offset, more) = (usize::from(cut & 0x1fff) * 8, cut & 0x2000 != 0);
        let fragment = Self { name, ttl: packet[8], first: name.protocol, offset, more, bytes };
        (offset > 0 || more).then_some(fragment)
    }

    fn of_v6(packet: &[u8]) -> Option<Self> {
        let address = |at: usize| Some(IpAddr::from(Ipv6Addr::from(*packet.get(at..)?.first_chunk::<16>()?)));
        let packet = packet.get(..40 + usize::from(word(packet, 4)?))?;
        // Headers allowed before a fragment header: hop-by-hop, destination options, routing.
        let (mut at, mut number) = (40, packet[6]);
        while matches!(number, 0 | 60 | 43) {
            (at, number) = (at + (usize::from(*packet.get(at + 1)?) + 1) * 8, *packet.get(at)?);
        }
        let header = packet.get(at..)?.first_chunk::<8>().filter(|_| number == 44)?;
        let id = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        let name = DatagramKey { src: address(8)?, dst: address(24)?, id, protocol: 0 };
        let cut = word(header, 2)?;
        let (offset, more) = (usize::from(cut & !7), cut & 1 != 0);
        let bytes = packet[at + 8..].to_vec();
        let fragment = Self { name, ttl: packet[7], first: header[0], offset, more, bytes };
        (offset > 0 || more).then_some(fragment)
    }

    /// The datagram's protocol and, in a first fragment, the content behind all headers of the IP layer; `None` if the
    /// fragment is invalid or its headers are incomplete.
    pub(crate) fn network(&self) -> Option<Network<'_>> {
        let DatagramKey { src, dst, .. } = self.name;
        let is_odd = self.more && !self.bytes.len().is_multiple_of(8);
        if is_odd || self.offset + self.bytes.len() > 65_535 {
            return None;
        }
        let (mut protocol, mut payload) = (self.first, &self.bytes[..]);
        while src.is_ipv6() && self.offset == 0 && matches!(protocol, 43 | 60) {
            let length = (usize::from(*payload.get(1)?) + 1) * 8;
            (protocol, payload) = (payload[0], payload.get(length..)?);
        }
        Some(Network { src, dst, protocol, ttl: self.ttl, payload })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Datagrams whose first fragment passed.
#[derive(Default)]
pub(crate) struct PassedDatagrams(HashMap<DatagramKey, Vec<(u64, usize, Flow)>>);

impl PassedDatagrams {
    /// Records a first fragment that passed at `now`, in seconds.
    pub(crate) fn begin(&mut self, now: u64, fragment: &Fragment, flow: Flow) {
        self.0.entry(fragment.name).or_default().push((now, fragment.bytes.len(), flow));
    }

    /// Whether a first fragment of this one's datagram has passed.
    pub(crate) fn has_first(&self, now: u64, fragment: &Fragment) -> bool {
        self.0.get(&fragment.name).is_some_and(|firsts| firsts.iter().any(|(at, ..)| now - at <= 30))
    }

    /// The flow of a later fragment: that of the most recent first fragment, unless it overlaps a first fragment of the
    /// last 30 seconds.
    pub(crate) fn flow_of(&self, now: u64, fragment: &Fragment) -> Option<Flow> {
        let firsts = self.0.get(&fragment.name)?.iter().filter(|(at, ..)| now - at <= 30);
        let mut flow = None;
        for (_, length, of) in firsts {
            flow = (fragment.offset >= *length).then_some(*of);
            flow?;
        }
        flow
    }
}
