//! One cluster and one pipeline: evaluates packets.

use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::ProgramOutcome;
use penstock_dataplane::conntrack::{Config, ConnTable, DatagramKey, OpenError, SweepCursor, Timestamp};
use penstock_dataplane::forward::{PortId, PortKind};
use penstock_dataplane::names::{Moment, NameTime};
use penstock_dataplane::packet::{Address, Flow, Packet, Transport, parse, quoted_flow, translate};
use penstock_dataplane::pipeline::{
    BATCH, DropReason, EarlyFragments, EvaluationReason, Frames, Observer, Pipeline, PipelineMode, ServiceConnection,
    StackSender, Verdict,
};
use penstock_dataplane::policy::{Direction, EvaluationForm, PolicySet, PolicyVerdict};
use penstock_dataplane::services::{Backend, Frontend};
use penstock_policy::model::ObjectChange;

use super::batch::PacketBatch;
use super::capture::Time;
use super::cluster::{ClusterError, HOST, ReplayCluster, UPLINK};
use super::kernel::{addresses, passed_to_kernel};
use super::rules::Rules;
use super::services::{BackendChoice, Reach, ServiceCounters, ShownBackends, TurnedDatagrams};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryPoint {
    /// A worker receives it from this port.
    Port(PortId),
    /// A worker received it from this port with this flow, and the capture shows it behind its translation for a Service.
    Turned(PortId, Flow),
    /// A worker never receives it: it is an answer of a Service's port to a client that has no connection there.
    Unasked,
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

/// Answers the pipeline's questions, and keeps what it tells, while it processes a batch.
struct VerdictObserver<'a> {
    evaluations: &'a mut Vec<PolicyEvaluation>,
    choices: &'a mut Vec<BackendChoice>,
    shown: &'a ShownBackends,
    policy: &'a PolicySet,
    time: Time,
    now: Timestamp,
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

    fn backend(&mut self, index: usize, flow: &Flow, frontend: &Frontend, last: Option<Backend>) -> Option<Backend> {
        let (place, known) = ((index, self.time), (self.shown, self.policy));
        let choice =
            BackendChoice::new(place, (flow, frontend), last, known, NameTime::At(Moment(self.now.as_millis())))?;
        let backend = choice.backend;
        self.choices.push(choice);
        Some(backend)
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
    shown: Arc<ShownBackends>,
    /// The last batch's.
    choices: Vec<BackendChoice>,
    services: ServiceCounters,
    turned: TurnedDatagrams,
    /// Whether a packet to or from a Service was met.
    has_met_services: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ServicePacket {
    /// The Service's port; empty if there is none any more.
    pub(super) service: Arc<str>,
    pub(super) backend: Option<Backend>,
    /// If it opens a connection: what policy says of the backends that it may get.
    pub(super) reach: Option<Reach>,
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
            shown: Arc::default(),
            choices: Vec::new(),
            services: ServiceCounters::default(),
            turned: TurnedDatagrams::default(),
            has_met_services: false,
        })
    }

    /// Sets the backends that the captures show.
    pub(super) fn showing(self, shown: Arc<ShownBackends>) -> Self {
        Self { shown, ..self }
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

    pub(super) fn services(&self) -> &ServiceCounters {
        &self.services
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
        if let Some(turned) = self.turned(frame) {
            return turned;
        }
        let forwarding = &self.cluster.snapshot().forwarding;
        let by_source = || addresses(frame).map_or(Ok(UPLINK), |(from, to)| self.port_by_source(from, to));
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

    /// Where a frame entered that the capture shows behind its translation, if it does. The interface of the capture is then
    /// where the packet left. What the table has forgotten, or policy has denied, has no answer either.
    fn turned(&self, frame: &[u8]) -> Option<EntryPoint> {
        if !self.has_met_services {
            return None;
        }
        let packet = parse(frame).ok().filter(|packet| !matches!(packet.transport, Transport::IcmpError { .. }))?;
        let received = if packet.transport == Transport::LaterFragment {
            self.turned.find(&packet)?
        } else if let Some(connection) = ServiceConnection::find(&self.table, &packet.flow, self.now) {
            connection.received?
        } else {
            let is_answer = self.cluster.frontend(&packet.flow.reversed()).is_some();
            let is_known = self.table.find(&self.table.prepare(&packet.flow), self.now).is_some();
            return (is_answer && !is_known).then_some(EntryPoint::Unasked);
        };
        let port = self.port_by_source(received.src, received.dst).ok()?;
        Some(EntryPoint::Turned(port, received))
    }

    /// Whether the entry point of a frame depends on the packets before it, which then must be played first.
    #[inline]
    pub(super) fn depends_on_connections(&mut self, frame: &[u8]) -> bool {
        if !self.cluster.translates() {
            return false;
        }
        let Some((from, to)) = addresses(frame) else { return false };
        let is_of_service = self.cluster.is_service(from) || self.cluster.is_service(to);
        self.has_met_services |= is_of_service;
        is_of_service || self.has_met_services && (self.cluster.is_backend(from) || self.cluster.is_backend(to))
    }

    /// Evaluates a batch that entered at `entry` at `time`, and rewrites the packets that pass.
    pub fn play(&mut self, entry: EntryPoint, time: Time, batch: &mut PacketBatch) {
        self.evaluations.clear();
        self.choices.clear();
        self.has_early = false;
        let port = match entry {
            EntryPoint::Kernel(outcome) => {
                self.counters.kernel[outcome as usize] += batch.packets().len() as u64;
                return;
            }
            EntryPoint::Port(port) => port,
            EntryPoint::Unasked => {
                self.verdicts.fill(Verdict::Drop(DropReason::NoConnection));
                self.counters.denied[DropReason::NoConnection as usize] += batch.packets().len() as u64;
                return;
            }
            EntryPoint::Turned(port, received) => {
                self.turn_back(batch, received);
                port
            }
        };
        self.advance(time);
        let snapshot = self.cluster.snapshot();
        let observer = &mut VerdictObserver {
            evaluations: &mut self.evaluations,
            choices: &mut self.choices,
            shown: &self.shown,
            policy: &snapshot.policy,
            time,
            now: self.now,
        };
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

    /// Writes the flow with which a worker received them into packets that are captured behind their translation.
    fn turn_back(&mut self, batch: &mut PacketBatch, received: Flow) {
        for index in 0..batch.len() {
            let frame = batch.bytes(index);
            let Ok(packet) = parse(frame) else { continue };
            self.turned.note(&packet, received);
            translate(frame, &packet, &received, None);
        }
    }

    fn count_connections(&mut self) {
        for choice in &self.choices {
            self.services.count(choice, |address| self.cluster.display_name(address));
        }
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
            EntryPoint::Port(_) | EntryPoint::Turned(..) | EntryPoint::Unasked => match self.verdicts[index] {
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
        let (EntryPoint::Port(port) | EntryPoint::Turned(port, _)) = entry else { return Some(number) };
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
        let to_service = ServiceConnection::find(&self.table, &flow, self.now);
        let (snapshot, rules) = self.cluster.parts();
        let policy_verdict = match to_service {
            Some(connection) => connection.evaluate(&snapshot.policy),
            None => snapshot.policy.evaluate_named(&flow, NameTime::Ever),
        };
        rules.of(&snapshot.policy, &policy_verdict)
    }

    /// The flow of the packet that opened this one's connection; of one to a Service as its client sent it.
    pub fn original_flow(&self, packet: &Packet, frame: &[u8]) -> Option<Flow> {
        let found = match packet.transport {
            Transport::IcmpError { quoted_at } => self.table.related(&quoted_flow(frame, packet, quoted_at)?, self.now),
            _ => self.table.find(&self.table.prepare(&packet.flow), self.now),
        };
        let flow = found?.original_flow();
        Some(ServiceConnection::find(&self.table, &flow, self.now).map_or(flow, |connection| connection.frontend))
    }

    /// The part of a Service in packet `index` of the last batch. Valid until the next batch.
    pub(super) fn service(&self, index: usize, packet: &Packet, frame: &[u8]) -> Option<ServicePacket> {
        if !self.has_met_services {
            return None;
        }
        let flow = self.original_flow(packet, frame).unwrap_or(packet.flow);
        let choice = self.choices.iter().rfind(|choice| choice.index == index);
        let connection = ServiceConnection::find(&self.table, &flow, self.now);
        let sent = connection.map_or(flow, |connection| connection.frontend);
        let frontend = self.cluster.frontend(&sent).or_else(|| self.cluster.frontend(&sent.reversed()));
        let service = choice.map(|choice| &choice.service).or(frontend.map(|frontend| &frontend.name)).cloned();
        if service.is_none() && connection.is_none() {
            return None;
        }
        let backend = connection.map(|connection| connection.backend()).or(choice.map(|choice| choice.backend));
        Some(ServicePacket { service: service.unwrap_or_default(), backend, reach: choice.map(BackendChoice::reach) })
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
    use DropReason::{HandOffFull, NoPort, PortGone, TooBig, TtlExpired, TxRingFull};
    matches!(reason, TtlExpired | TooBig | NoPort | PortGone | TxRingFull | HandOffFull)
}
