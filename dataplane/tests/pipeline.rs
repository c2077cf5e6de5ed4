//! Verdicts of the pipeline, packet by packet, without sockets: a node with three pods, its host port and an uplink.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use etherparse::{IcmpEchoHeader, Icmpv4Type, Icmpv6Type, PacketBuilder, TcpHeader};
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Transport, parse};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet, PortProtocol, PortRange,
    PortSpec, RuleName, RuleSet, RuleSpec, RuleTable,
};
use penstock_dataplane::{Epoch, Snapshot};

const HOST: PortId = PortId(0);
const WEB: PortId = PortId(1);
const DB: PortId = PortId(2);
const UPLINK: PortId = PortId(3);
const FRESH: PortId = PortId(4);

const WEB4: &str = "10.0.0.1";
const DB4: &str = "10.0.0.2";
const FRESH4: &str = "10.0.0.3";
const WEB6: &str = "fd00::1";
const DB6: &str = "fd00::2";
const NODE4: &str = "192.168.0.1";
const WORLD4: &str = "203.0.113.7";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn mac(port: PortId, end: u8) -> Mac {
    Mac([2, 0, 0, 0, port.0 as u8, end])
}

fn forwarding() -> Forwarding {
    let mut forwarding = Forwarding::new([ip(NODE4).into()]);
    for (id, kind, mtu, addresses) in [
        (HOST, PortKind::Host, 1500, &[][..]),
        (WEB, PortKind::Pod, 1500, &[WEB4, WEB6]),
        (DB, PortKind::Pod, 1400, &[DB4, DB6]),
        (UPLINK, PortKind::Uplink, 1500, &[]),
        // Its interface exists; policy does not know it yet.
        (FRESH, PortKind::Pod, 1500, &[FRESH4]),
    ] {
        let addresses = addresses.iter().map(|text| ip(text).into()).collect();
        forwarding.insert(id, Port::new(kind, mac(id, 1), mac(id, 2), mtu, addresses)).unwrap();
    }
    forwarding
}

/// Ingress policy of `db`.
#[derive(Clone, Copy)]
enum Ingress {
    /// TCP and UDP port 5432 from `web`; everything, ICMP included, from 203.0.113.0/24.
    Usual,
    /// Nothing.
    Nothing,
    /// As usual, and its egress policy allows nothing.
    UsualAndNoEgress,
    /// Nothing, and its egress policy allows nothing either.
    NothingBothWays,
}

fn policy(ingress: Ingress) -> PolicySet {
    let identity = |number| Identity(NonZeroU32::new(number).unwrap());
    let range = |protocol| PortRange { protocol, first: 5432, last: 5432 };
    let from_web = RuleSpec {
        name: RuleName::new("test/policy", "web"),
        peers: PeerSpec::AnyOf { every_pod: false, blocks: Vec::new() },
        ports: PortSpec::AnyOf(vec![range(PortProtocol::Tcp), range(PortProtocol::Udp)]),
    };
    let from_world = RuleSpec {
        name: RuleName::new("test/policy", "world"),
        peers: PeerSpec::AnyOf {
            every_pod: false,
            blocks: vec![penstock_dataplane::policy::AddressBlock {
                cidr: "203.0.113.0/24".parse().unwrap(),
                except: Vec::new(),
            }],
        },
        ports: PortSpec::Every,
    };
    let table = match ingress {
        Ingress::Usual | Ingress::UsualAndNoEgress => {
            RuleTable::new(&[from_web, from_world], [(identity(1), [0].into_iter().collect::<RuleSet>())])
        }
        Ingress::Nothing | Ingress::NothingBothWays => RuleTable::new(&[], []),
    };
    let egress = match ingress {
        Ingress::UsualAndNoEgress | Ingress::NothingBothWays => {
            EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])))
        }
        Ingress::Usual | Ingress::Nothing => EndpointPolicy::Open,
    };
    let pod = |number| AddressOwner::Pod {
        identity: identity(number),
        endpoint: Some(EndpointId(number)),
        node: Some(NodeId(0)),
    };
    let mut update = PolicySet::default().update();
    for (text, owner) in
        [(WEB4, pod(1)), (WEB6, pod(1)), (DB4, pod(2)), (DB6, pod(2)), (NODE4, AddressOwner::Node(NodeId(0)))]
    {
        update.set_address(ip(text).into(), Some(owner));
    }
    update
        .set_endpoint(EndpointId(1), Some(Endpoint { egress: EndpointPolicy::Open, ingress: EndpointPolicy::Open }))
        .set_endpoint(EndpointId(2), Some(Endpoint { egress, ingress: EndpointPolicy::Isolated(Arc::new(table)) }));
    update.finish()
}

struct Node {
    pipeline: Pipeline,
    snapshot: Snapshot,
    now: Timestamp,
}

impl Node {
    fn new() -> Self {
        Self::with(Config { entries: 1024, ..Config::default() }, PipelineMode::Full)
    }

    fn with(config: Config, mode: PipelineMode) -> Self {
        let connections = Arc::new(ConnTable::new(&config).unwrap());
        let snapshot = Snapshot::new(Epoch(1), policy(Ingress::Usual), forwarding());
        Self { pipeline: Pipeline::new(connections, mode), snapshot, now: Timestamp::from_millis(1_000_000) }
    }

    fn publish(&mut self, ingress: Ingress) {
        let epoch = Epoch(self.snapshot.epoch.0 + 1);
        self.snapshot = Snapshot::new(epoch, policy(ingress), self.snapshot.forwarding.clone());
    }

    /// Sends one frame in a batch of its own; returns its verdict and the resulting frame.
    fn send(&mut self, port: PortId, frame: &[u8]) -> (Verdict, Vec<u8>) {
        let mut frames = MemoryFrames::new();
        frames.push(frame.to_vec()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, self.now, port, &mut frames, &mut verdicts, &mut ());
        (verdicts[0], frames.drain().next().unwrap())
    }

    fn verdict(&mut self, port: PortId, frame: &[u8]) -> Verdict {
        self.send(port, frame).0
    }
}

fn udp(from: &str, to: &str, ports: (u16, u16)) -> Vec<u8> {
    let mut frame = Vec::new();
    match (ip(from), ip(to)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4(from.octets(), to.octets(), 64)
            .udp(ports.0, ports.1)
            .write(&mut frame, b"payload")
            .unwrap(),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv6(from.octets(), to.octets(), 64)
            .udp(ports.0, ports.1)
            .write(&mut frame, b"payload")
            .unwrap(),
        _ => panic!("{from} and {to} are of different families"),
    }
    frame
}

fn tcp(from: &str, to: &str, ports: (u16, u16), edit: impl FnOnce(&mut TcpHeader), payload: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (ip(from), ip(to)) else { panic!("IPv4 only") };
    let mut header = TcpHeader::new(ports.0, ports.1, 1000, 4096);
    edit(&mut header);
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(from.octets(), to.octets(), 64)
        .tcp_header(header)
        .write(&mut frame, payload)
        .unwrap();
    frame
}

fn ping(from: &str, to: &str, request: bool) -> Vec<u8> {
    let echo = IcmpEchoHeader { id: 77, seq: 1 };
    let mut frame = Vec::new();
    match (ip(from), ip(to)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4(from.octets(), to.octets(), 64)
            .icmpv4(if request { Icmpv4Type::EchoRequest(echo) } else { Icmpv4Type::EchoReply(echo) })
            .write(&mut frame, b"ping")
            .unwrap(),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv6(from.octets(), to.octets(), 64)
            .icmpv6(if request { Icmpv6Type::EchoRequest(echo) } else { Icmpv6Type::EchoReply(echo) })
            .write(&mut frame, b"ping")
            .unwrap(),
        _ => panic!("{from} and {to} are of different families"),
    }
    frame
}

/// A frame with its TTL or hop limit set and, in IPv4, the header checksum to match.
fn with_ttl(mut frame: Vec<u8>, ttl: u8) -> Vec<u8> {
    if frame[12] == 0x86 {
        frame[21] = ttl;
    } else {
        frame[22] = ttl;
        frame[24..26].fill(0);
        let header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
    }
    frame
}

#[test]
fn first_packets_get_verdicts_by_port_source_and_policy() {
    let forward = Verdict::Forward;
    let drop = Verdict::Drop;
    for (name, port, frame, expected) in [
        ("open to open", DB, udp(DB4, WEB4, (1, 2)), forward(WEB)),
        ("allowed by rule", WEB, udp(WEB4, DB4, (1, 5432)), forward(DB)),
        ("allowed by rule, IPv6", WEB, udp(WEB6, DB6, (1, 5432)), forward(DB)),
        ("port of no rule", WEB, udp(WEB4, DB4, (1, 80)), drop(DropReason::IngressDenied)),
        ("ICMP under a rule with ports", WEB, ping(WEB4, DB4, true), drop(DropReason::IngressDenied)),
        ("node to its pod", HOST, ping(NODE4, DB4, true), forward(DB)),
        ("pod to its node", DB, ping(DB4, NODE4, true), forward(HOST)),
        ("world to pod by the host port", HOST, udp(WORLD4, DB4, (1, 9)), forward(DB)),
        ("world to pod by the uplink", UPLINK, udp(WORLD4, DB4, (1, 9)), forward(DB)),
        ("world that no rule names", UPLINK, udp("198.51.100.1", DB4, (1, 9)), drop(DropReason::IngressDenied)),
        ("pod to world", WEB, udp(WEB4, WORLD4, (1, 53)), forward(HOST)),
        ("another's address", WEB, udp(DB4, DB4, (1, 2)), drop(DropReason::SpoofedSource)),
        ("an address of nobody's", WEB, udp("10.9.9.9", DB4, (1, 2)), drop(DropReason::SpoofedSource)),
        ("the node's address from a pod", WEB, udp(NODE4, DB4, (1, 2)), drop(DropReason::SpoofedSource)),
        ("a pod's address from outside", UPLINK, udp(WEB4, DB4, (1, 5432)), drop(DropReason::SpoofedSource)),
        ("the node's address from outside", UPLINK, udp(NODE4, DB4, (1, 2)), drop(DropReason::SpoofedSource)),
        ("multicast, to the node", WEB, udp(WEB4, "224.0.0.251", (5353, 5353)), forward(HOST)),
        ("broadcast, to the node", WEB, udp(WEB4, "255.255.255.255", (68, 67)), forward(HOST)),
        ("multicast by the host port", HOST, udp(WORLD4, "224.0.0.251", (1, 2)), drop(DropReason::Multicast)),
        ("multicast from outside", UPLINK, udp(WORLD4, "224.0.0.251", (1, 2)), drop(DropReason::Multicast)),
        ("from a multicast address", HOST, udp("224.0.0.251", WEB4, (1, 2)), drop(DropReason::NotRoutable)),
        ("link-local", WEB, udp(WEB4, "169.254.169.254", (1, 80)), forward(HOST)),
        ("link-local, IPv6", WEB, udp(WEB6, "fe80::1", (1, 80)), forward(HOST)),
        ("from a link-local address", HOST, udp("169.254.20.10", WEB4, (53, 1)), forward(WEB)),
        ("from a link-local address, IPv6", HOST, udp("fe80::1", WEB6, (53, 1)), forward(WEB)),
        ("IPv4's are routed, too", UPLINK, udp("169.254.169.254", WEB4, (80, 1)), forward(WEB)),
        ("IPv6's from outside", UPLINK, udp("fe80::1", WEB6, (53, 1)), drop(DropReason::NotRoutable)),
        ("link-local that no rule names", HOST, udp("169.254.1.1", DB4, (1, 2)), drop(DropReason::IngressDenied)),
        ("loopback", WEB, udp(WEB4, "127.0.0.1", (1, 80)), drop(DropReason::NotRoutable)),
        ("loopback by the host port", HOST, udp("127.0.0.1", WEB4, (1, 80)), drop(DropReason::NotRoutable)),
        ("world to a pod that is not there", HOST, udp(WORLD4, "10.0.0.99", (1, 2)), drop(DropReason::NotReady)),
        ("the stack's own, come back", HOST, udp(WEB4, WORLD4, (1, 2)), drop(DropReason::NoPort)),
        ("last hop spent", WEB, with_ttl(udp(WEB4, DB4, (1, 5432)), 1), drop(DropReason::TtlExpired)),
        ("last hop spent, IPv6", WEB, with_ttl(udp(WEB6, DB6, (1, 5432)), 1), drop(DropReason::TtlExpired)),
        ("the stack takes the hop", WEB, with_ttl(udp(WEB4, WORLD4, (1, 2)), 1), forward(HOST)),
        ("the stack has taken the hop", HOST, with_ttl(udp(WORLD4, DB4, (1, 2)), 1), forward(DB)),
        ("echo reply that answers nothing", DB, ping(DB4, WEB4, false), drop(DropReason::NoConnection)),
        ("pod that policy does not know", FRESH, udp(FRESH4, WEB4, (1, 2)), drop(DropReason::NotReady)),
        ("to a pod that policy does not know", WEB, udp(WEB4, FRESH4, (1, 2)), drop(DropReason::NotReady)),
        ("port without an entry", PortId(9), udp(WEB4, DB4, (1, 5432)), drop(DropReason::NotReady)),
        ("not IP", WEB, vec![0; 60], drop(DropReason::NotIp)),
    ] {
        assert_eq!(Node::new().verdict(port, &frame), expected, "{name}");
    }
}

#[test]
fn a_forwarded_packet_has_the_ports_macs_and_a_decremented_ttl() {
    for (name, port, frame, out, ttl) in [
        ("pod to pod", WEB, udp(WEB4, DB4, (1, 5432)), DB, 63),
        ("pod to pod, IPv6", WEB, udp(WEB6, DB6, (1, 5432)), DB, 63),
        ("uplink to pod", UPLINK, udp(WORLD4, DB4, (1, 2)), DB, 63),
        ("pod to host", WEB, udp(WEB4, WORLD4, (1, 2)), HOST, 64),
        ("host to pod", HOST, udp(WORLD4, DB4, (1, 2)), DB, 64),
    ] {
        let (verdict, after) = Node::new().send(port, &frame);
        assert_eq!(verdict, Verdict::Forward(out), "{name}");
        assert_eq!(after[..12], [mac(out, 2).0, mac(out, 1).0].concat(), "{name}");
        assert_eq!(parse(&after).unwrap().ttl, ttl, "{name}");
        assert_eq!(after.len(), frame.len(), "{name}");
    }
}

#[test]
fn a_packet_beyond_the_egress_mtu_is_dropped() {
    let big = |length: usize| tcp(WEB4, DB4, (1, 5432), |header| header.syn = true, &vec![0; length - 40]);
    assert_eq!(Node::new().verdict(WEB, &big(1400)), Verdict::Forward(DB));
    assert_eq!(Node::new().verdict(WEB, &big(1401)), Verdict::Drop(DropReason::TooBig));
}

#[test]
fn replies_pass_even_if_their_direction_is_denied() {
    let mut node = Node::new();
    let (request, reply) = (udp(WEB4, DB4, (40000, 5432)), udp(DB4, WEB4, (5432, 40000)));
    // The other way round, port 40000 of `web` would be open; so check the side that is isolated.
    let (back, forth) = (udp(DB4, WEB4, (7, 8)), udp(WEB4, DB4, (8, 7)));
    assert_eq!(node.verdict(WEB, &forth), Verdict::Drop(DropReason::IngressDenied), "before db has asked");
    assert_eq!(node.verdict(DB, &back), Verdict::Forward(WEB));
    assert_eq!(node.verdict(WEB, &forth), Verdict::Forward(DB), "db has asked");
    assert_eq!(node.verdict(WEB, &request), Verdict::Forward(DB));
    assert_eq!(node.verdict(DB, &reply), Verdict::Forward(WEB));

    assert_eq!(node.verdict(DB, &ping(DB4, WEB4, true)), Verdict::Forward(WEB));
    assert_eq!(node.verdict(WEB, &ping(WEB4, DB4, false)), Verdict::Forward(DB), "an echo reply");
}

/// A TCP handshake from `web` to `db`, and a segment each way.
fn establish(node: &mut Node) -> (Vec<u8>, Vec<u8>) {
    let ports = (40000, 5432);
    let syn = tcp(WEB4, DB4, ports, |header| header.syn = true, b"");
    let syn_ack = tcp(
        DB4,
        WEB4,
        (5432, 40000),
        |header| {
            (header.syn, header.ack) = (true, true);
            (header.sequence_number, header.acknowledgment_number) = (5000, 1001);
        },
        b"",
    );
    let data = |from, to, ports, seq, ack| {
        tcp(
            from,
            to,
            ports,
            |header: &mut TcpHeader| {
                header.ack = true;
                (header.sequence_number, header.acknowledgment_number) = (seq, ack);
            },
            b"data",
        )
    };
    let there = data(WEB4, DB4, ports, 1001, 5001);
    let back = data(DB4, WEB4, (5432, 40000), 5001, 1005);
    for (port, frame, out) in [(WEB, &syn, DB), (DB, &syn_ack, WEB), (WEB, &there, DB), (DB, &back, WEB)] {
        assert_eq!(node.verdict(port, frame), Verdict::Forward(out));
    }
    (there, back)
}

#[test]
fn a_change_revokes_a_connection_at_either_sides_packet() {
    for first in [WEB, DB] {
        let mut node = Node::new();
        let (there, back) = establish(&mut node);
        node.publish(Ingress::Usual);
        assert_eq!(node.verdict(WEB, &there), Verdict::Forward(DB), "a change that does not concern it");
        node.publish(Ingress::Nothing);
        let frame = if first == WEB { &there } else { &back };
        assert_eq!(node.verdict(first, frame), Verdict::Drop(DropReason::ConnectionRevoked));
        // `db` may open connections to `web`, but its segments on the revoked connection stay dropped.
        for _ in 0..3 {
            assert_eq!(node.verdict(DB, &back), Verdict::Drop(DropReason::ConnectionRevoked));
            assert_eq!(node.verdict(WEB, &there), Verdict::Drop(DropReason::ConnectionRevoked));
        }
        node.publish(Ingress::Usual);
        assert_eq!(node.verdict(WEB, &there), Verdict::Forward(DB), "allowed again while both ends still hold it");
        assert_eq!(node.verdict(DB, &back), Verdict::Forward(WEB));
    }
}

#[test]
fn replies_do_not_restore_a_revoked_udp_flow() {
    let mut node = Node::new();
    let (request, reply) = (udp(WEB4, DB4, (40000, 5432)), udp(DB4, WEB4, (5432, 40000)));
    assert_eq!(node.verdict(WEB, &request), Verdict::Forward(DB));
    assert_eq!(node.verdict(DB, &reply), Verdict::Forward(WEB));
    node.publish(Ingress::Nothing);
    for _ in 0..3 {
        assert_eq!(node.verdict(DB, &reply), Verdict::Drop(DropReason::ConnectionRevoked));
        assert_eq!(node.verdict(WEB, &request), Verdict::Drop(DropReason::ConnectionRevoked));
    }
}

#[test]
fn a_syn_reopens_a_revoked_connection_where_allowed() {
    let mut node = Node::new();
    let (there, _) = establish(&mut node);
    node.publish(Ingress::Nothing);
    assert_eq!(node.verdict(WEB, &there), Verdict::Drop(DropReason::ConnectionRevoked));
    let syn =
        |from, to, ports| tcp(from, to, ports, |header| (header.syn, header.sequence_number) = (true, 900_000), b"");
    assert_eq!(node.verdict(WEB, &syn(WEB4, DB4, (40000, 5432))), Verdict::Drop(DropReason::IngressDenied));
    assert_eq!(node.verdict(DB, &syn(DB4, WEB4, (5432, 40000))), Verdict::Forward(WEB), "its own connection");
}

#[test]
fn an_icmp_error_passes_only_for_the_connection_it_quotes() {
    let error = |from: &str, to: &str, quoted: &[u8]| {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (ip(from), ip(to)) else { panic!("IPv4 only") };
        let unreachable = etherparse::icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: 1300 };
        let mut frame = Vec::new();
        PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4(from.octets(), to.octets(), 64)
            .icmpv4(Icmpv4Type::DestinationUnreachable(unreachable))
            .write(&mut frame, &quoted[14..])
            .unwrap();
        assert!(matches!(parse(&frame).unwrap().transport, Transport::IcmpError { .. }));
        frame
    };
    let request = udp(WEB4, WORLD4, (40000, 53));
    let mut node = Node::new();
    assert_eq!(node.verdict(WEB, &request), Verdict::Forward(HOST));
    let router = "198.51.100.1";
    for (name, frame, expected) in [
        ("about a live connection", error(router, WEB4, &request), Verdict::Forward(WEB)),
        ("about none, without policy", error(router, WEB4, &udp(WEB4, WORLD4, (40001, 53))), Verdict::Forward(WEB)),
        ("about none", error(router, DB4, &udp(DB4, WORLD4, (40001, 53))), Verdict::Drop(DropReason::NoConnection)),
        ("to another than its sender", error(router, DB4, &request), Verdict::Drop(DropReason::NoConnection)),
        ("cut short", error(router, WEB4, &request[..30]), Verdict::Drop(DropReason::NoConnection)),
    ] {
        assert_eq!(node.verdict(HOST, &frame), expected, "{name}");
    }
    // A pod reports errors about packets sent to itself.
    let request = udp(WEB4, DB4, (40000, 5432));
    assert_eq!(node.verdict(WEB, &request), Verdict::Forward(DB));
    assert_eq!(node.verdict(DB, &error(DB4, WEB4, &request)), Verdict::Forward(WEB));
    let elsewhere = udp(WEB4, WORLD4, (40000, 53));
    assert_eq!(node.verdict(DB, &error(DB4, WEB4, &elsewhere)), Verdict::Drop(DropReason::NoConnection));
}

#[test]
fn every_frame_of_a_full_batch_gets_its_own_verdict() {
    let mut node = Node::new();
    let mut frames = MemoryFrames::new();
    for number in 0..BATCH as u16 {
        let frame = match number % 3 {
            0 => udp(WEB4, DB4, (1000 + number, 5432)),
            1 => udp(WEB4, DB4, (1000 + number, 80)),
            _ => udp(DB4, DB4, (1, 2)),
        };
        frames.push(frame).unwrap();
    }
    let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
    node.pipeline.process_batch(&node.snapshot, node.now, WEB, &mut frames, &mut verdicts, &mut ());
    for (number, verdict) in verdicts.iter().enumerate() {
        let expected = match number % 3 {
            0 => Verdict::Forward(DB),
            1 => Verdict::Drop(DropReason::IngressDenied),
            _ => Verdict::Drop(DropReason::SpoofedSource),
        };
        assert_eq!(*verdict, expected, "frame {number}");
    }
}

#[test]
fn forward_only_uses_neither_policy_nor_connections() {
    let mut node = Node::with(Config { entries: 1024, ..Config::default() }, PipelineMode::ForwardOnly);
    assert_eq!(node.verdict(WEB, &udp(WEB4, DB4, (1, 80))), Verdict::Forward(DB));
    assert_eq!(node.verdict(WEB, &udp(DB4, DB4, (1, 80))), Verdict::Drop(DropReason::SpoofedSource));
}

#[test]
fn the_quota_of_one_pod_leaves_room_for_the_others() {
    let mut node = Node::with(Config { entries: 1024, ..Config::default() }, PipelineMode::Full);
    let mut refused = 0;
    for port in 0..1000 {
        let handshake = |from, to, ports, edit: fn(&mut TcpHeader)| tcp(from, to, ports, edit, &[]);
        match node.verdict(WEB, &handshake(WEB4, DB4, (port, 5432), |tcp| tcp.syn = true)) {
            Verdict::Forward(DB) => {
                let reply = handshake(DB4, WEB4, (5432, port), |tcp| {
                    (tcp.syn, tcp.ack, tcp.acknowledgment_number) = (true, true, 1001);
                });
                assert_eq!(node.verdict(DB, &reply), Verdict::Forward(WEB));
                let last = handshake(WEB4, DB4, (port, 5432), |tcp| {
                    (tcp.ack, tcp.sequence_number, tcp.acknowledgment_number) = (true, 1001, 1001);
                });
                assert_eq!(node.verdict(WEB, &last), Verdict::Forward(DB));
            }
            Verdict::Drop(DropReason::QuotaExceeded) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refused, 1000 - 256, "a quarter of the table");
    assert_eq!(node.verdict(DB, &udp(DB4, WEB4, (1, 2))), Verdict::Forward(WEB));
}

#[test]
fn later_fragments_follow_their_first_fragment() {
    let fragment = |units: u16, more: bool, id: u16| {
        let frame = udp(WEB4, DB4, (40000, 5432));
        let mut header = etherparse::Ipv4Header::from_slice(&frame[14..]).unwrap().0;
        header.identification = id;
        header.dont_fragment = false;
        header.more_fragments = more;
        header.fragment_offset = units.try_into().unwrap();
        // Two units: a fragment other than the last contains whole units.
        let mut payload = frame[34..].to_vec();
        payload.resize(16, 0);
        header.set_payload_len(payload.len()).unwrap();
        header.header_checksum = header.calc_header_checksum();
        [&frame[..14], &header.to_bytes(), &payload].concat()
    };
    let mut node = Node::new();
    assert_eq!(node.verdict(WEB, &fragment(2, false, 7)), Verdict::Drop(DropReason::Fragment), "before the first");
    assert_eq!(node.verdict(WEB, &fragment(0, true, 7)), Verdict::Forward(DB));
    assert_eq!(node.verdict(WEB, &fragment(2, false, 7)), Verdict::Forward(DB));
    assert_eq!(
        node.verdict(WEB, &fragment(1, true, 7)),
        Verdict::Drop(DropReason::Fragment),
        "over the ports of the first"
    );
    assert_eq!(node.verdict(WEB, &fragment(2, false, 8)), Verdict::Drop(DropReason::Fragment), "another datagram's");
    node.publish(Ingress::Nothing);
    assert_eq!(
        node.verdict(WEB, &fragment(2, false, 7)),
        Verdict::Drop(DropReason::ConnectionRevoked),
        "of one that is cut"
    );
    assert_eq!(node.verdict(WEB, &fragment(0, true, 9)), Verdict::Drop(DropReason::ConnectionRevoked));
    assert_eq!(
        node.verdict(WEB, &fragment(2, false, 9)),
        Verdict::Drop(DropReason::Fragment),
        "its first did not pass"
    );
}

/// A segment with these flags that belongs to nothing.
fn segment(from: &str, to: &str, ports: (u16, u16), flags: &str) -> Vec<u8> {
    let edit = |header: &mut TcpHeader| {
        let has = |flag: char| flags.contains(flag);
        (header.syn, header.ack, header.fin, header.rst) = (has('S'), has('A'), has('F'), has('R'));
        (header.sequence_number, header.acknowledgment_number) = (77, 88);
    };
    tcp(from, to, ports, edit, b"data")
}

#[test]
fn between_ends_without_policy_no_state_is_asked_for() {
    let (there, back) = ((40000, 80), (80, 40000));
    let mut node = Node::with(Config { entries: 64, quota: Some(4), ..Config::default() }, PipelineMode::Full);
    for flags in ["A", "FA", "RA", "R", "SA", "SF", "F", "SA", "A", "S", "A"] {
        assert_eq!(node.verdict(WEB, &segment(WEB4, WORLD4, there, flags)), Verdict::Forward(HOST), "{flags}");
        assert_eq!(node.verdict(HOST, &segment(WORLD4, WEB4, back, flags)), Verdict::Forward(WEB), "{flags}");
        node.now = node.now.plus(std::time::Duration::from_secs(3));
    }
    assert_eq!(node.verdict(WEB, &ping(WEB4, WORLD4, false)), Verdict::Forward(HOST), "an answer to nothing");
    for port in 0..100 {
        let syn = segment(WEB4, WORLD4, (port, 80), "S");
        assert_eq!(node.verdict(WEB, &syn), Verdict::Forward(HOST), "beyond its share of the table");
    }
    // One of the ends is under policy.
    for (port, from, to) in [(WEB, WEB4, DB4), (DB, DB4, WORLD4), (HOST, WORLD4, DB4)] {
        for flags in ["FA", "R", "SA", "SF"] {
            let verdict = Node::new().verdict(port, &segment(from, to, there, flags));
            assert!(matches!(verdict, Verdict::Drop(_)), "{from} to {to}: {flags}: {verdict:?}");
        }
    }
}

#[test]
fn a_mid_stream_segment_opens_what_policy_allows_its_sender() {
    const OTHER4: &str = "198.51.100.1";
    // `db` accepts port 5432 from `web`, and everything from 203.0.113.0/24; it may send anything. Ports say nothing about the opener.
    for (name, port, (from, src), (to, dst), expected) in [
        ("of the opener", WEB, (WEB4, 40000), (DB4, 5432), Ok(HOST)),
        ("from outside", HOST, (WORLD4, 40000), (DB4, 80), Ok(DB)),
        ("to the outside", DB, (DB4, 80), (WORLD4, 40000), Ok(HOST)),
        ("of a client's own connection", DB, (DB4, 40000), (OTHER4, 80), Ok(HOST)),
        ("an answer to it: its opener may send", HOST, (OTHER4, 80), (DB4, 40000), Err(DropReason::IngressDenied)),
        ("of an opener that is denied", HOST, (OTHER4, 40000), (DB4, 5432), Err(DropReason::IngressDenied)),
        ("port of no rule", WEB, (WEB4, 40000), (DB4, 80), Err(DropReason::IngressDenied)),
        ("high ports of no rule", WEB, (WEB4, 50000), (DB4, 50001), Err(DropReason::IngressDenied)),
        ("low ports of no rule", WEB, (WEB4, 5000), (DB4, 5001), Err(DropReason::IngressDenied)),
    ] {
        let mut node = Node::new();
        let expected = expected.map_or_else(Verdict::Drop, Verdict::Forward);
        assert_eq!(node.verdict(port, &segment(from, to, (src, dst), "A")), expected, "{name}");
        let opened: Vec<_> = node.pipeline.connections().iter(node.now).map(|found| found.original.src).collect();
        let sender = matches!(expected, Verdict::Forward(_)).then(|| ip(from).into());
        assert_eq!(opened, Vec::from_iter(sender), "{name}");
        assert_eq!(node.pipeline.replies().take().count(), 0, "{name}: its receiver may have opened it");
    }
}

#[test]
fn a_connection_whose_server_was_seen_first_continues_under_policy() {
    // The server's segment comes first, while policy lets both ends open connections.
    for (client_may_open, expected) in
        [(true, Verdict::Forward(HOST)), (false, Verdict::Drop(DropReason::IngressDenied))]
    {
        let mut node = Node::new();
        let port = if client_may_open { 5432 } else { 80 };
        let (server, client) = ((DB, DB4, WEB4, (port, 40000)), (WEB, WEB4, DB4, (40000, port)));
        let send = |node: &mut Node, (from, src, dst, ports): (PortId, &str, &str, (u16, u16))| {
            node.verdict(from, &segment(src, dst, ports, "A"))
        };
        assert_eq!(send(&mut node, server), Verdict::Forward(HOST));
        node.publish(Ingress::UsualAndNoEgress);
        assert_eq!(send(&mut node, server), Verdict::Drop(DropReason::ConnectionRevoked));
        assert_eq!(send(&mut node, client), expected, "{client_may_open}");
        let answered = send(&mut node, server);
        assert_eq!(matches!(answered, Verdict::Forward(_)), client_may_open, "{answered:?}");
    }
}

#[test]
fn a_mid_stream_chunk_opens_what_policy_allows_its_sender() {
    // Data and a heartbeat (RFC 9260 section 3.2), behind a header with a verification tag.
    for (name, chunk) in [("DATA", 0), ("HEARTBEAT", 4)] {
        for ports in [(80, 40_000), (40_000, 80), (40_000, 40_001), (80, 81)] {
            let frame = |from: &str, to: &str| {
                let [src, dst] = [ports.0, ports.1].map(u16::to_be_bytes);
                let header = [src, dst, [0, 0], [0, 7], [0, 0], [0, 0], [chunk, 3], [0, 4]].concat();
                let [from, to] = [from, to].map(|end| end.parse::<std::net::Ipv4Addr>().unwrap().octets());
                let mut frame = Vec::new();
                let packet = PacketBuilder::ethernet2([2; 6], [2; 6]).ipv4(from, to, 64);
                packet.write(&mut frame, etherparse::IpNumber::SCTP, &header).unwrap();
                frame
            };
            // `web` may not send SCTP to `db`, and `db` may send anything to `web`.
            let mut node = Node::new();
            let denied = Verdict::Drop(DropReason::IngressDenied);
            assert_eq!(node.verdict(WEB, &frame(WEB4, DB4)), denied, "{name} {ports:?}");
            assert!(node.pipeline.connections().is_empty(), "{name} {ports:?}");
            assert_eq!(node.verdict(DB, &frame(DB4, WEB4)), Verdict::Forward(HOST), "{name} {ports:?}");
        }
    }
}

#[test]
fn only_a_segment_from_the_middle_is_refused_aloud() {
    for (flags, resets) in [("A", 1), ("FA", 1), ("S", 0), ("SA", 0), ("R", 0), ("RA", 0)] {
        let mut node = Node::new();
        node.publish(Ingress::NothingBothWays);
        let verdict = node.verdict(WEB, &segment(WEB4, DB4, (40000, 80), flags));
        assert_eq!(verdict, Verdict::Drop(DropReason::IngressDenied), "{flags}");
        let frames: Vec<_> = node.pipeline.replies().take().map(|(port, frame)| (port, frame.to_vec())).collect();
        assert_eq!(frames.len(), resets, "{flags}");
        for (port, frame) in frames {
            let Transport::Tcp(reset) = parse(&frame).unwrap().transport else { panic!("{flags}") };
            assert_eq!((port, reset.seq, reset.flags.0), (WEB, 88, 4), "what its sender expects next");
        }
    }
}

#[test]
fn a_flood_of_acks_never_evicts_what_both_ends_have_agreed_to() {
    let mut node = Node::with(Config { entries: 64, quota: Some(64), ..Config::default() }, PipelineMode::Full);
    let (there, back) = establish(&mut node);
    for port in 0..20_000 {
        // They belong to no connection: policy allows all of 203.0.113.0/24.
        let from = format!("203.0.113.{}", port % 250);
        node.verdict(HOST, &segment(&from, DB4, (40000 + port / 250, 80), "A"));
    }
    let statistics = node.pipeline.connections().statistics();
    assert!(statistics.refused_cannot_open > 0, "within half of the share: {statistics:?}");
    assert_eq!(node.verdict(WEB, &there), Verdict::Forward(DB));
    assert_eq!(node.verdict(DB, &back), Verdict::Forward(WEB));
}
