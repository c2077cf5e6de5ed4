//! One cluster and one pipeline: packets in, decisions out.

use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::conntrack::{Config, ConnTable, OpenError, SweepCursor, Timestamp};
use penstock_dataplane::forward::{PortId, PortKind};
use penstock_dataplane::packet::{Flow, Packet, Transport, parse, quoted_flow};
use penstock_dataplane::pipeline::{BATCH, DropReason, EvaluationReason, Observer, Pipeline, PipelineMode, Verdict};
use penstock_dataplane::policy::PolicyVerdict;
use penstock_xdp_redirect::XdpOutcome;

use crate::model::Change;

use super::batch::Batch;
use super::capture::Time;
use super::cluster::{Cluster, ClusterError, HOST, UPLINK};
use super::kernel::{addresses, left_to_kernel};
use super::rules::Rules;

/// Where a packet enters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// A worker gets it from this port.
    Port(PortId),
    /// No worker sees it, and why.
    Kernel(XdpOutcome),
}

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// It passed.
    Allow,
    /// It was dropped.
    Deny(DropReason),
    /// It was left to the kernel.
    Kernel(XdpOutcome),
}

/// What a packet is to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It opened one.
    New,
    /// It belongs to one.
    Established,
    /// It is an ICMP error about one.
    Related,
    /// It belongs to one that policy has ended.
    Cut,
}

/// A judgement that the policy made for a packet.
#[derive(Clone, Copy, Debug)]
struct Judged {
    index: usize,
    judgement: PolicyVerdict,
    occasion: EvaluationReason,
}

struct Listener<'a>(&'a mut Vec<Judged>);

impl Observer for Listener<'_> {
    #[inline]
    fn evaluated(&mut self, index: usize, _: &Flow, judgement: &PolicyVerdict, occasion: EvaluationReason) {
        self.0.push(Judged { index, judgement: *judgement, occasion });
    }
}

/// Counts over a replay.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Packets that passed.
    pub allowed: u64,
    /// Packets dropped, by [`DropReason`].
    pub denied: [u64; DropReason::COUNT],
    /// Packets left to the kernel, by [`XdpOutcome`].
    pub kernel: [u64; XdpOutcome::ALL.len()],
    /// Connections opened.
    pub connections: u64,
    /// Connections that were cut when policy changed.
    pub cut: u64,
}

/// What plays a capture under one set of objects.
pub struct Player {
    cluster: Cluster,
    pipeline: Pipeline,
    table: Arc<ConnTable>,
    now: Timestamp,
    swept: Timestamp,
    verdicts: [Verdict; BATCH],
    judged: Vec<Judged>,
    tally: Tally,
}

impl Player {
    /// With a connection table of its own.
    ///
    /// # Errors
    /// The table's settings cannot be, or there is not the memory.
    pub fn new(cluster: Cluster, connections: &Config) -> Result<Self, OpenError> {
        let table = Arc::new(ConnTable::new(connections)?);
        Ok(Self {
            cluster,
            pipeline: Pipeline::new(Arc::clone(&table), PipelineMode::Full),
            table,
            now: Timestamp::default(),
            swept: Timestamp::default(),
            verdicts: [Verdict::Drop(DropReason::NotReady); BATCH],
            judged: Vec::with_capacity(2 * BATCH),
            tally: Tally::default(),
        })
    }

    /// The cluster as it is now.
    #[inline]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// What was counted so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Changes the cluster. Connections of addresses that have another holder from now on are forgotten, as the node
    /// service forgets them.
    ///
    /// # Errors
    /// There are too many pods.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = Change>) -> Result<(), ClusterError> {
        let moved = self.cluster.apply(changes)?;
        if !moved.is_empty() {
            self.table.remove_addresses(&moved);
        }
        Ok(())
    }

    /// Where a frame enters: on the port that its interface is known to be, else on the one that its source address
    /// belongs to. A packet of the node that is for no pod goes its own way and crosses no worker.
    #[inline]
    pub fn place(&self, port: Option<PortId>, frame: &[u8]) -> Place {
        let forwarding = &self.cluster.snapshot().forwarding;
        let by_source = || match addresses(frame) {
            Some((from, to)) => match forwarding.pod_port(from) {
                Some(port) => Ok(port),
                None if !forwarding.is_node(from) => Ok(UPLINK),
                None if forwarding.pod_port(to).is_some() => Ok(HOST),
                None => Err(XdpOutcome::NotLocal),
            },
            None => Ok(UPLINK),
        };
        let port = match port.map_or_else(by_source, Ok) {
            Ok(port) => port,
            Err(outcome) => {
                return Place::Kernel(left_to_kernel(forwarding, PortKind::Host, frame).unwrap_or(outcome));
            }
        };
        let kind = forwarding.port(port).map_or(PortKind::Pod, |port| port.kind);
        match left_to_kernel(forwarding, kind, frame) {
            Some(outcome) => Place::Kernel(outcome),
            None => Place::Port(port),
        }
    }

    /// Judges a batch that entered at `place` at `time`, and rewrites what passes.
    pub fn play(&mut self, place: Place, time: Time, batch: &mut Batch) {
        self.judged.clear();
        let port = match place {
            Place::Kernel(outcome) => {
                self.tally.kernel[outcome as usize] += batch.members().len() as u64;
                return;
            }
            Place::Port(port) => port,
        };
        self.advance(time);
        let snapshot = self.cluster.snapshot();
        let listener = &mut Listener(&mut self.judged);
        self.pipeline.process_batch(snapshot, self.now, port, batch, &mut self.verdicts, listener);
        for verdict in &self.verdicts[..batch.members().len()] {
            match verdict {
                Verdict::Forward(_) => self.tally.allowed += 1,
                Verdict::Drop(cause) => self.tally.denied[*cause as usize] += 1,
            }
        }
        self.count_connections();
    }

    fn count_connections(&mut self) {
        let (snapshot, rules) = self.cluster.parts();
        for Judged { index, judgement, occasion } in &self.judged {
            match occasion {
                EvaluationReason::Opened if is_let_through(self.verdicts[*index]) => {
                    self.tally.connections += 1;
                    let rules_hit = rules.of(&snapshot.policy, judgement);
                    rules.hit(rules_hit);
                }
                EvaluationReason::Reevaluated if !judgement.is_allowed() => self.tally.cut += 1,
                EvaluationReason::Opened | EvaluationReason::Reevaluated => {}
            }
        }
    }

    /// What became of packet `index` of the batch played last, which entered at `place`.
    #[inline]
    pub fn decision(&self, place: Place, index: usize) -> Decision {
        match place {
            Place::Kernel(outcome) => Decision::Kernel(outcome),
            Place::Port(_) => match self.verdicts[index] {
                Verdict::Forward(_) => Decision::Allow,
                Verdict::Drop(cause) => Decision::Deny(cause),
            },
        }
    }

    /// The packet's standing and the rules that allow its connection. To be asked before the next batch is played.
    pub fn standing(&mut self, place: Place, index: usize, packet: &Packet, frame: &[u8]) -> (Option<Standing>, Rules) {
        let none = (None, Rules::default());
        let Place::Port(_) = place else { return none };
        let verdict = self.verdicts[index];
        if verdict == Verdict::Drop(DropReason::ConnectionCut) {
            return (Some(Standing::Cut), Rules::default());
        }
        if verdict == Verdict::Drop(DropReason::InvalidState) {
            return (Some(Standing::Established), self.rules_of(packet, frame));
        }
        if !is_let_through(verdict) {
            return none;
        }
        if matches!(packet.transport, Transport::IcmpError { .. }) {
            return (Some(Standing::Related), self.rules_of(packet, frame));
        }
        match self.judged.iter().rfind(|judged| judged.index == index) {
            Some(Judged { judgement, occasion, .. }) => {
                let (snapshot, rules) = self.cluster.parts();
                let standing = match occasion {
                    EvaluationReason::Opened => Standing::New,
                    EvaluationReason::Reevaluated => Standing::Established,
                };
                (Some(standing), rules.of(&snapshot.policy, judgement))
            }
            None => (Some(Standing::Established), self.rules_of(packet, frame)),
        }
    }

    /// The rules that allow the connection of a packet: the policy is asked again, in the connection's own direction.
    fn rules_of(&mut self, packet: &Packet, frame: &[u8]) -> Rules {
        let Some(flow) = self.original_flow(packet, frame) else { return Rules::default() };
        let (snapshot, rules) = self.cluster.parts();
        rules.of(&snapshot.policy, &snapshot.policy.evaluate(&flow))
    }

    /// The flow of the packet that opened the connection of this one.
    pub fn original_flow(&self, packet: &Packet, frame: &[u8]) -> Option<Flow> {
        let found = match packet.transport {
            Transport::IcmpError { quoted_at } => self.table.related(&quoted_flow(frame, packet, quoted_at)?, self.now),
            _ => self.table.find(&self.table.prepare(&packet.flow), self.now),
        };
        found.map(|connection| connection.original_flow())
    }

    /// Takes the capture's time for now; it never runs backwards.
    #[inline]
    fn advance(&mut self, time: Time) {
        let now = Timestamp::from_millis(time.0 / 1_000_000);
        if now > self.now {
            self.now = now;
            if now.as_millis() - self.swept.as_millis() >= SWEEP_EVERY.as_millis() as u64 {
                self.sweep();
            }
        }
    }

    /// Makes room, if it is getting scarce. After a long silence the table's clock is taken along step by step: it
    /// measures ages of up to 24 days only, and after three strides nothing is left that could be older.
    #[cold]
    fn sweep(&mut self) {
        const STRIDE: Duration = Duration::from_secs(10 * 86_400);
        let silence = self.now.as_millis() - self.swept.as_millis();
        if silence >= STRIDE.as_millis() as u64 {
            let mut moment = self.swept;
            for _ in 0..3 {
                moment = moment.plus(STRIDE).min(self.now);
                self.sweep_all(moment);
            }
        } else if self.table.len() > self.table.capacity() / 8 {
            self.sweep_all(self.now);
        }
        self.swept = self.now;
    }

    fn sweep_all(&self, now: Timestamp) {
        let epoch = self.cluster.snapshot().epoch;
        let mut cursor = SweepCursor::default();
        while !self.table.sweep(&mut cursor, self.table.capacity(), now, epoch).wrapped {}
    }
}

/// How much of the capture's time passes between two looks at how full the table is.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Whether connection and policy let it pass, whatever became of it afterwards.
#[inline]
fn is_let_through(verdict: Verdict) -> bool {
    use DropReason::{HandOffFull, NoPort, PortGone, TooBig, TtlExpired, TxRingFull};
    match verdict {
        Verdict::Forward(_) => true,
        Verdict::Drop(cause) => {
            matches!(cause, TtlExpired | TooBig | NoPort | PortGone | TxRingFull | HandOffFull)
        }
    }
}

/// Fills a frame that the capture's snap length cut up to its length on the wire, if what is there holds all headers:
/// its payload is not looked at. Whether it did.
pub fn fill_up(frame_start: usize, captured: u32, original: u32, frames: &mut Vec<u8>) -> bool {
    /// Longer than any frame that the pipeline takes.
    const LONGEST: usize = 14 + 65_535;
    let original = (original as usize).min(LONGEST);
    if original <= captured as usize {
        return false;
    }
    let end = frames.len();
    frames.resize(frame_start + original, 0);
    let has_headers = parse(&frames[frame_start..]).is_ok_and(|packet| {
        let header = match packet.transport {
            Transport::Tcp(_) => 20,
            Transport::Sctp { .. } => 16,
            Transport::Udp | Transport::EchoRequest | Transport::EchoReply => 8,
            Transport::IcmpError { .. } => return false,
            Transport::LaterFragment | Transport::Other => 0,
        };
        usize::from(packet.layout.transport) + header <= captured as usize
    });
    if !has_headers {
        frames.truncate(end);
    }
    has_headers
}
