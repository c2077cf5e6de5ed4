//! Records of single packets for a log, with limits so that logging never slows a worker down.
//!
//! A worker checks its budget for the outcome *before* it creates a record. Records go into a lock-free queue and are
//! lost if it is full. Both are counted. While the log is off and nothing is [staged](StagedLog), a batch costs one load.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::Guard;
use crossbeam::queue::ArrayQueue;

use super::counter::Counter;
use super::staged::{StagedJudge, StagedLog, StagedSet};
use crate::conntrack::{ConnTable, Timestamp};
use crate::forward::PortId;
use crate::names::{Moment, NameTime};
use crate::packet::{Flow, parse};
use crate::pipeline::{BATCH, DropReason, EvaluationReason, Frames, Observer, Verdict};
use crate::policy::{Direction, EvaluationForm, PolicySet, PolicyVerdict, RuleName};
use crate::{Epoch, Snapshot};

const CAPACITY: usize = 4096;
/// Outcomes with separate budgets: each drop reason, and an opened connection.
const OUTCOMES: usize = DropReason::COUNT + 1;

/// Evaluations are noted for the log.
const FOR_LOG: u32 = 1;
/// Evaluations are noted for staged policies.
const FOR_STAGED: u32 = 2;
/// Evaluations are noted for records of denied connections.
const FOR_DENIED: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LoggedOutcome {
    Opened,
    Dropped(DropReason),
}

impl LoggedOutcome {
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Opened).chain(DropReason::ALL.iter().map(|&reason| Self::Dropped(reason)))
    }

    /// Its name in logs and counters: the drop reason's, or `opened`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Dropped(reason) => reason.name(),
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Opened => 0,
            Self::Dropped(reason) => reason as usize + 1,
        }
    }
}

#[derive(Clone, Debug)]
pub struct VerdictRecord {
    /// When its batch was received.
    pub at: Instant,
    pub worker: usize,
    pub ingress: PortId,
    pub epoch: Epoch,
    /// Bytes received, Ethernet header included.
    pub bytes: usize,
    pub outcome: LoggedOutcome,
    /// Its flow. If policy was evaluated, the evaluated flow, in the direction in which its connection was opened; `None`
    /// if the packet could not be parsed.
    pub flow: Option<Flow>,
    /// Connection id, the same for all packets in both directions; see [`ConnTable::connection_id`].
    pub connection: Option<u64>,
    /// The policy verdict, if policy was evaluated for this packet.
    pub evaluation: Option<LoggedEvaluation>,
}

#[derive(Clone, Debug)]
pub struct LoggedEvaluation {
    /// The evaluated flow, in the direction in which its connection was opened.
    pub flow: Flow,
    pub policy_verdict: PolicyVerdict,
    pub evaluation_reason: EvaluationReason,
    pub egress_rule: Option<RuleName>,
    pub ingress_rule: Option<RuleName>,
    /// The rules that passed egress on to the next tier, in order.
    pub egress_passes: Vec<RuleName>,
    /// The rules that passed ingress on to the next tier, in order.
    pub ingress_passes: Vec<RuleName>,
    /// The policies that want what they decide recorded, and have decided this.
    pub recorded_for: Vec<Arc<str>>,
}

/// The queue of records from all workers to one reader.
#[derive(Debug)]
pub struct VerdictLog {
    queue: ArrayQueue<VerdictRecord>,
    /// Records per worker, outcome and second; 0 is off.
    budget: AtomicU32,
    opened: AtomicU32,
    /// For what evaluations are noted: [`FOR_LOG`], [`FOR_STAGED`].
    noted: AtomicU32,
    staged: StagedLog,
    /// Packets that were denied as the first of a connection, for who keeps records of flows; allocated once that is wanted.
    denied: OnceLock<ArrayQueue<VerdictRecord>>,
    /// So many of these per worker and second; 0 is off.
    denied_budget: AtomicU32,
    workers: Box<[WorkerLogCounters]>,
}

/// Records that one worker did not make, or lost.
#[derive(Debug)]
#[repr(align(128))]
struct WorkerLogCounters {
    suppressed: [Counter; OUTCOMES],
    lost: Counter,
    denied_missing: Counter,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VerdictBudget {
    /// Maximum records per worker, outcome and second; 0 turns the log off.
    pub each_second: u32,
    /// Whether allowed connections are recorded when they are opened.
    pub opened: bool,
}

impl VerdictLog {
    /// A log for this many workers, off until it has a budget.
    pub fn new(workers: usize) -> Self {
        let counters = || WorkerLogCounters {
            suppressed: [const { Counter::new() }; OUTCOMES],
            lost: Counter::new(),
            denied_missing: Counter::new(),
        };
        Self {
            queue: ArrayQueue::new(CAPACITY),
            budget: AtomicU32::new(0),
            opened: AtomicU32::new(0),
            noted: AtomicU32::new(0),
            staged: StagedLog::new(workers),
            denied: OnceLock::new(),
            denied_budget: AtomicU32::new(0),
            workers: (0..workers).map(|_| counters()).collect(),
        }
    }

    /// Sets the budget; it applies from each worker's next batch on.
    pub fn set_budget(&self, budget: VerdictBudget) {
        self.opened.store(budget.opened.into(), Ordering::Relaxed);
        self.budget.store(budget.each_second, Ordering::Relaxed);
        self.note(FOR_LOG, budget.each_second > 0);
    }

    /// Sets what workers ask beside what is in effect, from each worker's next batch on; `None`: nothing is staged.
    pub fn stage(&self, set: Option<StagedSet>) {
        let is_staged = set.is_some();
        self.staged.replace(set);
        self.note(FOR_STAGED, is_staged);
    }

    /// The change if everything that is staged were promoted.
    pub fn staged(&self) -> &StagedLog {
        &self.staged
    }

    fn note(&self, what: u32, on: bool) {
        if on {
            self.noted.fetch_or(what, Ordering::Relaxed);
        } else {
            self.noted.fetch_and(!what, Ordering::Relaxed);
        }
    }

    /// Keeps packets that were [denied as the first of a connection](DropReason::denies_connection), up to so many per
    /// worker and second, from each worker's next batch on. 0: none.
    pub fn keep_denied(&self, each_second: u32) {
        if each_second > 0 {
            let _ = self.denied.get_or_init(|| ArrayQueue::new(CAPACITY));
        }
        self.denied_budget.store(each_second, Ordering::Relaxed);
        self.note(FOR_DENIED, each_second > 0);
    }

    pub fn take_denied(&self) -> Option<VerdictRecord> {
        self.denied.get()?.pop()
    }

    /// Packets that were denied as the first of a connection and were not kept: beyond the budget, or the reader was too
    /// slow.
    pub fn denied_missing(&self) -> u64 {
        self.workers.iter().map(|counters| counters.denied_missing.get()).sum()
    }

    pub fn take(&self) -> Option<VerdictRecord> {
        self.queue.pop()
    }

    /// Packets with this outcome that were not recorded because the budget was used up.
    pub fn suppressed(&self, outcome: LoggedOutcome) -> u64 {
        self.workers.iter().map(|counters| counters.suppressed[outcome.index()].get()).sum()
    }

    pub fn lost(&self) -> u64 {
        self.workers.iter().map(|counters| counters.lost.get()).sum()
    }
}

pub(super) struct Recorder {
    log: Arc<VerdictLog>,
    worker: usize,
    filled: Option<Instant>,
    left: [u32; OUTCOMES],
    denied_left: u32,
    /// Policy evaluations of the current batch, in the order of its frames.
    evaluated: Vec<EvaluatedFlow>,
    judge: StagedJudge,
}

#[derive(Clone, Copy)]
pub(super) struct EvaluatedFlow {
    index: usize,
    /// The evaluated flow, in the direction in which its connection was opened.
    pub(super) flow: Flow,
    verdict: PolicyVerdict,
    form: EvaluationForm,
    reason: EvaluationReason,
}

/// A processed batch, for the records of its packets.
struct RecordedBatch<'a> {
    snapshot: &'a Snapshot,
    connections: &'a ConnTable,
    now: Instant,
    ingress: PortId,
}

impl RecordedBatch<'_> {
    /// The record of a packet with this outcome; `own`: how policy was evaluated for it.
    fn record(
        &self,
        worker: usize,
        frame: &[u8],
        outcome: LoggedOutcome,
        own: Option<&EvaluatedFlow>,
    ) -> VerdictRecord {
        // A packet that passed has been rewritten, but its flow was evaluated; a dropped one is unchanged.
        let flow = own.map(|own| own.flow).or_else(|| Some(parse(frame).ok()?.flow));
        VerdictRecord {
            at: self.now,
            worker,
            ingress: self.ingress,
            epoch: self.snapshot.epoch,
            bytes: frame.len(),
            outcome,
            flow,
            connection: flow.map(|flow| self.connections.connection_id(&flow)),
            evaluation: own.map(|own| own.name(&self.snapshot.policy)),
        }
    }
}

impl Recorder {
    pub(super) fn new(log: Arc<VerdictLog>, worker: usize) -> Self {
        Self {
            log,
            worker,
            filled: None,
            left: [0; OUTCOMES],
            denied_left: 0,
            evaluated: Vec::with_capacity(2 * BATCH),
            judge: StagedJudge::default(),
        }
    }

    /// Whether evaluations are noted; check it before each batch.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.log.noted.load(Ordering::Relaxed) != 0
    }

    /// Whether all connections that are opened are recorded, or asked about for staged policies.
    pub(super) fn sees_opened(&self) -> bool {
        let noted = self.log.noted.load(Ordering::Relaxed);
        noted & FOR_STAGED != 0 || noted & FOR_LOG != 0 && self.log.opened.load(Ordering::Relaxed) != 0
    }

    /// Records the packets of a batch that was processed with this as its observer, and asks the staged set about those that
    /// open a connection, or tried to.
    pub(super) fn record(
        &mut self,
        snapshot: &Snapshot,
        connections: &ConnTable,
        now: Instant,
        ingress: PortId,
        frames: &mut impl Frames,
        verdicts: &[Verdict; BATCH],
    ) {
        let noted = self.log.noted.load(Ordering::Relaxed);
        let batch = RecordedBatch { snapshot, connections, now, ingress };
        if noted & FOR_STAGED != 0 {
            let opening = self.evaluated.iter().filter(|noted| noted.reason == EvaluationReason::Opened);
            let asked = opening.map(|noted| (noted.flow, noted.form, frames.bytes(noted.index).len()));
            self.judge.judge(&self.log.staged, self.worker, now, asked);
        }
        if noted & (FOR_LOG | FOR_DENIED) != 0 {
            self.fill(now);
        }
        if noted & FOR_DENIED != 0 {
            self.record_denied(&batch, frames, verdicts);
        }
        if noted & FOR_LOG != 0 {
            self.record_packets(&batch, frames, verdicts);
        }
        self.evaluated.clear();
    }

    fn record_packets(&mut self, batch: &RecordedBatch<'_>, frames: &mut impl Frames, verdicts: &[Verdict; BATCH]) {
        let opened = self.log.opened.load(Ordering::Relaxed) != 0;
        let evaluated = std::mem::take(&mut self.evaluated);
        let mut next = 0;
        for (index, verdict) in verdicts.iter().enumerate().take(frames.len()) {
            let first = next;
            next += evaluated[first..].iter().take_while(|own| own.index == index).count();
            // The first of the two concerned a connection that had ended.
            let own = evaluated[first..next].last();
            let outcome = match (verdict, own) {
                (Verdict::Drop(reason), _) => LoggedOutcome::Dropped(*reason),
                (_, Some(own)) if own.is_recorded(opened, &batch.snapshot.policy) => LoggedOutcome::Opened,
                _ => continue,
            };
            if !self.within_budget(outcome) {
                continue;
            }
            let record = batch.record(self.worker, frames.bytes(index), outcome, own);
            if self.log.queue.push(record).is_err() {
                self.log.workers[self.worker].lost.add(1);
            }
        }
        self.evaluated = evaluated;
    }

    fn record_denied(&mut self, batch: &RecordedBatch<'_>, frames: &mut impl Frames, verdicts: &[Verdict; BATCH]) {
        let recorder: &Self = self;
        let Some(queue) = recorder.log.denied.get() else { return };
        let (mut left, missing) = (recorder.denied_left, &recorder.log.workers[recorder.worker].denied_missing);
        for (index, verdict) in verdicts.iter().enumerate().take(frames.len()) {
            let Verdict::Drop(reason) = *verdict else { continue };
            if !reason.denies_connection() {
                continue;
            }
            // Within the budget before there is a record.
            let Some(rest) = left.checked_sub(1) else {
                missing.add(1);
                continue;
            };
            left = rest;
            let (outcome, own) = (LoggedOutcome::Dropped(reason), recorder.evaluated(index));
            let record = batch.record(recorder.worker, frames.bytes(index), outcome, own);
            if queue.push(record).is_err() {
                missing.add(1);
            }
        }
        self.denied_left = left;
    }

    /// The last evaluation for a frame of the batch that was processed with this as its observer.
    pub(super) fn evaluated(&self, index: usize) -> Option<&EvaluatedFlow> {
        self.evaluated.iter().rev().find(|own| own.index == index)
    }

    pub(super) fn staged(&self) -> Guard<Option<Arc<StagedSet>>> {
        self.log.staged.set()
    }

    /// Leaves the batch that was processed with this as its observer without records.
    pub(super) fn forget(&mut self) {
        self.evaluated.clear();
    }

    fn fill(&mut self, now: Instant) {
        if self.filled.is_none_or(|filled| now.duration_since(filled) >= Duration::from_secs(1)) {
            self.filled = Some(now);
            self.left = [self.log.budget.load(Ordering::Relaxed); OUTCOMES];
            self.denied_left = self.log.denied_budget.load(Ordering::Relaxed);
        }
    }

    /// Whether the budget allows one more record of this outcome; otherwise counts it as suppressed.
    fn within_budget(&mut self, outcome: LoggedOutcome) -> bool {
        let left = &mut self.left[outcome.index()];
        let may = *left > 0;
        *left = left.saturating_sub(1);
        if !may {
            self.log.workers[self.worker].suppressed[outcome.index()].add(1);
        }
        may
    }
}

impl Observer for Recorder {
    fn evaluated(
        &mut self,
        index: usize,
        flow: &Flow,
        policy_verdict: &PolicyVerdict,
        form: EvaluationForm,
        reason: EvaluationReason,
    ) {
        // At most twice per frame; anything beyond a batch is ignored.
        if self.evaluated.len() < self.evaluated.capacity() {
            self.evaluated.push(EvaluatedFlow { index, flow: *flow, verdict: *policy_verdict, form, reason });
        }
    }
}

impl EvaluatedFlow {
    /// With the names of the rules of the policies that it was evaluated by.
    pub(super) fn name(&self, policy: &PolicySet) -> LoggedEvaluation {
        let Self { flow, verdict, reason, .. } = *self;
        // Increments a reference count; copies nothing.
        let rule = |side: crate::policy::DirectionVerdict| side.rule().and_then(|rule| policy.rule_name(rule)).cloned();
        // Empty, without an allocation, unless a rule passed the flow on.
        let passes = |direction, verdict| -> Vec<RuleName> {
            let rules = policy.passes(&flow, direction, verdict).into_iter();
            rules.filter_map(|rule| policy.rule_name(rule).cloned()).collect()
        };
        LoggedEvaluation {
            flow,
            policy_verdict: verdict,
            evaluation_reason: reason,
            egress_rule: rule(verdict.egress),
            ingress_rule: rule(verdict.ingress),
            egress_passes: passes(Direction::Egress, verdict.egress),
            ingress_passes: passes(Direction::Ingress, verdict.ingress),
            // As with these.
            recorded_for: policy.recorded_for(&flow, &verdict),
        }
    }

    /// Whether it opened a connection that is recorded: all are, or a policy that allows it wants that.
    fn is_recorded(&self, all: bool, policy: &PolicySet) -> bool {
        self.reason == EvaluationReason::Opened && (all || policy.records_allowed(&self.verdict))
    }

    /// How it would be evaluated if everything that is staged were promoted; `None` of a packet that opens no connection and
    /// does not try to.
    pub(super) fn promoted(&self, staged: &StagedSet, now: Timestamp) -> Option<LoggedEvaluation> {
        if self.reason != EvaluationReason::Opened {
            return None;
        }
        let time = NameTime::At(Moment(now.as_millis()));
        let verdict = staged.promoted.evaluate_as(&self.flow, self.form, time);
        Some(Self { verdict, ..*self }.name(&staged.promoted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::MemoryFrames;
    use crate::conntrack::Config;

    /// Records a batch of frames too short to be parsed, all dropped for this reason.
    fn record(recorder: &mut Recorder, now: Instant, reason: DropReason, count: usize) {
        let connections = ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap();
        let mut frames = MemoryFrames::new();
        (0..count).for_each(|_| frames.push(vec![0; 10]).unwrap());
        let verdicts = [Verdict::Drop(reason); BATCH];
        recorder.record(&Snapshot::default(), &connections, now, PortId(3), &mut frames, &verdicts);
    }

    #[test]
    fn each_reason_has_a_budget_and_the_excess_is_counted() {
        let log = Arc::new(VerdictLog::new(2));
        let mut recorder = Recorder::new(log.clone(), 1);
        assert!(!recorder.is_on());
        log.set_budget(VerdictBudget { each_second: 3, opened: false });
        assert!(recorder.is_on());
        let start = Instant::now();
        record(&mut recorder, start, DropReason::Truncated, 10);
        record(&mut recorder, start + Duration::from_millis(999), DropReason::Truncated, 10);
        record(&mut recorder, start, DropReason::Malformed, 1);
        let records: Vec<_> = std::iter::from_fn(|| log.take()).collect();
        let of = |reason| records.iter().filter(|record| record.outcome == LoggedOutcome::Dropped(reason)).count();
        assert_eq!((of(DropReason::Truncated), of(DropReason::Malformed), records.len()), (3, 1, 4));
        assert!(
            records.iter().all(|record| record.flow.is_none() && record.ingress == PortId(3) && record.bytes == 10)
        );
        assert_eq!(log.suppressed(LoggedOutcome::Dropped(DropReason::Truncated)), 17);
        assert_eq!(log.suppressed(LoggedOutcome::Dropped(DropReason::Malformed)), 0);
        record(&mut recorder, start + Duration::from_secs(1), DropReason::Truncated, 10);
        assert_eq!(std::iter::from_fn(|| log.take()).count(), 3, "a second later there is a budget again");
        log.set_budget(VerdictBudget::default());
        assert!(!recorder.is_on());
    }

    #[test]
    fn a_slow_reader_loses_records_and_blocks_no_worker() {
        let log = Arc::new(VerdictLog::new(1));
        log.set_budget(VerdictBudget { each_second: u32::MAX, opened: false });
        let mut recorder = Recorder::new(log.clone(), 0);
        let now = Instant::now();
        for _ in 0..CAPACITY / BATCH + 2 {
            record(&mut recorder, now, DropReason::NoPort, BATCH);
        }
        assert_eq!(log.lost(), 2 * BATCH as u64);
        assert_eq!(std::iter::from_fn(|| log.take()).count(), CAPACITY);
        assert_eq!(log.suppressed(LoggedOutcome::Dropped(DropReason::NoPort)), 0);
    }

    #[test]
    fn every_outcome_has_a_unique_index_and_name() {
        let all: Vec<LoggedOutcome> = LoggedOutcome::all().collect();
        assert_eq!(all.len(), OUTCOMES);
        for (place, outcome) in all.iter().enumerate() {
            assert_eq!(outcome.index(), place);
            assert!(all.iter().all(|other| other == outcome || other.name() != outcome.name()));
        }
    }

    #[test]
    fn denied_first_packets_have_a_budget_of_their_own() {
        let log = Arc::new(VerdictLog::new(1));
        let mut recorder = Recorder::new(log.clone(), 0);
        log.keep_denied(3);
        assert!(recorder.is_on());
        let start = Instant::now();
        record(&mut recorder, start, DropReason::IngressDenied, 10);
        record(&mut recorder, start, DropReason::InvalidState, 10);
        assert!(log.take().is_none(), "the log itself is off");
        let kept: Vec<_> = std::iter::from_fn(|| log.take_denied()).collect();
        assert_eq!((kept.len(), log.denied_missing()), (3, 7));
        assert!(kept.iter().all(|it| it.outcome == LoggedOutcome::Dropped(DropReason::IngressDenied)));
        record(&mut recorder, start + Duration::from_secs(1), DropReason::TableFull, 1);
        assert!(log.take_denied().is_some(), "a second later");
        log.keep_denied(0);
        assert!(!recorder.is_on() && log.suppressed(LoggedOutcome::Dropped(DropReason::IngressDenied)) == 0);
    }
}
