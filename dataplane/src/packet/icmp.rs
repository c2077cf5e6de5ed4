//! ICMP and ICMPv6: queries with their identifiers, and errors with the packets they quote.

use super::flow::{Asker, Flow, Protocol};
use super::transport::Transport;
use crate::Cause;

/// The queries whose replies contain the request's identifier, in bytes 4 and 5 of both.
///
/// Linux tracks these too (`net/netfilter/nf_conntrack_proto_icmp.c`), and obsolete ones (RFC 6918).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
enum Query {
    /// RFC 792 and RFC 4443.
    Echo = 1,
    /// RFC 792.
    Timestamp = 2,
    /// RFC 8335.
    ExtendedEcho = 3,
}

impl Query {
    const ALL: [Self; 3] = [Self::Echo, Self::Timestamp, Self::ExtendedEcho];

    /// The query type of a message and its querying end.
    #[inline]
    const fn of(protocol: Protocol, kind: u8) -> Option<(Self, Asker)> {
        match (protocol, kind) {
            (Protocol::ICMP, 8) | (Protocol::ICMPV6, 128) => Some((Self::Echo, Asker::Source)),
            (Protocol::ICMP, 0) | (Protocol::ICMPV6, 129) => Some((Self::Echo, Asker::Destination)),
            (Protocol::ICMP, 13) => Some((Self::Timestamp, Asker::Source)),
            (Protocol::ICMP, 14) => Some((Self::Timestamp, Asker::Destination)),
            (Protocol::ICMP, 42) | (Protocol::ICMPV6, 160) => Some((Self::ExtendedEcho, Asker::Source)),
            (Protocol::ICMP, 43) | (Protocol::ICMPV6, 161) => Some((Self::ExtendedEcho, Asker::Destination)),
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
    fn set_identifier(&mut self, query: Query, identifier: u16, asker: Asker) {
        let ports = (identifier, identifier.wrapping_add(query as u16));
        (self.src_port, self.dst_port) = match asker {
            Asker::Source => ports,
            Asker::Destination => (ports.1, ports.0),
        };
    }

    /// The identifier of an ICMP query and its querying end.
    pub fn identifier(&self) -> Option<(u16, Asker)> {
        if !matches!(self.protocol, Protocol::ICMP | Protocol::ICMPV6) {
            return None;
        }
        let is = |distance: u16| Query::ALL.iter().any(|query| *query as u16 == distance);
        if is(self.dst_port.wrapping_sub(self.src_port)) {
            Some((self.src_port, Asker::Source))
        } else if is(self.src_port.wrapping_sub(self.dst_port)) {
            Some((self.dst_port, Asker::Destination))
        } else {
            None
        }
    }
}

/// Stores a query's identifier in its flow; `None` if the message is not a query.
#[inline]
pub(super) fn query(header: &[u8; 8], flow: &mut Flow) -> Option<Transport> {
    let (query, asker) = Query::of(flow.protocol, header[0])?;
    flow.set_identifier(query, u16::from_be_bytes([header[4], header[5]]), asker);
    Some(match asker {
        Asker::Source => Transport::EchoRequest,
        Asker::Destination => Transport::EchoReply,
    })
}

/// Parses an ICMP message at offset `at` of its frame.
#[inline(never)]
pub(super) fn v4(bytes: &[u8], flow: &mut Flow, at: u16) -> Result<Transport, Cause> {
    let Some(header) = bytes.first_chunk::<8>() else { return Err(Cause::Truncated) };
    match header[0] {
        // Unreachable, time exceeded, parameter problem. Source quench is deprecated (RFC 6633).
        3 | 11 | 12 => Ok(Transport::IcmpError { quoted_at: at + 8 }),
        // A redirect would change routes independently of policy.
        5 => Err(Cause::Redirect),
        _ => Ok(query(header, flow).unwrap_or(Transport::Other)),
    }
}

/// Parses an ICMPv6 message at offset `at` of its frame.
#[inline(never)]
pub(super) fn v6(bytes: &[u8], flow: &mut Flow, at: u16) -> Result<Transport, Cause> {
    let Some(header) = bytes.first_chunk::<8>() else { return Err(Cause::Truncated) };
    match header[0] {
        // Unreachable, packet too big, time exceeded, parameter problem.
        1..=4 => Ok(Transport::IcmpError { quoted_at: at + 8 }),
        137 => Err(Cause::Redirect),
        // RFC 4861: the XDP program passed valid ones to the kernel.
        133..=136 => Err(Cause::NeighbourDiscovery),
        _ => Ok(query(header, flow).unwrap_or(Transport::Other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Address;

    /// The flow of a query from host `from` to host `to`, out of hosts 1 and 2.
    fn flow(query: Query, identifier: u16, (from, to): (u8, u8), asker: Asker) -> Flow {
        let address = |host: u8| Address::from_v4_octets([10, 0, 0, host]);
        let mut flow = Flow { src: address(from), dst: address(to), protocol: Protocol::ICMP, ..Flow::default() };
        flow.set_identifier(query, identifier, asker);
        flow
    }

    fn every() -> impl Iterator<Item = (Query, u16)> {
        Query::ALL.into_iter().flat_map(|query| (0..=u16::MAX).map(move |identifier| (query, identifier)))
    }

    #[test]
    fn no_two_queries_between_two_hosts_share_a_key_whatever_their_identifiers() {
        let mut keys = std::collections::HashSet::new();
        for (query, identifier) in every() {
            for ends in [(1, 2), (2, 1)] {
                let (key, _) = flow(query, identifier, ends, Asker::Source).key();
                assert!(keys.insert(key), "{query:?} {identifier} from {ends:?}");
            }
        }
        let bare = Flow { src_port: 0, dst_port: 0, ..flow(Query::Echo, 0, (1, 2), Asker::Source) };
        assert!(!keys.contains(&bare.key().0), "a message without an identifier");
    }

    #[test]
    fn a_reply_has_its_requests_key_and_both_show_the_identifier_that_was_sent() {
        for (query, identifier) in every() {
            let (request, reply) =
                (flow(query, identifier, (1, 2), Asker::Source), flow(query, identifier, (2, 1), Asker::Destination));
            assert_eq!(request.reversed(), reply);
            assert_eq!(request.identifier(), Some((identifier, Asker::Source)));
            assert_eq!(reply.identifier(), Some((identifier, Asker::Destination)));
            assert_eq!((request.shown_ports(), reply.shown_ports()), ((identifier, 0), (0, identifier)));
        }
    }

    #[test]
    fn queries_of_a_host_to_itself_are_as_many_connections_as_identifiers() {
        let keys: std::collections::HashSet<_> =
            every().map(|(query, identifier)| flow(query, identifier, (1, 1), Asker::Source).key().0).collect();
        assert_eq!(keys.len(), 3 << 16);
    }

    #[test]
    fn what_is_no_query_shows_its_own_ports() {
        let udp = Flow { protocol: Protocol::UDP, src_port: 7, dst_port: 8, ..Flow::default() };
        assert_eq!((udp.identifier(), udp.shown_ports()), (None, (7, 8)));
        let other = Flow { protocol: Protocol::ICMP, ..Flow::default() };
        assert_eq!((other.identifier(), other.shown_ports()), (None, (0, 0)));
    }
}
