//! Connection tracking of the oracle: an independent parser and a map of connections.

use std::collections::HashMap;
use std::net::IpAddr;

use etherparse::{Ipv6ExtensionSlice, NetSlice, SlicedPacket};

use super::fragments::{Fragment, PassedDatagrams};
use super::policy::{ClusterObjects, Flow};

/// The oracle's verdict on a packet; `None` if it has none.
pub(crate) type OracleVerdict = Option<&'static str>;

/// Where a packet entered, according to the capture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum EntryPoint {
    /// Not recorded.
    Unknown,
    /// A pod's interface.
    Pod(String),
    /// The node's own interface.
    Host,
    /// An uplink.
    Uplink,
}

#[derive(Clone, Debug)]
struct TrackedConnection {
    opened: Flow,
    allowed: bool,
    answered: bool,
    last: u64,
    /// Next sequence number of each side of a TCP connection, if seen; the opener's first.
    next: [Option<u32>; 2],
    tags: [Option<u32>; 2],
    ends: u8,
    reset: bool,
    /// Whether it was picked up from a segment in mid-stream.
    picked_up: bool,
    /// A SYN that passed on a live connection: its side, and the number that acknowledges it.
    syn: Option<(usize, u32)>,
    /// Whether a packet of it has met a policy that denies it.
    revoked: bool,
}

/// A node.
#[derive(Default)]
pub(crate) struct Oracle {
    pub(crate) cluster: ClusterObjects,
    connections: HashMap<Flow, TrackedConnection>,
    datagrams: PassedDatagrams,
}

/// The relevant fields of a packet.
struct ParsedPacket {
    flow: Flow,
    ttl: u8,
    kind: PacketKind,
    fragment: Option<Fragment>,
}

enum PacketKind {
    Tcp { flags: u8, seq: u32, ack: u32, len: u32 },
    Udp,
    Sctp { chunk: u8, tag: u32, initiate: u32 },
    Ask,
    Answer,
    Error(Option<Flow>),
    Wrong,
    Other,
}

impl Oracle {
    /// Whether this is a later fragment of a datagram whose first has not passed yet.
    pub(crate) fn is_early(&self, now: u64, frame: &[u8]) -> bool {
        Fragment::of(frame).is_some_and(|fragment| fragment.offset > 0 && !self.datagrams.has_first(now, &fragment))
    }

    /// Evaluates a packet seen at `now`, in seconds.
    pub(crate) fn evaluate(&mut self, now: u64, entry: &EntryPoint, frame: &[u8]) -> OracleVerdict {
        if let Some(verdict) = self.before_workers(entry, frame) {
            return verdict;
        }
        let seen = match parse_frame(frame) {
            Ok(seen) => seen,
            Err(verdict) => return verdict,
        };
        let (src, dst) = (seen.flow.src, seen.flow.dst);
        let own = match self.entry(entry, src) {
            EntryPoint::Pod(pod) => self.cluster.local_pod(src).is_some_and(|own| own.key.to_string() == pod),
            EntryPoint::Uplink => self.cluster.local_pod(src).is_none() && !self.cluster.is_own_node(src),
            EntryPoint::Host | EntryPoint::Unknown => true,
        };
        let is_of_pod = matches!(self.entry(entry, src), EntryPoint::Pod(_));
        // RFC 1122 section 3.2.1.3; what is for a group or the link is the node's to take, if a pod sends it.
        let is_group = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.is_multicast() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_multicast(),
        };
        let is_of_host = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.is_loopback() || v4.octets()[0] == 0,
            IpAddr::V6(v6) => v6.is_loopback() || v6.is_unspecified(),
        };
        let is_of_link = |address: IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let from_outside = self.entry(entry, src) == EntryPoint::Uplink;
        if !own
            || is_group(src)
            || is_of_host(src)
            || is_of_host(dst)
            || (is_group(dst) && !is_of_pod)
            || (from_outside && (is_of_link(src) || is_of_link(dst)))
        {
            return Some("deny");
        }
        // Tunnels that a node would decapsulate: protocol numbers and UDP ports of IANA, and Linux's VXLAN port.
        let unwrapped = match seen.flow.protocol {
            17 => [1701, 2152, 3386, 4754, 4789, 6080, 6081, 6635, 8472].contains(&seen.flow.dport),
            protocol => [4, 41, 47, 103, 108, 115, 137, 143].contains(&protocol),
        };
        let is_on_link = match dst {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        if unwrapped && is_of_pod && (self.cluster.node_of(dst).is_some() || is_group(dst) || is_on_link) {
            return Some("deny");
        }
        let passes = self.fragment_or_packet_passes(now, &seen);
        let to_pod = self.cluster.local_pod(dst).is_some();
        let from_host = self.entry(entry, src) == EntryPoint::Host;
        let spent = to_pod && !from_host && seen.ttl <= 1;
        Some(if passes && !spent { "allow" } else { "deny" })
    }

    /// Removes connections of these addresses, which have another owner.
    pub(crate) fn forget(&mut self, addresses: &[IpAddr]) {
        self.connections.retain(|_, connection| {
            !addresses.iter().any(|gone| [connection.opened.src, connection.opened.dst].contains(gone))
        });
    }

    /// Evaluates every connection again: those that policy no longer allows are revoked.
    pub(crate) fn reevaluate(&mut self) {
        for connection in self.connections.values_mut() {
            connection.allowed = self.cluster.allows(&connection.opened);
        }
    }

    fn entry(&self, entry: &EntryPoint, src: IpAddr) -> EntryPoint {
        match entry {
            EntryPoint::Unknown => match self.cluster.local_pod(src) {
                Some(pod) => EntryPoint::Pod(pod.key.to_string()),
                None if self.cluster.is_own_node(src) || self.cluster.is_a_service_alone(src) => EntryPoint::Host,
                None => EntryPoint::Uplink,
            },
            known => known.clone(),
        }
    }

    /// Verdict on packets that no worker receives.
    fn before_workers(&self, entry: &EntryPoint, frame: &[u8]) -> Option<OracleVerdict> {
        let kernel = Some(Some("kernel"));
        let ethertype = match frame.get(12..14) {
            Some(ethertype) => u16::from_be_bytes([ethertype[0], ethertype[1]]),
            None => return kernel,
        };
        let ends = addresses(ethertype, frame);
        let entry = match ends {
            Some((src, _)) => self.entry(entry, src),
            None if *entry == EntryPoint::Unknown => EntryPoint::Uplink,
            None => entry.clone(),
        };
        match ethertype {
            0x8100 if entry != EntryPoint::Uplink => return Some(Some("deny")),
            0x0800 | 0x86dd => {}
            _ => return kernel,
        }
        let Some((_, dst)) = ends else { return if entry == EntryPoint::Uplink { kernel } else { Some(Some("deny")) } };
        if ethertype == 0x86dd && frame[20] == 58 && frame[21] == 255 && (133..=137).contains(frame.get(54)?) {
            let IpAddr::V6(to) = dst else { return None };
            let link_scope = to.is_unicast_link_local() || (to.is_multicast() && to.octets()[1] & 0xf == 2);
            if link_scope || self.cluster.is_own_node(dst) {
                return kernel;
            }
        }
        let for_pod = self.cluster.local_pod(dst).is_some();
        (!for_pod && matches!(entry, EntryPoint::Uplink | EntryPoint::Host)).then_some(Some("kernel"))
    }

    /// Whether it passes: later fragments if the connection of their first one does, all else by itself.
    fn fragment_or_packet_passes(&mut self, now: u64, seen: &ParsedPacket) -> bool {
        let Some(fragment) = &seen.fragment else { return self.passes(now, seen) };
        if fragment.offset > 0 {
            let Some(flow) = self.datagrams.flow_of(now, fragment) else { return self.cluster.is_free(&seen.flow) };
            let found = self.find(now, &[flow, reversed(flow)]);
            return found.is_some_and(|found| self.connections[&found].allowed);
        }
        let passes = self.passes(now, seen);
        if passes {
            self.datagrams.begin(now, fragment, seen.flow);
        }
        passes
    }

    /// Whether its connection or policy allows it.
    fn passes(&mut self, now: u64, seen: &ParsedPacket) -> bool {
        match &seen.kind {
            PacketKind::Wrong => return false,
            PacketKind::Error(quoted_flow) => {
                let Some(quoted_flow) = quoted_flow.filter(|quoted_flow| quoted_flow.src == seen.flow.dst) else {
                    return false;
                };
                if self.cluster.local_pod(seen.flow.src).is_some() && quoted_flow.dst != seen.flow.src {
                    return false;
                }
                let found = self.find(now, &[quoted_flow, reversed(quoted_flow)]);
                return match found {
                    Some(found) => self.connections[&found].allowed,
                    None => self.cluster.is_free(&seen.flow),
                };
            }
            _ => {}
        }
        let keys = match seen.kind {
            // A query opens a connection and a reply does not. Two hosts that query each other have two connections.
            PacketKind::Ask => vec![seen.flow],
            PacketKind::Answer => vec![reversed(seen.flow)],
            _ => vec![seen.flow, reversed(seen.flow)],
        };
        let is_free = self.cluster.is_free(&seen.flow);
        if let Some(key) = self.find(now, &keys) {
            if let Some(verdict) = self.out_of_sync(now, &key, seen) {
                return verdict;
            }
            let found = self.find(now, &keys).and_then(|key| self.connections.get_mut(&key));
            if let Some(verdict) = found.and_then(|found| found.take(now, seen, is_free)) {
                return verdict;
            }
        }
        let opens = match seen.kind {
            // RFC 9293: a SYN without ACK opens a connection. One that was missed may be picked up by a segment with
            // only ACK.
            PacketKind::Tcp { flags, .. } => matches!(flags & 0x17, 0x02 | 0x10),
            PacketKind::Answer => false,
            _ => true,
        };
        let picked_up = match seen.kind {
            PacketKind::Tcp { flags, .. } => flags & 0x02 == 0,
            PacketKind::Sctp { chunk, .. } => chunk != 1,
            _ => false,
        };
        let allowed = self.cluster.allows(&seen.flow);
        if allowed && opens {
            self.enter(TrackedConnection::new(seen.flow, now, picked_up)).take(now, seen, is_free);
        }
        allowed && (opens || is_free)
    }

    /// Inserts a connection, replacing any other between the same ports. Echo connections are separate for each
    /// direction.
    fn enter(&mut self, connection: TrackedConnection) -> &mut TrackedConnection {
        if !matches!(connection.opened.protocol, 1 | 58) {
            self.connections.remove(&reversed(connection.opened));
        }
        self.connections.entry(connection.opened).insert_entry(connection).into_mut()
    }

    /// Handles a SYN on a live connection and the SYN-ACK that may answer it; `None` for every other segment.
    ///
    /// The sender of the SYN may have lost the connection. If its peer has lost it too, the peer answers with a SYN-ACK
    /// that acknowledges the SYN. If the peer still has it, it answers with an ACK (RFC 9293 section 3.10.7.4, RFC 5961
    /// section 4), and the connection stays. The kernel also records the numbers of such a SYN
    /// (net/netfilter/nf_conntrack_proto_tcp.c, `TCP_CONNTRACK_IGNORE`). A SYN from the answering side opens a
    /// connection in its own direction.
    fn out_of_sync(&mut self, now: u64, key: &Flow, seen: &ParsedPacket) -> Option<bool> {
        let PacketKind::Tcp { flags, seq, ack, .. } = seen.kind else { return None };
        let found = self.connections.get_mut(key).filter(|found| found.allowed && !found.is_over())?;
        let side = usize::from(seen.flow != found.opened);
        match flags & 0x17 {
            0x02 if found.is_opening() => None,
            0x02 => {
                let passes = side == 0 || self.cluster.allows(&seen.flow);
                if passes {
                    found.syn = Some((side, seq.wrapping_add(1)));
                }
                Some(passes)
            }
            0x12 if found.syn == Some((1 - side, ack)) => {
                let opened = reversed(seen.flow);
                let passes = self.cluster.allows(&opened);
                if passes {
                    let anew = self.enter(TrackedConnection::new(opened, now, false));
                    anew.next[0] = Some(ack);
                    return None;
                }
                Some(false)
            }
            // It opens nothing at its receiver.
            0x12 if !found.is_opening() => Some(true),
            _ => None,
        }
    }

    /// The first of these flows that opened a live connection.
    fn find(&self, now: u64, keys: &[Flow]) -> Option<Flow> {
        let found = *keys.iter().find(|key| self.connections.contains_key(key))?;
        let connection = &self.connections[&found];
        (now.saturating_sub(connection.last) <= connection.timeout()).then_some(found)
    }
}

impl TrackedConnection {
    /// An allowed connection before its first packet.
    fn new(opened: Flow, now: u64, picked_up: bool) -> Self {
        Self {
            opened,
            allowed: true,
            answered: false,
            last: now,
            next: [None; 2],
            tags: [None; 2],
            ends: 0,
            reset: false,
            picked_up,
            syn: None,
            revoked: false,
        }
    }

    fn is_over(&self) -> bool {
        self.reset || self.ends >= 2
    }

    /// Whether only SYNs were seen so far: another SYN is a new attempt or crosses the first.
    fn is_opening(&self) -> bool {
        !self.answered && !self.picked_up
    }

    /// In seconds; those of a node with kube-proxy.
    fn timeout(&self) -> u64 {
        match (self.opened.protocol, self.answered) {
            // As long as either side may try again.
            (6, _) if self.revoked => 300,
            (17, _) if self.revoked => 120,
            (6, _) if self.reset => 10,
            (6, _) if self.ends >= 2 => 120,
            // As long as the data of one side may remain unacknowledged.
            (6, false) if self.picked_up => 300,
            (6, false) => 120,
            (6, true) => 86_400,
            (17, false) => 30,
            (17, true) => 120,
            (1 | 58, _) => 30,
            (132, _) => 210,
            _ => 600,
        }
    }

    /// Updates the connection with a packet; returns whether the packet passes, or `None` if it opens another
    /// connection.
    fn take(&mut self, now: u64, seen: &ParsedPacket, is_free: bool) -> Option<bool> {
        let side = usize::from(seen.flow != self.opened);
        if let PacketKind::Tcp { flags, seq, .. } = seen.kind {
            let is_syn = flags & 0x17 == 0x02;
            let over = self.is_over() || !self.allowed;
            if is_syn && over && self.next[side].is_none_or(|next| seq.wrapping_sub(next) as i32 > 0 || !self.allowed) {
                return None;
            }
            if is_syn && side == 0 && self.is_opening() {
                self.next[0] = None;
            }
        }
        if !self.allowed && matches!(seen.kind, PacketKind::Sctp { chunk: 1, .. }) {
            return None;
        }
        self.revoked = !self.allowed;
        if self.revoked {
            self.last = now;
            return Some(false);
        }
        match seen.kind {
            PacketKind::Tcp { flags, seq, len, .. } => {
                let ahead = self.next[side].map_or(0, |next| seq.wrapping_sub(next) as i32);
                if ahead.unsigned_abs() > 1 << 24 && !(flags & 0x04 != 0 && seq == 0) {
                    // It is of no use to its receiver, and says nothing about the connection.
                    return Some(true);
                }
                let after = seq.wrapping_add(len + u32::from(flags & 0x02 != 0) + u32::from(flags & 0x01 != 0));
                if self.next[side].is_none_or(|next| after.wrapping_sub(next) as i32 > 0) {
                    self.next[side] = Some(after);
                }
                self.ends += u8::from(flags & 0x01 != 0);
                self.reset |= flags & 0x04 != 0;
            }
            PacketKind::Sctp { chunk, tag, initiate } => {
                if matches!(chunk, 1 | 2) {
                    self.tags[side] = Some(initiate);
                }
                // A packet carries the verification tag that its receiver chose.
                if self.tags[1 - side].is_some_and(|wanted| wanted != tag) {
                    return Some(is_free);
                }
            }
            PacketKind::Answer if side == 0 => return Some(is_free),
            PacketKind::Ask if side == 1 => return Some(is_free),
            _ => {}
        }
        self.answered |= side == 1;
        self.last = now.max(self.last);
        Some(true)
    }
}

pub(crate) fn reversed(flow: Flow) -> Flow {
    Flow { src: flow.dst, dst: flow.src, sport: flow.dport, dport: flow.sport, ..flow }
}

fn addresses(ethertype: u16, frame: &[u8]) -> Option<(IpAddr, IpAddr)> {
    if ethertype == 0x0800 {
        let v4 = |at| Some(IpAddr::from(*frame.get(at..)?.first_chunk::<4>()?));
        Some((v4(26)?, v4(30)?))
    } else {
        let v6 = |at| Some(IpAddr::from(*frame.get(at..)?.first_chunk::<16>()?));
        Some((v6(22)?, v6(38)?))
    }
}

/// The IP layer of a frame.
pub(crate) struct Network<'a> {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ttl: u8,
    pub(crate) payload: &'a [u8],
}

/// The IP layer of a whole packet as parsed by etherparse; `None` if it or an additional check finds an error.
fn network(frame: &[u8]) -> Option<Network<'_>> {
    let sliced = SlicedPacket::from_ethernet(frame).ok()?;
    match sliced.net? {
        NetSlice::Ipv4(v4) => {
            let header = v4.header();
            let is_right = header.to_header().calc_header_checksum() == header.header_checksum();
            (is_right && options_are_good(header.options())).then_some(())?;
            Some(Network {
                src: header.source_addr().into(),
                dst: header.destination_addr().into(),
                protocol: v4.payload_ip_number().0,
                ttl: header.ttl(),
                payload: v4.payload().payload,
            })
        }
        NetSlice::Ipv6(v6) => {
            let header = v6.header();
            let extensions: Vec<_> = v6.extensions().clone().into_iter().collect();
            let routes = extensions.iter().any(|extension| match extension {
                Ipv6ExtensionSlice::Routing(routing) => routing.payload()[1] > 0,
                _ => false,
            });
            (!routes && extensions.len() <= 6 && header.payload_length() > 0).then_some(())?;
            Some(Network {
                src: header.source_addr().into(),
                dst: header.destination_addr().into(),
                protocol: v6.payload().ip_number.0,
                ttl: header.hop_limit(),
                payload: v6.payload().payload,
            })
        }
        NetSlice::Arp(_) => None,
    }
}

/// Whether IPv4 options are well-formed and contain no source route.
fn options_are_good(mut options: &[u8]) -> bool {
    loop {
        options = match options {
            [] | [0, ..] => return true,
            [1, rest @ ..] => rest,
            [131 | 137, ..] => return false,
            [_, length, ..] if *length >= 2 && usize::from(*length) <= options.len() => {
                &options[usize::from(*length)..]
            }
            _ => return false,
        };
    }
}

/// Parses a frame.
///
/// # Errors
/// The verdict on an invalid frame.
fn parse_frame(frame: &[u8]) -> Result<ParsedPacket, OracleVerdict> {
    const WRONG: OracleVerdict = Some("deny");
    let fragment = Fragment::of(frame);
    let network = match &fragment {
        Some(fragment) => fragment.network().ok_or(WRONG)?,
        None => network(frame).ok_or(WRONG)?,
    };
    let Network { src, dst, protocol, ttl, payload } = network;
    let mut flow = Flow { src, dst, protocol, sport: 0, dport: 0 };
    if fragment.as_ref().is_some_and(|fragment| fragment.offset > 0) {
        return Ok(ParsedPacket { flow, ttl, kind: PacketKind::Other, fragment });
    }
    let word = |at: usize| u16::from_be_bytes([payload[at], payload[at + 1]]);
    let long = |at: usize| u32::from(word(at)) << 16 | u32::from(word(at + 2));
    let least = match protocol {
        6 => 20,
        132 => 16,
        17 | 1 | 58 => 8,
        _ => 0,
    };
    if payload.len() < least {
        return Err(WRONG);
    }
    if matches!(protocol, 6 | 17 | 132) {
        (flow.sport, flow.dport) = (word(0), word(2));
    }
    let kind = match protocol {
        6 => {
            let header = usize::from(payload[12] >> 4) * 4;
            if header < 20 || header > payload.len() {
                return Err(WRONG);
            }
            PacketKind::Tcp { flags: payload[13], seq: long(4), ack: long(8), len: (payload.len() - header) as u32 }
        }
        17 if word(4) < 8 || (usize::from(word(4)) > payload.len() && fragment.is_none()) => return Err(WRONG),
        17 => PacketKind::Udp,
        132 => {
            let initiate = if matches!(payload[12], 1 | 2) && payload.len() >= 20 { long(16) } else { 0 };
            PacketKind::Sctp { chunk: payload[12], tag: long(4), initiate }
        }
        1 | 58 => match (protocol, payload[0]) {
            // The other port is the query's type, so that two kinds of query with the same identifier differ.
            (1, asked @ (8 | 13 | 42)) | (58, asked @ (128 | 160)) => {
                (flow.sport, flow.dport) = (word(4), asked.into());
                PacketKind::Ask
            }
            (1, 0) | (58, 129) => {
                (flow.sport, flow.dport) = (if protocol == 1 { 8 } else { 128 }, word(4));
                PacketKind::Answer
            }
            (1, answered @ (14 | 43)) | (58, answered @ 161) => {
                (flow.sport, flow.dport) = (u16::from(answered) - 1, word(4));
                PacketKind::Answer
            }
            (1, 3 | 11 | 12) | (58, 1..=4) => PacketKind::Error(quoted_flow(&payload[8..], src.is_ipv6())),
            (1, 5) | (58, 133..=137) => PacketKind::Wrong,
            _ => PacketKind::Other,
        },
        _ => PacketKind::Other,
    };
    Ok(ParsedPacket { flow, ttl, kind, fragment })
}

/// The flow of a frame; `None` if it is invalid.
pub(crate) fn flow_of(frame: &[u8]) -> Option<Flow> {
    parse_frame(frame).ok().map(|packet| packet.flow)
}

/// The flow of the packet quoted by an error, if its addresses are present. Without ports it is of no protocol.
fn quoted_flow(bytes: &[u8], is_v6: bool) -> Option<Flow> {
    let (ethertype, header, protocol) = match is_v6 {
        false => (0x0800, usize::from(bytes.first()? & 0xf) * 4, *bytes.get(9)?),
        true => (0x86dd, 40, *bytes.get(6)?),
    };
    let (src, dst) = addresses(ethertype, &[&[0; 14], bytes].concat())?;
    let Some(transport) = bytes.get(header..).and_then(|rest| rest.first_chunk::<8>()) else {
        return Some(Flow { src, dst, protocol: 255, sport: 0, dport: 0 });
    };
    let word = |at: usize| u16::from_be_bytes([transport[at], transport[at + 1]]);
    let (sport, dport) = match (protocol, transport[0]) {
        (6 | 17 | 132, _) => (word(0), word(2)),
        (1, asked @ (8 | 13 | 42)) | (58, asked @ (128 | 160)) => (word(4), asked.into()),
        _ => (0, 0),
    };
    Some(Flow { src, dst, protocol, sport, dport })
}
