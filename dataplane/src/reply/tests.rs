//! Replies of the pipeline, parsed by etherparse; checksums are computed independently.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;
use crate::batch::MemoryFrames;
use crate::conntrack::{Config, ConnTable};
use crate::forward::{Mac, Port};
use crate::packet::{Sum, parse};
use crate::pipeline::{BATCH, Pipeline, PipelineMode, Verdict};
use crate::policy::{AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PolicySet, RuleTable};
use crate::{DropReason, Epoch, Snapshot};

const HOST: PortId = PortId(0);
const WEB: PortId = PortId(1);
const DB: PortId = PortId(2);
const WEB_IPS: [&str; 2] = ["10.0.0.1", "fd00::1"];
const DB_IPS: [&str; 2] = ["10.0.0.2", "fd00::2"];
const NODE_IPS: [&str; 2] = ["192.168.0.1", "fd01::1"];
const WORLD_IPS: [&str; 2] = ["203.0.113.7", "2001:db8::7"];
const DB_MTU: u16 = 1400;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A node with two pods, `web` and `db`; `db` admits everything or nothing.
struct Node {
    pipeline: Pipeline,
    snapshot: Snapshot,
    now: Timestamp,
}

impl Node {
    fn new(on_revoke: OnRevoke) -> Self {
        Self::replying(ReplySettings { on_revoke, ..ReplySettings::default() })
    }

    fn replying(settings: ReplySettings) -> Self {
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        let mut forwarding = Forwarding::new(NODE_IPS.map(|text| ip(text).into()));
        for (id, kind, mtu, addresses) in [
            (HOST, PortKind::Host, 1500, [].as_slice()),
            (WEB, PortKind::Pod, 1500, &WEB_IPS),
            (DB, PortKind::Pod, DB_MTU, &DB_IPS),
        ] {
            let addresses = addresses.iter().map(|text| ip(text).into()).collect();
            let mac = |end| Mac([2, 0, 0, 0, id.0 as u8, end]);
            forwarding.insert(id, Port::new(kind, mac(1), mac(2), mtu, addresses)).unwrap();
        }
        let pipeline = Pipeline::new(connections, PipelineMode::Full).replying(settings);
        let now = Timestamp::from_millis(1_000_000);
        let mut node = Self { pipeline, snapshot: Snapshot { forwarding, ..Snapshot::default() }, now };
        node.publish(true);
        node
    }

    fn publish(&mut self, open: bool) {
        let pod = |number| AddressOwner::Pod {
            identity: Identity(NonZeroU32::new(number).unwrap()),
            endpoint: Some(EndpointId(number)),
            node: Some(NodeId(0)),
        };
        let mut update = PolicySet::default().update();
        for (addresses, owner) in [(WEB_IPS, pod(1)), (DB_IPS, pod(2)), (NODE_IPS, AddressOwner::Node(NodeId(0)))] {
            for text in addresses {
                update.set_address(ip(text).into(), Some(owner));
            }
        }
        let closed = EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])));
        let ingress = if open { EndpointPolicy::Open } else { closed };
        update
            .set_endpoint(EndpointId(1), Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open }))
            .set_endpoint(EndpointId(2), Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
        let epoch = Epoch(self.snapshot.epoch.0 + 1);
        self.snapshot = Snapshot::new(epoch, update.finish(), self.snapshot.forwarding.clone());
    }

    /// Processes a batch of these frames; returns the verdict on the first one and the replies.
    fn send_all(&mut self, port: PortId, all: &[Vec<u8>]) -> (Verdict, Vec<(PortId, Vec<u8>)>) {
        let mut frames = MemoryFrames::new();
        all.iter().for_each(|frame| frames.push(frame.clone()).unwrap());
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, self.now, port, &mut frames, &mut verdicts, &mut ());
        (verdicts[0], self.pipeline.replies().take().map(|(port, bytes)| (port, bytes.to_vec())).collect())
    }

    fn send(&mut self, port: PortId, frame: &[u8]) -> (Verdict, Vec<(PortId, Vec<u8>)>) {
        self.send_all(port, &[frame.to_vec()])
    }
}

fn builder(from: &str, to: &str, ttl: u8) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    match (ip(from), ip(to)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), ttl),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), ttl),
        _ => panic!("two families"),
    }
}

fn udp(from: &str, to: &str, ttl: u8, payload: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    builder(from, to, ttl).udp(1000, 5432).write(&mut frame, &vec![7; payload]).unwrap();
    frame
}

/// A segment with this sequence and acknowledgement number (0: no ACK) and payload.
fn tcp(from: (&str, u16), to: (&str, u16), kind: &str, numbers: (u32, u32), payload: &[u8]) -> Vec<u8> {
    let mut step = builder(from.0, to.0, 64).tcp(from.1, to.1, numbers.0, 60_000);
    if kind.contains('S') {
        step = step.syn();
    }
    if kind.contains('R') {
        step = step.rst();
    }
    if numbers.1 > 0 {
        step = step.ack(numbers.1);
    }
    let mut frame = Vec::new();
    step.write(&mut frame, payload).unwrap();
    frame
}

/// Asserts that all checksums of a reply are valid and that it can be parsed.
fn check(frame: &[u8]) -> Packet {
    let packet = parse(frame).unwrap_or_else(|reason| panic!("an answer is refused by our own parser: {reason}"));
    assert_eq!(usize::from(packet.layout.end), frame.len(), "no byte too many");
    assert_eq!(packet.ttl, 64);
    let bytes = &frame[usize::from(packet.layout.transport)..];
    let sum = match packet.flow.protocol {
        Protocol::ICMP => Sum::default(),
        protocol => Sum::pseudo_header(packet.flow.src, packet.flow.dst, protocol, bytes.len() as u16),
    };
    assert_eq!(sum.add_bytes(bytes).folded(), 0xffff, "transport checksum");
    packet
}

/// A RST: egress port, source, destination, sequence and acknowledgement number.
type Rst = (PortId, (IpAddr, u16), (IpAddr, u16), u32, Option<u32>);

/// Parses a reply as a RST.
fn rst((port, frame): &(PortId, Vec<u8>)) -> Rst {
    let packet = check(frame);
    assert_eq!(frame[..12], [[2, 0, 0, 0, port.0 as u8, 2], [2, 0, 0, 0, port.0 as u8, 1]].concat(), "its MACs");
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(TransportSlice::Tcp(tcp)) = sliced.transport else { panic!("no TCP segment") };
    assert!(tcp.rst() && !tcp.syn() && !tcp.fin() && tcp.payload().is_empty());
    let Flow { src, dst, src_port, dst_port, .. } = packet.flow;
    let acknowledged = tcp.ack().then(|| tcp.acknowledgment_number());
    (*port, (src.into(), src_port), (dst.into(), dst_port), tcp.sequence_number(), acknowledged)
}

/// Parses a reply as an ICMP error: type, code, the four bytes behind the checksum, and the quoted packet.
fn icmp(frame: &[u8]) -> (IpAddr, IpAddr, u8, u8, [u8; 4], Vec<u8>) {
    let packet = check(frame);
    let sliced = SlicedPacket::from_ethernet(frame).unwrap();
    let payload = match sliced.net {
        Some(NetSlice::Ipv4(v4)) => v4.payload().payload.to_vec(),
        Some(NetSlice::Ipv6(v6)) => v6.payload().payload.to_vec(),
        _ => panic!("no IP packet"),
    };
    let four = payload[4..8].try_into().unwrap();
    (packet.flow.src.into(), packet.flow.dst.into(), payload[0], payload[1], four, payload[8..].to_vec())
}

#[test]
fn both_ends_of_a_revoked_connection_get_a_valid_reset() {
    for (web, db) in WEB_IPS.into_iter().zip(DB_IPS) {
        let (w, d) = ((web, 40_000), (db, 5432));
        let mut node = Node::new(OnRevoke::Reset);
        let established = |node: &mut Node| {
            for (port, frame) in [
                (WEB, tcp(w, d, "S", (1000, 0), b"")),
                (DB, tcp(d, w, "S", (9000, 1001), b"")),
                (WEB, tcp(w, d, "", (1001, 9001), b"")),
                (WEB, tcp(w, d, "", (1001, 9001), b"hello")),
                (DB, tcp(d, w, "", (9001, 1006), b"hi")),
            ] {
                let (verdict, replies) = node.send(port, &frame);
                assert!(matches!(verdict, Verdict::Forward(_)) && replies.is_empty(), "{verdict:?}");
            }
        };
        established(&mut node);
        node.publish(false);
        // A retransmission of data that `db` has already received: its own number would not be the one that `db`
        // expects.
        let (verdict, replies) = node.send(WEB, &tcp(w, d, "", (1001, 9001), b"hello"));
        assert_eq!(verdict, Verdict::Drop(DropReason::ConnectionRevoked));
        let (at_web, at_db) = ((ip(web), 40_000), (ip(db), 5432));
        let resets: Vec<_> = replies.iter().map(rst).collect();
        assert_eq!(resets, [(WEB, at_db, at_web, 9001, None), (DB, at_web, at_db, 1006, Some(9001))]);

        let (verdict, replies) = node.send(DB, &tcp(d, w, "", (9003, 1006), b"more"));
        assert_eq!(verdict, Verdict::Drop(DropReason::ConnectionRevoked));
        assert_eq!(replies.iter().map(rst).collect::<Vec<_>>(), [(DB, at_web, at_db, 1006, None)], "its sender alone");
        let (_, replies) = node.send(DB, &tcp(d, w, "R", (9003, 0), b""));
        assert!(replies.is_empty(), "a reset is not answered");
        let (verdict, replies) = node.send(WEB, &tcp(w, d, "S", (5000, 0), b""));
        assert_eq!(
            (verdict, replies.len()),
            (Verdict::Drop(DropReason::IngressDenied), 0),
            "a new one is merely denied"
        );

        let mut silent = Node::new(OnRevoke::Drop);
        established(&mut silent);
        silent.publish(false);
        let (verdict, replies) = silent.send(WEB, &tcp(w, d, "", (1006, 9003), b"x"));
        assert_eq!((verdict, replies.len()), (Verdict::Drop(DropReason::ConnectionRevoked), 0));
    }
}

#[test]
fn senders_on_other_revoked_connections_get_an_icmp_error() {
    for (v6, ((web, db), world)) in WEB_IPS.into_iter().zip(DB_IPS).zip(WORLD_IPS).enumerate() {
        let mut node = Node::new(OnRevoke::Reset);
        let datagram = udp(web, db, 64, 100);
        assert_eq!(node.send(WEB, &datagram), (Verdict::Forward(DB), vec![]));
        assert_eq!(node.send(HOST, &udp(world, db, 64, 9)), (Verdict::Forward(DB), vec![]));
        node.publish(false);
        let (verdict, replies) = node.send(WEB, &datagram);
        assert_eq!((verdict, replies.len(), replies[0].0), (Verdict::Drop(DropReason::ConnectionRevoked), 1, WEB));
        let (kind, code) = if v6 == 1 { (1, 1) } else { (3, 13) };
        let from_node = ip(NODE_IPS[v6]);
        assert_eq!(icmp(&replies[0].1), (from_node, ip(web), kind, code, [0; 4], datagram[14..].to_vec()));
        // Through the host port the source is the pod: the node's stack accepts no packet from outside with its own
        // address.
        let (_, replies) = node.send(HOST, &udp(world, db, 64, 9));
        assert_eq!((replies[0].0, icmp(&replies[0].1).0, icmp(&replies[0].1).1), (HOST, ip(db), ip(world)));
    }
}

#[test]
fn senders_in_the_cluster_are_told_of_a_denied_connection() {
    for (v6, ((web, db), world)) in WEB_IPS.into_iter().zip(DB_IPS).zip(WORLD_IPS).enumerate() {
        for on_deny in [OnDeny::Reject, OnDeny::Drop] {
            let mut node = Node::replying(ReplySettings { on_deny, ..ReplySettings::default() });
            node.publish(false);
            let is_told = on_deny == OnDeny::Reject;
            let denied = Verdict::Drop(DropReason::IngressDenied);
            let (verdict, replies) = node.send(WEB, &tcp((web, 1000), (db, 80), "S", (5000, 0), b""));
            assert_eq!((verdict, replies.len()), (denied, usize::from(is_told)), "{on_deny:?}");
            let datagram = udp(web, db, 64, 100);
            let (verdict, replies) = node.send(WEB, &datagram);
            assert_eq!((verdict, replies.len()), (denied, usize::from(is_told)), "{on_deny:?}");
            if is_told {
                let (kind, code) = if v6 == 1 { (1, 1) } else { (3, 13) };
                let expected = (ip(NODE_IPS[v6]), ip(web), kind, code, [0; 4], datagram[14..].to_vec());
                assert_eq!((replies[0].0, icmp(&replies[0].1)), (WEB, expected));
            }
            // A machine outside learns nothing.
            assert_eq!(node.send(HOST, &udp(world, db, 64, 9)), (denied, vec![]));
            assert_eq!(node.send(HOST, &tcp((world, 1000), (db, 80), "S", (5000, 0), b"")), (denied, vec![]));
        }
    }
}

#[test]
fn a_packet_beyond_the_next_links_mtu_gets_packet_too_big() {
    for (v6, (web, db)) in WEB_IPS.into_iter().zip(DB_IPS).enumerate() {
        let mut node = Node::new(OnRevoke::Drop);
        let header = if v6 == 1 { 48 } else { 28 };
        let fits = udp(web, db, 64, usize::from(DB_MTU) - header);
        assert_eq!(node.send(WEB, &fits), (Verdict::Forward(DB), vec![]));
        let long = udp(web, db, 64, usize::from(DB_MTU) - header + 1);
        let (verdict, replies) = node.send(WEB, &long);
        assert_eq!((verdict, replies.len(), replies[0].0), (Verdict::Drop(DropReason::TooBig), 1, WEB));
        let (kind, code, quoted) = if v6 == 1 { (2, 0, 1280 - 48) } else { (3, 4, 576 - 28) };
        let expected = (ip(NODE_IPS[v6]), ip(web), kind, code, [0, 0, 5, 120], long[14..14 + quoted].to_vec());
        assert_eq!(icmp(&replies[0].1), expected, "an MTU of 1400");
    }
}

#[test]
fn an_expired_ttl_gets_time_exceeded_from_the_node() {
    for (v6, (web, db)) in WEB_IPS.into_iter().zip(DB_IPS).enumerate() {
        let mut node = Node::new(OnRevoke::Drop);
        let last = udp(web, db, 1, 20);
        let (verdict, replies) = node.send(WEB, &last);
        assert_eq!((verdict, replies.len(), replies[0].0), (Verdict::Drop(DropReason::TtlExpired), 1, WEB));
        let kind = if v6 == 1 { 3 } else { 11 };
        assert_eq!(icmp(&replies[0].1), (ip(NODE_IPS[v6]), ip(web), kind, 0, [0; 4], last[14..].to_vec()));
    }
}

#[test]
fn errors_and_later_fragments_get_no_reply() {
    let mut node = Node::new(OnRevoke::Reset);
    assert_eq!(node.send(WEB, &udp(WEB_IPS[0], DB_IPS[0], 64, 8)).0, Verdict::Forward(DB));
    // `db` replies with an ICMP error whose TTL expires.
    let quoted = &udp(WEB_IPS[0], DB_IPS[0], 64, 8)[14..];
    let mut error = Vec::new();
    let unreachable = etherparse::Icmpv4Type::DestinationUnreachable(etherparse::icmpv4::DestUnreachableHeader::Port);
    builder(DB_IPS[0], WEB_IPS[0], 1).icmpv4(unreachable).write(&mut error, quoted).unwrap();
    assert_eq!(node.send(DB, &error), (Verdict::Drop(DropReason::TtlExpired), vec![]));
    // A first fragment gets a reply, a later one of the same datagram does not.
    let fragment = |offset: u16| {
        let mut header =
            etherparse::Ipv4Header::new(24, 1, etherparse::ip_number::UDP, [10, 0, 0, 1], [10, 0, 0, 2]).unwrap();
        (header.identification, header.dont_fragment, header.more_fragments) = (77, false, offset == 0);
        header.fragment_offset = (offset / 8).try_into().unwrap();
        let payload: [u8; 24] = std::array::from_fn(|at| match at {
            _ if offset > 0 => 9,
            0..8 => [3, 0xe8, 0x15, 0x38, 0, 48, 0, 0][at],
            _ => 9,
        });
        let mut frame = [[1; 6], [2; 6]].concat();
        frame.extend([8, 0]);
        header.header_checksum = header.calc_header_checksum();
        frame.extend_from_slice(&header.to_bytes());
        frame.extend_from_slice(&payload);
        frame
    };
    let (verdict, replies) = node.send(WEB, &fragment(0));
    assert_eq!((verdict, replies.len()), (Verdict::Drop(DropReason::TtlExpired), 1));
    assert_eq!(node.send(WEB, &fragment(24)), (Verdict::Drop(DropReason::TtlExpired), vec![]));
}

#[test]
fn replies_are_rate_limited_by_port() {
    let mut node = Node::new(OnRevoke::Drop);
    let mut answered = |port, milliseconds| {
        let (src, dst) = if port == WEB { (WEB_IPS[0], DB_IPS[0]) } else { (DB_IPS[0], WEB_IPS[0]) };
        let batch: Vec<Vec<u8>> = (0..BATCH).map(|_| udp(src, dst, 1, 20)).collect();
        node.now = Timestamp::from_millis(node.now.as_millis() + milliseconds);
        node.send_all(port, &batch).1.len()
    };
    assert_eq!(answered(WEB, 0), CAPACITY, "of one batch");
    assert_eq!(answered(WEB, 0), 50 - CAPACITY, "at once");
    assert_eq!(answered(WEB, 0), 0);
    assert_eq!(answered(WEB, 7), 7, "a thousand a second");
    assert_eq!(answered(DB, 0), CAPACITY, "of another pod, whatever the first one has sent");
    assert_eq!(node.pipeline.replies().take_suppressed(), (5 * BATCH - 57 - CAPACITY) as u64);
}

proptest! {
    #[test]
    fn every_reply_is_a_valid_packet(
        v6: bool,
        ttl in 1..3u8,
        payload in 0..1460usize,
        changes in prop::collection::vec((0..70usize, any::<u8>()), 0..4),
    ) {
        let mut node = Node::new(OnRevoke::Reset);
        let family = usize::from(v6);
        let mut frame = udp(WEB_IPS[family], DB_IPS[family], ttl, payload);
        for (at, byte) in changes {
            let at = at % frame.len();
            frame[at] = byte;
        }
        for open in [true, false] {
            node.publish(open);
            for (port, reply) in node.send(WEB, &frame).1 {
                prop_assert_eq!(port, WEB, "to its sender");
                check(&reply);
            }
        }
    }
}
