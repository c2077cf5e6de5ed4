//! Staged policies beside those in effect: what each opened connection's verdict would be.
//!
//! A worker asks the staged set only about packets for which policy was evaluated: those that open a connection, or try
//! to. It evaluates two sets that were compiled from the same objects, one as they are in effect and one as promoted, so
//! that a difference is never one of time. Where they differ it puts a record into a lock-free queue, within a budget;
//! records that do not fit are counted. While nothing is staged, a batch costs the one load that also asks for the
//! verdict log.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use crossbeam::queue::ArrayQueue;

use super::counter::Counter;
use crate::conntrack::Timestamp;
use crate::names::{Moment, NameTime};
use crate::packet::Flow;
use crate::policy::{EvaluationForm, PolicySet, PolicyVerdict, RuleName};

const CAPACITY: usize = 4096;
/// Records per worker and second. More tell a reader nothing: they are counted by group.
const BUDGET: u32 = 2_000;

/// Two sets made from the same objects at the same time.
#[derive(Clone, Debug, Default)]
pub struct StagedSet {
    /// Which staged policies it is about, for the reader of the records.
    pub number: u64,
    pub present: PolicySet,
    /// The policy that would be in effect if everything that is staged were promoted.
    pub promoted: PolicySet,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NamedVerdict {
    pub verdict: PolicyVerdict,
    pub egress_rule: Option<RuleName>,
    pub ingress_rule: Option<RuleName>,
}

impl NamedVerdict {
    fn new(set: &PolicySet, verdict: PolicyVerdict) -> Self {
        // Increments a reference count; copies nothing.
        let rule = |side: crate::policy::DirectionVerdict| side.rule().and_then(|rule| set.rule_name(rule)).cloned();
        Self { verdict, egress_rule: rule(verdict.egress), ingress_rule: rule(verdict.ingress) }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct VerdictChange {
    pub present: NamedVerdict,
    pub promoted: NamedVerdict,
}

impl StagedSet {
    /// The change for a flow by promotion: whether it passes, or in which direction it is denied.
    pub fn change(&self, flow: &Flow, form: EvaluationForm, time: NameTime) -> Option<VerdictChange> {
        self.differing(self.present.evaluate_as(flow, form, time), self.promoted.evaluate_as(flow, form, time))
    }

    /// The same for verdicts of the two sets.
    pub fn differing(&self, present: PolicyVerdict, promoted: PolicyVerdict) -> Option<VerdictChange> {
        (present.drop_reason() != promoted.drop_reason()).then(|| VerdictChange {
            present: NamedVerdict::new(&self.present, present),
            promoted: NamedVerdict::new(&self.promoted, promoted),
        })
    }
}

/// A packet that opened a connection, or tried to, and whose verdict promotion would change.
#[derive(Clone, Debug)]
pub struct StagedRecord {
    /// That of the [`StagedSet`].
    pub number: u64,
    /// When its batch was received.
    pub at: Instant,
    /// The flow that was evaluated, in the direction in which its connection is opened.
    pub flow: Flow,
    /// Bytes received, Ethernet header included.
    pub bytes: usize,
    pub change: VerdictChange,
}

/// The staged set, and the queue of records from all workers to one reader.
#[derive(Debug)]
pub struct StagedLog {
    set: ArcSwapOption<StagedSet>,
    /// Sets that a worker may still use. They are dropped here, so that no worker has to free one.
    retired: Mutex<Vec<Arc<StagedSet>>>,
    queue: ArrayQueue<StagedRecord>,
    workers: Box<[StagedCounters]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct StagedCounters {
    judged: Counter,
    unrecorded: Counter,
}

impl StagedLog {
    pub(super) fn new(workers: usize) -> Self {
        Self {
            set: ArcSwapOption::empty(),
            retired: Mutex::default(),
            queue: ArrayQueue::new(CAPACITY),
            workers: (0..workers).map(|_| StagedCounters::default()).collect(),
        }
    }

    /// Sets what workers ask from their next batch on; `None`: nothing is staged.
    pub(super) fn replace(&self, set: Option<StagedSet>) {
        let set = set.map(Arc::new);
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.extend(self.set.swap(set));
        retired.retain(|old| Arc::strong_count(old) > 1);
    }

    pub(super) fn set(&self) -> Guard<Option<Arc<StagedSet>>> {
        self.set.load()
    }

    pub fn take(&self) -> Option<StagedRecord> {
        self.queue.pop()
    }

    pub fn judged(&self) -> u64 {
        self.workers.iter().map(|counters| counters.judged.get()).sum()
    }

    /// Packets whose verdict would change, without a record: beyond the budget, or the reader was too slow.
    pub fn unrecorded(&self) -> u64 {
        self.workers.iter().map(|counters| counters.unrecorded.get()).sum()
    }
}

/// A worker's budget for records.
#[derive(Default)]
pub(super) struct StagedJudge {
    filled: Option<Instant>,
    left: u32,
}

impl StagedJudge {
    /// Asks the staged set about packets that were evaluated: flow, form and bytes of each.
    pub(super) fn judge(
        &mut self,
        log: &StagedLog,
        worker: usize,
        now: Instant,
        evaluated: impl Iterator<Item = (Flow, EvaluationForm, usize)>,
    ) {
        let set = log.set();
        let Some(set) = &*set else { return };
        if self.filled.is_none_or(|filled| now.duration_since(filled) >= Duration::from_secs(1)) {
            (self.filled, self.left) = (Some(now), BUDGET);
        }
        let counters = &log.workers[worker];
        let mut evaluated = evaluated.peekable();
        if evaluated.peek().is_none() {
            return;
        }
        // Once for all connections that the batch opens.
        let time = NameTime::At(Moment(Timestamp::now().as_millis()));
        for (flow, form, bytes) in evaluated {
            counters.judged.add(1);
            let Some(change) = set.change(&flow, form, time) else { continue };
            let may = self.left > 0;
            self.left = self.left.saturating_sub(1);
            if !may || log.queue.push(StagedRecord { number: set.number, at: now, flow, bytes, change }).is_err() {
                counters.unrecorded.add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::packet::{Address, Protocol};
    use crate::policy::{AddressOwner, Endpoint, EndpointId, EndpointPolicy, Identity, NodeId, RuleTable};

    const POD: [u8; 4] = [10, 0, 0, 1];

    /// A set with one pod of this node, under this policy.
    fn set(ingress: EndpointPolicy) -> PolicySet {
        let (empty, endpoint) = (PolicySet::default(), EndpointId(0));
        let mut update = empty.update();
        let owner =
            AddressOwner::Pod { identity: Identity(NonZeroU32::MIN), endpoint: Some(endpoint), node: Some(NodeId(0)) };
        update.set_address(Address::from_v4_bytes(POD), Some(owner));
        update.set_endpoint(endpoint, Some(Endpoint { egress: EndpointPolicy::Open, ingress }));
        update.finish()
    }

    fn isolated() -> EndpointPolicy {
        EndpointPolicy::Isolated(Arc::new(RuleTable::new(&[], [])))
    }

    fn flow(port: u16) -> Flow {
        let src = Address::from_v4_bytes([192, 0, 2, 1]);
        Flow { src, dst: Address::from_v4_bytes(POD), protocol: Protocol::UDP, src_port: 9, dst_port: port }
    }

    fn asked(flows: usize) -> impl Iterator<Item = (Flow, EvaluationForm, usize)> {
        (0..flows).map(|number| (flow(number as u16), EvaluationForm::Plain, 60))
    }

    #[test]
    fn differences_beyond_the_budget_are_counted() {
        let log = StagedLog::new(2);
        let (mut judge, now) = (StagedJudge::default(), Instant::now());
        judge.judge(&log, 1, now, asked(10));
        assert_eq!(log.judged(), 0, "nothing is staged");
        let (open, closed) = (set(EndpointPolicy::Open), set(isolated()));
        log.replace(Some(StagedSet { number: 1, present: open.clone(), promoted: open.clone() }));
        judge.judge(&log, 1, now, asked(10));
        assert_eq!((log.judged(), log.unrecorded(), log.take().is_none()), (10, 0, true), "no difference");
        log.replace(Some(StagedSet { number: 2, present: open, promoted: closed }));
        judge.judge(&log, 1, now, asked(BUDGET as usize - 5));
        let record = log.take().unwrap();
        assert_eq!((record.number, record.flow, record.bytes), (2, flow(0), 60));
        assert!(record.change.present.verdict.is_allowed() && !record.change.promoted.verdict.is_allowed());
        judge.judge(&log, 1, now, asked(8));
        assert_eq!((log.unrecorded(), std::iter::from_fn(|| log.take()).count()), (3, BUDGET as usize - 1));
        judge.judge(&log, 1, now + Duration::from_secs(1), asked(1));
        assert!(log.take().is_some(), "a second later there is a budget again");
        log.replace(None);
        judge.judge(&log, 1, now, asked(10));
        assert!(log.take().is_none());
    }

    #[test]
    fn a_slow_reader_blocks_no_worker() {
        let log = StagedLog::new(1);
        let (present, promoted) = (set(EndpointPolicy::Open), set(isolated()));
        log.replace(Some(StagedSet { number: 1, present, promoted }));
        let (mut judge, now) = (StagedJudge::default(), Instant::now());
        for second in 0..4 {
            judge.judge(&log, 0, now + Duration::from_secs(second), asked(BUDGET as usize));
        }
        assert_eq!(log.unrecorded(), 4 * u64::from(BUDGET) - CAPACITY as u64);
        assert_eq!(std::iter::from_fn(|| log.take()).count(), CAPACITY);
    }
}
