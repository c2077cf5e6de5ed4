//! ICMP and ICMPv6: queries with their identifiers, and errors with the packets they quote.

use super::flow::{Flow, Protocol, QueryingEnd};
use super::transport::Transport;
use crate::DropReason;

/// The queries whose replies contain the request's identifier, in bytes 4 and 5 of both.
///
/// Linux tracks these too (`net/netfilter/nf_conntrack_proto_icmp.c`), and obsolete ones (RFC 6918).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
enum IcmpQuery {
    /// RFC 792 and RFC 4443.
    Echo = 1,
    /// RFC 792.
    Timestamp = 2,
    /// RFC 8335.
    ExtendedEcho = 3,
}

impl IcmpQuery {
    const ALL: [Self; 3] = [Self::Echo, Self::Timestamp, Self::ExtendedEcho];

    /// The query type of a message and its querying end.
    #[inline]
    const fn of(protocol: Protocol, kind: u8) -> Option<(Self, QueryingEnd)> {
        match (protocol, kind) {
            (Protocol::ICMP, 8) | (Protocol::ICMPV6, 128) => Some((Self::Echo, QueryingEnd::Source)),
            (Protocol::ICMP, 0) | (Protocol::ICMPV6, 129) => Some((Self::Echo, QueryingEnd::Destination)),
            (Protocol::ICMP, 13) => Some((Self::Timestamp, QueryingEnd::Source)),
            (Protocol::ICMP, 14) => Some((Self::Timestamp, QueryingEnd::Destination)),
            (Protocol::ICMP, 42) | (Protocol::ICMPV6, 160) => Some((Self::ExtendedEcho, QueryingEnd::Source)),
            (Protocol::ICMP, 43) | (Protocol::ICMPV6, 161) => Some((Self::ExtendedEcho, QueryingEnd::Destination)),
            _ => None,
        }
    }
}

impl Flow {
    /// Encodes a query in the ports: the querier's port is the identifier, the other one is the identifier plus the
    /// number of the query type.
    ///
    /// Two hosts that query each other have two connections whatever their identifiers. So have two types of query
    /// between them. For the port pairs of two queries to be equal from both ends, their types would have to add up to
    /// 0 modulo 2¹⁶. No pair is (0, 0) either, which stands for messages without an identifier.
    #[inline]
    fn set_identifier(&mut self, query: IcmpQuery, identifier: u16, querying_end: QueryingEnd) {
        let ports = (identifier, identifier.wrapping_add(query as u16));
        (self.src_port, self.dst_port) = match querying_end {
            QueryingEnd::Source => ports,
            QueryingEnd::Destination => (ports.1, ports.0),
        };
    }

    /// The identifier of an ICMP query and its querying end.
    pub fn identifier(&self) -> Option<(u16, QueryingEnd)> {
        if !matches!(self.protocol, Protocol::ICMP | Protocol::ICMPV6) {
            return None;
        }
        let is = |distance: u16| IcmpQuery::ALL.iter().any(|query| *query as u16 == distance);
        if is(self.dst_port.wrapping_sub(self.src_port)) {
            Some((self.src_port, QueryingEnd::Source))
        } else if is(self.src_port.wrapping_sub(self.dst_port)) {
            Some((self.dst_port, QueryingEnd::Destination))
        } else {
            None
        }
    }
}

/// Stores a query's identifier in its flow; `None` if the message is not a query.
#[inline]
pub(super) fn query(header: &[u8; 8], flow: &mut Flow) -> Option<Transport> {
    let (query, querying_end) = IcmpQuery::of(flow.protocol, header[0])?;
    flow.set_identifier(query, u16::from_be_bytes([header[4], header[5]]), querying_end);
    Some(match querying_end {
        QueryingEnd::Source => Transport::EchoRequest,
        QueryingEnd::Destination => Transport::EchoReply,
    })
}

/// Parses an ICMP message at offset `at` of its frame.
#[inline(never)]
pub(super) fn v4(bytes: &[u8], flow: &mut Flow, at: u16) -> Result<Transport, DropReason> {
    let Some(header) = bytes.first_chunk::<8>() else { return Err(DropReason::Truncated) };
    match header[0] {
        // Unreachable, time exceeded, parameter problem. Source quench is deprecated (RFC 6633).
        3 | 11 | 12 => Ok(Transport::IcmpError { quoted_at: at + 8 }),
        // A redirect would change routes independently of policy.
        5 => Err(DropReason::Redirect),
        _ => Ok(query(header, flow).unwrap_or(Transport::Other)),
    }
}

/// Parses an ICMPv6 message at offset `at` of its frame.
#[inline(never)]
pub(super) fn v6(bytes: &[u8], flow: &mut Flow, at: u16) -> Result<Transport, DropReason> {
    let Some(header) = bytes.first_chunk::<8>() else { return Err(DropReason::Truncated) };
    match header[0] {
        // Unreachable, packet too big, time exceeded, parameter problem.
        1..=4 => Ok(Transport::IcmpError { quoted_at: at + 8 }),
        137 => Err(DropReason::Redirect),
        // RFC 4861: the programs passed valid ones to the kernel.
        133..=136 => Err(DropReason::InvalidDiscovery),
        _ => Ok(query(header, flow).unwrap_or(Transport::Other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Address;

    /// The flow of a query from host `from` to host `to`, out of hosts 1 and 2.
    fn flow(query: IcmpQuery, identifier: u16, (from, to): (u8, u8), querying_end: QueryingEnd) -> Flow {
        let address = |host: u8| Address::from_v4_bytes([10, 0, 0, host]);
        let mut flow = Flow { src: address(from), dst: address(to), protocol: Protocol::ICMP, ..Flow::default() };
        flow.set_identifier(query, identifier, querying_end);
        flow
    }

    fn every() -> impl Iterator<Item = (IcmpQuery, u16)> {
        IcmpQuery::ALL.into_iter().flat_map(|query| (0..=u16::MAX).map(move |identifier| (query, identifier)))
    }

    #[test]
    fn different_queries_between_two_hosts_have_different_keys() {
        let mut keys = std::collections::HashSet::new();
        for (query, identifier) in every() {
            for ends in [(1, 2), (2, 1)] {
                let (key, _) = flow(query, identifier, ends, QueryingEnd::Source).key();
                assert!(keys.insert(key), "{query:?} {identifier} from {ends:?}");
            }
        }
        let bare = Flow { src_port: 0, dst_port: 0, ..flow(IcmpQuery::Echo, 0, (1, 2), QueryingEnd::Source) };
        assert!(!keys.contains(&bare.key().0), "a message without an identifier");
    }

    #[test]
    fn a_reply_has_its_requests_key_and_both_show_the_identifier() {
        for (query, identifier) in every() {
            let (request, reply) = (
                flow(query, identifier, (1, 2), QueryingEnd::Source),
                flow(query, identifier, (2, 1), QueryingEnd::Destination),
            );
            assert_eq!(request.reversed(), reply);
            assert_eq!(request.identifier(), Some((identifier, QueryingEnd::Source)));
            assert_eq!(reply.identifier(), Some((identifier, QueryingEnd::Destination)));
            assert_eq!((request.shown_ports(), reply.shown_ports()), ((identifier, 0), (0, identifier)));
        }
    }

    #[test]
    fn a_hosts_queries_to_itself_have_a_connection_each() {
        let keys: std::collections::HashSet<_> =
            every().map(|(query, identifier)| flow(query, identifier, (1, 1), QueryingEnd::Source).key().0).collect();
        assert_eq!(keys.len(), 3 << 16);
    }

    #[test]
    fn non_queries_show_their_own_ports() {
        let udp = Flow { protocol: Protocol::UDP, src_port: 7, dst_port: 8, ..Flow::default() };
        assert_eq!((udp.identifier(), udp.shown_ports()), (None, (7, 8)));
        let other = Flow { protocol: Protocol::ICMP, ..Flow::default() };
        assert_eq!((other.identifier(), other.shown_ports()), (None, (0, 0)));
    }
}
