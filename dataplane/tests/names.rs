//! Domain names of egress rules, packet by packet: what a pod learns from the DNS answers that workers forward to it, and what it
//! may reach by that. On a clock of the test's own.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use etherparse::{PacketBuilder, TcpHeader};
use penstock_dataplane::Snapshot;
use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::{Forwarding, Mac, Port, PortId, PortKind};
use penstock_dataplane::names::{NamePattern, NameRules, NameTable, NamedPod, Resolvers};
use penstock_dataplane::pipeline::MemoryFrames;
use penstock_dataplane::pipeline::{BATCH, DropReason, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::{
    AddressBlock, AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, PeerSpec, PolicySet,
    PortProtocol, PortRange, PortSpec, RuleAction, RuleName, RuleSpec, RuleTable, TieredTable,
};

const HOST: PortId = PortId(0);
const WEB: PortId = PortId(1);
const DB: PortId = PortId(2);

const WEB4: &str = "10.0.0.1";
const WEB6: &str = "fd00::1";
const DB4: &str = "10.0.0.2";
const RESOLVER4: &str = "192.0.2.53";
const RESOLVER6: &str = "2001:db8::53";
const SITE4: &str = "203.0.113.7";
const SITE6: &str = "2001:db8::7";

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn rule(blocks: &[&str], ports: &[(PortProtocol, u16)]) -> RuleSpec {
    let blocks = blocks.iter().map(|block| AddressBlock { cidr: block.parse().unwrap(), except: Vec::new() });
    let range = |&(protocol, port): &(PortProtocol, u16)| PortRange { protocol, first: port, last: port };
    RuleSpec {
        name: RuleName::new("test/policy", "rule"),
        peers: PeerSpec::AnyOf { every_pod: false, blocks: blocks.collect() },
        ports: if ports.is_empty() { PortSpec::Every } else { PortSpec::AnyOf(ports.iter().map(range).collect()) },
    }
}

/// Accepts DNS to the resolver, TCP port 443 to a name, then denies everything, but passes port 9 on before.
fn egress(name: Option<&str>) -> EndpointPolicy {
    let everything = ["0.0.0.0/0", "::/0"];
    let dns = [(PortProtocol::Udp, 53), (PortProtocol::Udp, 5353), (PortProtocol::Tcp, 53)];
    let rules = [
        rule(&["192.0.2.53/32", "2001:db8::53/128", "10.0.0.2/32"], &dns),
        rule(&[], &[(PortProtocol::Tcp, 443), (PortProtocol::Tcp, 9)]),
        rule(&everything, &[(PortProtocol::Tcp, 9)]),
        rule(&everything, &[]),
    ];
    let actions = [RuleAction::Accept, RuleAction::Accept, RuleAction::Pass, RuleAction::Deny];
    let pattern = name.map(|name| NamePattern::new(name).unwrap());
    let tiers = TieredTable::new(RuleTable::new(&rules, []), actions, 4, false);
    EndpointPolicy::Tiered(Arc::new(tiers.with_names(NameRules::new(pattern.iter().map(|name| (1, name))))))
}

struct Node {
    pipeline: Pipeline,
    snapshot: Snapshot,
    table: NameTable,
    now: Timestamp,
}

impl Node {
    /// A node with two pods, whose egress rules name this.
    fn new(name: &str) -> Self {
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        let mut node = Self {
            pipeline: Pipeline::new(connections, PipelineMode::Full),
            snapshot: Snapshot::default(),
            table: NameTable::default(),
            now: Timestamp::from_millis(1_000_000),
        };
        node.publish([egress(Some(name)), egress(Some(name))]);
        node
    }

    fn publish(&mut self, egress: [EndpointPolicy; 2]) {
        let mut forwarding = Forwarding::new([ip("192.168.0.1").into()]);
        let ports = [(HOST, PortKind::Host, &[][..]), (WEB, PortKind::Pod, &[WEB4, WEB6]), (DB, PortKind::Pod, &[DB4])];
        for (id, kind, addresses) in ports {
            let mac = |end| Mac([2, 0, 0, 0, id.0 as u8, end]);
            let addresses = addresses.iter().map(|text| ip(text).into()).collect();
            let port = Port::new(kind, mac(1), mac(2), 1500, addresses);
            forwarding.insert(id, port).unwrap();
        }
        let mut update = PolicySet::default().update();
        for (text, number) in [(WEB4, 1), (WEB6, 1), (DB4, 2)] {
            let identity = Identity(NonZeroU32::new(number).unwrap());
            let owner = AddressOwner::Pod { identity, endpoint: Some(EndpointId(number)), node: Some(NodeId(0)) };
            update.set_address(ip(text).into(), Some(owner));
        }
        for (number, egress) in (1..).zip(egress) {
            let has_names = matches!(&egress, EndpointPolicy::Tiered(tiers) if tiers.has_names());
            let names = self.table.of(NamedPod { name: format!("{number}"), created: None, addresses: Vec::new() });
            update.set_endpoint(EndpointId(number), Some(Endpoint { egress, ingress: EndpointPolicy::Open }));
            update.set_names(EndpointId(number), has_names.then_some(names));
        }
        let epoch = self.snapshot.epoch.next();
        let resolvers = [RESOLVER4, RESOLVER6, DB4].map(|text| ip(text).into());
        self.snapshot = Snapshot::new(epoch, update.finish(), forwarding)
            .with_resolvers(Resolvers::new(resolvers, ["198.51.100.0/25".parse().unwrap()]));
    }

    fn wait(&mut self, millis: u64) {
        self.now = self.now.plus(Duration::from_millis(millis));
    }

    fn passes(&mut self, port: PortId, frame: Vec<u8>) -> bool {
        let mut frames = MemoryFrames::new();
        frames.push(frame).unwrap();
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        self.pipeline.process_batch(&self.snapshot, self.now, port, &mut frames, &mut verdicts, &mut ());
        matches!(verdicts[0], Verdict::Forward(_))
    }

    /// The pod asks, and gets this answer: whether both pass.
    fn resolve(&mut self, pod: &str, resolver: &str, answer: &[u8]) -> bool {
        let from = if pod == DB4 { DB } else { WEB };
        self.passes(from, udp((pod, 4000), (resolver, 53), &question_of(answer)))
            && self.passes(HOST, udp((resolver, 53), (pod, 4000), answer))
    }

    /// Whether a new connection of the pod is allowed; then it is established.
    fn connects(&mut self, pod: &str, to: &str, source: u16) -> bool {
        let from = if pod == DB4 { DB } else { WEB };
        let is_allowed = self.passes(from, tcp((pod, source), (to, 443), true));
        if is_allowed {
            assert!(self.passes(HOST, segment((to, 443), (pod, source), true, 5000, Some(1001))), "its answer passes");
            assert!(self.passes(from, tcp((pod, source), (to, 443), false)));
        }
        is_allowed
    }
}

fn packet(
    from: &str,
    to: &str,
    finish: impl Fn(etherparse::PacketBuilderStep<etherparse::IpHeaders>) -> Vec<u8>,
) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([1; 6], [2; 6]);
    finish(match (ip(from), ip(to)) {
        (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
        _ => panic!("{from} and {to} are of different families"),
    })
}

fn udp(from: (&str, u16), to: (&str, u16), payload: &[u8]) -> Vec<u8> {
    packet(from.0, to.0, |ip| {
        let mut frame = Vec::new();
        ip.udp(from.1, to.1).write(&mut frame, payload).unwrap();
        frame
    })
}

/// A segment of a connection: its SYN, or a later one of either end, by numbers of sequence and acknowledgement.
fn segment(from: (&str, u16), to: (&str, u16), syn: bool, seq: u32, ack: Option<u32>) -> Vec<u8> {
    packet(from.0, to.0, |ip| {
        let mut header = TcpHeader::new(from.1, to.1, seq, 4096);
        (header.syn, header.ack, header.acknowledgment_number) = (syn, ack.is_some(), ack.unwrap_or_default());
        let mut frame = Vec::new();
        ip.tcp_header(header).write(&mut frame, b"").unwrap();
        frame
    })
}

/// A SYN, or what its sender sends once it is answered.
fn tcp(from: (&str, u16), to: (&str, u16), opens: bool) -> Vec<u8> {
    if opens { segment(from, to, true, 1000, None) } else { segment(from, to, false, 1001, Some(5001)) }
}

/// An answer that gives this address for a name.
fn answer(name: &str, ttl: u32, address: &str) -> Vec<u8> {
    let mut wire = vec![0, 7, 0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0];
    for label in name.split('.') {
        wire.push(label.len() as u8);
        wire.extend(label.as_bytes());
    }
    let (rtype, data) = match ip(address) {
        IpAddr::V4(v4) => (1, v4.octets().to_vec()),
        IpAddr::V6(v6) => (28, v6.octets().to_vec()),
    };
    wire.extend([0, 0, rtype, 0, 1, 0xc0, 12, 0, rtype, 0, 1]);
    wire.extend(ttl.to_be_bytes());
    wire.extend([0, data.len() as u8]);
    wire.extend(data);
    wire
}

/// The question that this answers, as far as it is an answer.
fn question_of(answer: &[u8]) -> Vec<u8> {
    let mut end = 12;
    while answer.get(end).is_some_and(|length| *length != 0) {
        end += 1 + usize::from(answer[end]);
    }
    let Some(asked) = answer.get(12..end + 5) else { return b"question".to_vec() };
    [&answer[..2], &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0], asked].concat()
}

#[test]
fn a_pod_reaches_a_name_from_its_answer_until_it_expires() {
    for (resolver, site) in [(RESOLVER4, SITE4), (RESOLVER6, SITE6), (RESOLVER4, SITE6), (RESOLVER6, SITE4)] {
        let own = |other: &str| if ip(other).is_ipv4() { WEB4 } else { WEB6 };
        let mut node = Node::new("www.example.org");
        assert!(!node.connects(own(site), site, 1), "nothing is learnt");
        assert!(node.resolve(own(resolver), resolver, &answer("WWW.example.org", 2, site)));
        assert!(node.connects(own(site), site, 2));
        assert!(!node.passes(WEB, tcp((own(site), 3), (site, 80), true)), "another port");
        node.wait(1_999);
        assert!(node.connects(own(site), site, 4));
        node.wait(1);
        assert!(!node.connects(own(site), site, 5), "expired");
        assert!(node.passes(WEB, tcp((own(site), 4), (site, 443), false)), "what is open stays so");
        assert!(node.resolve(own(resolver), resolver, &answer("www.example.org", 2, site)));
        assert!(node.connects(own(site), site, 6));
    }
}

#[test]
fn an_accept_by_name_stands_before_a_pass_as_it_is_written() {
    let mut node = Node::new("*.example.org");
    let nine = |source| tcp((WEB4, source), (SITE4, 9), true);
    assert!(node.passes(WEB, nine(1)), "the Pass leads to the default");
    node.resolve(WEB4, RESOLVER4, &answer("www.example.org", 60, SITE4));
    assert!(node.passes(WEB, nine(2)));
}

#[test]
fn an_answer_teaches_nothing_to_another_pod_or_for_another_name() {
    let mut node = Node::new("*.example.org");
    assert!(node.resolve(DB4, RESOLVER4, &answer("www.example.org", 60, SITE4)));
    assert!(node.connects(DB4, SITE4, 1) && !node.connects(WEB4, SITE4, 1));
    for name in ["example.org", "www.example.com", "wwwexample.org"] {
        assert!(node.resolve(WEB4, RESOLVER4, &answer(name, 60, SITE4)));
        assert!(!node.connects(WEB4, SITE4, 2), "{name}");
    }
}

#[test]
fn what_a_pod_has_not_asked_for_teaches_nothing() {
    let mut node = Node::new("www.example.org");
    let good = answer("www.example.org", 60, SITE4);
    // Ingress is open: what comes unasked reaches the pod, but opens a connection of its own.
    assert!(node.passes(HOST, udp((RESOLVER4, 53), (WEB4, 4000), &good)), "unasked");
    assert!(node.passes(HOST, udp(("198.51.100.9", 53), (WEB4, 4000), &good)), "by a stranger");
    assert!(node.passes(WEB, udp((WEB4, 4001), (RESOLVER4, 53), &question_of(&good))));
    assert!(node.passes(HOST, udp((RESOLVER4, 53), (WEB4, 4002), &good)), "to another port");
    assert!(node.passes(HOST, udp((RESOLVER4, 5353), (WEB4, 4001), &good)), "from another port");
    // Another pod claims to be the resolver, and a pod sends answers itself.
    assert!(!node.passes(DB, udp((RESOLVER4, 53), (WEB4, 4001), &good)));
    assert!(!node.passes(WEB, udp((WEB4, 53), (RESOLVER4, 4001), &good)));
    assert!(!node.connects(WEB4, SITE4, 1));
    // A resolver that policy denies answers nobody.
    assert!(!node.resolve(WEB4, "198.51.100.1", &good));
    assert!(!node.connects(WEB4, SITE4, 1));
    assert_eq!(node.table.counts().learnt, 0);
    assert!(node.passes(HOST, udp((RESOLVER4, 53), (WEB4, 4001), &good)), "the one that was asked for");
    assert!(node.connects(WEB4, SITE4, 2));
}

#[test]
fn junk_and_questions_from_a_resolver_are_counted_and_pass() {
    let mut node = Node::new("www.example.org");
    let good = answer("www.example.org", 60, SITE4);
    for (number, junk) in
        [&b"junk"[..], &good[..good.len() - 1], b"", &[&[0, 7, 1, 0], &good[4..]].concat()].into_iter().enumerate()
    {
        assert!(node.resolve(WEB4, RESOLVER4, junk), "it filters no DNS");
        assert_eq!(node.table.counts().not_understood, number as u64 + 1);
    }
    assert!(!node.connects(WEB4, SITE4, 1));
}

#[test]
fn a_live_connection_survives_the_expiry_of_its_name() {
    let mut node = Node::new("www.example.org");
    let established = |source| tcp((WEB4, source), (SITE4, 443), false);
    node.resolve(WEB4, RESOLVER4, &answer("www.example.org", 2, SITE4));
    assert!(node.connects(WEB4, SITE4, 1));
    node.wait(60_000);
    node.publish([egress(Some("*.example.org")), egress(None)]);
    assert!(node.passes(WEB, established(1)), "the rule has another name that matches");
    assert!(!node.connects(WEB4, SITE4, 2), "a new one does not");
    node.publish([egress(Some("www.example.com")), egress(None)]);
    assert!(!node.passes(WEB, established(1)), "no rule accepts it");
}

#[test]
fn a_later_rule_matches_names_that_its_pod_has_learnt() {
    let mut node = Node::new("www.example.com");
    assert!(node.resolve(WEB4, RESOLVER4, &answer("www.example.org", 60, SITE4)));
    node.publish([egress(Some("www.example.org")), egress(None)]);
    assert!(node.connects(WEB4, SITE4, 1));
    // A pod without names learns nothing, until it gets a rule: also on a connection that it had before.
    assert!(node.resolve(DB4, RESOLVER4, &answer("www.example.org", 60, SITE4)));
    node.publish([egress(None), egress(Some("www.example.org"))]);
    assert!(!node.connects(DB4, SITE4, 1));
    assert!(node.resolve(DB4, RESOLVER4, &answer("www.example.org", 60, SITE4)));
    assert!(node.connects(DB4, SITE4, 2));
}

#[test]
fn an_answer_counts_from_the_next_packet_on() {
    let mut node = Node::new("www.example.org");
    for name in ["www.example.com", "www.example.org"] {
        assert!(node.passes(WEB, udp((WEB4, 4000), (DB4, 53), &question_of(&answer(name, 60, SITE4)))));
    }
    // The resolver is a pod of this node: its answer, and the same for the other question, are in one batch.
    let mut frames = MemoryFrames::new();
    for name in ["www.example.com", "www.example.org"] {
        frames.push(udp((DB4, 53), (WEB4, 4000), &answer(name, 60, SITE4))).unwrap();
    }
    let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
    node.pipeline.process_batch(&node.snapshot, node.now, DB, &mut frames, &mut verdicts, &mut ());
    assert_eq!(verdicts[..2], [Verdict::Forward(WEB); 2]);
    assert!(node.connects(WEB4, SITE4, 1));
}

/// By a policy that lets the pod ask anybody.
#[test]
fn answers_of_others_than_the_clusters_resolvers_teach_nothing() {
    let mut node = Node::new("www.example.org");
    let good = answer("www.example.org", 60, SITE4);
    for resolvers in [Resolvers::default(), Resolvers::new([ip(RESOLVER6).into()], ["192.0.2.0/29".parse().unwrap()])] {
        node.snapshot = node.snapshot.clone().with_resolvers(resolvers);
        assert!(node.resolve(WEB4, RESOLVER4, &good), "it filters no DNS");
        assert!(!node.connects(WEB4, SITE4, 1));
    }
    node.snapshot = node.snapshot.clone().with_resolvers(Resolvers::new([], ["192.0.2.0/24".parse().unwrap()]));
    assert!(node.resolve(WEB4, RESOLVER4, &good) && node.connects(WEB4, SITE4, 2));
}

/// In segments of these lengths, of which the first comes again and the second one late.
#[test]
fn answers_by_tcp_count_however_they_are_cut() {
    const CLIENT: u16 = 4053;
    let good = answer("www.example.org", 60, SITE4);
    let framed = |message: &[u8]| [&(message.len() as u16).to_be_bytes()[..], message].concat();
    let (question, response) = (framed(&question_of(&good)), framed(&good));
    for cuts in [vec![response.len()], vec![1, response.len()], vec![2, 9, 30, response.len()]] {
        let mut node = Node::new("www.example.org");
        let sends = |node: &mut Node, port, from: (&str, u16), to: (&str, u16), seq, ack, data: &[u8]| {
            assert!(node.passes(port, data_segment(from, to, seq, ack, data)));
        };
        let (pod, resolver) = ((WEB4, CLIENT), (RESOLVER4, 53));
        assert!(node.passes(WEB, segment(pod, resolver, true, 1000, None)));
        assert!(node.passes(HOST, segment(resolver, pod, true, 5000, Some(1001))));
        sends(&mut node, WEB, pod, resolver, 1001, 5001, &question[..2]);
        sends(&mut node, WEB, pod, resolver, 1003, 5001, &question[2..]);
        let asked = 1001 + question.len() as u32;
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let mut parts: Vec<(usize, usize)> = starts.zip(cuts.iter().copied()).collect();
        parts.push(parts[0]);
        if parts.len() > 3 {
            parts.swap(1, 2);
        }
        assert!(!node.connects(WEB4, SITE4, 1), "nothing is learnt");
        for (start, end) in parts {
            sends(&mut node, HOST, resolver, pod, 5001 + start as u32, asked, &response[start..end]);
        }
        assert!(node.connects(WEB4, SITE4, 2), "{cuts:?}");
        assert_eq!(node.table.counts().not_understood, 0);
    }
}

fn data_segment(from: (&str, u16), to: (&str, u16), seq: u32, ack: u32, data: &[u8]) -> Vec<u8> {
    packet(from.0, to.0, |ip| {
        let mut header = TcpHeader::new(from.1, to.1, seq, 4096);
        (header.ack, header.psh, header.acknowledgment_number) = (true, true, ack);
        let mut frame = Vec::new();
        ip.tcp_header(header).write(&mut frame, data).unwrap();
        frame
    })
}
