//! Connections to Services, packet by packet through the pipeline, without sockets. The names of tests have the clause.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use etherparse::{IcmpEchoHeader, Icmpv4Header, Icmpv4Type, IpNumber, PacketBuilder, TcpHeader, icmpv4};
use penstock_dataplane::conntrack::{Config, ConnTable, EndedConnection, Ending, SweepCursor, TableMemory, Timestamp};
use penstock_dataplane::forward::{Encapsulation, Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Flow, Protocol, Transport, parse};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::{
    AddressBlock, AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet,
    PortProtocol, PortRange, PortSpec, RuleAction, RuleName, RuleSet, RuleSpec, RuleTable, TieredTable,
};
use penstock_dataplane::services::{Affinity, Backend, Frontend, FrontendKey, ServiceSet, WithoutBackend};
use penstock_dataplane::{Epoch, Snapshot};

const HOST: PortId = PortId(0);
/// The client: pod `web`.
const WEB: PortId = PortId(1);
/// A backend on this node: pod `db`.
const DB: PortId = PortId(2);
const UPLINK: PortId = PortId(3);

const WEB4: &str = "10.0.0.1";
const WEB6: &str = "fd00::1";
const DB4: &str = "10.0.0.2";
const DB6: &str = "fd00::2";
/// A backend on another node.
const FAR4: &str = "10.0.1.9";
const FAR6: &str = "fd00::1:9";
const NODE4: &str = "192.168.0.1";
/// The Service's addresses.
const VIP4: &str = "10.96.0.10";
const VIP6: &str = "fd00:96::10";
/// The Service's port, and that of its backends.
const PORT: u16 = 80;
const TARGET: u16 = 8080;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn forwarding(node: &[&str]) -> Forwarding {
    let mut forwarding = Forwarding::new(node.iter().map(|text| ip(text).into()))
        .with_services(&["10.96.0.0/16".parse().unwrap(), "fd00:96::/108".parse().unwrap()]);
    for (id, kind, mtu, addresses) in [
        (HOST, PortKind::Host, 1500, &[][..]),
        (WEB, PortKind::Pod, 1500, &[WEB4, WEB6]),
        (DB, PortKind::Pod, 1400, &[DB4, DB6]),
        (UPLINK, PortKind::Uplink, 1500, &[]),
    ] {
        let addresses = addresses.iter().map(|text| ip(text).into()).collect();
        let (own_mac, peer_mac) = (Mac([2, 0, 0, 0, id.0 as u8, 1]), Mac([2, 0, 0, 0, id.0 as u8, 2]));
        forwarding.insert(id, Port::new(kind, own_mac, peer_mac, mtu, addresses)).unwrap();
    }
    forwarding
}

fn identity(number: u32) -> Identity {
    Identity(NonZeroU32::new(number).unwrap())
}

/// Pods `web`, `db` and one on another node, each with an identity of its own, and what the first two are subject to.
fn policy(web_egress: EndpointPolicy, db_ingress: EndpointPolicy) -> PolicySet {
    let pod = |number, node: u32| AddressOwner::Pod {
        identity: identity(number),
        endpoint: (node == 0).then_some(EndpointId(number)),
        node: Some(NodeId(node)),
    };
    let mut update = PolicySet::default().update();
    for (text, owner) in [
        (WEB4, pod(1, 0)),
        (WEB6, pod(1, 0)),
        (DB4, pod(2, 0)),
        (DB6, pod(2, 0)),
        (FAR4, pod(3, 1)),
        (FAR6, pod(3, 1)),
        (NODE4, AddressOwner::Node(NodeId(0))),
    ] {
        update.set_address(ip(text).into(), Some(owner));
    }
    update
        .set_endpoint(EndpointId(1), Some(Endpoint { egress: web_egress, ingress: EndpointPolicy::Open }))
        .set_endpoint(EndpointId(2), Some(Endpoint { egress: EndpointPolicy::Open, ingress: db_ingress }));
    update.finish()
}

/// A rule for pod `peer` on this port.
fn rule(port: u16) -> RuleSpec {
    let range = |protocol| PortRange { protocol, first: port, last: port };
    RuleSpec {
        name: RuleName::new("test/policy", "rule"),
        peers: PeerSpec::AnyOf { every_pod: false, blocks: Vec::new() },
        ports: PortSpec::AnyOf(vec![range(PortProtocol::Tcp), range(PortProtocol::Udp)]),
    }
}

fn rows(peer: u32) -> [(Identity, Option<RuleSet>); 1] {
    [(identity(peer), Some([0].into_iter().collect()))]
}

fn only(peer: u32, port: u16) -> EndpointPolicy {
    let rows = rows(peer).into_iter().filter_map(|(identity, row)| Some((identity, row?)));
    EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[rule(port)], rows)))
}

fn backend(text: &str) -> Backend {
    Backend { address: ip(text).into(), port: TARGET }
}

/// A frontend with these backends, all of which serve.
fn frontend(backends: &[&str]) -> Frontend {
    let mut backends: Vec<Backend> = backends.iter().map(|text| backend(text)).collect();
    backends.sort();
    let serving: Arc<[Backend]> = backends.clone().into();
    let (backends, without) = (backends.into(), WithoutBackend::Refused);
    Frontend { name: "shop/api:http".into(), backends, serving, without, affinity: None }
}

/// The Service at both of its addresses for TCP, UDP and SCTP, with the backends of each family.
fn services(frontend: impl Fn(bool) -> Frontend) -> ServiceSet {
    let mut set = ServiceSet::default();
    for (v4, vip) in [(true, VIP4), (false, VIP6)] {
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            let key = FrontendKey { address: ip(vip).into(), protocol, port: PORT };
            set.set(key, Some(Arc::new(frontend(v4))));
        }
    }
    set
}

struct Node {
    pipeline: Pipeline,
    snapshot: Snapshot,
    now: Timestamp,
}

impl Node {
    /// All is allowed; `db` is the only backend.
    fn new() -> Self {
        Self::with(services(|v4| frontend(&[if v4 { DB4 } else { DB6 }])))
    }

    fn with(services: ServiceSet) -> Self {
        Self::on(&Config { entries: 4096, ..Config::default() }, services)
    }

    fn on(config: &Config, services: ServiceSet) -> Self {
        let pipeline = Pipeline::new(Arc::new(ConnTable::new(config).unwrap()), PipelineMode::Full);
        let policy = policy(EndpointPolicy::Open, EndpointPolicy::Open);
        let snapshot = Snapshot::new(Epoch(1), policy, forwarding(&[NODE4])).with_services(Some(services));
        Self { pipeline, snapshot, now: Timestamp::from_millis(1_000_000) }
    }

    fn publish(&mut self, edit: impl FnOnce(&mut Snapshot)) {
        edit(&mut self.snapshot);
        let Snapshot { epoch, policy, forwarding, services, .. } = self.snapshot.clone();
        self.snapshot = Snapshot::new(epoch.next(), policy, forwarding).with_services(services);
    }

    fn set_services(&mut self, services: ServiceSet) {
        self.publish(|snapshot| snapshot.services = Some(services));
    }

    fn send(&mut self, port: PortId, frame: &[u8]) -> (Verdict, Vec<u8>) {
        let mut frames = MemoryFrames::new();
        frames.push(frame.to_vec()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, self.now, port, &mut frames, &mut verdicts, &mut ());
        (verdicts[0], frames.drain().next().unwrap())
    }

    /// Sends a packet that must pass to this port; returns the flow with which it leaves.
    fn pass(&mut self, from: PortId, frame: &[u8], to: PortId) -> Flow {
        let (verdict, sent) = self.send(from, frame);
        assert_eq!(verdict, Verdict::Forward(to));
        assert_sound(&sent);
        parse(&sent).unwrap().flow
    }

    fn refuse(&mut self, from: PortId, frame: &[u8], reason: DropReason) {
        assert_eq!(self.send(from, frame).0, Verdict::Drop(reason));
    }

    /// The replies of the node to the last batch, as frames with their port.
    fn replies(&mut self) -> Vec<(PortId, Vec<u8>)> {
        self.pipeline.replies().take().map(|(port, frame)| (port, frame.to_vec())).collect()
    }
}

/// Asserts all checksums of a frame.
fn assert_sound(frame: &[u8]) {
    let packet = parse(frame).expect("a valid packet");
    let (start, end) = (usize::from(packet.layout.transport), usize::from(packet.layout.end));
    let transport = &frame[start..end];
    if packet.fragment.is_some() || packet.transport == Transport::LaterFragment {
        return;
    }
    let protocol = packet.flow.protocol;
    if matches!(protocol, Protocol::TCP | Protocol::UDP | Protocol::ICMPV6) {
        let sum = penstock_dataplane::packet::Sum::pseudo_header(
            packet.flow.src,
            packet.flow.dst,
            protocol,
            transport.len() as u16,
        );
        assert_eq!(sum.add_bytes(transport).folded(), 0xffff, "{packet:?}");
    } else if protocol == Protocol::ICMP {
        assert_eq!(penstock_dataplane::packet::Sum::default().add_bytes(transport).folded(), 0xffff);
    }
}

fn flow(protocol: Protocol, from: (&str, u16), to: (&str, u16)) -> Flow {
    Flow { src: ip(from.0).into(), dst: ip(to.0).into(), protocol, src_port: from.1, dst_port: to.1 }
}

fn frame(flow: &Flow, edit: impl FnOnce(&mut TcpHeader)) -> Vec<u8> {
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    let ip = match (flow.src.v4_bytes(), flow.dst.v4_bytes()) {
        (Some(src), Some(dst)) => ethernet.ipv4(src, dst, 64),
        _ => ethernet.ipv6(flow.src.bits().to_be_bytes(), flow.dst.bits().to_be_bytes(), 64),
    };
    match flow.protocol {
        Protocol::TCP => {
            let mut header = TcpHeader::new(flow.src_port, flow.dst_port, 1000, 4096);
            edit(&mut header);
            ip.tcp_header(header).write(&mut frame, &[]).unwrap();
        }
        Protocol::UDP => ip.udp(flow.src_port, flow.dst_port).write(&mut frame, b"payload").unwrap(),
        _ => {
            let mut sctp = [flow.src_port.to_be_bytes(), flow.dst_port.to_be_bytes(), [0, 0], [0, 0]].concat();
            sctp.extend([0, 0, 0, 0, 1, 0, 0, 20]);
            sctp.extend([9; 16]);
            let crc = crc32c::crc32c(&sctp).to_le_bytes();
            sctp[8..12].copy_from_slice(&crc);
            ip.write(&mut frame, IpNumber::SCTP, &sctp).unwrap();
        }
    }
    frame
}

fn syn(flow: &Flow) -> Vec<u8> {
    frame(flow, |header| header.syn = true)
}

fn packet(flow: &Flow) -> Vec<u8> {
    frame(flow, |header| header.syn = true)
}

/// S9 and S10: what a client sends to the Service reaches the backend, and its answer comes from the Service.
#[test]
fn s10_replies_come_from_the_services_address() {
    for (client, vip, server) in [(WEB4, VIP4, DB4), (WEB6, VIP6, DB6)] {
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            let mut node = Node::new();
            let sent = flow(protocol, (client, 4000), (vip, PORT));
            let inner = flow(protocol, (client, 4000), (server, TARGET));
            assert_eq!(node.pass(WEB, &packet(&sent), DB), inner);
            if protocol == Protocol::SCTP {
                continue;
            }
            let answer = frame(&inner.reversed(), |header| (header.syn, header.ack) = (true, true));
            let answer = if protocol == Protocol::TCP { with_ack(answer) } else { answer };
            assert_eq!(node.pass(DB, &answer, WEB), sent.reversed());
            assert_eq!(node.pass(WEB, &later(&sent), DB), inner, "and so on");
        }
    }
}

/// Acknowledges the SYN of [`syn`].
fn with_ack(mut answer: Vec<u8>) -> Vec<u8> {
    let packet = parse(&answer).unwrap();
    let start = usize::from(packet.layout.transport);
    answer[start + 8..start + 12].copy_from_slice(&1001u32.to_be_bytes());
    answer[start + 16..start + 18].fill(0);
    let end = usize::from(packet.layout.end);
    let Flow { src, dst, protocol, .. } = packet.flow;
    let pseudo = penstock_dataplane::packet::Sum::pseudo_header(src, dst, protocol, (end - start) as u16);
    let checksum = !pseudo.add_bytes(&answer[start..end]).folded();
    answer[start + 16..start + 18].copy_from_slice(&checksum.to_be_bytes());
    answer
}

/// The client's next packet after a handshake, or datagram.
fn later(flow: &Flow) -> Vec<u8> {
    frame(flow, |header| {
        header.ack = true;
        header.sequence_number = 1001;
        header.acknowledgment_number = 1001;
    })
}

#[test]
fn s10_remote_backends_answer_by_the_host_port_or_an_uplink() {
    for from in [HOST, UPLINK] {
        let mut node = Node::with(services(|v4| frontend(&[if v4 { FAR4 } else { FAR6 }])));
        let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
        let inner = node.pass(WEB, &packet(&sent), HOST);
        assert_eq!(inner, flow(Protocol::UDP, (WEB4, 4000), (FAR4, TARGET)));
        assert_eq!(node.pass(from, &packet(&inner.reversed()), WEB), sent.reversed());
    }
}

#[test]
fn s10_a_host_network_backend_answers_as_the_service() {
    let mut node = Node::with(services(|v4| frontend(&[if v4 { NODE4 } else { FAR6 }])));
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &packet(&sent), HOST);
    assert_eq!(node.pass(HOST, &packet(&inner.reversed()), WEB), sent.reversed());
}

/// The ICMP error "port unreachable" from `from` about this packet.
fn unreachable(from: &str, about: &[u8]) -> Vec<u8> {
    let quoted = &about[14..];
    let (IpAddr::V4(src), Some(dst)) = (ip(from), parse(about).unwrap().flow.src.v4_bytes()) else { panic!("IPv4") };
    let kind = Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::Port);
    let bytes = [&Icmpv4Header::with_checksum(kind, quoted).to_bytes()[..], quoted].concat();
    let mut frame = Vec::new();
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(src.octets(), dst, 64)
        .write(&mut frame, IpNumber::ICMP, &bytes)
        .unwrap();
    frame
}

fn quote(frame: &[u8]) -> Flow {
    let packet = parse(frame).unwrap();
    let Transport::IcmpError { quoted_at } = packet.transport else { panic!("{packet:?}") };
    penstock_dataplane::packet::quoted_flow(frame, &packet, quoted_at).unwrap()
}

#[test]
fn s10_icmp_errors_quote_what_their_receiver_has_sent() {
    let mut node = Node::new();
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let (_, forwarded) = node.send(WEB, &packet(&sent));
    // By the backend, and by a router on the way.
    for (from, port, seen_from) in [(DB4, DB, VIP4), ("203.0.113.9", HOST, "203.0.113.9")] {
        let (verdict, error) = node.send(port, &unreachable(from, &forwarded));
        assert_eq!(verdict, Verdict::Forward(WEB));
        assert_sound(&error);
        let outer = parse(&error).unwrap().flow;
        assert_eq!((outer.src, outer.dst, quote(&error)), (ip(seen_from).into(), ip(WEB4).into(), sent));
    }
    // By the client about an answer.
    let inner = flow(Protocol::UDP, (WEB4, 4000), (DB4, TARGET));
    let (_, answer) = node.send(DB, &packet(&inner.reversed()));
    let (verdict, error) = node.send(WEB, &unreachable(WEB4, &answer));
    assert_eq!(verdict, Verdict::Forward(DB));
    assert_sound(&error);
    assert_eq!((parse(&error).unwrap().flow.dst, quote(&error)), (ip(DB4).into(), inner.reversed()));
}

#[test]
fn s10_path_mtu_errors_are_about_the_clients_own_packet() {
    let mut node = Node::new();
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let mut long = Vec::new();
    let (Some(src), Some(dst)) = (sent.src.v4_bytes(), sent.dst.v4_bytes()) else { panic!() };
    PacketBuilder::ethernet2([1; 6], [2; 6])
        .ipv4(src, dst, 64)
        .udp(sent.src_port, sent.dst_port)
        .write(&mut long, &[7; 1450])
        .unwrap();
    node.refuse(WEB, &long, DropReason::TooBig);
    let replies = node.replies();
    assert_eq!((replies.len(), replies[0].0, quote(&replies[0].1)), (1, WEB, sent));
    assert_eq!(replies[0].1[14 + 20 + 6..14 + 20 + 8], 1400u16.to_be_bytes());
}

/// S5: 12,000 connections over three backends: chi-square with two degrees of freedom, p = 0.0001.
#[test]
fn s5_backends_are_chosen_uniformly_once_for_each_connection() {
    let many = Config { entries: 120_000, ..Config::default() };
    let mut node = Node::on(&many, services(|_| frontend(&[DB4, FAR4, "10.0.1.10"])));
    let mut counts: BTreeMap<IpAddr, u32> = BTreeMap::new();
    for number in 0..12_000u16 {
        let sent = flow(Protocol::TCP, (WEB4, 1024 + number), (VIP4, PORT));
        let [first, again] = [(); 2].map(|()| {
            let (verdict, frame) = node.send(WEB, &syn(&sent));
            assert!(matches!(verdict, Verdict::Forward(_)), "{number}: {verdict:?}");
            frame
        });
        let chosen = parse(&first).unwrap().flow;
        assert_eq!(parse(&again).unwrap().flow, chosen, "pinned");
        *counts.entry(chosen.dst.into()).or_default() += 1;
    }
    let expected = 4000.0;
    let squares = counts.values().map(|&count| (f64::from(count) - expected).powi(2) / expected);
    assert!(counts.len() == 3 && squares.sum::<f64>() < 18.4, "{counts:?}");
}

#[test]
fn s5_a_connection_keeps_its_backend() {
    let mut node = Node::new();
    let sent = flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &syn(&sent), DB);
    node.set_services(services(|v4| frontend(&[if v4 { FAR4 } else { FAR6 }])));
    assert_eq!(node.pass(WEB, &syn(&sent), DB), inner);
    let other = flow(Protocol::TCP, (WEB4, 4001), (VIP4, PORT));
    assert_eq!(node.pass(WEB, &syn(&other), HOST).dst, ip(FAR4).into());
}

#[test]
fn s5_a_reused_port_after_an_ended_connection_chooses_again() {
    let mut node = Node::new();
    let sent = flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT));
    for backends in [[DB4, DB6], [FAR4, FAR6], [FAR4, FAR6], [DB4, DB6]] {
        node.set_services(services(|v4| frontend(&[backends[usize::from(!v4)]])));
        let to = if backends[0] == DB4 { DB } else { HOST };
        let inner = node.pass(WEB, &syn(&sent), to);
        assert_eq!(inner.dst, ip(backends[0]).into());
        let reset = frame(&inner.reversed(), |header| (header.rst, header.ack) = (true, true));
        assert_eq!(node.pass(to, &with_ack(reset), WEB), sent.reversed());
    }
}

#[test]
fn s6_a_client_keeps_its_backend_for_the_time_of_affinity() {
    let affinity = Some(Affinity { id: 7, seconds: 60 });
    let of = |backends: &[&str]| services(|_| Frontend { affinity, ..frontend(backends) });
    let mut node = Node::with(of(&[DB4, FAR4, "10.0.1.10", "10.0.1.11"]));
    let mut number = 1024;
    let mut open = |node: &mut Node, vip: &str| {
        number += 1;
        let (_, sent) = node.send(WEB, &syn(&flow(Protocol::TCP, (WEB4, number), (vip, PORT))));
        IpAddr::from(parse(&sent).unwrap().flow.dst)
    };
    let first = open(&mut node, VIP4);
    for _ in 0..20 {
        node.now = node.now.plus(std::time::Duration::from_secs(50));
        assert_eq!(open(&mut node, VIP4), first, "since the last new connection");
    }
    node.set_services(of(&["10.0.1.12", "10.0.1.13"]));
    let second = open(&mut node, VIP4);
    assert_ne!(second, first, "no longer eligible");
    assert!((0..20).all(|_| open(&mut node, VIP4) == second));
    let later: Vec<IpAddr> = (0..20)
        .map(|_| {
            node.now = node.now.plus(std::time::Duration::from_secs(61));
            open(&mut node, VIP4)
        })
        .collect();
    assert!(later.iter().any(|chosen| *chosen != later[0]), "{later:?}");
    let counted = node.pipeline.connections().statistics();
    assert_eq!((counted.translated, counted.affinity_kept), (62, 40));
    assert_eq!(node.pipeline.connections().affinity_entries().0, 1, "one client, one Service's port");
}

#[test]
fn s7_without_a_backend_tcp_is_reset_and_udp_unreachable() {
    let mut node = Node::with(services(|_| frontend(&[])));
    for (client, vip) in [(WEB4, VIP4), (WEB6, VIP6)] {
        let sent = flow(Protocol::TCP, (client, 4000), (vip, PORT));
        node.refuse(WEB, &syn(&sent), DropReason::NoBackend);
        let [(port, reset)] = &node.replies()[..] else { panic!("one reply") };
        let packet = parse(reset).unwrap();
        let Transport::Tcp(segment) = packet.transport else { panic!() };
        assert_eq!((*port, packet.flow, segment.flags.0, segment.ack), (WEB, sent.reversed(), 0x14, 1001));
        assert_sound(reset);
        for protocol in [Protocol::UDP, Protocol::SCTP] {
            let sent = flow(protocol, (client, 4000), (vip, PORT));
            node.refuse(WEB, &frame(&sent, |_| {}), DropReason::NoBackend);
            let [(port, error)] = &node.replies()[..] else { panic!("one reply") };
            assert_eq!((*port, quote(error)), (WEB, sent));
            assert_eq!(error[14 + if client == WEB4 { 20 } else { 40 } + 1], if client == WEB4 { 3 } else { 4 });
        }
    }
    assert!(node.pipeline.connections().is_empty());
}

#[test]
fn s3_with_backends_elsewhere_alone_packets_are_dropped() {
    let mut node = Node::with(services(|_| Frontend { without: WithoutBackend::Dropped, ..frontend(&[]) }));
    node.refuse(WEB, &syn(&flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT))), DropReason::NoLocalBackend);
    assert!(node.replies().is_empty());
}

#[test]
fn s8_other_ports_are_refused_and_other_addresses_dropped() {
    let mut node = Node::new();
    let other_port = flow(Protocol::TCP, (WEB4, 4000), (VIP4, 81));
    node.refuse(WEB, &syn(&other_port), DropReason::NoServicePort);
    assert_eq!(node.replies().len(), 1);
    let mut ping = Vec::new();
    let (Some(src), Some(dst)) = (other_port.src.v4_bytes(), other_port.dst.v4_bytes()) else { panic!() };
    let echo = Icmpv4Type::EchoRequest(IcmpEchoHeader { id: 7, seq: 1 });
    PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4(src, dst, 64).icmpv4(echo).write(&mut ping, b"ping").unwrap();
    node.refuse(WEB, &ping, DropReason::NoServicePort);
    assert_eq!(node.replies().len(), 1);
    node.refuse(WEB, &syn(&flow(Protocol::TCP, (WEB4, 4000), ("10.96.0.11", PORT))), DropReason::NoService);
    assert!(node.replies().is_empty());
    let outside = flow(Protocol::TCP, (WEB4, 4000), ("203.0.113.9", PORT));
    assert_eq!(node.pass(WEB, &syn(&outside), HOST), outside, "no Service's");
}

/// S9: the port is the backend's, and the Service's address matches nothing.
#[test]
fn s9_policy_is_evaluated_for_the_backend_on_both_sides() {
    let sent = flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT));
    let vip_block = RuleSpec {
        name: RuleName::new("test/policy", "vip"),
        peers: PeerSpec::AnyOf {
            every_pod: false,
            blocks: vec![AddressBlock { cidr: "10.96.0.0/16".parse().unwrap(), except: Vec::new() }],
        },
        ports: PortSpec::Every,
    };
    let to_vip = EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[vip_block], [])));
    let denied = |reason| Verdict::Drop(reason);
    for (egress, ingress, expected) in [
        (only(2, TARGET), only(1, TARGET), Verdict::Forward(DB)),
        (only(2, PORT), EndpointPolicy::Open, denied(DropReason::EgressDenied)),
        (only(3, TARGET), EndpointPolicy::Open, denied(DropReason::EgressDenied)),
        (to_vip, EndpointPolicy::Open, denied(DropReason::EgressDenied)),
        (EndpointPolicy::Open, only(1, PORT), denied(DropReason::IngressDenied)),
        (EndpointPolicy::Open, only(3, TARGET), denied(DropReason::IngressDenied)),
    ] {
        let mut node = Node::new();
        node.publish(|snapshot| snapshot.policy = policy(egress, ingress));
        assert_eq!(node.send(WEB, &syn(&sent)).0, expected);
        assert_eq!(node.pipeline.connections().is_empty(), expected != Verdict::Forward(DB));
    }
}

#[test]
fn s9_a_revoked_connection_is_cut_in_both_directions() {
    let mut node = Node::new();
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &packet(&sent), DB);
    node.publish(|snapshot| snapshot.policy = policy(only(3, TARGET), EndpointPolicy::Open));
    node.refuse(WEB, &packet(&sent), DropReason::ConnectionRevoked);
    node.refuse(DB, &packet(&inner.reversed()), DropReason::ConnectionRevoked);
    node.publish(|snapshot| snapshot.policy = policy(only(2, TARGET), EndpointPolicy::Open));
    assert_eq!(node.pass(WEB, &packet(&sent), DB), inner);
    assert_eq!(node.pass(DB, &packet(&inner.reversed()), WEB), sent.reversed());
}

#[test]
fn s11_a_pod_that_is_its_own_backend_reaches_itself() {
    for (client, vip) in [(WEB4, VIP4), (WEB6, VIP6)] {
        let mut node = Node::with(services(|v4| frontend(&[if v4 { WEB4 } else { WEB6 }])));
        let closed = || EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])));
        node.publish(|snapshot| snapshot.policy = policy(closed(), closed()));
        let sent = flow(Protocol::UDP, (client, 4000), (vip, PORT));
        let inner = node.pass(WEB, &packet(&sent), WEB);
        assert_eq!(inner, flow(Protocol::UDP, (vip, 4000), (client, TARGET)));
        assert_eq!(node.pass(WEB, &packet(&inner.reversed()), WEB), sent.reversed());
        node.publish(|snapshot| snapshot.policy = policy(only(2, 1), closed()));
        assert_eq!(node.pass(WEB, &packet(&sent), WEB), inner, "evaluated again");
        assert_eq!(node.pass(WEB, &packet(&inner.reversed()), WEB), sent.reversed());
    }
}

#[test]
fn s11_tiers_apply_to_a_pod_that_is_its_own_backend() {
    let mut node = Node::with(services(|v4| frontend(&[if v4 { WEB4 } else { WEB6 }])));
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    for (action, expected) in
        [(RuleAction::Deny, Verdict::Drop(DropReason::EgressDenied)), (RuleAction::Accept, Verdict::Forward(WEB))]
    {
        let rows = rows(1).into_iter().filter_map(|(identity, row)| Some((identity, row?)));
        let table = RuleTable::new(&[rule(TARGET)], rows);
        let tiers = EndpointPolicy::Tiered(Arc::new(TieredTable::new(table, [action], 1, true)));
        node.publish(|snapshot| snapshot.policy = policy(tiers, EndpointPolicy::Open));
        assert_eq!(node.send(WEB, &packet(&sent)).0, expected);
    }
}

#[test]
fn s12_a_datagram_flow_leaves_a_backend_that_stops_serving() {
    let mut node = Node::new();
    let udp = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let tcp = flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &packet(&udp), DB);
    assert_eq!(node.pass(WEB, &syn(&tcp), DB).dst, ip(DB4).into());
    // It terminates and still serves.
    let leaving = Frontend { serving: [backend(DB4), backend(FAR4)].into(), ..frontend(&[FAR4]) };
    node.set_services(services(|_| leaving.clone()));
    assert_eq!(node.pass(WEB, &packet(&udp), DB), inner);
    // None serves: refused, as kube-proxy does, which forgets the flow.
    node.set_services(services(|_| frontend(&[])));
    node.refuse(WEB, &packet(&udp), DropReason::NoBackend);
    node.set_services(services(|_| frontend(&[FAR4])));
    assert_eq!(node.pass(WEB, &packet(&udp), HOST), flow(Protocol::UDP, (WEB4, 4000), (FAR4, TARGET)));
    assert_eq!(node.pass(WEB, &syn(&tcp), DB).dst, ip(DB4).into(), "TCP is left to end by itself");
}

/// A resolver asks from a port again, when its last question from there has timed out and was not swept yet.
#[test]
fn a_port_used_again_after_expiry_chooses_again() {
    let mut node = Node::new();
    let udp = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    for backends in [[DB4, DB6], [FAR4, FAR6], [DB4, DB6], [FAR4, FAR6]] {
        node.set_services(services(|v4| frontend(&[backends[usize::from(!v4)]])));
        let to = if backends[0] == DB4 { DB } else { HOST };
        let inner = node.pass(WEB, &packet(&udp), to);
        assert_eq!(inner.dst, ip(backends[0]).into());
        assert_eq!(node.pass(to, &packet(&inner.reversed()), WEB), udp.reversed());
        node.now = node.now.plus(std::time::Duration::from_secs(600));
    }
}

/// Otherwise it would open a connection from backend to client, for which no later packet could get this backend again.
#[test]
fn s12_a_late_answer_of_a_former_backend_is_the_services() {
    let mut node = Node::new();
    let udp = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &packet(&udp), DB);
    node.set_services(services(|_| frontend(&[FAR4])));
    for _ in 0..2 {
        assert_eq!(node.pass(DB, &packet(&inner.reversed()), WEB), udp.reversed());
    }
    let other = flow(Protocol::UDP, (WEB4, 4000), (FAR4, TARGET));
    assert_eq!(node.pass(WEB, &packet(&udp), HOST), other, "answers do not keep the flow");
    node.set_services(services(|_| frontend(&[DB4])));
    assert_eq!(node.pass(WEB, &packet(&udp), DB), inner, "the former backend can be had again");
    // Policy counts for late answers, too.
    node.set_services(services(|_| frontend(&[FAR4])));
    node.publish(|snapshot| snapshot.policy = policy(EndpointPolicy::Open, only(3, TARGET)));
    node.refuse(DB, &packet(&inner.reversed()), DropReason::ConnectionRevoked);
    assert_eq!(node.pass(WEB, &packet(&udp), HOST), other, "one that is denied does not either");
}

#[test]
fn s12_errors_and_fragments_of_a_former_backend_do_not_keep_it() {
    let udp = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let other = flow(Protocol::UDP, (WEB4, 4000), (FAR4, TARGET));
    let mut node = Node::new();
    let (_, forwarded) = node.send(WEB, &packet(&udp));
    node.set_services(services(|_| frontend(&[FAR4])));
    for (from, port) in [(DB4, DB), ("203.0.113.9", HOST)] {
        node.refuse(port, &unreachable(from, &forwarded), DropReason::NoConnection);
    }
    assert_eq!(node.pass(WEB, &packet(&udp), HOST), other);

    let mut node = Node::new();
    let datagram = [&packet(&udp)[34..], &[7; 100]].concat();
    assert_eq!(node.send(WEB, &fragment(0, true, &datagram[..64])).0, Verdict::Forward(DB));
    node.set_services(services(|_| frontend(&[FAR4])));
    node.refuse(WEB, &fragment(64, false, &datagram[64..]), DropReason::Fragment);
    assert_eq!(node.pass(WEB, &packet(&udp), HOST), other);
}

#[test]
fn s12_a_service_that_is_deleted_ends_its_datagram_flows() {
    let mut node = Node::new();
    let udp = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let tcp = flow(Protocol::TCP, (WEB4, 4000), (VIP4, PORT));
    let other = flow(Protocol::UDP, (WEB4, 4001), (VIP4, PORT));
    node.pass(WEB, &packet(&udp), DB);
    node.pass(WEB, &syn(&tcp), DB);
    let answer = node.pass(WEB, &packet(&other), DB).reversed();
    node.set_services(ServiceSet::default());
    node.refuse(DB, &packet(&answer), DropReason::NoConnection);
    node.refuse(WEB, &packet(&udp), DropReason::NoService);
    node.pass(WEB, &syn(&tcp), DB);
}

#[test]
fn s13_an_address_that_the_node_has_itself_goes_to_the_node() {
    let mut node = Node::new();
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    node.pass(WEB, &packet(&sent), DB);
    node.publish(|snapshot| snapshot.forwarding = forwarding(&[NODE4, VIP4]));
    assert_eq!(node.pass(WEB, &packet(&sent), HOST), sent);
    let other = flow(Protocol::UDP, (WEB4, 4001), (VIP4, PORT));
    assert_eq!(node.pass(WEB, &packet(&other), HOST), other);
    node.publish(|snapshot| snapshot.forwarding = forwarding(&[NODE4]));
    let third = flow(Protocol::UDP, (WEB4, 4002), (VIP4, PORT));
    assert_eq!(node.pass(WEB, &packet(&third), DB).dst, ip(DB4).into());
}

/// S15: what comes from the node or from outside is kube-proxy's.
#[test]
fn s15_only_pods_packets_are_translated() {
    let mut node = Node::new();
    let from_node = flow(Protocol::UDP, (NODE4, 4000), (DB4, TARGET));
    assert_eq!(node.pass(HOST, &packet(&from_node), DB), from_node);
    let to_vip = flow(Protocol::UDP, (NODE4, 4000), (VIP4, PORT));
    assert!(matches!(node.send(HOST, &packet(&to_vip)).0, Verdict::Drop(_)), "it has no way back to the node");
}

#[test]
fn without_services_packets_go_to_the_node_unchanged() {
    let mut node = Node::new();
    node.publish(|snapshot| snapshot.services = None);
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    assert_eq!(node.pass(WEB, &packet(&sent), HOST), sent);
    // A connection that the node translates stays with it when workers begin to translate.
    node.set_services(services(|_| frontend(&[DB4])));
    assert_eq!(node.pass(WEB, &packet(&sent), HOST), sent);
}

/// The same client port to the Service and to its backend: the second one cannot be told from the first.
#[test]
fn a_flow_of_another_connection_is_not_chosen_or_taken() {
    let mut node = Node::with(services(|_| frontend(&[DB4, FAR4])));
    let direct = flow(Protocol::UDP, (WEB4, 4000), (DB4, TARGET));
    assert_eq!(node.pass(WEB, &packet(&direct), DB), direct);
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    assert_eq!(node.pass(WEB, &packet(&sent), HOST).dst, ip(FAR4).into(), "the other one");
    let direct = flow(Protocol::UDP, (WEB4, 4000), (FAR4, TARGET));
    node.refuse(WEB, &packet(&direct), DropReason::FlowInUse);
    let mut node = Node::new();
    let direct = flow(Protocol::UDP, (WEB4, 4000), (DB4, TARGET));
    node.pass(WEB, &packet(&direct), DB);
    node.refuse(WEB, &packet(&sent), DropReason::FlowInUse);
}

/// A fragment of the client's datagram to the Service.
fn fragment(offset: u16, more: bool, payload: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(client), IpAddr::V4(vip)) = (ip(WEB4), ip(VIP4)) else { panic!() };
    let length = payload.len() as u16;
    let mut header = etherparse::Ipv4Header::new(length, 64, IpNumber::UDP, client.octets(), vip.octets()).unwrap();
    header.identification = 77;
    header.more_fragments = more;
    header.fragment_offset = (offset / 8).try_into().unwrap();
    header.header_checksum = header.calc_header_checksum();
    [&[1; 6][..], &[2; 6], &[8, 0], &header.to_bytes(), payload].concat()
}

#[test]
fn fragments_go_to_the_backend_of_their_first_one() {
    let mut node = Node::new();
    let whole = packet(&flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT)));
    let udp = [&whole[34..], &[7; 100]].concat();
    let first = node.send(WEB, &fragment(0, true, &udp[..64]));
    let second = node.send(WEB, &fragment(64, false, &udp[64..]));
    assert_eq!((first.0, second.0), (Verdict::Forward(DB), Verdict::Forward(DB)));
    let (first, second) = (parse(&first.1).unwrap(), parse(&second.1).unwrap());
    assert_eq!(first.flow, flow(Protocol::UDP, (WEB4, 4000), (DB4, TARGET)));
    assert_eq!((second.flow.src, second.flow.dst), (ip(WEB4).into(), ip(DB4).into()));
}

#[test]
fn a_tunnel_to_a_node_is_no_backend() {
    let mut node = Node::with(services(|_| Frontend {
        backends: [Backend { address: ip(NODE4).into(), port: 4789 }].into(),
        ..frontend(&[])
    }));
    node.publish(|snapshot| {
        let encapsulation = Encapsulation::refused([4789], [ip(NODE4).into()], []);
        snapshot.forwarding = snapshot.forwarding.clone().with_encapsulation(Arc::new(encapsulation));
    });
    node.refuse(WEB, &packet(&flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT))), DropReason::Encapsulation);
}

#[test]
fn a_restart_keeps_connections_to_services_with_their_backends() {
    let directory = tempfile::tempdir().unwrap();
    let config =
        Config { entries: 4096, memory: TableMemory::File(directory.path().join("conntrack")), ..Config::default() };
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let mut node = Node::on(&config, services(|_| frontend(&[DB4])));
    let inner = node.pass(WEB, &packet(&sent), DB);
    drop(node);
    let also = Frontend { serving: [backend(DB4), backend(FAR4)].into(), ..frontend(&[FAR4]) };
    let mut node = Node::on(&config, services(|_| also.clone()));
    assert_eq!(node.pipeline.connections().len(), 2);
    assert_eq!(node.pass(WEB, &packet(&sent), DB), inner);
    assert_eq!(node.pass(DB, &packet(&inner.reversed()), WEB), sent.reversed());
}

#[test]
fn both_entries_of_a_connection_end_together() {
    let mut node = Node::new();
    let sent = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let inner = node.pass(WEB, &packet(&sent), DB);
    assert_eq!(node.pipeline.connections().len(), 2);
    let listed: Vec<_> = node.pipeline.connections().iter(node.now).collect();
    assert_eq!(listed.len(), 1, "a listing has it once");
    let ends = |flow: Flow| (IpAddr::from(flow.src), IpAddr::from(flow.dst), flow.dst_port);
    assert_eq!(listed[0].frontend.map(ends), Some((ip(WEB4), ip(VIP4), PORT)), "with what its client sent");
    assert_eq!(ends(listed[0].original), (ip(WEB4), ip(DB4), TARGET));
    assert_eq!(node.pipeline.connections().remove_addresses(&[ip(DB4).into()]), 1);
    let mut cursor = Default::default();
    let later = node.now.plus(std::time::Duration::from_secs(2));
    while !node.pipeline.connections().sweep(&mut cursor, 256, later, Epoch(1)).wrapped {}
    assert!(node.pipeline.connections().is_empty());
    // And without waiting for it: the same flow again, at once.
    assert_eq!(node.pass(WEB, &packet(&sent), DB), inner);
    node.pipeline.connections().remove_addresses(&[ip(DB4).into()]);
    assert_eq!(node.pass(WEB, &packet(&sent), DB), inner);
    assert_eq!(node.pass(DB, &packet(&inner.reversed()), WEB), sent.reversed());
    assert_eq!(node.pipeline.connections().len(), 2);
    // The client's entry alone.
    node.pipeline.connections().remove_addresses(&[ip(VIP4).into()]);
    node.pass(WEB, &packet(&sent), DB);
    assert_eq!(node.pass(DB, &packet(&inner.reversed()), WEB), sent.reversed());
}

#[test]
fn a_flood_to_a_service_does_not_fill_the_table() {
    let small = Config { entries: 1024, ..Config::default() };
    let mut node = Node::on(&small, services(|_| frontend(&[DB4, FAR4])));
    for number in 0..60_000u32 {
        let sent = flow(Protocol::UDP, (WEB4, 1024 + (number % 60_000) as u16), (VIP4, PORT));
        node.now = node.now.plus(std::time::Duration::from_millis(1));
        let (first, again) = (node.send(WEB, &packet(&sent)), node.send(WEB, &packet(&sent)));
        // It evicts older connections of the pod, and is pinned all the same.
        match first.0 {
            Verdict::Forward(_) => assert_eq!(first.1, again.1, "{number}"),
            other => assert_eq!(other, Verdict::Drop(DropReason::QuotaExceeded), "{number}"),
        }
    }
    let connections = node.pipeline.connections();
    assert!(connections.len() <= 1200, "{}", connections.len());
}

/// A record of a connection to a Service names the address that its client used, however it ended.
#[test]
fn records_of_connections_to_services_have_the_cluster_address() {
    let to_vip = flow(Protocol::UDP, (WEB4, 4000), (VIP4, PORT));
    let opened = |entries| {
        let config = Config { entries, ended: 4096, ..Config::default() };
        let mut node = Node::on(&config, services(|v4| frontend(&[if v4 { DB4 } else { DB6 }])));
        node.pass(WEB, &packet(&to_vip), DB);
        node
    };
    let ended = |node: &Node| node.pipeline.connections().take_ended().expect("an ended connection");
    let assert_record = |record: EndedConnection, ending| {
        assert_eq!((record.ending, record.frontend), (ending, Some(to_vip)));
        assert_eq!((record.original.dst, record.original.dst_port), (ip(DB4).into(), TARGET));
        assert_eq!(record.traffic.map(|traffic| traffic.packets), [1, 0]);
    };

    let node = opened(4096);
    let later = node.now.plus(Duration::from_secs(600));
    let mut cursor = SweepCursor::default();
    while !node.pipeline.connections().sweep(&mut cursor, 4096, later, node.snapshot.epoch).wrapped {}
    assert_record(ended(&node), Ending::Expired);

    let mut node = opened(4096);
    node.set_services(services(|v4| frontend(&[if v4 { FAR4 } else { FAR6 }])));
    node.send(WEB, &packet(&to_vip));
    assert_record(ended(&node), Ending::BackendGone);

    // Its frontend's entry is evicted, or its own.
    let mut node = opened(64);
    let others = (1..2000).map(|port| flow(Protocol::UDP, (WEB4, 10_000 + port), (DB4, 53)));
    others.for_each(|other| _ = node.send(WEB, &packet(&other)));
    let found = std::iter::from_fn(|| node.pipeline.connections().take_ended()).find(|it| it.frontend.is_some());
    assert_record(found.expect("it was evicted"), Ending::Evicted);
}
