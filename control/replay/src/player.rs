//! One cluster and one pipeline: evaluates packets.

use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::ProgramOutcome;
use penstock_dataplane::conntrack::{Config, ConnTable, DatagramKey, OpenError, SweepCursor, Timestamp};
use penstock_dataplane::forward::{PortId, PortKind};
use penstock_dataplane::names::NameTime;
use penstock_dataplane::packet::{Address, Flow, Packet, Transport, parse, quoted_flow};
use penstock_dataplane::pipeline::{
    BATCH, DropReason, EarlyFragments, EvaluationReason, Observer, Pipeline, PipelineMode, StackSender, Verdict,
};
use penstock_dataplane::policy::{Direction, EvaluationForm, PolicyVerdict};
use penstock_policy::model::ObjectChange;

use super::batch::PacketBatch;
use super::capture::Time;
use super::cluster::{ClusterError, HOST, ReplayCluster, UPLINK};
use super::kernel::{addresses_behind_tags, passed_to_kernel};
use super::rules::Rules;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryPoint {
    /// A worker receives it from this port.
    Port(PortId),
    /// No worker receives it; the outcome says why.
    Kernel(ProgramOutcome),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    Allow,
    Deny(DropReason),
    /// It went to the kernel.
    Kernel(ProgramOutcome),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConnectionState {
    New,
    Established,
    /// Is an ICMP error about one.
    Related,
    Revoked,
}

#[derive(Clone, Copy, Debug)]
struct PolicyEvaluation {
    index: usize,
    flow: Flow,
    policy_verdict: PolicyVerdict,
    evaluation_reason: EvaluationReason,
}

/// Keeps what the pipeline tells while it processes a batch.
struct VerdictObserver<'a> {
    evaluations: &'a mut Vec<PolicyEvaluation>,
}

impl Observer for VerdictObserver<'_> {
    #[inline]
    fn evaluated(
        &mut self,
        index: usize,
        flow: &Flow,
        policy_verdict: &PolicyVerdict,
        _: EvaluationForm,
        evaluation_reason: EvaluationReason,
    ) {
        let evaluation = PolicyEvaluation { index, flow: *flow, policy_verdict: *policy_verdict, evaluation_reason };
        self.evaluations.push(evaluation);
    }
}

#[derive(Clone, Debug)]
pub struct PacketCounters {
    /// Packets that passed.
    pub allowed: u64,
    /// Packets dropped, by [`DropReason`].
    pub denied: [u64; DropReason::COUNT],
    /// Packets that went to the kernel, by [`ProgramOutcome`].
    pub kernel: [u64; ProgramOutcome::COUNT],
    pub connections: u64,
    pub revoked: u64,
}

impl Default for PacketCounters {
    fn default() -> Self {
        let kernel = [0; ProgramOutcome::COUNT];
        Self { allowed: 0, denied: [0; DropReason::COUNT], kernel, connections: 0, revoked: 0 }
    }
}

/// Plays a capture under one set of objects.
pub struct Player {
    cluster: ReplayCluster,
    pipeline: Pipeline,
    /// The numbers of held packets.
    early: EarlyFragments<u64>,
    /// Whether one of the last batch is held.
    has_early: bool,
    table: Arc<ConnTable>,
    now: Timestamp,
    swept: Timestamp,
    verdicts: [Verdict; BATCH],
    evaluations: Vec<PolicyEvaluation>,
    counters: PacketCounters,
}

impl Player {
    /// A player with its own connection table.
    ///
    /// # Errors
    /// The table's settings are invalid, or memory is short.
    pub fn new(cluster: ReplayCluster, connections: &Config) -> Result<Self, OpenError> {
        let table = Arc::new(ConnTable::new(connections)?);
        Ok(Self {
            cluster,
            pipeline: Pipeline::new(Arc::clone(&table), PipelineMode::Full),
            early: EarlyFragments::new(EarlyFragments::<u64>::MOST),
            has_early: false,
            table,
            now: Timestamp::default(),
            swept: Timestamp::default(),
            verdicts: [Verdict::Drop(DropReason::NotReady); BATCH],
            evaluations: Vec::with_capacity(2 * BATCH),
            counters: PacketCounters::default(),
        })
    }

    /// Holds fragments that come before their first, as a worker does. Otherwise they are dropped.
    pub(super) fn holding(mut self) -> Self {
        self.pipeline.hold_early(true);
        self
    }

    #[inline]
    pub fn cluster(&self) -> &ReplayCluster {
        &self.cluster
    }

    pub fn counters(&self) -> &PacketCounters {
        &self.counters
    }

    /// Changes the cluster. Forgets the connections of addresses whose owner changed, as the daemon does.
    pub fn apply(&mut self, changes: impl IntoIterator<Item = ObjectChange>) -> Result<(), ClusterError> {
        let changed_owner = self.cluster.apply(changes)?;
        if !changed_owner.is_empty() {
            self.table.remove_addresses(&changed_owner);
        }
        Ok(())
    }

    /// Where a frame enters: the port mapped to its interface, or else the port of its source address. A packet that the
    /// node sends to something other than a pod crosses no worker.
    #[inline]
    pub fn entry_point(&self, port: Option<PortId>, frame: &[u8]) -> EntryPoint {
        let forwarding = &self.cluster.snapshot().forwarding;
        let by_source = || addresses_behind_tags(frame).map_or(Ok(UPLINK), |(from, to)| self.port_by_source(from, to));
        let port = match port.map_or_else(by_source, Ok) {
            Ok(port) => port,
            Err(outcome) => {
                return EntryPoint::Kernel(passed_to_kernel(forwarding, PortKind::Host, frame).unwrap_or(outcome));
            }
        };
        let kind = forwarding.port(port).map_or(PortKind::Pod, |port| port.kind);
        match passed_to_kernel(forwarding, kind, frame) {
            Some(outcome) => EntryPoint::Kernel(outcome),
            None => EntryPoint::Port(port),
        }
    }

    /// Where a frame entered that a worker received from this port.
    pub(super) fn entry_of_worker(&self, port: Option<PortId>) -> EntryPoint {
        EntryPoint::Port(port.unwrap_or(UPLINK))
    }

    /// The port where what `from` sends to `to` enters. What has the address of a Service that the kernel translates, the node's stack sends.
    fn port_by_source(&self, from: Address, to: Address) -> Result<PortId, ProgramOutcome> {
        let forwarding = &self.cluster.snapshot().forwarding;
        match forwarding.pod_port(from) {
            Some(port) => Ok(port),
            None if !forwarding.is_node(from) && !self.cluster.is_postponed(from) => Ok(UPLINK),
            None if forwarding.pod_port(to).is_some() => Ok(HOST),
            None => Err(ProgramOutcome::NotLocal),
        }
    }

    /// Evaluates a batch that entered at `entry` at `time`, and rewrites the packets that pass.
    pub fn play(&mut self, entry: EntryPoint, time: Time, batch: &mut PacketBatch) {
        self.evaluations.clear();
        self.has_early = false;
        let port = match entry {
            EntryPoint::Kernel(outcome) => {
                self.counters.kernel[outcome as usize] += batch.packets().len() as u64;
                return;
            }
            EntryPoint::Port(port) => port,
        };
        self.advance(time);
        let snapshot = self.cluster.snapshot();
        let observer = &mut VerdictObserver { evaluations: &mut self.evaluations };
        self.pipeline.process_batch(snapshot, self.now, port, batch, &mut self.verdicts, observer);
        for verdict in &self.verdicts[..batch.packets().len()] {
            match verdict {
                Verdict::Forward(_) => self.counters.allowed += 1,
                Verdict::Drop(reason) => self.counters.denied[*reason as usize] += 1,
                Verdict::Early => self.has_early = true,
            }
        }
        self.count_connections();
    }

    fn count_connections(&mut self) {
        let (snapshot, rules) = self.cluster.parts();
        for PolicyEvaluation { index, flow, policy_verdict, evaluation_reason } in &self.evaluations {
            match evaluation_reason {
                EvaluationReason::Opened => {
                    let is_opened = is_let_through(self.verdicts[*index]);
                    self.counters.connections += u64::from(is_opened);
                    if is_opened || !policy_verdict.is_allowed() {
                        let rules_hit = rules.of(&snapshot.policy, policy_verdict);
                        rules.hit(rules_hit);
                        let has_tiers = rules.has_tiers();
                        let directions = [Direction::Egress, Direction::Ingress];
                        for direction in directions.into_iter().filter(|_| has_tiers) {
                            let verdict = match direction {
                                Direction::Egress => policy_verdict.egress,
                                Direction::Ingress => policy_verdict.ingress,
                            };
                            rules.passed(&snapshot.policy, snapshot.policy.passes(flow, direction, verdict));
                        }
                    }
                }
                EvaluationReason::Reevaluated if !policy_verdict.is_allowed() => self.counters.revoked += 1,
                EvaluationReason::Reevaluated => {}
            }
        }
    }

    /// The result for packet `index` of the last batch, which entered at `entry`.
    #[inline]
    pub fn decision(&self, entry: EntryPoint, index: usize) -> Decision {
        match entry {
            EntryPoint::Kernel(outcome) => Decision::Kernel(outcome),
            EntryPoint::Port(_) => match self.verdicts[index] {
                Verdict::Forward(_) => Decision::Allow,
                Verdict::Drop(reason) => Decision::Deny(reason),
                Verdict::Early => Decision::Deny(DropReason::Fragment),
            },
        }
    }

    /// Whether a packet of the last batch is held.
    #[inline]
    pub(super) fn has_early(&self) -> bool {
        self.has_early
    }

    /// Whether packet `index` of the last batch is held: nothing is decided.
    #[inline]
    pub(super) fn is_early(&self, index: usize) -> bool {
        self.has_early && self.verdicts[index] == Verdict::Early
    }

    /// Holds a packet with this number, which entered at `entry`. Returns the one that is to be played again instead.
    pub(super) fn hold_early(&mut self, entry: EntryPoint, number: u64, frame: &[u8]) -> Option<u64> {
        let EntryPoint::Port(port) = entry else { return Some(number) };
        let packet = parse(frame).ok();
        let datagram = packet.as_ref().and_then(|packet| Some((packet, DatagramKey::of(packet, port)?)));
        let Some((packet, datagram)) = datagram else { return Some(number) };
        let holder = EarlyFragments::<u64>::holder(self.cluster.snapshot(), port, StackSender::Unknown, packet);
        self.early.hold(datagram, holder, self.now, number)
    }

    /// Takes the held packets that are to be played again at this time: their first fragment has passed, or their time is over.
    pub(super) fn take_due(&mut self, time: Time) -> Vec<u64> {
        self.advance(time);
        let (fragments, now) = (self.table.fragments(), self.now);
        if self.early.is_empty() || !self.early.may_be_due(fragments, now) {
            return Vec::new();
        }
        let mut from = 0;
        std::iter::from_fn(|| self.early.take_due(&mut from, fragments, now)).collect()
    }

    /// Takes the packet that is held for longest.
    pub(super) fn take_oldest(&mut self) -> Option<u64> {
        self.early.take_oldest()
    }

    /// Plays a packet that was held; it is not held again.
    pub(super) fn play_again(&mut self, entry: EntryPoint, time: Time, batch: &mut PacketBatch) {
        self.pipeline.hold_early(false);
        self.play(entry, time, batch);
        self.pipeline.hold_early(true);
    }

    /// The packet's relation to a connection, and the rules that allow that connection or deny the packet. Valid until the next batch.
    pub fn connection_state(
        &mut self,
        entry: EntryPoint,
        index: usize,
        packet: &Packet,
        frame: &[u8],
    ) -> (Option<ConnectionState>, Rules) {
        let none = (None, Rules::default());
        if let EntryPoint::Kernel(_) = entry {
            return none;
        }
        let verdict = self.verdicts[index];
        if verdict == Verdict::Drop(DropReason::ConnectionRevoked) {
            return (Some(ConnectionState::Revoked), Rules::default());
        }
        if verdict == Verdict::Drop(DropReason::InvalidState) {
            return (Some(ConnectionState::Established), self.rules_of(packet, frame));
        }
        let own = self.evaluations.iter().rfind(|evaluation| evaluation.index == index);
        if let (Verdict::Drop(DropReason::EgressDenied | DropReason::IngressDenied), Some(own)) = (verdict, own) {
            let (snapshot, rules) = self.cluster.parts();
            return (None, rules.of(&snapshot.policy, &own.policy_verdict));
        }
        if !is_let_through(verdict) {
            return none;
        }
        if matches!(packet.transport, Transport::IcmpError { .. }) {
            return (Some(ConnectionState::Related), self.rules_of(packet, frame));
        }
        match self.evaluations.iter().rfind(|evaluation| evaluation.index == index) {
            Some(PolicyEvaluation { policy_verdict, evaluation_reason, .. }) => {
                let (snapshot, rules) = self.cluster.parts();
                let connection_state = match evaluation_reason {
                    EvaluationReason::Opened => ConnectionState::New,
                    EvaluationReason::Reevaluated => ConnectionState::Established,
                };
                (Some(connection_state), rules.of(&snapshot.policy, policy_verdict))
            }
            None => (Some(ConnectionState::Established), self.rules_of(packet, frame)),
        }
    }

    /// The rules that allow a packet's connection: evaluates the policy again, in the connection's direction.
    fn rules_of(&mut self, packet: &Packet, frame: &[u8]) -> Rules {
        let Some(flow) = self.original_flow(packet, frame) else { return Rules::default() };
        let (snapshot, rules) = self.cluster.parts();
        let policy_verdict = snapshot.policy.evaluate_named(&flow, NameTime::Ever);
        rules.of(&snapshot.policy, &policy_verdict)
    }

    /// The flow of the packet that opened this one's connection.
    pub fn original_flow(&self, packet: &Packet, frame: &[u8]) -> Option<Flow> {
        let found = match packet.transport {
            Transport::IcmpError { quoted_at } => self.table.related(&quoted_flow(frame, packet, quoted_at)?, self.now),
            _ => self.table.find(&self.table.prepare(&packet.flow), self.now),
        };
        Some(found?.original_flow())
    }

    /// Sets the clock to the capture's time; it never runs backwards.
    #[inline]
    fn advance(&mut self, time: Time) {
        let now = time.on_table_clock();
        if now > self.now {
            self.now = now;
            if now.as_millis() - self.swept.as_millis() >= SWEEP_EVERY.as_millis() as u64 {
                self.sweep();
            }
        }
    }

    /// Sweeps the table if it is nearly full. After a long gap it advances the table's clock in steps: the table
    /// measures ages up to 24 days, and after three steps no entry can be older.
    #[cold]
    fn sweep(&mut self) {
        const STRIDE: Duration = Duration::from_secs(10 * 86_400);
        let silence = self.now.as_millis() - self.swept.as_millis();
        if silence >= STRIDE.as_millis() as u64 {
            let mut step = self.swept;
            for _ in 0..3 {
                step = step.plus(STRIDE).min(self.now);
                self.sweep_all(step);
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

/// Capture time between two checks of the table's fill level.
const SWEEP_EVERY: Duration = Duration::from_secs(10);

/// Whether connection and policy allow the packet, even if it is dropped later.
#[inline]
fn is_let_through(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Forward(_) => true,
        Verdict::Drop(reason) => leaves_connection(reason),
        Verdict::Early => false,
    }
}

/// Whether a packet that is dropped so has opened its connection, or belongs to it, all the same.
pub(super) fn leaves_connection(reason: DropReason) -> bool {
    use DropReason::{NoPort, PortGone, TooBig, TtlExpired, TxRingFull};
    matches!(reason, TtlExpired | TooBig | NoPort | PortGone | TxRingFull)
}
