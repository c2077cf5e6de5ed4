//! Connections between two pods that traverse the node's own stack: they do so in both directions, and so do ICMP
//! errors and resets about them.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use etherparse::{IpNumber, Ipv4Header, PacketBuilder};
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::{Encapsulation, Forwarding, Mac, Port, PortId, PortKind, WELL_KNOWN_TUNNEL_PORTS};
use penstock_dataplane::names::NameTime;
use penstock_dataplane::packet::{Address, Flow, parse};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{
    BATCH, DropReason, EvaluationReason, Frames, Observer, OriginalSources, Pipeline, PipelineMode, StackSender,
    Verdict, evaluate_connection,
};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, EvaluationForm, Identity, NodeId, PolicySet, PolicyVerdict,
    RuleTable,
};
use penstock_dataplane::reply::{OnRevoke, ReplySettings};
use penstock_dataplane::{Epoch, Snapshot};

pub(crate) const HOST: PortId = PortId(0);
pub(crate) const A: PortId = PortId(1);
pub(crate) const B: PortId = PortId(2);
pub(crate) const UPLINK: PortId = PortId(3);
pub(crate) const A_IPS: [&str; 2] = ["10.0.0.1", "fd00::1"];
pub(crate) const B_IPS: [&str; 2] = ["10.0.0.2", "fd00::2"];
const GHOST: &str = "10.0.0.9";
pub(crate) const NODE_IPS: [&str; 2] = ["192.168.0.1", "fd01::1"];
const B_MTU: u16 = 1400;

const SYN: u8 = 2;
const SYN_ACK: u8 = 18;
const ACK: u8 = 16;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) struct Node {
    pub(crate) pipeline: Pipeline,
    pub(crate) snapshot: Snapshot,
}

impl Node {
    pub(crate) fn new() -> Self {
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        let encapsulation = Encapsulation::refused(WELL_KNOWN_TUNNEL_PORTS, NODE_IPS.map(|text| ip(text).into()), []);
        let mut forwarding = Forwarding::new(NODE_IPS.map(|text| ip(text).into()))
            .with_portless([ip(GHOST).into()])
            .with_encapsulation(Arc::new(encapsulation));
        for (id, kind, mtu, addresses) in [
            (HOST, PortKind::Host, 1500, [].as_slice()),
            (A, PortKind::Pod, 1500, &A_IPS),
            (B, PortKind::Pod, B_MTU, &B_IPS),
            (UPLINK, PortKind::Uplink, 1500, &[]),
        ] {
            let addresses = addresses.iter().map(|text| ip(text).into()).collect();
            let mac = |end| Mac([2, 0, 0, 0, id.0 as u8, end]);
            forwarding.insert(id, Port::new(kind, mac(1), mac(2), mtu, addresses)).unwrap();
        }
        let pipeline = Pipeline::new(connections, PipelineMode::Full)
            .replying(ReplySettings { on_revoke: OnRevoke::Reset, ..ReplySettings::default() });
        let mut node = Self { pipeline, snapshot: Snapshot::new(Epoch(0), PolicySet::default(), forwarding) };
        node.publish(true);
        node
    }

    /// `b` admits everything, or nothing.
    fn publish(&mut self, open: bool) {
        self.publish_both(true, open);
    }

    /// `a` may send everything, or nothing.
    fn publish_egress(&mut self, open: bool) {
        self.publish_both(open, true);
    }

    fn publish_both(&mut self, a_may_send: bool, b_admits: bool) {
        let policy = |open| {
            if open { EndpointPolicy::Open } else { EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], []))) }
        };
        self.publish_policies(policy(a_may_send), policy(b_admits));
    }

    /// The egress policy of `a`, and the ingress policy of `b`.
    pub(crate) fn publish_policies(&mut self, egress: EndpointPolicy, ingress: EndpointPolicy) {
        let pod = |number| AddressOwner::Pod {
            identity: Identity(NonZeroU32::new(number).unwrap()),
            endpoint: Some(EndpointId(number)),
            node: Some(NodeId(0)),
        };
        let mut update = PolicySet::default().update();
        for (texts, owner) in [(A_IPS, pod(1)), (B_IPS, pod(2)), (NODE_IPS, AddressOwner::Node(NodeId(0)))] {
            for text in texts {
                update.set_address(ip(text).into(), Some(owner));
            }
        }
        update
            .set_endpoint(EndpointId(1), Some(Endpoint { egress, ingress: EndpointPolicy::Open }))
            .set_endpoint(EndpointId(2), Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
        let epoch = Epoch(self.snapshot.epoch.0 + 1);
        self.snapshot = Snapshot::new(epoch, update.finish(), self.snapshot.forwarding.clone());
    }

    /// The verdict on one frame, and its replies with their egress ports.
    fn send(&mut self, port: PortId, frame: &[u8]) -> (Verdict, Vec<(PortId, Vec<u8>)>) {
        let mut frames = MemoryFrames::new();
        frames.push(frame.to_vec()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let now = Timestamp::from_millis(1_000_000);
        self.pipeline.process_batch(&self.snapshot, now, port, &mut frames, &mut verdicts, &mut ());
        let replies = self.pipeline.replies().take().map(|(port, frame)| (port, frame.to_vec())).collect();
        (verdicts[0], replies)
    }

    fn verdict(&mut self, port: PortId, frame: &[u8]) -> Verdict {
        self.send(port, frame).0
    }

    /// The verdict on one frame, and how it leaves.
    pub(crate) fn forward(&mut self, port: PortId, sender: StackSender, frame: Vec<u8>) -> (Verdict, Vec<u8>) {
        let mut frames = OfStack(MemoryFrames::new(), sender);
        frames.0.push(frame).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let now = Timestamp::from_millis(1_000_000);
        self.pipeline.process_batch(&self.snapshot, now, port, &mut frames, &mut verdicts, &mut ());
        (verdicts[0], frames.bytes(0).to_vec())
    }
}

pub(crate) fn builder(from: &str, to: &str, ttl: u8) -> etherparse::PacketBuilderStep<etherparse::IpHeaders> {
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    match (ip(from), ip(to)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), ttl),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), ttl),
        _ => panic!("{from} and {to} are of two families"),
    }
}

pub(crate) fn udp(from: (&str, u16), to: (&str, u16), length: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    builder(from.0, to.0, 64).udp(from.1, to.1).write(&mut frame, &vec![0; length]).unwrap();
    frame
}

fn tcp(from: (&str, u16), to: (&str, u16), flags: u8, (seq, ack): (u32, u32)) -> Vec<u8> {
    let mut header = etherparse::TcpHeader::new(from.1, to.1, seq, 4096);
    (header.syn, header.ack, header.acknowledgment_number) = (flags & SYN != 0, flags & ACK != 0, ack);
    let mut frame = Vec::new();
    builder(from.0, to.0, 64).tcp_header(header).write(&mut frame, &[]).unwrap();
    frame
}

/// "Port unreachable" about a frame.
fn unreachable(from: &str, to: &str, about: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    if ip(from).is_ipv4() {
        let kind = etherparse::Icmpv4Type::DestinationUnreachable(etherparse::icmpv4::DestUnreachableHeader::Port);
        builder(from, to, 64).icmpv4(kind).write(&mut frame, &about[14..]).unwrap();
    } else {
        let kind = etherparse::Icmpv6Type::DestinationUnreachable(etherparse::icmpv6::DestUnreachableCode::Port);
        builder(from, to, 64).icmpv6(kind).write(&mut frame, &about[14..]).unwrap();
    }
    frame
}

/// One of two fragments of an IPv4 datagram.
fn fragment(mut frame: Vec<u8>, offset: u16, more: bool) -> Vec<u8> {
    let word = (offset / 8) | (u16::from(more) << 13);
    frame[18..20].copy_from_slice(&77_u16.to_be_bytes());
    frame[20..22].copy_from_slice(&word.to_be_bytes());
    let header = Ipv4Header::from_slice(&frame[14..]).unwrap().0;
    frame[24..26].copy_from_slice(&header.calc_header_checksum().to_be_bytes());
    frame
}

#[test]
fn a_connection_by_the_nodes_stack_uses_it_both_ways() {
    for v6 in [0, 1] {
        let mut node = Node::new();
        let (a, b) = ((A_IPS[v6], 1000), (B_IPS[v6], 8080));
        // The node has translated what A sent to a Service.
        assert_eq!(node.verdict(HOST, &udp(a, b, 10)), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &udp(b, a, 10)), Verdict::Forward(HOST));
        // From there the reply returns with the Service's address or, untranslated, with its own.
        assert_eq!(node.verdict(HOST, &udp(b, a, 10)), Verdict::Forward(A));
        assert_eq!(node.verdict(A, &udp(a, b, 10)), Verdict::Forward(HOST));
        // This does not apply to a connection that did not come from there.
        let (direct, other) = ((A_IPS[v6], 1001), (B_IPS[v6], 8080));
        assert_eq!(node.verdict(A, &udp(direct, other, 10)), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &udp(other, direct, 10)), Verdict::Forward(A));
        // Until its opener reaches the same pod through a Service, from the same port.
        assert_eq!(node.verdict(HOST, &udp(direct, other, 10)), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &udp(other, direct, 10)), Verdict::Forward(HOST));
        node.publish(true);
        assert_eq!(node.verdict(B, &udp(other, direct, 10)), Verdict::Forward(HOST), "after it was evaluated again");
    }
}

#[test]
fn a_mid_stream_segment_between_pods_goes_by_the_stack() {
    for v6 in [0, 1] {
        let mut node = Node::new();
        let (a, b) = ((A_IPS[v6], 1000), (B_IPS[v6], 8080));
        assert_eq!(node.verdict(B, &tcp(b, a, ACK, (5000, 1001))), Verdict::Forward(HOST));
        assert_eq!(node.verdict(HOST, &tcp(b, a, ACK, (5000, 1001))), Verdict::Forward(A));
        // One that is seen from its beginning does not.
        let (a, b) = ((A_IPS[v6], 1001), (B_IPS[v6], 8080));
        assert_eq!(node.verdict(A, &tcp(a, b, SYN, (1000, 0))), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &tcp(b, a, SYN_ACK, (5000, 1001))), Verdict::Forward(A));
    }
}

#[test]
fn icmp_errors_follow_a_connection_through_the_stack() {
    for v6 in [0, 1] {
        let mut node = Node::new();
        let (a, b) = ((A_IPS[v6], 1000), (B_IPS[v6], 8080));
        let sent = udp(a, b, 10);
        assert_eq!(node.verdict(HOST, &sent), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &unreachable(b.0, a.0, &sent)), Verdict::Forward(HOST));
        // A packet too long for B's link: the sender's stack only learns the translated packet's MTU through the node.
        let (verdict, replies) = node.send(HOST, &udp(a, b, 1420));
        assert_eq!(verdict, Verdict::Drop(DropReason::TooBig));
        assert_eq!(replies.iter().map(|reply| reply.0).collect::<Vec<_>>(), [HOST]);
        assert_eq!(&replies[0].1[..6], &[2, 0, 0, 0, 0, 2], "to the node's end");
        // On a direct connection the sender is notified directly.
        let (verdict, replies) = node.send(A, &udp((a.0, 1001), b, 1420));
        assert_eq!((verdict, replies[0].0), (Verdict::Drop(DropReason::TooBig), A));
    }
}

#[test]
fn later_fragments_follow_the_first_through_the_stack() {
    let mut node = Node::new();
    let (a, b) = ((A_IPS[0], 1000), (B_IPS[0], 8080));
    assert_eq!(node.verdict(HOST, &udp(a, b, 10)), Verdict::Forward(B));
    let reply = udp(b, a, 800);
    assert_eq!(node.verdict(B, &fragment(reply.clone(), 0, true)), Verdict::Forward(HOST));
    assert_eq!(node.verdict(B, &fragment(reply, 808, false)), Verdict::Forward(HOST));
}

#[test]
fn resets_through_the_stack_take_each_ends_path() {
    let mut node = Node::new();
    let (a, b) = ((A_IPS[0], 1000), (B_IPS[0], 8080));
    assert_eq!(node.verdict(HOST, &tcp(a, b, SYN, (1000, 0))), Verdict::Forward(B));
    assert_eq!(node.verdict(B, &tcp(b, a, SYN_ACK, (5000, 1001))), Verdict::Forward(HOST));
    assert_eq!(node.verdict(HOST, &tcp(a, b, ACK, (1001, 5001))), Verdict::Forward(B));
    node.publish(false);
    let (verdict, replies) = node.send(B, &tcp(b, a, ACK, (5001, 1001)));
    assert_eq!(verdict, Verdict::Drop(DropReason::ConnectionRevoked));
    assert_eq!(replies.iter().map(|reply| reply.0).collect::<Vec<_>>(), [B, HOST], "the sender, then the other end");
}

#[test]
fn an_untranslated_connection_leaves_the_nodes_stack() {
    for v6 in [0, 1] {
        let ends = |port| ((A_IPS[v6], port), (B_IPS[v6], 8080));
        // Workers met it in its middle.
        let (mut node, (a, b)) = (Node::new(), ends(1000));
        let (asks, answers) = (tcp(a, b, ACK, (1001, 5000)), tcp(b, a, ACK, (5000, 1001)));
        for sender in [StackSender::Unknown, StackSender::Forwarded] {
            assert_eq!(node.verdict(B, &answers), Verdict::Forward(HOST));
            assert_eq!(node.evaluate(HOST, sender, answers.clone()).0, Verdict::Forward(A), "{sender:?}");
            assert_eq!(node.verdict(A, &asks), Verdict::Forward(HOST), "{sender:?}");
        }
        assert_eq!(node.evaluate(HOST, StackSender::Unchanged, answers.clone()).0, Verdict::Forward(A));
        assert_eq!(node.verdict(A, &asks), Verdict::Forward(B));
        assert_eq!(node.verdict(B, &answers), Verdict::Forward(A));
        // One of its packets was on its way through the stack when the other pod got its port.
        for (port, sender, back) in [(1001, StackSender::Unchanged, A), (1002, StackSender::Forwarded, HOST)] {
            let (a, b) = ends(port);
            assert_eq!(node.verdict(A, &udp(a, b, 10)), Verdict::Forward(B));
            assert_eq!(node.evaluate(HOST, sender, udp(a, b, 10)).0, Verdict::Forward(B));
            assert_eq!(node.verdict(B, &udp(b, a, 10)), Verdict::Forward(back), "{sender:?}");
        }
        // Its first packet comes from there.
        let (a, b) = ends(1003);
        assert_eq!(node.evaluate(HOST, StackSender::Unchanged, udp(a, b, 10)).0, Verdict::Forward(B));
        assert_eq!(node.verdict(B, &udp(b, a, 10)), Verdict::Forward(A));
    }
}

#[test]
fn packets_of_a_pod_with_filters_take_the_nodes_stack() {
    for v6 in [0, 1] {
        let mut node = Node::new();
        let mut port = node.snapshot.forwarding.port(A).unwrap().clone();
        port.by_stack = true;
        node.snapshot.forwarding.insert(A, port).unwrap();
        let (a, b) = ((A_IPS[v6], 1000), (B_IPS[v6], 8080));
        for _ in 0..2 {
            assert_eq!(node.verdict(A, &udp(a, b, 10)), Verdict::Forward(HOST), "to the filters on its interface");
            assert_eq!(node.evaluate(HOST, StackSender::Unchanged, udp(a, b, 10)).0, Verdict::Forward(B));
            assert_eq!(node.verdict(B, &udp(b, a, 10)), Verdict::Forward(A), "which has none for what it sends");
        }
        // Policy is asked before the stack, and behind it.
        node.publish(false);
        for (port, sender) in [(A, StackSender::Unknown), (HOST, StackSender::Unchanged)] {
            let denied = Verdict::Drop(DropReason::IngressDenied);
            assert_eq!(node.evaluate(port, sender, udp((A_IPS[v6], 1001), b, 10)).0, denied);
        }
    }
}

#[test]
fn by_the_nodes_stack_no_hop_is_spent_between_neighbours() {
    let to_neighbour = [2, 0, 0, 0, A.0 as u8, 2];
    for (bridges, to, ttl, leaves_with) in [
        ([7, 7], to_neighbour, 64, 65),
        ([7, 7], to_neighbour, 1, 2),
        ([7, 7], to_neighbour, 253, 254),
        ([7, 7], to_neighbour, 254, 254),
        ([7, 7], to_neighbour, 255, 255),
        ([7, 7], to_neighbour, 0, 0),
        ([7, 7], [2, 0, 0, 0, B.0 as u8, 1], 64, 64),
        ([7, 8], to_neighbour, 64, 64),
        ([0, 0], to_neighbour, 64, 64),
    ] {
        let mut node = Node::new();
        for (id, bridge) in [A, B].into_iter().zip(bridges) {
            let port = Port { bridge, ..node.snapshot.forwarding.port(id).unwrap().clone() };
            node.snapshot.forwarding.insert(id, port).unwrap();
        }
        // Workers meet it in its middle, and ask the stack whether it translates it.
        let header = etherparse::TcpHeader { ack: true, ..etherparse::TcpHeader::new(80, 1000, 5000, 4096) };
        let mut frame = Vec::new();
        builder(B_IPS[0], A_IPS[0], ttl).tcp_header(header).write(&mut frame, &[]).unwrap();
        frame[..6].copy_from_slice(&to);
        let (verdict, frame) = node.forward(B, StackSender::Unknown, frame);
        assert_eq!(
            (verdict, frame[22]),
            (Verdict::Forward(HOST), leaves_with),
            "TTL {ttl}, bridges {bridges:?}, {to:x?}"
        );
        assert!(parse(&frame).is_ok(), "its checksum is right");
    }
}

#[test]
fn an_uplink_drops_the_source_of_a_local_pod_without_port() {
    let mut node = Node::new();
    assert_eq!(node.verdict(UPLINK, &udp((GHOST, 1), (B_IPS[0], 2), 10)), Verdict::Drop(DropReason::SpoofedSource));
    assert_eq!(node.verdict(UPLINK, &udp(("203.0.113.7", 1), (B_IPS[0], 2), 10)), Verdict::Forward(B));
}

#[test]
fn tunnel_packets_from_pods_to_nodes_are_dropped() {
    let mut node = Node::new();
    let dropped = Verdict::Drop(DropReason::Encapsulation);
    let of_protocol = |from: &str, to: &str, number: u8| {
        let mut frame = Vec::new();
        builder(from, to, 64).write(&mut frame, IpNumber(number), &[0; 40]).unwrap();
        frame
    };
    for v6 in [0, 1] {
        let (a, host) = (A_IPS[v6], NODE_IPS[v6]);
        for number in [4, 41, 47, 103, 108, 115, 137, 143] {
            assert_eq!(node.verdict(A, &of_protocol(a, host, number)), dropped, "protocol {number}");
        }
        assert_eq!(node.verdict(A, &of_protocol(a, B_IPS[v6], 47)), Verdict::Forward(B), "to a pod");
        assert_eq!(node.verdict(A, &of_protocol(a, host, 50)), Verdict::Forward(HOST), "ESP has a key");
        for port in WELL_KNOWN_TUNNEL_PORTS {
            assert_eq!(node.verdict(A, &udp((a, 1), (host, port), 10)), dropped, "port {port}");
        }
        for port in [53, 51820, 4790] {
            assert_eq!(node.verdict(A, &udp((a, 1), (host, port), 10)), Verdict::Forward(HOST), "port {port}");
        }
        assert_eq!(node.verdict(A, &udp((a, 1), (B_IPS[v6], 4789), 10)), Verdict::Forward(B), "to a pod");
        assert_eq!(node.verdict(HOST, &of_protocol(host, a, 47)), Verdict::Forward(A), "from the node");
    }
    let first = fragment(udp((A_IPS[0], 1), (NODE_IPS[0], 8472), 800), 0, true);
    assert_eq!(node.verdict(A, &first), dropped, "a first fragment");
    // Policy would have allowed it; it is not evaluated.
    node.snapshot.forwarding = node.snapshot.forwarding.clone().with_encapsulation(Arc::default());
    assert_eq!(node.verdict(A, &udp((A_IPS[0], 1), (NODE_IPS[0], 8472), 10)), Verdict::Forward(HOST));
}

/// A frame that the node's stack sent, and for whom.
pub(crate) struct OfStack(pub(crate) MemoryFrames, pub(crate) StackSender);

impl Frames for OfStack {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&mut self, index: usize) -> &mut [u8] {
        self.0.bytes(index)
    }

    fn stack_sender(&mut self, _: usize) -> StackSender {
        self.1
    }
}

/// The node gives this machine's packets its own address.
pub(crate) const CLIENT: [&str; 2] = ["203.0.113.7", "2001:db8::7"];

/// Connections from the node's port 40000 to `b` are the client's.
#[derive(Debug)]
struct OfClient;

impl OriginalSources for OfClient {
    fn source_of(&self, flow: &Flow) -> Option<Address> {
        let v6 = usize::from(!flow.src.is_v4());
        let is_known =
            flow.src == ip(NODE_IPS[v6]).into() && flow.dst == ip(B_IPS[v6]).into() && flow.src_port == 40_000;
        is_known.then(|| ip(CLIENT[v6]).into())
    }
}

/// Sources and destinations of the flows that were evaluated.
#[derive(Default)]
struct Evaluated(Vec<(IpAddr, IpAddr)>);

impl Observer for Evaluated {
    fn evaluated(&mut self, _: usize, flow: &Flow, _: &PolicyVerdict, _: EvaluationForm, _: EvaluationReason) {
        self.0.push((flow.src.into(), flow.dst.into()));
    }
}

/// A node that knows whose packets it translates.
pub(crate) fn masquerading() -> Node {
    let mut node = Node::new();
    let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
    node.pipeline = Pipeline::new(connections, PipelineMode::Full).with_sources(Some(Arc::new(OfClient)));
    node
}

impl Node {
    /// The verdict on a frame of the stack or of a pod, and the flows that were evaluated for it.
    fn evaluate(&mut self, port: PortId, sender: StackSender, frame: Vec<u8>) -> (Verdict, Vec<(IpAddr, IpAddr)>) {
        let mut frames = OfStack(MemoryFrames::new(), sender);
        frames.0.push(frame).unwrap();
        let (mut verdicts, mut evaluated) = ([Verdict::Drop(DropReason::NotReady); BATCH], Evaluated::default());
        let now = Timestamp::from_millis(1_000_000);
        self.pipeline.process_batch(&self.snapshot, now, port, &mut frames, &mut verdicts, &mut evaluated);
        (verdicts[0], evaluated.0)
    }
}

#[test]
fn only_the_nodes_own_processes_are_exempt_from_policy() {
    let (passes, denied) = (Verdict::Forward(B), Verdict::Drop(DropReason::IngressDenied));
    for v6 in [0, 1] {
        let (own, client) = (ip(NODE_IPS[v6]), ip(CLIENT[v6]));
        for (sender, port, source, when_closed) in [
            (StackSender::Unknown, 40_000, own, passes),
            (StackSender::Process, 40_000, own, passes),
            (StackSender::Translated, 40_000, client, denied),
            // Forwarded, and nobody knows for whom.
            (StackSender::Translated, 40_001, own, denied),
            (StackSender::Forwarded, 40_000, own, denied),
        ] {
            for open in [true, false] {
                let mut node = masquerading();
                node.publish(open);
                let frame = udp((NODE_IPS[v6], port), (B_IPS[v6], 53), 10);
                let expected = if open { passes } else { when_closed };
                assert_eq!(
                    node.evaluate(HOST, sender, frame),
                    (expected, vec![(source, ip(B_IPS[v6]))]),
                    "{sender:?} from port {port}, open: {open}"
                );
            }
        }
    }
}

#[test]
fn an_outsider_with_the_nodes_address_answers_no_pod() {
    for v6 in [0, 1] {
        for sender in [StackSender::Unchanged, StackSender::Untranslated] {
            for (open, expected) in [(true, Verdict::Forward(B)), (false, Verdict::Drop(DropReason::SpoofedSource))] {
                let mut node = masquerading();
                node.publish(open);
                // A pod may reach its own node, which answers.
                let asks = udp((B_IPS[v6], 5000), (NODE_IPS[v6], 53), 10);
                let answers = udp((NODE_IPS[v6], 53), (B_IPS[v6], 5000), 10);
                assert_eq!(node.evaluate(B, StackSender::Unknown, asks).0, Verdict::Forward(HOST));
                assert_eq!(node.evaluate(HOST, StackSender::Process, answers.clone()).0, Verdict::Forward(B));
                assert_eq!(node.evaluate(HOST, sender, answers.clone()).0, expected, "{sender:?}, open: {open}");
                // One that the node has translated is of a connection through it.
                assert_eq!(node.evaluate(HOST, StackSender::Forwarded, answers).0, Verdict::Forward(B));
            }
        }
    }
}

/// Whoever has sent what the node translates, it has come with the node's own address.
#[derive(Debug)]
struct OfNode;

impl OriginalSources for OfNode {
    fn source_of(&self, flow: &Flow) -> Option<Address> {
        Some(flow.src)
    }
}

#[test]
fn a_translated_source_that_was_the_nodes_has_no_exemption() {
    for v6 in [0, 1] {
        let mut node = masquerading();
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        node.pipeline = Pipeline::new(connections, PipelineMode::Full).with_sources(Some(Arc::new(OfNode)));
        node.publish(false);
        let frame = udp((NODE_IPS[v6], 40_000), (B_IPS[v6], 53), 10);
        let (verdict, _) = node.evaluate(HOST, StackSender::Translated, frame);
        assert_eq!(verdict, Verdict::Drop(DropReason::IngressDenied));
    }
}

#[test]
fn packets_by_the_node_to_another_machine_are_the_pods() {
    let elsewhere = ["203.0.113.99", "2001:db8::99"];
    for v6 in [0, 1] {
        // With the pod's own source, and with one that the node gave it. Port 40000 is another client's.
        for source in [A_IPS[v6], NODE_IPS[v6]] {
            let mut node = masquerading();
            let frame = udp((source, 40_000), (elsewhere[v6], 53), 10);
            let leaving = |port: PortId| StackSender::Leaving { port: port.0, uplink: 7 };
            let asked = vec![(ip(A_IPS[v6]), ip(elsewhere[v6]))];
            assert_eq!(node.evaluate(HOST, leaving(A), frame.clone()), (Verdict::Forward(HOST), asked));
            let segment = tcp((source, 40_000), (elsewhere[v6], 53), ACK, (1, 1));
            let later = (Verdict::Forward(HOST), vec![]);
            assert_eq!(node.evaluate(HOST, leaving(A), segment), later, "it opens nothing, and no rule counts it");
            assert_eq!(node.pipeline.connections().statistics().created, 0, "nothing is tracked");
            node.publish_egress(false);
            let denied = (Verdict::Drop(DropReason::EgressDenied), vec![(ip(A_IPS[v6]), ip(elsewhere[v6]))]);
            assert_eq!(node.evaluate(HOST, leaving(A), frame.clone()), denied, "from {source}");
            // A port without a pod is not known.
            for port in [HOST, UPLINK, PortId(99)] {
                let unknown = (Verdict::Drop(DropReason::NotReady), vec![]);
                assert_eq!(node.evaluate(HOST, leaving(port), frame.clone()), unknown, "{port}");
            }
            // A pod cannot write this.
            assert_ne!(node.evaluate(B, leaving(A), frame).0, Verdict::Forward(HOST));
        }
    }
}

#[test]
fn a_packet_leaves_by_the_uplink_as_the_node_sent_it() {
    for v6 in [0, 1] {
        let frame = udp((NODE_IPS[v6], 9), (CLIENT[v6], 53), 10);
        let mut frames = OfStack(MemoryFrames::new(), StackSender::Leaving { port: A.0, uplink: 7 });
        frames.0.push(frame.clone()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let mut node = Node::new();
        let now = Timestamp::from_millis(1_000_000);
        node.pipeline.process_batch(&node.snapshot, now, HOST, &mut frames, &mut verdicts, &mut ());
        assert_eq!(verdicts[0], Verdict::Forward(HOST));
        assert_eq!(frames.bytes(0)[12..], frame[12..], "the packet is as it was");
        let [port, epoch] = [53_u32, node.snapshot.epoch.0].map(u32::to_be_bytes);
        assert_eq!(frames.bytes(0)[..6], [2, 0xfb, 10, 7, 0, A.0 as u8], "UDP, by the pod of this port");
        assert_eq!(frames.bytes(0)[6..12], [&port[2..], &epoch].concat()[..], "the next ones need no worker");
    }
}

#[test]
fn later_fragments_that_leave_follow_what_was_said_of_the_first() {
    let elsewhere = "203.0.113.99";
    let leaving = StackSender::Leaving { port: A.0, uplink: 7 };
    for is_open in [true, false] {
        let mut node = masquerading();
        node.publish_egress(is_open);
        let whole = udp((NODE_IPS[0], 40_000), (elsewhere, 53), 64);
        let [first, later] = [(0, true), (72, false)].map(|(at, more)| fragment(whole.clone(), at, more));
        let unknown = Verdict::Drop(DropReason::Fragment);
        assert_eq!(node.evaluate(HOST, leaving, later.clone()).0, unknown, "before the first one");
        let denied = Verdict::Drop(DropReason::EgressDenied);
        assert_eq!(node.evaluate(HOST, leaving, first).0, if is_open { Verdict::Forward(HOST) } else { denied });
        assert_eq!(node.evaluate(HOST, leaving, later).0, if is_open { Verdict::Forward(HOST) } else { unknown });
    }
}

/// Knows the client until it has been told to forget, as if others had taken its place.
#[derive(Debug, Default)]
struct Forgetful(AtomicBool);

impl OriginalSources for Forgetful {
    fn source_of(&self, flow: &Flow) -> Option<Address> {
        if self.0.load(Ordering::Relaxed) { None } else { OfClient.source_of(flow) }
    }
}

#[test]
fn no_flood_forgets_the_client_of_a_connection() {
    for v6 in [0, 1] {
        let there = udp((NODE_IPS[v6], 40_000), (B_IPS[v6], 53), 10);
        let back = udp((B_IPS[v6], 53), (NODE_IPS[v6], 40_000), 10);
        let of_client = vec![(ip(CLIENT[v6]), ip(B_IPS[v6]))];
        let sources = Arc::new(Forgetful::default());
        let mut node = Node::new();
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        node.pipeline = Pipeline::new(connections, PipelineMode::Full).with_sources(Some(sources.clone()));
        assert_eq!(node.evaluate(HOST, StackSender::Translated, there.clone()).0, Verdict::Forward(B));
        sources.0.store(true, Ordering::Relaxed);
        for (open, expected) in [(true, Verdict::Forward(HOST)), (false, Verdict::Drop(DropReason::ConnectionRevoked))]
        {
            node.publish(open);
            assert_eq!(node.evaluate(B, StackSender::Unknown, back.clone()), (expected, of_client.clone()), "{open}");
        }
        // A new one, of which nobody knows the client, is closed where policy isolates.
        let unknown = udp((NODE_IPS[v6], 40_001), (B_IPS[v6], 53), 10);
        let (verdict, _) = node.evaluate(HOST, StackSender::Translated, unknown);
        assert_eq!(verdict, Verdict::Drop(DropReason::IngressDenied));
    }
}

#[test]
fn a_translated_connection_is_reevaluated_for_its_client() {
    for v6 in [0, 1] {
        let there = |port| udp((NODE_IPS[v6], port), (B_IPS[v6], 53), 10);
        let back = udp((B_IPS[v6], 53), (NODE_IPS[v6], 40_000), 10);
        let of_client = vec![(ip(CLIENT[v6]), ip(B_IPS[v6]))];
        for reply_first in [false, true] {
            let mut node = masquerading();
            assert_eq!(node.evaluate(HOST, StackSender::Translated, there(40_000)).0, Verdict::Forward(B));
            assert_eq!(node.evaluate(B, StackSender::Unknown, back.clone()), (Verdict::Forward(HOST), vec![]));
            for (open, expected) in [(true, None), (false, Some(Verdict::Drop(DropReason::ConnectionRevoked)))] {
                node.publish(open);
                let (verdict, evaluated) = if reply_first {
                    node.evaluate(B, StackSender::Unknown, back.clone())
                } else {
                    node.evaluate(HOST, StackSender::Translated, there(40_000))
                };
                let passes = Verdict::Forward(if reply_first { HOST } else { B });
                assert_eq!((verdict, evaluated), (expected.unwrap_or(passes), of_client.clone()), "{reply_first}");
            }
        }
        // The table was lost, and the reply comes first.
        let mut node = masquerading();
        node.publish(false);
        let (verdict, evaluated) = node.evaluate(B, StackSender::Unknown, back);
        assert_eq!((verdict, evaluated), (Verdict::Drop(DropReason::IngressDenied), of_client));
    }
}

/// The flows that were evaluated, and how.
#[derive(Default)]
struct Noted(Vec<(Flow, PolicyVerdict, EvaluationForm)>);

impl Observer for Noted {
    fn evaluated(&mut self, _: usize, flow: &Flow, verdict: &PolicyVerdict, form: EvaluationForm, _: EvaluationReason) {
        self.0.push((*flow, *verdict, form));
    }
}

impl Node {
    /// How a frame is evaluated.
    fn note(&mut self, port: PortId, sender: StackSender, frame: &[u8]) -> (Flow, PolicyVerdict, EvaluationForm) {
        let mut frames = OfStack(MemoryFrames::new(), sender);
        frames.0.push(frame.to_vec()).unwrap();
        let (mut verdicts, mut noted) = ([Verdict::Drop(DropReason::NotReady); BATCH], Noted::default());
        let now = Timestamp::from_millis(1_000_000);
        self.pipeline.process_batch(&self.snapshot, now, port, &mut frames, &mut verdicts, &mut noted);
        let [evaluated] = noted.0[..] else { panic!("{:?}", noted.0) };
        evaluated
    }
}

#[test]
fn a_staged_set_judges_as_if_it_were_published() {
    for v6 in [0, 1] {
        let node_ip = NODE_IPS[v6];
        let to_b = |from: &str, port| udp((from, port), (B_IPS[v6], 53), 10);
        for (port, sender, frame) in [
            (A, StackSender::Unknown, to_b(A_IPS[v6], 1000)),
            (HOST, StackSender::Unknown, to_b(A_IPS[v6], 1000)),
            (HOST, StackSender::Process, to_b(node_ip, 40_000)),
            (HOST, StackSender::Translated, to_b(node_ip, 40_000)),
            (HOST, StackSender::Translated, to_b(node_ip, 40_001)),
            (HOST, StackSender::Forwarded, to_b(node_ip, 40_002)),
            (UPLINK, StackSender::Unknown, to_b(CLIENT[v6], 7)),
            (B, StackSender::Unknown, udp((B_IPS[v6], 9), (node_ip, 53), 10)),
        ] {
            let mut node = masquerading();
            let open = node.snapshot.policy.clone();
            let (flow, verdict, form) = node.note(port, sender, &frame);
            assert_eq!(open.evaluate_as(&flow, form, NameTime::Never), verdict, "{sender:?} {flow:?}");
            node.publish(false);
            let closed = node.snapshot.policy.clone();
            let asked = masquerading().closed().note(port, sender, &frame);
            assert_eq!(
                (flow, closed.evaluate_as(&flow, form, NameTime::Never), form),
                asked,
                "{sender:?}: a packet that opens one"
            );
            let connections: Vec<_> = node.pipeline.connections().iter(Timestamp::from_millis(1_000_000)).collect();
            let [connection] = connections[..] else { panic!("{connections:?}") };
            let judged = evaluate_connection(&closed, Some(&OfClient), &connection);
            let (flow, verdict, _) = node.note(port, sender, &frame);
            assert_eq!(judged, (flow, verdict), "{sender:?}: a connection that is open");
        }
    }
}

impl Node {
    fn closed(mut self) -> Self {
        self.publish(false);
        self
    }
}
