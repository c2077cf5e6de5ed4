//! What workers tell of single packets, for a log: bounded in every way, so that a log never slows them.
//!
//! A worker asks its budget for the outcome at hand *before* it makes a record; a record goes into a queue without locks,
//! and is lost where that is full. Both are counted. While the log is off, a batch costs one load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;

use super::statistics::Counter;
use crate::conntrack::ConnTable;
use crate::forward::PortId;
use crate::packet::{Flow, parse};
use crate::pipeline::{BATCH, Cause, Frames, Observer, Occasion, Verdict};
use crate::policy::{Judgement, RuleName};
use crate::{Epoch, Snapshot};

/// Records that may wait for their reader.
const CAPACITY: usize = 4096;
/// Outcomes that have a budget of their own: each cause, and a connection that was opened.
const OUTCOMES: usize = Cause::COUNT + 1;

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// It was the first of a connection, which policy allows.
    Opened,
    /// It was dropped.
    Dropped(Cause),
}

impl Outcome {
    /// Every outcome.
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::Opened).chain(Cause::ALL.iter().map(|&cause| Self::Dropped(cause)))
    }

    /// Its name in logs and counters: the cause's, or `opened`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Opened => "opened",
            Self::Dropped(cause) => cause.name(),
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Opened => 0,
            Self::Dropped(cause) => cause as usize + 1,
        }
    }
}

/// What one packet came to.
#[derive(Clone, Debug)]
pub struct VerdictRecord {
    /// When its batch was received.
    pub at: Instant,
    /// By which worker.
    pub worker: usize,
    /// On which port.
    pub ingress: PortId,
    /// Under which snapshot.
    pub epoch: Epoch,
    /// Octets received, Ethernet header included.
    pub octets: usize,
    /// What became of it.
    pub outcome: Outcome,
    /// Its flow; where the policy was asked for it, the one that was judged, in the direction in which its connection was
    /// opened; `None` where it could not be parsed.
    pub flow: Option<Flow>,
    /// One number for all packets of a connection, in both directions; see [`ConnTable::connection_id`].
    pub connection: Option<u64>,
    /// What the policy said, where it was asked for this packet.
    pub judged: Option<Judged>,
}

/// An answer of the policy.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The flow that was judged, in the direction in which its connection was opened.
    pub flow: Flow,
    /// What both sides said.
    pub judgement: Judgement,
    /// Why it was asked.
    pub occasion: Occasion,
    /// The rule that allowed its egress.
    pub egress_rule: Option<RuleName>,
    /// The rule that allowed its ingress.
    pub ingress_rule: Option<RuleName>,
}

/// The records of all workers on their way to a log. Workers put in, one reader takes out.
#[derive(Debug)]
pub struct VerdictLog {
    queue: ArrayQueue<VerdictRecord>,
    /// Records a worker makes of one outcome in a second; 0 is off.
    budget: AtomicU32,
    /// Whether opened connections are told of, too.
    opened: AtomicU32,
    workers: Box<[Kept]>,
}

/// What one worker did not tell.
#[derive(Debug)]
#[repr(align(128))]
struct Kept {
    suppressed: [Counter; OUTCOMES],
    lost: Counter,
}

/// How much is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VerdictBudget {
    /// Most records of one worker and one outcome in a second; 0 tells nothing.
    pub each_second: u32,
    /// Whether connections that policy allows are told of when they are opened.
    pub opened: bool,
}

impl VerdictLog {
    /// One for so many workers, off until it has a budget.
    pub fn new(workers: usize) -> Self {
        let kept = || Kept { suppressed: [const { Counter::new() }; OUTCOMES], lost: Counter::new() };
        Self {
            queue: ArrayQueue::new(CAPACITY),
            budget: AtomicU32::new(0),
            opened: AtomicU32::new(0),
            workers: (0..workers).map(|_| kept()).collect(),
        }
    }

    /// Sets how much is told, from each worker's next batch on.
    pub fn set_budget(&self, budget: VerdictBudget) {
        self.opened.store(budget.opened.into(), Ordering::Relaxed);
        self.budget.store(budget.each_second, Ordering::Relaxed);
    }

    /// The oldest record that is waiting.
    pub fn take(&self) -> Option<VerdictRecord> {
        self.queue.pop()
    }

    /// Packets of an outcome that no record was made of because the budget was used up.
    pub fn suppressed(&self, outcome: Outcome) -> u64 {
        self.workers.iter().map(|kept| kept.suppressed[outcome.index()].get()).sum()
    }

    /// Records that were lost because the reader was too slow.
    pub fn lost(&self) -> u64 {
        self.workers.iter().map(|kept| kept.lost.get()).sum()
    }
}

/// One worker's way into the log.
pub(super) struct Recorder {
    log: Arc<VerdictLog>,
    worker: usize,
    /// When the budget was last filled.
    filled: Option<Instant>,
    left: [u32; OUTCOMES],
    /// Judgements of the batch at hand, in the order of its frames.
    judged: Vec<(usize, Flow, Judgement, Occasion)>,
}

impl Recorder {
    pub(super) fn new(log: Arc<VerdictLog>, worker: usize) -> Self {
        Self { log, worker, filled: None, left: [0; OUTCOMES], judged: Vec::with_capacity(2 * BATCH) }
    }

    /// Whether anything is told at all; to be asked before each batch.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.log.budget.load(Ordering::Relaxed) > 0
    }

    /// Tells of the packets of a batch that was processed with this as its observer.
    pub(super) fn tell(
        &mut self,
        snapshot: &Snapshot,
        connections: &ConnTable,
        now: Instant,
        ingress: PortId,
        frames: &mut impl Frames,
        verdicts: &[Verdict; BATCH],
    ) {
        self.fill(now);
        let opened = self.log.opened.load(Ordering::Relaxed) != 0;
        let mut judged = std::mem::take(&mut self.judged);
        let mut next = 0;
        for (index, verdict) in verdicts.iter().enumerate().take(frames.len()) {
            let first = next;
            next += judged[first..].iter().take_while(|(of, ..)| *of == index).count();
            // Of two, the first was about a connection that had ended.
            let own = judged[first..next].last();
            let outcome = match (verdict, own) {
                (Verdict::Drop(cause), _) => Outcome::Dropped(*cause),
                (_, Some((.., Occasion::Opened))) if opened => Outcome::Opened,
                _ => continue,
            };
            if !self.may_tell(outcome) {
                continue;
            }
            let frame = frames.bytes(index);
            // A packet that passed has been rewritten, but its flow was judged; one that was dropped is as it came.
            let flow = own.map(|(_, flow, ..)| *flow).or_else(|| Some(parse(frame).ok()?.flow));
            let record = VerdictRecord {
                at: now,
                worker: self.worker,
                ingress,
                epoch: snapshot.epoch,
                octets: frame.len(),
                outcome,
                flow,
                connection: flow.map(|flow| connections.connection_id(&flow)),
                judged: own.map(|(_, flow, judgement, occasion)| name(snapshot, *flow, *judgement, *occasion)),
            };
            if self.log.queue.push(record).is_err() {
                self.log.workers[self.worker].lost.add(1);
            }
        }
        judged.clear();
        self.judged = judged;
    }

    fn fill(&mut self, now: Instant) {
        if self.filled.is_none_or(|filled| now.duration_since(filled) >= Duration::from_secs(1)) {
            self.filled = Some(now);
            self.left = [self.log.budget.load(Ordering::Relaxed); OUTCOMES];
        }
    }

    /// Whether the budget has room for one of this outcome; counts it where not.
    fn may_tell(&mut self, outcome: Outcome) -> bool {
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
    fn judged(&mut self, index: usize, flow: &Flow, judgement: &Judgement, occasion: Occasion) {
        // Twice a frame at most; a batch longer than a batch is not looked at.
        if self.judged.len() < self.judged.capacity() {
            self.judged.push((index, *flow, *judgement, occasion));
        }
    }
}

fn name(snapshot: &Snapshot, flow: Flow, judgement: Judgement, occasion: Occasion) -> Judged {
    // A reference count more, no copy.
    let rule = |side: crate::policy::Side| side.rule().and_then(|rule| snapshot.policy.rule_name(rule)).cloned();
    Judged { flow, judgement, occasion, egress_rule: rule(judgement.egress), ingress_rule: rule(judgement.ingress) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conntrack::Config;
    use crate::io::MemoryFrames;

    /// Tells of a batch of frames too short to be parsed, all dropped for this cause.
    fn tell(recorder: &mut Recorder, now: Instant, cause: Cause, count: usize) {
        let connections = ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap();
        let mut frames = MemoryFrames::new();
        (0..count).for_each(|_| frames.push(vec![0; 10]).unwrap());
        let verdicts = [Verdict::Drop(cause); BATCH];
        recorder.tell(&Snapshot::default(), &connections, now, PortId(3), &mut frames, &verdicts);
    }

    #[test]
    fn each_cause_has_a_budget_a_second_and_what_is_beyond_is_counted() {
        let log = Arc::new(VerdictLog::new(2));
        let mut recorder = Recorder::new(log.clone(), 1);
        assert!(!recorder.is_on());
        log.set_budget(VerdictBudget { each_second: 3, opened: false });
        assert!(recorder.is_on());
        let start = Instant::now();
        tell(&mut recorder, start, Cause::Truncated, 10);
        tell(&mut recorder, start + Duration::from_millis(999), Cause::Truncated, 10);
        tell(&mut recorder, start, Cause::Malformed, 1);
        let told: Vec<_> = std::iter::from_fn(|| log.take()).collect();
        let of = |cause| told.iter().filter(|record| record.outcome == Outcome::Dropped(cause)).count();
        assert_eq!((of(Cause::Truncated), of(Cause::Malformed), told.len()), (3, 1, 4));
        assert!(told.iter().all(|record| record.flow.is_none() && record.ingress == PortId(3) && record.octets == 10));
        assert_eq!(log.suppressed(Outcome::Dropped(Cause::Truncated)), 17);
        assert_eq!(log.suppressed(Outcome::Dropped(Cause::Malformed)), 0);
        tell(&mut recorder, start + Duration::from_secs(1), Cause::Truncated, 10);
        assert_eq!(std::iter::from_fn(|| log.take()).count(), 3, "a second later there is a budget again");
        log.set_budget(VerdictBudget::default());
        assert!(!recorder.is_on());
    }

    #[test]
    fn a_reader_that_is_too_slow_loses_records_and_stops_nobody() {
        let log = Arc::new(VerdictLog::new(1));
        log.set_budget(VerdictBudget { each_second: u32::MAX, opened: false });
        let mut recorder = Recorder::new(log.clone(), 0);
        let now = Instant::now();
        for _ in 0..CAPACITY / BATCH + 2 {
            tell(&mut recorder, now, Cause::NoPort, BATCH);
        }
        assert_eq!(log.lost(), 2 * BATCH as u64);
        assert_eq!(std::iter::from_fn(|| log.take()).count(), CAPACITY);
        assert_eq!(log.suppressed(Outcome::Dropped(Cause::NoPort)), 0);
    }

    #[test]
    fn every_outcome_has_a_place_and_a_name_of_its_own() {
        let all: Vec<Outcome> = Outcome::all().collect();
        assert_eq!(all.len(), OUTCOMES);
        for (place, outcome) in all.iter().enumerate() {
            assert_eq!(outcome.index(), place);
            assert!(all.iter().all(|other| other == outcome || other.name() != outcome.name()));
        }
    }
}
