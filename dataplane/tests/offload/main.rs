//! Packets that the kernel's programs forward without a worker, against what a worker does with them: they share the
//! connection table. Needs root; each test has a network namespace of its own, in which nothing is sent.

mod captures;
mod ended;
mod entry;
mod epochs;
mod headers;
mod histories;
mod hits;
mod mutations;
mod repeat;
mod states;
mod translated;
mod unserved;
mod verifier;

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::panic::resume_unwind;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader};
use nix::sched::{CloneFlags, unshare};
use penstock_dataplane::conntrack::{
    Config, ConnTable, KernelMapFds, KernelMapSizes, KernelMaps, TableMemory, TableOrigin, Timestamp, Traffic,
};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::pipeline::{
    BATCH, DropReason, Frames, Pipeline, PipelineMode, StackSender, Verdict, keep_answers, keep_offloaded,
};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet, PortSpec, RuleName,
    RuleSpec, RuleTable,
};
use penstock_dataplane::{Epoch, Snapshot};
use penstock_xdp_redirect::{
    ConnectionMapSizes, ConnectionMaps, Filtered, Interface, PodVeth, ServedPort, TcxOptions, TcxPrograms, TriedSender,
};

const HOST: PortId = PortId(0);
const A: PortId = PortId(1);
const B: PortId = PortId(2);
const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xee];
const MTU: u16 = 1400;
/// `TC_ACT_UNSPEC`, on to the next program, and `TC_ACT_REDIRECT` of `linux/pkt_cls.h`.
const NEXT: u32 = u32::MAX;
const REDIRECT: u32 = 7;
const TO_WORKER: [u8; 2] = [2, 0xfa];

/// How a pod is served that is on this bridge, 0: on none.
fn served(port: PortId, bridge: u32) -> ServedPort {
    let (node_mac, pod_mac, filtered) = (NODE_MAC, pod_mac(port), Filtered::default());
    ServedPort { port: port.0, node_mac, pod_mac, bridge, mtu: MTU.into(), filtered }
}

fn pod_mac(port: PortId) -> [u8; 6] {
    [2, 0, 0, 0, 1, port.0 as u8]
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Addresses of the two pods, of a machine outside, and of a Service that the node translates, by family.
fn address(end: End, v4: bool) -> IpAddr {
    ip(match (end, v4) {
        (End::A, true) => "10.0.0.1",
        (End::B, true) => "10.0.0.2",
        (End::Outside, true) => "203.0.113.7",
        (End::Service, true) => "10.97.0.9",
        (End::A, false) => "fd00::a",
        (End::B, false) => "fd00::2",
        (End::Outside, false) => "2001:db8::7",
        (End::Service, false) => "fd00:97::9",
    })
}

/// The port of who answers.
const ANSWERING_PORT: u16 = 80;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    A,
    B,
    Outside,
    /// A backend behind the node's stack, by a Service's address.
    Service,
}

impl End {
    fn port(self) -> PortId {
        match self {
            Self::A => A,
            Self::B => B,
            Self::Outside | Self::Service => HOST,
        }
    }

    fn is_pod(self) -> bool {
        self.port() != HOST
    }
}

fn everything() -> RuleSpec {
    RuleSpec { name: RuleName::new("test/policy", "everything"), peers: PeerSpec::Every, ports: PortSpec::Every }
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
    /// The bridges that the pods are on, 0: none.
    bridges: [u32; 2],
    /// The next event of a connection that a program has opened.
    heard: AtomicU64,
    /// Who sends what comes from outside: another machine, or the node itself.
    outside: StackSender,
}

/// A batch of one frame, and who has sent it if it came from the node's stack.
struct OneFrame(Vec<u8>, StackSender);

impl Frames for OneFrame {
    fn len(&self) -> usize {
        1
    }

    fn bytes(&mut self, _: usize) -> &mut [u8] {
        &mut self.0
    }

    fn stack_sender(&mut self, _: usize) -> StackSender {
        self.1
    }
}

fn open_table(maps: &ConnectionMaps) -> Arc<ConnTable> {
    let table = open_table_for(maps, WITHOUT_DAEMON);
    table.adopt();
    table
}

/// The table as it is, where programs open connections for so long when the process has ended.
fn open_table_for(maps: &ConnectionMaps, longest: Duration) -> Arc<ConnTable> {
    let [table, tags, entries, uses] = maps.descriptors().unwrap();
    let memory = TableMemory::Kernel(KernelMaps(Arc::new(KernelMapFds { table, tags, entries, uses })));
    Arc::new(ConnTable::new(&Config { entries: ENTRIES, memory, repeats: Some(longest), ..Config::default() }).unwrap())
}

const ENTRIES: usize = 128;
/// How long programs open connections when the process has ended.
const WITHOUT_DAEMON: Duration = Duration::from_secs(600);

impl Node {
    fn new() -> Self {
        let KernelMapSizes { groups, entries, with_openers } = KernelMapSizes::of(ENTRIES);
        let sizes = ConnectionMapSizes {
            version: KernelMapSizes::VERSION,
            table: KernelMapSizes::TABLE,
            tags: (groups, KernelMapSizes::TAGS),
            entries: (with_openers, KernelMapSizes::ENTRY),
            usage: (entries, KernelMapSizes::USE),
        };
        let maps = ConnectionMaps::open(None, &sizes).unwrap();
        let programs =
            TcxPrograms::load(&TcxOptions { host_routing: true, ..TcxOptions::default() }, Some(&maps)).unwrap();
        programs.set_pairs(&[1], &[]).unwrap();
        let veths = [A, B].map(|port| {
            let name = format!("v{}", port.0);
            let made = Command::new("ip").args(["link", "add", "name", &name, "type", "veth"]).status().unwrap();
            assert!(made.success());
            let mut veth = programs.attach_pod(&Interface::by_name(&name).unwrap()).unwrap();
            veth.serve(&served(port, 0)).unwrap();
            veth
        });
        let pipeline = Pipeline::new(open_table(&maps), PipelineMode::Full);
        let mut node = Self {
            programs,
            veths,
            maps,
            pipeline,
            snapshot: Snapshot::default(),
            bridges: [0; 2],
            heard: AtomicU64::new(0),
            outside: StackSender::Untranslated,
        };
        node.publish(Epoch(1), true);
        node
    }

    fn interface(&self, end: End) -> u32 {
        match end {
            End::Outside | End::Service => 0,
            end => self.veths[end.port().index() - 1].interface().index,
        }
    }

    /// The pods are on these bridges from now on.
    fn bridge(&mut self, bridges: [u32; 2]) {
        for ((veth, port), bridge) in self.veths.iter_mut().zip([A, B]).zip(bridges) {
            veth.serve(&served(port, bridge)).unwrap();
        }
        self.bridges = bridges;
        self.next_epoch(true);
    }

    /// Publishes policy by which B accepts connections, or none.
    fn publish(&mut self, epoch: Epoch, allowed: bool) {
        self.snapshot = self.snapshot_of(epoch, allowed);
        self.pipeline.connections().publish_epoch(epoch);
    }

    fn snapshot_of(&self, epoch: Epoch, allowed: bool) -> Snapshot {
        let mut forwarding = Forwarding::new([ip("192.168.0.1").into()]);
        for (id, end) in [(HOST, End::Outside), (A, End::A), (B, End::B)] {
            let is_pod = end.is_pod();
            let addresses =
                if is_pod { vec![address(end, true).into(), address(end, false).into()] } else { Vec::new() };
            let port = Port {
                interface: self.interface(end),
                bridge: if is_pod { self.bridges[id.index() - 1] } else { 0 },
                ..Port::new(
                    if is_pod { PortKind::Pod } else { PortKind::Host },
                    Mac(NODE_MAC),
                    Mac(pod_mac(id)),
                    if is_pod { MTU } else { 65_535 },
                    addresses,
                )
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
            // A connection with B is tracked: without policy nothing would be asked of its state.
            let rules = if allowed { vec![everything()] } else { Vec::new() };
            let ingress = match end {
                End::B => EndpointPolicy::Isolated(Arc::new(RuleTable::new(&rules, []))),
                _ => EndpointPolicy::Open,
            };
            update.set_endpoint(endpoint, Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
        }
        update.set_services(&Arc::new([true, false].map(|v4| address(End::Service, v4).into()).into_iter().collect()));
        Snapshot::new(epoch, update.finish(), forwarding)
    }

    fn next_epoch(&mut self, allowed: bool) {
        self.publish(self.snapshot.epoch.next(), allowed);
    }

    /// The same, after connections that stay allowed, and answers, got the new verdict. Returns how many connections.
    fn next_epoch_keeping(&mut self, allowed: bool) -> usize {
        self.keep_and_publish(self.snapshot_of(self.snapshot.epoch.next(), allowed))
    }

    fn keep_and_publish(&mut self, next: Snapshot) -> usize {
        self.snapshot = next;
        let kept = keep_offloaded(self.pipeline.connections(), &self.snapshot, Duration::from_secs(1));
        keep_answers(self.pipeline.connections(), &self.snapshot);
        self.pipeline.connections().publish_epoch(self.snapshot.epoch);
        kept
    }

    /// A worker's verdict on a frame from this end, and the frame afterwards.
    fn worker(&mut self, from: End, frame: &[u8], now: Timestamp) -> (Verdict, Vec<u8>) {
        let mut batch = OneFrame(frame.to_vec(), self.outside);
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, now, from.port(), &mut batch, &mut verdicts, &mut ());
        (verdicts[0], batch.0)
    }

    /// A worker's verdict on a packet of a handshake, with the numbers that it must have.
    fn handshake(&mut self, packet: Sent, flags: u8, from_opener: bool, now: Timestamp) -> Verdict {
        let frame = Sent { flags: if packet.tcp { flags } else { 0 }, payload: 0, ..packet }.frame();
        self.worker(packet.from, &in_step(frame, packet.tcp, flags, from_opener), now).0
    }

    /// The program's answer where it meets the frame: at the sending pod, or at the receiving one if the sender
    /// is outside. `None`: it is for a worker, or dropped.
    fn program(&self, from: End, to: End, frame: &[u8], segment: u32) -> Option<(u32, Vec<u8>)> {
        let at = if from.is_pod() { from } else { to };
        let before = self.programs.offloaded().unwrap();
        let sender = match (from, self.outside) {
            (End::A | End::B, _) => TriedSender::Pod,
            (_, StackSender::Process) => TriedSender::Node,
            _ => TriedSender::Stack,
        };
        let tried = self.programs.try_frame(sender, self.interface(at), frame, segment).unwrap();
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

/// A packet in one of the directions of a flow between two ends.
#[derive(Clone, Copy, Debug)]
struct Sent {
    from: End,
    to: End,
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
        if opens { ((from, client), (to, ANSWERING_PORT)) } else { ((from, ANSWERING_PORT), (to, client)) }
    }

    /// The packet in the other direction.
    fn back(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }

    fn frame(&self) -> Vec<u8> {
        let ((from, src), (to, dst)) = self.ends();
        let from_mac = if self.from.is_pod() { pod_mac(self.from.port()) } else { NODE_MAC };
        let to_mac = if self.from.is_pod() { NODE_MAC } else { pod_mac(self.to.port()) };
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
const FIN: u8 = 1;

fn sent(from: End, to: End, tcp: bool, flags: u8) -> Sent {
    Sent { from, to, v4: true, tcp, flow: 1, flags, ttl: 64, payload: 10 }
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
        (End::Outside | End::Service, _) | (_, HOST) => {
            assert_eq!((done.0, &by_program[..12]), (NEXT, &frame[..12]), "{of:?}: between the same MACs");
            assert_eq!(by_worker[12..], by_program[12..], "{of:?}");
        }
        // The MACs tell to which pod.
        _ => assert_eq!((done.0, by_program), (REDIRECT, by_worker), "{of:?}"),
    }
}

/// The parts that are alike in the headers of a long segment and of those that it becomes: not lengths, checksums and numbers.
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
    let is_to_pod = packet.from.is_pod() && egress != HOST;
    let from = if is_to_pod { 0 } else { 12 };
    assert_eq!(of_all_segments(&by_program)[from..], of_all_segments(&by_worker)[from..], "{packet:?}, {size}");
    assert!(!packet.v4 || headers::is_sound(&by_program), "{packet:?}, {size}");
    let longest = size as usize + if packet.v4 { 40 } else { 60 };
    assert!(egress == HOST || longest <= MTU.into(), "{longest} bytes: {packet:?}");
    true
}
