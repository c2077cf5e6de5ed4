//! A node in memory: workers, and around them its stack, which translates as kube-proxy's rules say, and the programs that bring packets
//! from there to workers (`to_pod` and `to_uplink` in `xdp-redirect/src/bpf/tcx.bpf.c`).

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use penstock_dataplane::conntrack::{Config, ConnTable, Timestamp};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::{self, Address};
use penstock_dataplane::pipeline::{
    BATCH, DropReason, Frames, OriginalSources, Pipeline, PipelineMode, StackSender, Verdict,
};
use penstock_pcap_tests::packet::build;
use penstock_pcap_tests::script::{PacketEnd, PacketLine};
use penstock_replay::cluster::{HOST, ReplayCluster, UPLINK};

use crate::oracle::connections::{flow_of, reversed};
use crate::oracle::policy::Flow;
use crate::oracle::services::Backend as End;

const UDP: u8 = 17;
const NODE: [&str; 2] = ["192.168.0.1", "fd00:ffff::1"];

/// A packet: its flow, and what else it has in the words of a case.
#[derive(Clone, Debug)]
pub(super) struct Packet {
    pub(super) flow: Flow,
    pub(super) words: Vec<(String, String)>,
}

/// The rule that meets a packet which opens a connection in the node's stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rule {
    /// No rule.
    None,
    /// It is refused.
    Refuse,
    /// It gets this destination, and the node's own source, if `masquerades`.
    To { backend: End, masquerades: bool },
}

/// The flow of a packet as its receiver gets it, or why there is none.
pub(super) type Arrival = Result<Flow, &'static str>;

/// A connection of the node's stack: as its first packet came, and as the answers come.
struct Tracked {
    opened: Flow,
    answers: Flow,
    is_answered: bool,
    last: u64,
}

impl Tracked {
    /// As Linux forgets it; connections of TCP live longer than a case.
    fn is_live(&self, now: u64) -> bool {
        self.opened.protocol != UDP || now - self.last <= if self.is_answered { 120 } else { 30 } * 1_000_000_000
    }
}

/// Sources of what the stack has masqueraded, by the flow as it leaves.
#[derive(Debug, Default)]
struct Sources(Mutex<HashMap<Flow, IpAddr>>);

impl OriginalSources for Sources {
    fn source_of(&self, flow: &packet::Flow) -> Option<Address> {
        let (src, dst) = (flow.src.into(), flow.dst.into());
        let key = Flow { src, dst, protocol: flow.protocol.0, sport: flow.src_port, dport: flow.dst_port };
        self.0.lock().unwrap().get(&key).map(|source| (*source).into())
    }
}

/// A frame, and who sent it, where it comes from the stack.
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

pub(super) struct Node {
    pub(super) cluster: ReplayCluster,
    /// Addresses at which egress policy is postponed, as the program at the uplink has them.
    pub(super) postponed: HashSet<IpAddr>,
    /// In nanoseconds.
    pub(super) now: u64,
    pipeline: Pipeline,
    sources: Arc<Sources>,
    tracked: Vec<Tracked>,
    masqueraded: u16,
}

impl Node {
    pub(super) fn new(cluster: ReplayCluster) -> Self {
        let connections = Arc::new(ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap());
        let sources = Arc::new(Sources::default());
        let pipeline = Pipeline::new(connections, PipelineMode::Full).with_sources(Some(sources.clone()));
        Self { cluster, postponed: HashSet::new(), now: 0, pipeline, sources, tracked: Vec::new(), masqueraded: 50_000 }
    }

    /// Forgets connections of UDP, as kube-proxy makes the kernel forget them: those that this function does not keep, by what the client
    /// sends to and who answers.
    pub(super) fn forget(&mut self, keeps: impl Fn(End, End) -> bool) {
        self.tracked.retain(|it| {
            it.opened.protocol != UDP || keeps((it.opened.dst, it.opened.dport), (it.answers.src, it.answers.sport))
        });
    }

    /// A pod sends a packet. `rule` is for what it sends to.
    pub(super) fn send(&mut self, packet: &Packet, rule: Rule) -> Arrival {
        let port = self.pod_port(packet.flow.src).ok_or("no such pod")?;
        match self.worker(port, StackSender::Unknown, packet)? {
            (HOST, flow) => self.through_stack(&Packet { flow, ..packet.clone() }, rule, false),
            (_, flow) => Ok(flow),
        }
    }

    /// Somebody answers this packet: a pod, the node itself, or another machine, whose packets come `by_uplink` or through the stack.
    pub(super) fn answer(&mut self, packet: &Packet, by_uplink: bool) -> Arrival {
        if self.pod_port(packet.flow.src).is_some() {
            return self.send(packet, Rule::None);
        }
        let is_of_node = is_nodes(packet.flow.src);
        let is_turned = self.tracked.iter().any(|it| it.answers == packet.flow && it.opened != reversed(it.answers));
        // The program at an uplink leaves what is translated to the kernel.
        if by_uplink && !is_of_node && !is_turned && !is_nodes(packet.flow.dst) {
            return self.worker(UPLINK, StackSender::Unknown, packet).map(|(_, flow)| flow);
        }
        self.through_stack(packet, Rule::None, is_of_node)
    }

    fn pod_port(&self, address: IpAddr) -> Option<PortId> {
        self.cluster.snapshot().forwarding.pod_port(address.into())
    }

    /// Where a worker sends a packet, and with which flow.
    fn worker(&mut self, port: PortId, sender: StackSender, packet: &Packet) -> Result<(PortId, Flow), &'static str> {
        let mut frame = OneFrame(frame_of(packet), sender);
        let mut verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let (now, snapshot) = (Timestamp::from_millis(self.now / 1_000_000), self.cluster.snapshot());
        self.pipeline.process_batch(snapshot, now, port, &mut frame, &mut verdicts, &mut ());
        match verdicts[0] {
            Verdict::Drop(reason) => Err(reason.name()),
            Verdict::Early => Err("early"),
            Verdict::Forward(port) => Ok((port, flow_of(&frame.0).ok_or("a worker sends what cannot be read")?)),
        }
    }

    /// The flow with which the stack sends a packet on, and whether it is of the side that has opened its connection.
    fn track(&mut self, flow: Flow, rule: Rule) -> Result<(Flow, bool), &'static str> {
        let now = self.now;
        self.tracked.retain(|it| it.is_live(now));
        if let Some(it) = self.tracked.iter_mut().find(|it| it.opened == flow || it.answers == flow) {
            let opens = it.opened == flow;
            it.last = now;
            it.is_answered |= !opens;
            return Ok((reversed(if opens { it.answers } else { it.opened }), opens));
        }
        let mut leaves = flow;
        match rule {
            Rule::None => {}
            Rule::Refuse => return Err("refused by the stack"),
            Rule::To { backend: (dst, dport), masquerades } => {
                (leaves.dst, leaves.dport) = (dst, dport);
                // A pod that is its own backend must not see its own address.
                if masquerades || dst == flow.src {
                    self.masqueraded += 1;
                    leaves.src = NODE[usize::from(flow.src.is_ipv6())].parse().unwrap();
                    leaves.sport = self.masqueraded;
                }
            }
        }
        self.tracked.push(Tracked { opened: flow, answers: reversed(leaves), is_answered: false, last: now });
        Ok((leaves, true))
    }

    /// A packet that has come to the node's stack, or that the node itself sends.
    fn through_stack(&mut self, packet: &Packet, rule: Rule, is_own: bool) -> Arrival {
        let came = packet.flow;
        let (leaves, opens) = self.track(came, rule)?;
        let packet = Packet { flow: leaves, ..packet.clone() };
        if is_nodes(leaves.dst) {
            return Ok(leaves);
        }
        if self.pod_port(leaves.dst).is_some() {
            let sender = match () {
                () if is_own => StackSender::Process,
                () if opens && came.src != leaves.src => {
                    self.sources.0.lock().unwrap().insert(leaves, came.src);
                    StackSender::Translated
                }
                () if came == leaves => StackSender::Unchanged,
                () if came.src == leaves.src => StackSender::Untranslated,
                () => StackSender::Forwarded,
            };
            return match self.worker(HOST, sender, &packet)? {
                (HOST, _) => Err("a worker sends it back"),
                (_, flow) => Ok(flow),
            };
        }
        let is_turned = (came.dst, came.dport) != (leaves.dst, leaves.dport);
        let is_asked = opens && is_turned || self.postponed.contains(&leaves.dst);
        match self.pod_port(came.src).filter(|_| is_asked) {
            None => Ok(leaves),
            Some(PortId(port)) => {
                let leaving = StackSender::Leaving { port, uplink: 1 };
                self.worker(HOST, leaving, &packet).map(|(_, flow)| flow)
            }
        }
    }
}

fn is_nodes(address: IpAddr) -> bool {
    NODE.iter().any(|own| own.parse() == Ok(address))
}

fn frame_of(packet: &Packet) -> Vec<u8> {
    let Packet { flow, words } = packet;
    let end = |address, port| PacketEnd { address, port };
    let kind = if flow.protocol == UDP { "udp" } else { "tcp" };
    let line = PacketLine {
        time: 0,
        src: end(flow.src, flow.sport),
        dst: end(flow.dst, flow.dport),
        kind: kind.to_owned(),
        words: words.clone(),
        place: "a packet of a case".to_owned(),
    };
    build(&line, &[]).frame
}
