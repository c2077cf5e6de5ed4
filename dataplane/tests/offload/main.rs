//! What the kernel's programs forward without a worker, against what a worker does with the same packet: they share the
//! connection table. Needs root; each test has a network namespace of its own, in which nothing is sent.

mod captures;
mod entry;
mod headers;
mod mutations;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::panic::resume_unwind;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader};
use nix::sched::{CloneFlags, unshare};
use penstock_dataplane::conntrack::{
    Config, ConnTable, KernelMapFds, KernelMapSizes, KernelMaps, TableMemory, TableOrigin, Timestamp, Traffic,
};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::io::MemoryFrames;
use penstock_dataplane::packet::Protocol;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict, keep_offloaded};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PolicySet, RuleTable,
};
use penstock_dataplane::services::{Backend, Frontend, FrontendKey, ServiceSet, WithoutBackend};
use penstock_dataplane::{Epoch, Snapshot};
use penstock_xdp_redirect::{
    ConnectionMapSizes, ConnectionMaps, Interface, PodVeth, ServedPort, TcxOptions, TcxPrograms,
};
use proptest::prelude::*;
use proptest::test_runner::{Config as RunnerConfig, TestRunner};

const HOST: PortId = PortId(0);
const A: PortId = PortId(1);
const B: PortId = PortId(2);
const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xee];
const MTU: u16 = 1400;
/// `TC_ACT_OK`, `TC_ACT_SHOT` and `TC_ACT_REDIRECT` of `linux/pkt_cls.h`.
const OK: u32 = 0;
const REDIRECT: u32 = 7;
const TO_WORKER: [u8; 2] = [2, 0xfa];

fn pod_mac(port: PortId) -> [u8; 6] {
    [2, 0, 0, 0, 1, port.0 as u8]
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Addresses of the two pods and of a machine outside, by family.
fn address(end: End, v4: bool) -> IpAddr {
    ip(match (end, v4) {
        (End::A, true) => "10.0.0.1",
        (End::B, true) => "10.0.0.2",
        (End::Outside, true) => "203.0.113.7",
        (End::A, false) => "fd00::1",
        (End::B, false) => "fd00::2",
        (End::Outside, false) => "2001:db8::7",
    })
}

/// Cluster address of the Service whose only backend is this end.
fn cluster_address(backend: End, v4: bool) -> IpAddr {
    ip(match (backend, v4) {
        (End::A, true) => "10.96.0.1",
        (End::B, true) => "10.96.0.2",
        (End::Outside, true) => "10.96.0.7",
        (End::A, false) => "fd00:96::1",
        (End::B, false) => "fd00:96::2",
        (End::Outside, false) => "fd00:96::7",
    })
}

/// Ports of Services, and of who answers.
const SERVICE_PORT: u16 = 81;
const ANSWERING_PORT: u16 = 80;

/// A Service of each end.
fn services() -> ServiceSet {
    let mut set = ServiceSet::default();
    for (end, v4, protocol) in [End::A, End::B, End::Outside]
        .into_iter()
        .flat_map(|end| [(end, true), (end, false)])
        .flat_map(|(end, v4)| [(end, v4, Protocol::TCP), (end, v4, Protocol::UDP)])
    {
        let key = FrontendKey { address: cluster_address(end, v4).into(), protocol, port: SERVICE_PORT };
        let backends: Arc<[Backend]> = [Backend { address: address(end, v4).into(), port: ANSWERING_PORT }].into();
        let (serving, without) = (backends.clone(), WithoutBackend::Refused);
        let frontend = Frontend { name: "shop/api:http".into(), backends, serving, without, affinity: None };
        set.set(key, Some(Arc::new(frontend)));
    }
    set
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    A,
    B,
    Outside,
}

impl End {
    fn port(self) -> PortId {
        match self {
            Self::A => A,
            Self::B => B,
            Self::Outside => HOST,
        }
    }
}

fn in_namespace<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    let run = || {
        unshare(CloneFlags::CLONE_NEWNET).expect("these tests need root");
        test()
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|panic| resume_unwind(panic))
}

/// Two pods, the programs at their veths, and a worker's pipeline over the same connection table.
struct Node {
    programs: TcxPrograms,
    veths: [PodVeth; 2],
    maps: ConnectionMaps,
    pipeline: Pipeline,
    snapshot: Snapshot,
}

fn open_table(maps: &ConnectionMaps) -> Arc<ConnTable> {
    let [table, tags, entries, uses] = maps.descriptors().unwrap();
    let memory = TableMemory::Kernel(KernelMaps(Arc::new(KernelMapFds { table, tags, entries, uses })));
    Arc::new(ConnTable::new(&Config { entries: ENTRIES, memory, ..Config::default() }).unwrap())
}

const ENTRIES: usize = 128;

impl Node {
    fn new() -> Self {
        let KernelMapSizes { groups, entries, with_links } = KernelMapSizes::of(ENTRIES);
        let sizes = ConnectionMapSizes {
            version: KernelMapSizes::VERSION,
            table: KernelMapSizes::TABLE,
            tags: (groups, KernelMapSizes::TAGS),
            entries: (with_links, KernelMapSizes::ENTRY),
            usage: (entries, KernelMapSizes::USE),
        };
        let maps = ConnectionMaps::open(None, &sizes).unwrap();
        let programs = TcxPrograms::load(&TcxOptions::default(), Some(&maps)).unwrap();
        programs.set_pairs(&[1], &[]).unwrap();
        let veths = [A, B].map(|port| {
            let name = format!("v{}", port.0);
            let made = Command::new("ip").args(["link", "add", "name", &name, "type", "veth"]).status().unwrap();
            assert!(made.success());
            let mut veth = programs.attach_pod(&Interface::by_name(&name).unwrap()).unwrap();
            veth.serve(&ServedPort {
                port: port.0,
                node_mac: NODE_MAC,
                pod_mac: pod_mac(port),
                is_bridged: false,
                mtu: MTU.into(),
            })
            .unwrap();
            veth
        });
        let pipeline = Pipeline::new(open_table(&maps), PipelineMode::Full);
        let mut node = Self { programs, veths, maps, pipeline, snapshot: Snapshot::default() };
        node.publish(Epoch(1), true);
        node
    }

    fn interface(&self, end: End) -> u32 {
        match end {
            End::Outside => 0,
            end => self.veths[end.port().index() - 1].interface().index,
        }
    }

    /// Publishes policy by which B accepts connections, or none.
    fn publish(&mut self, epoch: Epoch, allowed: bool) {
        self.snapshot = self.snapshot_of(epoch, allowed);
        self.pipeline.connections().publish_epoch(epoch);
    }

    fn snapshot_of(&self, epoch: Epoch, allowed: bool) -> Snapshot {
        let mut forwarding = Forwarding::new([ip("192.168.0.1").into()]);
        for (id, end) in [(HOST, End::Outside), (A, End::A), (B, End::B)] {
            let is_pod = end != End::Outside;
            let addresses =
                if is_pod { vec![address(end, true).into(), address(end, false).into()] } else { Vec::new() };
            let port = Port {
                kind: if is_pod { PortKind::Pod } else { PortKind::Host },
                own_mac: Mac(NODE_MAC),
                peer_mac: Mac(pod_mac(id)),
                mtu: if is_pod { MTU } else { 65_535 },
                interface: self.interface(end),
                addresses,
            };
            forwarding.insert(id, port).unwrap();
        }
        let mut update = PolicySet::default().update();
        for (number, end) in [(1, End::A), (2, End::B)] {
            let endpoint = EndpointId(number);
            let identity = Identity(NonZeroU32::new(number).unwrap());
            for v4 in [true, false] {
                let owner = AddressOwner::Pod { identity, endpoint: Some(endpoint), node: Some(NodeId(0)) };
                update.set_address(address(end, v4).into(), Some(owner));
            }
            let ingress = match (end, allowed) {
                (End::B, false) => EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], []))),
                _ => EndpointPolicy::Open,
            };
            update.set_endpoint(endpoint, Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
        }
        Snapshot::new(epoch, update.finish(), forwarding).with_services(Some(services()))
    }

    fn next_epoch(&mut self, allowed: bool) {
        self.publish(self.snapshot.epoch.next(), allowed);
    }

    /// The same, after connections that stay allowed got the new verdict. Returns how many.
    fn next_epoch_keeping(&mut self, allowed: bool) -> usize {
        self.keep_and_publish(self.snapshot_of(self.snapshot.epoch.next(), allowed))
    }

    fn keep_and_publish(&mut self, next: Snapshot) -> usize {
        self.snapshot = next;
        let kept = keep_offloaded(self.pipeline.connections(), &self.snapshot, Duration::from_secs(1));
        self.pipeline.connections().publish_epoch(self.snapshot.epoch);
        kept
    }

    /// What a worker does with a frame from this end, and the frame afterwards.
    fn worker(&mut self, from: End, frame: &[u8], now: Timestamp) -> (Verdict, Vec<u8>) {
        let mut batch = MemoryFrames::new();
        batch.push(frame.to_vec()).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, now, from.port(), &mut batch, &mut verdicts, &mut ());
        (verdicts[0], batch.drain().next().unwrap())
    }

    /// What a worker does with a packet of a handshake that has the numbers that it must have.
    fn handshake(&mut self, packet: Sent, flags: u8, from_opener: bool, now: Timestamp) -> Verdict {
        let frame = Sent { flags: if packet.tcp { flags } else { 0 }, payload: 0, ..packet }.frame();
        self.worker(packet.from, &in_step(frame, packet.tcp, flags, from_opener), now).0
    }

    /// What the program does with it where it meets the frame: at the sending pod, or at the receiving one if the sender
    /// is outside. `None`: it is for a worker, or dropped.
    fn program(&self, from: End, to: End, frame: &[u8], segment: u32) -> Option<(u32, Vec<u8>)> {
        let at = if from == End::Outside { to } else { from };
        let before = self.programs.offloaded().unwrap();
        let tried = self.programs.try_frame(from != End::Outside, self.interface(at), frame, segment).unwrap();
        let offloaded = self.programs.offloaded().unwrap() != before;
        let to_worker = tried.action == REDIRECT && tried.frame[..2] == TO_WORKER;
        assert!(to_worker || (tried.action == REDIRECT) <= offloaded, "{tried:?}");
        assert!(!(to_worker && offloaded), "{tried:?}");
        offloaded.then_some((tried.action, tried.frame))
    }
}

/// Removes the connections of the pods, so that the next one is alone in the table.
fn forget(node: &Node) {
    let ends = [End::A, End::B].map(|end| [true, false].map(|v4| address(end, v4).into()));
    node.pipeline.connections().remove_addresses(ends.as_flattened());
}

/// Which flow between two ends a packet is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Of a connection that A has opened, or the outside to B.
    Direct,
    /// The client's, to the Service of the other end.
    ToService,
    /// The answering end's.
    Answer,
    /// The answering end's, where a pod is the backend of its own connection.
    AnswerToService,
}

/// A packet in one of the directions of a flow between two ends.
#[derive(Clone, Copy, Debug)]
struct Sent {
    from: End,
    to: End,
    way: Way,
    v4: bool,
    tcp: bool,
    /// Which of the flows between these ends.
    flow: u8,
    /// TCP flags, by bit.
    flags: u8,
    ttl: u8,
    payload: usize,
}

impl Sent {
    /// Addresses and ports of its source and destination.
    fn ends(&self) -> ((IpAddr, u16), (IpAddr, u16)) {
        let (from, to) = (address(self.from, self.v4), address(self.to, self.v4));
        let client = 1000 + u16::from(self.flow);
        let opens = matches!((self.from, self.to), (End::A, _) | (End::Outside, End::B));
        match self.way {
            Way::Direct if opens => ((from, client), (to, ANSWERING_PORT)),
            Way::Direct | Way::Answer => ((from, ANSWERING_PORT), (to, client)),
            Way::ToService => ((from, client), (cluster_address(self.to, self.v4), SERVICE_PORT)),
            Way::AnswerToService => ((from, ANSWERING_PORT), (cluster_address(self.from, self.v4), client)),
        }
    }

    /// The packet in the other direction.
    fn back(self) -> Self {
        let way = match self.way {
            Way::ToService if self.from == self.to => Way::AnswerToService,
            Way::ToService => Way::Answer,
            way => way,
        };
        Self { from: self.to, to: self.from, way, ..self }
    }

    fn frame(&self) -> Vec<u8> {
        let ((from, src), (to, dst)) = self.ends();
        let from_mac = if self.from == End::Outside { NODE_MAC } else { pod_mac(self.from.port()) };
        let to_mac = if self.from == End::Outside { pod_mac(self.to.port()) } else { NODE_MAC };
        let ethernet = PacketBuilder::ethernet2(from_mac, to_mac);
        let builder = match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), self.ttl),
            (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), self.ttl),
            _ => unreachable!("one family"),
        };
        let mut frame = Vec::new();
        let payload = vec![0x5a; self.payload];
        if self.tcp {
            let mut header = TcpHeader::new(src, dst, 1000, 4000);
            header.acknowledgment_number = 1000;
            (header.fin, header.syn, header.rst) = (self.flags & 1 != 0, self.flags & 2 != 0, self.flags & 4 != 0);
            (header.psh, header.ack) = (self.flags & 8 != 0, self.flags & 16 != 0);
            builder.tcp_header(header).write(&mut frame, &payload).unwrap();
        } else {
            builder.udp(src, dst).write(&mut frame, &payload).unwrap();
        }
        frame
    }
}

const ACK: u8 = 16;
const SYN: u8 = 2;

fn sent(from: End, to: End, tcp: bool, flags: u8) -> Sent {
    Sent { from, to, way: Way::Direct, v4: true, tcp, flow: 1, flags, ttl: 64, payload: 10 }
}

/// To the Service of `to`.
fn to_service(from: End, to: End, tcp: bool, flags: u8) -> Sent {
    Sent { way: Way::ToService, ..sent(from, to, tcp, flags) }
}

/// Opens a connection by workers alone. Of datagrams a stream: whose packets need no worker, however slow the test runs.
fn open(node: &mut Node, of: Sent, now: Timestamp) {
    let began = Timestamp::from_millis(now.as_millis() - 3000);
    open_since(node, of, began, now);
}

/// The same, where the last packet came at `now` and all before it when it began.
fn open_since(node: &mut Node, of: Sent, began: Timestamp, now: Timestamp) {
    let back = of.back();
    let steps = [
        (of, SYN, true, began),
        (back, SYN | ACK, false, began),
        (of, ACK, true, began),
        (back, ACK, false, began),
        (of, ACK, true, now),
    ];
    for (packet, flags, from_opener, time) in steps {
        let verdict = node.handshake(packet, flags, from_opener, time);
        assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?} {flags:x}: {verdict:?}");
    }
}

/// Gives a segment of a handshake the numbers that it must have.
fn in_step(mut frame: Vec<u8>, tcp: bool, flags: u8, from_opener: bool) -> Vec<u8> {
    if tcp {
        let at = if frame[12..14] == [8, 0] { 34 } else { 54 };
        let (seq, ack): (u32, u32) = match (flags, from_opener) {
            (SYN, _) => (999, 0),
            (_, false) if flags & SYN != 0 => (999, 1000),
            _ => (1000, 1000),
        };
        frame[at + 4..at + 8].copy_from_slice(&seq.to_be_bytes());
        frame[at + 8..at + 12].copy_from_slice(&ack.to_be_bytes());
    }
    frame
}

/// A TCP or UDP frame without its checksum. A worker completes one that looks as if the sender's stack had left it open, as a
/// mutated one may; with a packet that is whole the kernel knows.
fn without_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    let (transport, protocol) = if frame[12..14] == [8, 0] { (34, frame[23]) } else { (54, frame[20]) };
    let at = transport + if protocol == 6 { 16 } else { 6 };
    frame[at..at + 2].fill(0);
    frame
}

/// Asserts that the program forwards a packet exactly as a worker then does.
fn assert_alike(node: &mut Node, of: Sent, frame: &[u8], done: &(u32, Vec<u8>), now: Timestamp) {
    let (verdict, by_worker) = node.worker(of.from, frame, now);
    let Verdict::Forward(egress) = verdict else {
        panic!("the program forwards what a worker drops: {verdict:?}: {of:?}")
    };
    let compared = |bytes: &[u8]| if frame == of.frame() { bytes.to_vec() } else { without_checksum(bytes.to_vec()) };
    let (by_worker, by_program) = (compared(&by_worker), compared(&done.1));
    match (of.from, egress) {
        (End::Outside, _) | (_, HOST) => {
            assert_eq!((done.0, &by_program[..12]), (OK, &frame[..12]), "{of:?}: between the same MACs");
            assert_eq!(by_worker[12..], by_program[12..], "{of:?}");
        }
        // The MACs tell to which pod.
        _ => assert_eq!((done.0, by_program), (REDIRECT, by_worker), "{of:?}"),
    }
}

/// What is alike in the headers of a long segment and of those that it becomes: not lengths, checksums and numbers.
fn of_all_segments(frame: &[u8]) -> Vec<u8> {
    let parts: &[std::ops::Range<usize>] =
        if frame[12..14] == [8, 0] { &[0..16, 20..24, 26..38] } else { &[0..18, 20..58] };
    parts.iter().flat_map(|part| &frame[part.clone()]).copied().collect()
}

/// Gives a program a long segment. Where it forwards it, asserts that a worker would do the same with the segments that it becomes.
/// Returns whether it does.
fn assert_segmented_alike(node: &mut Node, packet: Sent, size: u16, now: Timestamp) -> bool {
    let one = Sent { payload: packet.payload.min(size.into()), ..packet };
    let done = node.program(packet.from, packet.to, &packet.frame(), size.into());
    let (verdict, by_worker) = node.worker(one.from, &one.frame(), now);
    let Some((_, by_program)) = done else { return false };
    let Verdict::Forward(egress) = verdict else {
        panic!("the program forwards what becomes segments that a worker drops: {verdict:?}: {packet:?}, {size}")
    };
    let is_to_pod = packet.from != End::Outside && egress != HOST;
    let from = if is_to_pod { 0 } else { 12 };
    assert_eq!(of_all_segments(&by_program)[from..], of_all_segments(&by_worker)[from..], "{packet:?}, {size}");
    assert!(!packet.v4 || headers::is_sound(&by_program), "{packet:?}, {size}");
    let longest = size as usize + if packet.v4 { 40 } else { 60 };
    assert!(egress == HOST || longest <= MTU.into(), "{longest} bytes: {packet:?}");
    true
}

#[test]
fn packets_of_an_established_connection_pass_without_a_worker_in_both_directions() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (a, b) in [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)] {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..sent(a, b, tcp, ACK) };
                assert!(node.program(a, b, &there.frame(), 0).is_none(), "{there:?}: not open yet");
                open(&mut node, there, now);
                for (from, to) in [(a, b), (b, a)] {
                    let packet = Sent { from, to, ..there };
                    let frame = packet.frame();
                    let done = node.program(from, to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                    assert_alike(&mut node, packet, &frame, &done, now);
                }
            }
        }
    });
}

/// Whose Service which pods use: a pod's on this node, one elsewhere, and the client's own.
const CLIENTS: [(End, End); 4] = [(End::A, End::B), (End::B, End::A), (End::A, End::Outside), (End::A, End::A)];

#[test]
fn packets_of_a_connection_to_a_service_are_translated_without_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (client, backend) in CLIENTS {
            for (v4, tcp) in [(true, true), (false, true), (true, false), (false, false)] {
                let there = Sent { v4, ..to_service(client, backend, tcp, ACK) };
                assert!(node.program(client, backend, &there.frame(), 0).is_none(), "{there:?}: not open yet");
                open(&mut node, there, now);
                for packet in [there, there.back()] {
                    let frame = packet.frame();
                    let done = node.program(packet.from, packet.to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                    assert_ne!(done.1[26..], frame[26..], "addresses or ports differ");
                    assert_alike(&mut node, packet, &frame, &done, now);
                }
                // The same flow without the Service is another connection.
                let direct = Sent { way: Way::Direct, ..there };
                if client == End::A && client != backend {
                    assert!(node.program(client, backend, &direct.frame(), 0).is_none(), "{direct:?}");
                }
            }
        }
    });
}

#[test]
fn a_translated_packet_keeps_a_checksum_as_right_or_wrong_as_it_is() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (tcp, v4, checksum) in [
            (false, true, 0_u16),
            (false, true, 0x1234),
            (false, false, 0x1234),
            (true, true, 0x1234),
            (true, false, 0x1234),
        ] {
            let there = Sent { v4, ..to_service(End::A, End::B, tcp, ACK) };
            open(&mut node, there, now);
            let packet = there.back();
            let mut frame = packet.frame();
            let at = if v4 { 34 } else { 54 } + if tcp { 16 } else { 6 };
            frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
            let (_, by_program) = node.program(packet.from, packet.to, &frame, 0).unwrap();
            let (_, by_worker) = node.worker(packet.from, &frame, now);
            assert_eq!(by_program, by_worker, "{packet:?}");
            assert_eq!(by_program[at..at + 2] == [0, 0], checksum == 0, "{packet:?}");
        }
    });
}

#[test]
fn a_datagram_to_a_service_meets_a_worker_once_its_backends_change() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = to_service(End::A, End::B, false, 0);
        open(&mut node, there, now);
        let back = there.back();
        assert!(node.program(back.from, back.to, &back.frame(), 0).is_some());
        let mut snapshot = node.snapshot_of(node.snapshot.epoch.next(), true);
        snapshot.services = Some(ServiceSet::default());
        node.snapshot = snapshot;
        node.pipeline.connections().publish_epoch(node.snapshot.epoch);
        assert!(node.program(back.from, back.to, &back.frame(), 0).is_none());
        let (_, by_worker) = node.worker(back.from, &back.frame(), now);
        assert_eq!(by_worker[26..34], back.frame()[26..34], "the Service is gone: what answers is no Service any more");
        assert!(node.program(there.from, there.to, &there.frame(), 0).is_none());
    });
}

#[test]
fn all_packets_of_a_captured_pod_are_left_to_workers_and_no_others() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let ways = [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)];
        let ways: Vec<(End, End)> = ways.into_iter().flat_map(|(a, b)| [(a, b), (b, a)]).collect();
        ways.iter().step_by(2).for_each(|&(a, b)| open(&mut node, sent(a, b, true, ACK), now));
        let forwarded = |node: &mut Node| -> Vec<bool> {
            ways.iter()
                .map(|&(from, to)| node.program(from, to, &sent(from, to, true, ACK).frame(), 0).is_some())
                .collect()
        };
        assert_eq!(forwarded(&mut node), [true; 6]);
        let served = ServedPort { port: A.0, node_mac: NODE_MAC, pod_mac: pod_mac(A), is_bridged: false, mtu: 1400 };
        node.veths[0].set_captured(true).unwrap();
        // What A sends and gets; not what B and the node say to each other.
        let of_others = [false, false, false, false, true, true];
        assert_eq!(forwarded(&mut node), of_others);
        node.veths[0].serve(&served).unwrap();
        assert_eq!(forwarded(&mut node), of_others, "also once the pod is served anew");
        node.veths[1].set_captured(true).unwrap();
        assert_eq!(forwarded(&mut node), [false; 6]);
        node.veths.iter_mut().for_each(|veth| veth.set_captured(false).unwrap());
        assert_eq!(forwarded(&mut node), [true; 6], "and no longer");
    });
}

#[test]
fn what_needs_a_worker_is_left_to_it() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let base = sent(End::A, End::B, true, ACK);
        open(&mut node, base, now);
        let long = Sent { payload: usize::from(MTU) - 40, ..base };
        let cases: [(&str, Sent, bool); 9] = [
            ("a segment", base, true),
            ("as long as the MTU", long, true),
            ("longer than the MTU", Sent { payload: long.payload + 1, ..base }, false),
            ("its last hop", Sent { ttl: 1, ..base }, false),
            ("SYN", Sent { flags: SYN, ..base }, false),
            ("RST", Sent { flags: ACK | 4, ..base }, false),
            ("FIN without ACK", Sent { flags: FIN, ..base }, false),
            ("another flow", Sent { flow: 2, ..base }, false),
            ("FIN", Sent { flags: FIN | ACK, ..base }, true),
        ];
        for (what, packet, passes) in cases {
            assert_eq!(node.program(End::A, End::B, &packet.frame(), 0).is_some(), passes, "{what}");
        }
        // A long TCP segment is measured by what it becomes.
        let large = Sent { payload: 3000, ..base }.frame();
        assert!(node.program(End::A, End::B, &large, u32::from(MTU) - 40).is_some());
        assert!(node.program(End::A, End::B, &large, u32::from(MTU) - 39).is_none());
        // The same packet from another pod, and one with another pod's MACs towards the node's stack.
        let tried = node.programs.try_frame(true, node.interface(End::B), &base.frame(), 0).unwrap();
        assert_eq!(tried.frame[..2], TO_WORKER, "a forged source is a worker's to drop");
        let out = sent(End::A, End::Outside, true, ACK);
        open(&mut node, out, now);
        assert!(node.program(End::A, End::Outside, &out.frame(), 0).is_some());
        for at in [0, 6] {
            let mut frame = out.frame();
            frame[at + 5] ^= 1;
            assert!(node.program(End::A, End::Outside, &frame, 0).is_none(), "byte {at}");
        }
    });
}

#[test]
fn after_a_change_each_connection_meets_a_worker_once_and_is_evaluated() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let (there, back) = (sent(End::A, End::B, true, ACK), sent(End::B, End::A, true, ACK));
        open(&mut node, there, now);
        node.next_epoch(true);
        for packet in [there, back] {
            assert!(
                node.program(packet.from, packet.to, &packet.frame(), 0).is_none(),
                "evaluated under an older epoch"
            );
            assert!(matches!(node.worker(packet.from, &packet.frame(), now).0, Verdict::Forward(_)));
            assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_some());
        }
        node.next_epoch(false);
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_none());
        assert!(matches!(node.worker(End::A, &there.frame(), now).0, Verdict::Drop(_)));
        for packet in [there, back] {
            assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "revoked");
        }
    });
}

/// The programs read 23 bits of the epoch in an entry, and 16 in its path.
#[test]
fn a_stale_epoch_is_no_hit_across_the_wrap_of_its_numbers() {
    for start in [0x7f_fffd, 0xff_fffd, 0xfffd] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            node.publish(Epoch(start), true);
            let opened = [true, false].map(|v4| Sent { v4, ..sent(End::A, End::B, true, ACK) });
            opened.iter().for_each(|there| open(&mut node, *there, now));
            for _ in 0..5 {
                let epoch = node.snapshot.epoch.next();
                node.publish(epoch, true);
                for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                    let frame = packet.frame();
                    assert!(node.program(packet.from, packet.to, &frame, 0).is_none(), "{epoch:?}: {packet:?}");
                    assert!(matches!(node.worker(packet.from, &frame, now).0, Verdict::Forward(_)));
                    let done = node.program(packet.from, packet.to, &frame, 0);
                    assert_alike(
                        &mut node,
                        packet,
                        &frame,
                        &done.unwrap_or_else(|| panic!("{epoch:?}: {packet:?}")),
                        now,
                    );
                }
            }
            // What stays allowed needs no worker, and what does not is revoked, across the wrap too.
            forget(&node);
            node.publish(Epoch(start), true);
            opened.iter().for_each(|there| open(&mut node, *there, now));
            for _ in 0..5 {
                assert_eq!(node.next_epoch_keeping(true), opened.len());
                for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                    assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_some(), "{packet:?}");
                }
            }
            node.next_epoch(false);
            for packet in opened.iter().flat_map(|there| [*there, there.back()]) {
                assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "{packet:?}");
                assert!(matches!(node.worker(packet.from, &packet.frame(), now).0, Verdict::Drop(_)));
                assert!(node.program(packet.from, packet.to, &packet.frame(), 0).is_none(), "{packet:?}");
            }
        });
    }
}

#[test]
fn connections_that_stay_allowed_need_no_worker_after_a_change() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let between = [(End::A, End::B), (End::A, End::Outside), (End::Outside, End::B)];
        let tcp = between.map(|(a, b)| sent(a, b, true, ACK));
        let opened = [tcp.as_slice(), &[sent(End::A, End::B, false, 0)]].concat();
        opened.iter().for_each(|there| open(&mut node, *there, now));
        assert_eq!(node.next_epoch_keeping(true), opened.len());
        for there in opened.iter().copied() {
            let back = Sent { from: there.to, to: there.from, ..there };
            for packet in [there, back] {
                let frame = packet.frame();
                let done = node.program(packet.from, packet.to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                assert_alike(&mut node, packet, &frame, &done, now);
            }
        }
        assert_eq!(node.next_epoch_keeping(false), 1, "B takes no more connections; A's to the outside stays");
        for there in opened {
            let stays = there.to == End::Outside;
            assert_eq!(node.program(there.from, there.to, &there.frame(), 0).is_some(), stays, "{there:?}");
        }
    });
}

/// Unlike TCP's, which stay where they are.
#[test]
fn datagrams_that_may_have_another_way_now_meet_a_worker_after_a_change() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let to_pod = Sent { flow: 2, ..sent(End::A, End::B, false, 0) };
        let elsewhere = [
            sent(End::A, End::Outside, false, 0),
            sent(End::Outside, End::B, false, 0),
            to_service(End::A, End::B, false, 0),
        ];
        for there in elsewhere.into_iter().chain([to_pod]) {
            open(&mut node, there, now);
            assert!(node.program(there.from, there.to, &there.frame(), 0).is_some(), "{there:?}");
        }
        assert_eq!(node.next_epoch_keeping(true), 1);
        for there in elsewhere {
            assert!(node.program(there.from, there.to, &there.frame(), 0).is_none(), "{there:?}");
        }
        assert!(node.program(to_pod.from, to_pod.to, &to_pod.frame(), 0).is_some());

        // A Service gets the pod's address, as one of its external addresses.
        let mut services = services();
        let name = "shop/dns:udp".into();
        let frontend = Frontend {
            name,
            backends: [].into(),
            serving: [].into(),
            without: WithoutBackend::Refused,
            affinity: None,
        };
        let key = FrontendKey { address: address(End::B, true).into(), protocol: Protocol::UDP, port: 53 };
        services.set(key, Some(Arc::new(frontend)));
        let next = node.snapshot_of(node.snapshot.epoch.next(), true).with_services(Some(services));
        assert_eq!(node.keep_and_publish(next), 0);
        assert!(node.program(to_pod.from, to_pod.to, &to_pod.frame(), 0).is_none());
    });
}

#[test]
fn connections_to_services_that_stay_allowed_need_no_worker_after_a_change() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let opened = CLIENTS.map(|(client, backend)| to_service(client, backend, true, ACK));
        opened.iter().for_each(|there| open(&mut node, *there, now));
        assert_eq!(node.next_epoch_keeping(true), 3, "a worker sees a pod's connection to itself once");
        for there in &opened[..3] {
            for packet in [*there, there.back()] {
                let frame = packet.frame();
                let done = node.program(packet.from, packet.to, &frame, 0).unwrap_or_else(|| panic!("{packet:?}"));
                assert_alike(&mut node, packet, &frame, &done, now);
            }
        }
        assert_eq!(node.next_epoch_keeping(false), 2, "B takes no more connections");
        for (there, stays) in opened.into_iter().zip([false, true, true, false]) {
            assert_eq!(node.program(there.from, there.to, &there.frame(), 0).is_some(), stays, "{there:?}");
        }
    });
}

#[test]
fn a_connection_whose_packets_the_kernel_forwards_does_not_expire() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        // Its last packet at a worker was longer ago than the timeout of an answered datagram, 120 s.
        let old = Timestamp::from_millis(now.as_millis() - 300_000);
        let (there, back) = (sent(End::A, End::B, false, 0), sent(End::B, End::A, false, 0));
        open(&mut node, there, old);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_none(), "expired");
        let near = Timestamp::from_millis(now.as_millis() - 100_000);
        open(&mut node, there, near);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_some());
        let later = now.plus(Duration::from_secs(60));
        let idle: Vec<Duration> = node.pipeline.connections().iter(later).map(|found| found.idle).collect();
        assert!(idle.len() == 1 && idle[0] <= Duration::from_secs(61), "{idle:?}");
        let (verdict, _) = node.worker(End::B, &back.frame(), later);
        assert_eq!(verdict, Verdict::Forward(A), "160 s after the last packet at a worker");
    });
}

/// What the table says was forwarded of the only connection.
fn counted(node: &Node) -> [Traffic; 2] {
    let listed: Vec<_> = node.pipeline.connections().iter(Timestamp::now()).collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    listed[0].traffic.expect("programs read the table")
}

#[test]
fn a_connection_counts_what_workers_and_programs_forward_in_each_direction() {
    for there in [
        sent(End::A, End::B, true, ACK),
        sent(End::A, End::B, false, 0),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
        to_service(End::A, End::B, true, ACK),
        Sent { v4: false, ..to_service(End::A, End::A, false, 0) },
    ] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            open(&mut node, there, now);
            let before = counted(&node);
            assert_eq!(before.map(|traffic| traffic.packets), [3, 2], "{there:?}: of the handshake");
            let mut expected = before;
            for (turn, payload) in [0, 1, 900, 1200].into_iter().enumerate() {
                for (direction, packet) in [there, there.back()].into_iter().enumerate() {
                    let packet = Sent { payload, ..packet };
                    let frame = packet.frame();
                    // The opener's packets go by program and worker in turn, the other end's by program alone.
                    if direction == 0 && turn % 2 == 1 {
                        assert!(matches!(node.worker(packet.from, &frame, now).0, Verdict::Forward(_)), "{packet:?}");
                    } else {
                        assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}");
                    }
                    expected[direction].packets += 1;
                    expected[direction].bytes += frame.len() as u64 - 14;
                }
            }
            assert_eq!(counted(&node), expected, "{there:?}");
            // What is dropped is not counted. From the node's stack such a packet passes: the stack has counted its hop.
            if there.from != End::Outside {
                let dropped = Sent { ttl: 1, ..there }.frame();
                assert!(node.program(there.from, there.to, &dropped, 0).is_none());
                assert!(matches!(node.worker(there.from, &dropped, now).0, Verdict::Drop(_)));
                assert_eq!(counted(&node), expected, "{there:?}");
            }
        });
    }
}

#[test]
fn a_datagram_that_may_open_a_stream_meets_a_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let (there, back) = (sent(End::A, End::B, false, 0), sent(End::B, End::A, false, 0));
        let began = Timestamp::from_millis(now.as_millis() - 3000);
        open_since(&mut node, there, began, began);
        assert!(node.program(End::B, End::A, &back.frame(), 0).is_some(), "only the opener's make a stream");
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_none(), "two seconds after the first");
        assert_eq!(node.worker(End::A, &there.frame(), now).0, Verdict::Forward(B));
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_some(), "the worker has noted it");
    });
}

#[test]
fn a_datagram_too_early_to_open_a_stream_needs_no_worker() {
    in_namespace(|| {
        let mut node = Node::new();
        // On a busy machine the two seconds may be over before the program runs. And its clock is behind by up to a jiffy: at the
        // end of a tick it takes such a connection for one of the future.
        let passes = (0..20).any(|flow| {
            let there = Sent { flow, ..sent(End::A, End::B, false, 0) };
            let began = Timestamp::now();
            open_since(&mut node, there, began, began);
            let done = node.program(End::A, End::B, &there.frame(), 0);
            Timestamp::now().as_millis() - began.as_millis() < 1500 && done.is_some()
        });
        assert!(passes, "twenty tries of 1.5 s");
    });
}

#[test]
fn segments_after_those_that_the_kernel_forwarded_are_not_out_of_window() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        open(&mut node, there, now);
        let mut far = Sent { flags: ACK | 1, ..there }.frame();
        far[38..42].copy_from_slice(&2_000_000_000_u32.to_be_bytes());
        assert_eq!(
            node.worker(End::A, &far, now).0,
            Verdict::Drop(DropReason::InvalidState),
            "nothing came in between"
        );
        assert!(node.program(End::A, End::B, &there.frame(), 0).is_some());
        assert_eq!(
            node.worker(End::A, &far, now).0,
            Verdict::Forward(B),
            "the worker has not seen what came before it"
        );
    });
}

const FIN: u8 = 1;

/// State and time left of the only connection, as listed.
fn listed(node: &Node, now: Timestamp) -> (String, Duration) {
    let listed: Vec<_> = node.pipeline.connections().iter(now).collect();
    assert_eq!(listed.len(), 1, "{listed:?}");
    (listed[0].state.to_string(), listed[0].expires_in)
}

/// A SYN and its answer, by a worker.
fn half_open(node: &mut Node, there: Sent, now: Timestamp) {
    for (packet, flags, from_opener) in [(there, SYN, true), (there.back(), SYN | ACK, false)] {
        let frame = Sent { flags, payload: 0, ..packet }.frame();
        let (verdict, _) = node.worker(packet.from, &in_step(frame, true, flags, from_opener), now);
        assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
    }
}

/// What is different in a TCP header.
type Change<'a> = &'a dyn Fn(&mut [u8]);

#[test]
fn the_end_of_a_handshake_needs_no_worker_if_it_has_the_numbers_of_both_syns() {
    for there in [
        sent(End::A, End::B, true, ACK),
        sent(End::B, End::A, true, ACK),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
        to_service(End::A, End::B, true, ACK),
        to_service(End::B, End::A, true, ACK),
    ] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            half_open(&mut node, there, now);
            let program = |node: &Node, packet: Sent, change: Change<'_>| {
                let mut frame = packet.frame();
                change(&mut frame[if packet.v4 { 34 } else { 54 }..]);
                node.program(packet.from, packet.to, &frame, 0)
            };
            let data = Sent { payload: 1, ..there };
            let there = Sent { payload: 0, ..there };
            let others: [(&str, Sent, Change<'_>); 7] = [
                ("with data", data, &|_| {}),
                ("of the answering end", there.back(), &|_| {}),
                ("another sequence number", there, &|tcp| tcp[7] ^= 1),
                ("another acknowledgement", there, &|tcp| tcp[11] ^= 1),
                ("neither", there, &|tcp| tcp[4..12].fill(0)),
                ("SYN", Sent { flags: SYN, ..there }, &|_| {}),
                ("RST", Sent { flags: ACK | 4, ..there }, &|_| {}),
            ];
            for (what, packet, change) in others {
                assert!(program(&node, packet, change).is_none(), "{what}: {there:?}");
                assert_eq!(listed(&node, now).0, "SYN_RECV", "{what}: {there:?}");
            }
            assert!(program(&node, there, &|_| {}).is_some(), "{there:?}");
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
            assert!(program(&node, there.back(), &|_| {}).is_some(), "{there:?}");
            assert!(program(&node, there, &|tcp| tcp[7] ^= 1).is_some(), "{there:?}: no longer of the handshake");
            let table = node.pipeline.connections();
            let swept =
                table.sweep(&mut Default::default(), usize::MAX, now.plus(Duration::from_secs(3600)), Epoch(1)).expired;
            assert_eq!(swept, 0, "{there:?}: as long as an established one");
            let kept = node.next_epoch_keeping(true);
            assert_eq!(program(&node, there, &|_| {}).is_some(), kept == 1, "{there:?}");
            let (verdict, _) = node.worker(there.back().from, &there.back().frame(), now);
            assert!(matches!(verdict, Verdict::Forward(_)), "{there:?}: {verdict:?}");
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
        });
    }
}

#[test]
fn a_reset_after_a_handshake_that_a_program_completed_closes_by_its_number() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        for (flow, with_data, expected) in [(1, false, "CLOSE"), (2, true, "RESETTING")] {
            let there = Sent { payload: 0, flow, ..sent(End::A, End::B, true, ACK) };
            half_open(&mut node, there, now);
            assert!(node.program(End::A, End::B, &there.frame(), 0).is_some());
            if with_data {
                // Workers do not see how much it was.
                assert!(node.program(End::A, End::B, &Sent { payload: 9, ..there }.frame(), 0).is_some());
            }
            let reset = Sent { flags: ACK | 4, ..there }.frame();
            assert_eq!(node.worker(End::A, &reset, now).0, Verdict::Forward(B));
            assert_eq!(listed(&node, now).0, expected);
            node.pipeline.connections().remove_addresses(&[address(End::A, true).into()]);
        }
    });
}

#[test]
fn a_connection_that_its_ends_close_without_a_worker_has_ended_for_workers() {
    for there in [
        sent(End::A, End::B, true, ACK),
        Sent { v4: false, ..sent(End::Outside, End::B, true, ACK) },
        to_service(End::A, End::B, true, ACK),
    ] {
        in_namespace(|| {
            let mut node = Node::new();
            let now = Timestamp::now();
            open(&mut node, there, now);
            let by_program = |node: &Node, packet: Sent, flags| {
                let frame = Sent { flags, ..packet }.frame();
                assert!(node.program(packet.from, packet.to, &frame, 0).is_some(), "{packet:?}: {flags:x}");
            };
            by_program(&node, there, FIN | ACK);
            assert_eq!(listed(&node, now).0, "FIN_WAIT", "{there:?}");
            // Half closed: the other end goes on sending, and the first one acknowledges.
            by_program(&node, there.back(), ACK);
            by_program(&node, there, ACK);
            assert_eq!(listed(&node, now).0, "FIN_WAIT", "{there:?}");
            by_program(&node, there.back(), FIN | ACK);
            by_program(&node, there, ACK);
            let (state, left) = listed(&node, now);
            assert!(state == "TIME_WAIT" && left <= Duration::from_secs(121), "{there:?}: {state}, {left:?}");
            let sweep = |node: &Node, after: u64| {
                let table = node.pipeline.connections();
                table.sweep(&mut Default::default(), usize::MAX, now.plus(Duration::from_secs(after)), Epoch(1)).expired
            };
            assert_eq!(sweep(&node, 110), 0, "{there:?}");
            // A new connection with the same ports is one that nobody has closed.
            open(&mut node, there, now);
            assert_eq!(listed(&node, now).0, "ESTABLISHED", "{there:?}");
            assert_eq!(sweep(&node, 130), 0, "{there:?}");
            by_program(&node, there, FIN | ACK);
            by_program(&node, there.back(), FIN | ACK);
            assert!(sweep(&node, 130) > 0, "{there:?}");
        });
    }
}

#[test]
fn a_worker_goes_on_where_a_program_has_forwarded_a_fin() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        let back = there.back();
        open(&mut node, there, now);
        let fin = Sent { flags: FIN | ACK, ..there }.frame();
        assert!(node.program(End::A, End::B, &fin, 0).is_some());
        // Policy changes, so that the next packets meet a worker.
        node.next_epoch(true);
        let steps = [(back, FIN | ACK, "LAST_ACK"), (there, ACK, "TIME_WAIT")];
        for (number, (packet, flags, state)) in steps.into_iter().enumerate() {
            let mut frame = Sent { flags, payload: 0, ..packet }.frame();
            // After ten bytes and a FIN of one side, and after a FIN of the other.
            let (seq, ack): (u32, u32) = if number == 0 { (1000, 1011) } else { (1011, 1001) };
            frame[38..42].copy_from_slice(&seq.to_be_bytes());
            frame[42..46].copy_from_slice(&ack.to_be_bytes());
            let verdict = node.worker(packet.from, &frame, now).0;
            assert!(matches!(verdict, Verdict::Forward(_)), "{packet:?}: {verdict:?}");
            assert_eq!(listed(&node, now).0, state);
        }
    });
}

#[test]
fn the_next_process_finds_the_table_and_forwarding_goes_on_meanwhile() {
    in_namespace(|| {
        let mut node = Node::new();
        let now = Timestamp::now();
        let there = sent(End::A, End::B, true, ACK);
        open(&mut node, there, now);
        node.next_epoch(true);
        open(&mut node, Sent { flow: 2, ..there }, now);
        let second = Sent { flow: 2, ..there };
        node.pipeline = Pipeline::new(open_table(&node.maps), PipelineMode::Full);
        let table = node.pipeline.connections();
        assert_eq!((table.origin(), table.len(), table.last_epoch()), (&TableOrigin::Found, 2, Epoch(2)));
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_some(), "under the last epoch");
        // Until it has ports and policy, what it publishes does not count.
        node.next_epoch(true);
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_some());
        node.pipeline.connections().take_over();
        assert!(node.pipeline.connections().publish_epoch(node.snapshot.epoch));
        assert!(node.program(End::A, End::B, &second.frame(), 0).is_none());
        for packet in [there, second] {
            assert!(matches!(node.worker(End::A, &packet.frame(), now).0, Verdict::Forward(B)));
            assert!(node.program(End::A, End::B, &packet.frame(), 0).is_some());
        }
    });
}

#[derive(Clone, Debug)]
enum Step {
    /// The packets that open the connection of this one.
    Open(Sent),
    /// This packet with so many mutated bytes (position, and what is changed in it).
    Packet(Sent, Vec<(u16, u8)>),
    /// A long TCP segment, that becomes segments with so many bytes each.
    Long(Sent, u16),
    /// Policy that allows connections to B or not, and whether connections that stay allowed get its verdict at once.
    Publish(bool, bool),
}

fn any_ends() -> impl Strategy<Value = (End, End, Way)> {
    let direct = [
        (End::A, End::B),
        (End::B, End::A),
        (End::A, End::Outside),
        (End::Outside, End::A),
        (End::Outside, End::B),
        (End::B, End::Outside),
    ];
    let direct = direct.map(|(from, to)| (from, to, Way::Direct));
    let translated = CLIENTS.into_iter().flat_map(|(client, backend)| {
        let there = to_service(client, backend, true, ACK);
        [there, there.back()].map(|packet| (packet.from, packet.to, packet.way))
    });
    prop::sample::select(direct.into_iter().chain(translated).collect::<Vec<_>>())
}

fn any_packet() -> impl Strategy<Value = Sent> {
    let flags = prop_oneof![8 => Just(ACK), 2 => Just(SYN), 2 => Just(SYN | ACK), 1 => Just(ACK | 1), 1 => 0..64_u8];
    let ttl = prop_oneof![8 => Just(64_u8), 1 => Just(1), 1 => Just(2), 1 => Just(0)];
    let payload = prop_oneof![8 => 0..64_usize, 1 => Just(1355), 1 => 1340..1380_usize];
    (any_ends(), any::<bool>(), any::<bool>(), 0..3_u8, flags, ttl, payload).prop_map(
        |((from, to, way), v4, tcp, flow, flags, ttl, payload)| Sent {
            from,
            to,
            way,
            v4,
            tcp,
            flow,
            flags,
            ttl,
            payload,
        },
    )
}

fn any_step() -> impl Strategy<Value = Step> {
    let mutation = (0..80_u16, 1..=255_u8);
    let long = (any_packet(), 1..3000_usize, prop_oneof![1..1500_u16, 1335..1365_u16]);
    prop_oneof![
        4 => any_packet().prop_map(Step::Open),
        20 => any_packet().prop_map(|packet| Step::Packet(packet, Vec::new())),
        8 => (any_packet(), prop::collection::vec(mutation, 1..3)).prop_map(|(packet, at)| Step::Packet(packet, at)),
        6 => long.prop_map(|(packet, payload, size)| Step::Long(Sent { tcp: true, flags: ACK, payload, ..packet }, size)),
        1 => (prop::bool::weighted(0.7), any::<bool>()).prop_map(|(allowed, keeps)| Step::Publish(allowed, keeps)),
    ]
}

#[test]
fn the_kernel_forwards_only_what_a_worker_would_forward_and_with_the_same_bytes() {
    in_namespace(|| {
        let mut node = Node::new();
        let (mut forwarded, mut translated, mut long) = (0_u32, 0_u32, 0_u32);
        let mut runner = TestRunner::new(RunnerConfig { cases: 200, ..RunnerConfig::default() });
        let steps = prop::collection::vec(any_step(), 1..200);
        let cell = std::cell::RefCell::new((&mut node, &mut forwarded, &mut translated, &mut long));
        runner
            .run(&steps, |steps| {
                let (node, forwarded, translated, long) = &mut *cell.borrow_mut();
                forget(node);
                node.next_epoch(true);
                for step in steps {
                    let now = Timestamp::now();
                    let (packet, mutations) = match step {
                        Step::Publish(allowed, true) => {
                            node.next_epoch_keeping(allowed);
                            continue;
                        }
                        Step::Publish(allowed, false) => {
                            node.next_epoch(allowed);
                            continue;
                        }
                        Step::Long(packet, size) => {
                            **long += u32::from(assert_segmented_alike(node, packet, size, now));
                            continue;
                        }
                        Step::Open(packet) => {
                            let (there, back) = (Sent { ttl: 64, ..packet }, Sent { ttl: 64, ..packet }.back());
                            // Policy, or the connection's state before, may forbid it.
                            for (packet, flags, from_opener) in
                                [(there, SYN, true), (back, SYN | ACK, false), (there, ACK, true), (back, ACK, false)]
                            {
                                node.handshake(packet, flags, from_opener, now);
                            }
                            continue;
                        }
                        Step::Packet(packet, mutations) => (packet, mutations),
                    };
                    let mut frame = packet.frame();
                    for (at, change) in mutations {
                        if let Some(byte) = frame.get_mut(usize::from(at)) {
                            *byte ^= change;
                        }
                    }
                    match node.program(packet.from, packet.to, &frame, 0) {
                        Some(done) => {
                            assert_alike(node, packet, &frame, &done, now);
                            **forwarded += 1;
                            **translated += u32::from(done.1[26..] != frame[26..]);
                        }
                        None => _ = node.worker(packet.from, &frame, now),
                    }
                }
                Ok(())
            })
            .unwrap();
        assert!(forwarded > 200, "only {forwarded} packets of all passed without a worker");
        assert!(translated > 100, "only {translated} packets of {forwarded} were translated");
        assert!(long > 20, "only {long} long segments passed without a worker");
    });
}
