//! The records of ended connections: their counts together are those of the packets that were forwarded.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader};
use penstock_dataplane::conntrack::{
    Config, ConnTable, EndedConnection, Ending, State, SweepCursor, TcpState, Timestamp,
};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::packet::{Flow, TcpFlags, parse};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::{
    AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet, PortSpec, RuleName,
    RuleSpec, RuleTable,
};
use penstock_dataplane::{Epoch, Snapshot};
use proptest::prelude::*;

const HOST: PortId = PortId(0);
const PODS: [(PortId, &str); 2] = [(PortId(1), "10.0.0.1"), (PortId(2), "10.0.0.2")];
const ETHERNET: usize = 14;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn forwarding() -> Forwarding {
    let mac = |id: PortId, end| Mac([2, 0, 0, 0, id.0 as u8, end]);
    let mut forwarding = Forwarding::new([]);
    let pods = PODS.map(|(id, address)| (id, PortKind::Pod, vec![ip(address).into()]));
    for (id, kind, addresses) in pods.into_iter().chain([(HOST, PortKind::Host, Vec::new())]) {
        let port = Port::new(kind, mac(id, 1), mac(id, 2), 1500, addresses);
        forwarding.insert(id, port).unwrap();
    }
    forwarding
}

/// Both pods send what they like; the second takes all, or nothing.
fn policy(is_open: bool) -> PolicySet {
    let mut update = PolicySet::default().update();
    for (number, (_, address)) in (1..).zip(PODS) {
        let identity = Identity(NonZeroU32::new(number).unwrap());
        let endpoint = Some(EndpointId(number));
        update.set_address(ip(address).into(), Some(AddressOwner::Pod { identity, endpoint, node: Some(NodeId(0)) }));
        // A rule that allows all: what no policy selects would pass without a connection.
        let every =
            RuleSpec { name: RuleName::new("test/policy", "every"), peers: PeerSpec::Every, ports: PortSpec::Every };
        let rules = if is_open { vec![every] } else { Vec::new() };
        let isolated = EndpointPolicy::Isolated(Arc::new(RuleTable::new(&rules, [])));
        let ingress = if number == 1 { EndpointPolicy::Open } else { isolated };
        update.set_endpoint(EndpointId(number), Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
    }
    update.finish()
}

/// Packets and bytes.
type Counts = (u64, u64);

struct Node {
    pipeline: Pipeline,
    table: Arc<ConnTable>,
    snapshot: Snapshot,
    now: Timestamp,
    /// The packets that were forwarded, by their flow, as seen from outside.
    forwarded: BTreeMap<String, Counts>,
    ended: Vec<EndedConnection>,
}

impl Node {
    fn new(entries: usize, ended: usize) -> Self {
        let table = Arc::new(ConnTable::new(&Config { entries, ended, ..Config::default() }).unwrap());
        Self {
            pipeline: Pipeline::new(table.clone(), PipelineMode::Full),
            table,
            snapshot: Snapshot::new(Epoch(1), policy(true), forwarding()),
            now: Timestamp::from_millis(1_000_000),
            forwarded: BTreeMap::new(),
            ended: Vec::new(),
        }
    }

    fn publish(&mut self, is_open: bool) {
        self.snapshot = Snapshot::new(self.snapshot.epoch.next(), policy(is_open), forwarding());
    }

    /// Sends packets of one pod, at most a batch, and counts those that pass.
    fn send(&mut self, from: usize, packets: &[Vec<u8>]) -> Vec<Verdict> {
        let mut frames = MemoryFrames::new();
        packets.iter().for_each(|packet| frames.push(packet.clone()).unwrap());
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, self.now, PODS[from].0, &mut frames, &mut verdicts, &mut ());
        for (packet, verdict) in packets.iter().zip(&verdicts) {
            if let Verdict::Forward(_) = verdict {
                let counts = self.forwarded.entry(name(&parse(packet).unwrap().flow)).or_default();
                *counts = (counts.0 + 1, counts.1 + (packet.len() - ETHERNET) as u64);
            }
        }
        self.take();
        verdicts[..packets.len()].to_vec()
    }

    fn sweep(&mut self, after: Duration) {
        self.now = self.now.plus(after);
        let mut cursor = SweepCursor::default();
        while !self.table.sweep(&mut cursor, 4096, self.now, self.snapshot.epoch).wrapped {}
        self.take();
    }

    fn take(&mut self) {
        self.ended.extend(std::iter::from_fn(|| self.table.take_ended()));
    }

    /// The sums of the records, by direction.
    fn recorded(&self) -> BTreeMap<String, Counts> {
        let mut recorded = BTreeMap::<String, Counts>::new();
        for ended in &self.ended {
            let flow = ended.original;
            for (flow, traffic) in [flow, turned(&flow)].iter().zip(ended.traffic) {
                if traffic.packets > 0 {
                    let counts = recorded.entry(name(flow)).or_default();
                    *counts = (counts.0 + traffic.packets, counts.1 + traffic.bytes);
                }
            }
        }
        recorded
    }
}

fn turned(flow: &Flow) -> Flow {
    Flow { src: flow.dst, dst: flow.src, src_port: flow.dst_port, dst_port: flow.src_port, ..*flow }
}

fn name(flow: &Flow) -> String {
    format!("{} {}:{} {}:{}", flow.protocol, flow.src, flow.src_port, flow.dst, flow.dst_port)
}

/// A packet from one pod to the other. Without flags it is a datagram.
fn packet(from: usize, ports: (u16, u16), flags: Option<TcpFlags>, payload: usize) -> Vec<u8> {
    let addresses = [from, 1 - from].map(|pod| match ip(PODS[pod].1) {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(_) => unreachable!("the pods' addresses above are IPv4"),
    });
    let ip = PacketBuilder::ethernet2([1; 6], [2; 6]).ipv4(addresses[0], addresses[1], 64);
    let (mut frame, payload) = (Vec::new(), vec![7; payload]);
    match flags {
        None => ip.udp(ports.0, ports.1).write(&mut frame, &payload).unwrap(),
        Some(flags) => {
            let mut header = TcpHeader::new(ports.0, ports.1, 1000, 4096);
            header.syn = flags.contains(TcpFlags::SYN);
            header.ack = flags.contains(TcpFlags::ACK);
            header.fin = flags.contains(TcpFlags::FIN);
            header.rst = flags.contains(TcpFlags::RST);
            header.acknowledgment_number = 1000;
            ip.tcp_header(header).write(&mut frame, &payload).unwrap();
        }
    }
    frame
}

#[derive(Clone, Debug)]
enum Step {
    /// Packets of one pod: the client's port, flags, and length of what they carry.
    Send(usize, Vec<(u16, Option<u8>, usize)>),
    Wait(u64),
    Publish(bool),
    Remove,
}

fn step(clients: u16) -> impl Strategy<Value = Step> {
    const FLAGS: [Option<u8>; 6] = [None, None, Some(0x02), Some(0x10), Some(0x11), Some(0x04)];
    let packet = (0..clients, prop::sample::select(FLAGS.to_vec()), 0..200_usize);
    prop_oneof![
        10 => (0..2_usize, prop::collection::vec(packet, 1..BATCH)).prop_map(|(from, packets)| Step::Send(from, packets)),
        2 => (0..400_u64).prop_map(Step::Wait),
        1 => any::<bool>().prop_map(Step::Publish),
        1 => Just(Step::Remove),
    ]
}

fn run(node: &mut Node, steps: Vec<Step>) {
    for step in steps {
        match step {
            Step::Send(from, packets) => {
                let ports = |client| if from == 0 { (1024 + client, 53) } else { (53, 1024 + client) };
                let packets: Vec<_> = packets
                    .iter()
                    .map(|&(client, flags, payload)| packet(from, ports(client), flags.map(TcpFlags), payload))
                    .collect();
                node.send(from, &packets);
            }
            Step::Wait(seconds) => node.sweep(Duration::from_secs(seconds)),
            Step::Publish(is_open) => node.publish(is_open),
            Step::Remove => {
                node.table.remove_addresses(&[ip(PODS[1].1).into()]);
                node.take();
            }
        }
    }
    // Longer than any timeout.
    node.sweep(Duration::from_secs(6 * 86_400));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// With room for all connections, each direction of each flow has exactly the packets and bytes that left.
    #[test]
    fn records_have_the_packets_and_bytes_that_were_forwarded(steps in prop::collection::vec(step(4), 1..60)) {
        let mut node = Node::new(4096, 4096);
        run(&mut node, steps);
        prop_assert!(node.table.is_empty());
        prop_assert_eq!(node.table.ended_lost(), 0);
        prop_assert_eq!(node.recorded(), node.forwarded);
    }

    /// A table too small for them evicts connections, some in the batch of their first packet: those packets are counted
    /// as uncounted, and no others.
    #[test]
    fn a_crowded_table_loses_no_packet_unaccounted(steps in prop::collection::vec(step(400), 1..30)) {
        let mut node = Node::new(64, 1 << 16);
        run(&mut node, steps);
        let total = |counts: BTreeMap<String, Counts>| counts.values().map(|(packets, _)| packets).sum::<u64>();
        prop_assert_eq!(total(node.recorded()) + node.table.uncounted(), total(node.forwarded));
    }
}

#[test]
fn a_record_says_how_and_when_a_connection_ended() {
    let (syn, syn_ack, ack) = (TcpFlags::SYN, TcpFlags::SYN.with(TcpFlags::ACK), TcpFlags::ACK);
    let mut node = Node::new(64, 64);
    let there = |flags, payload| packet(0, (1024, 80), flags, payload);
    let back = |flags, payload| packet(1, (80, 1024), flags, payload);
    let begun = node.now;

    node.send(0, &[there(None, 100)]);
    node.send(1, &[back(None, 300)]);
    node.sweep(Duration::from_secs(600));
    let udp = node.ended.pop().expect("it has expired");
    assert_eq!((udp.ending, udp.state, udp.begun), (Ending::Expired, State::Replied, Some(begun)));
    assert_eq!(udp.traffic.map(|traffic| (traffic.packets, traffic.bytes)), [(1, 128), (1, 328)]);
    assert!(Duration::from_secs(599) <= udp.idle(node.now) && udp.idle(node.now) <= Duration::from_secs(601));

    node.send(0, &[there(Some(syn), 0)]);
    node.send(1, &[back(Some(syn_ack), 0)]);
    node.send(0, &[there(Some(ack), 0)]);
    node.publish(false);
    node.send(0, &[there(Some(ack), 10)]);
    node.table.remove_addresses(&[ip(PODS[1].1).into()]);
    node.take();
    let revoked = node.ended.pop().expect("it was removed");
    assert_eq!((revoked.ending, revoked.state, revoked.flags), (Ending::Removed, State::Revoked, syn_ack));
    assert_eq!(revoked.traffic.map(|traffic| traffic.packets), [2, 1], "what was dropped does not count");

    node.publish(true);
    node.send(0, &[there(Some(syn), 0)]);
    node.send(1, &[back(Some(TcpFlags::RST.with(ack)), 0)]);
    node.send(0, &[there(Some(syn), 0)]);
    let reset = node.ended.pop().expect("a new one has taken its place");
    assert_eq!((reset.ending, reset.state), (Ending::Replaced, State::Tcp(TcpState::Close)));
    assert!(node.ended.is_empty());
}

#[test]
fn an_unread_table_keeps_some_records_and_counts_the_rest() {
    let mut node = Node::new(4096, 16);
    (0..100).for_each(|client| _ = node.send(0, &[packet(0, (1024 + client, 53), None, 1)]));
    node.now = node.now.plus(Duration::from_secs(600));
    let mut cursor = SweepCursor::default();
    while !node.table.sweep(&mut cursor, 4096, node.now, node.snapshot.epoch).wrapped {}
    assert_eq!(node.table.ended_lost(), 84);
    assert_eq!(std::iter::from_fn(|| node.table.take_ended()).count(), 16);
}

#[test]
fn without_records_nothing_is_counted_and_nothing_is_kept() {
    let mut node = Node::new(64, 0);
    node.send(0, &[packet(0, (1024, 53), None, 1)]);
    assert!(node.table.iter(node.now).all(|connection| connection.traffic.is_none() && connection.begun.is_none()));
    node.sweep(Duration::from_secs(600));
    assert!(node.ended.is_empty() && !node.table.counts());
}
