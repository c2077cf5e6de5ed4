//! Processing of packet batches by a worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::capture::{CaptureTap, CapturedBatch};
use super::long::LongPacket;
use super::verdicts::{Recorder, VerdictLog};
use crate::conntrack::{ConnTable, Fragments, SweepCursor, Timestamp};
use crate::forward::PortId;
use crate::io::RxBatch;
use crate::packet::Flow;
use crate::pipeline::{BATCH, EvaluationReason, Frames, Observer, OriginalSources, Pipeline, PipelineMode, Verdict};
use crate::policy::{EvaluationForm, PolicySet, PolicyVerdict};
use crate::reply::{Replies, ReplySettings};
use crate::{DropReason, Snapshot};

/// Processes a batch of packets: the pipeline, or something simpler in this module's tests.
pub(crate) trait Processor: Send + 'static {
    /// Evaluates a batch received on `ingress`; the verdict on frame `i` is written to `verdicts[i]`.
    fn process(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    );

    /// The same for a packet outside of the UMEM. It is not [early](Verdict::Early).
    fn process_long(
        &mut self,
        _snapshot: &Snapshot,
        _now: Instant,
        _ingress: PortId,
        _packet: &mut LongPacket,
        verdicts: &mut [Verdict; BATCH],
    ) {
        verdicts[0] = Verdict::Drop(DropReason::TooBig);
    }

    /// Replies to the last batch.
    fn replies(&mut self) -> Option<&mut Replies> {
        None
    }

    /// The first fragments that have passed, and the time on their clock; `None`: no packet is early.
    fn fragments(&self, _now: Instant) -> Option<(&Fragments, Timestamp)> {
        None
    }

    /// Captures packets into `tap` from now on, or no longer. Returns what it captured into before.
    fn capture(&mut self, tap: Option<Box<CaptureTap>>) -> Option<Box<CaptureTap>> {
        tap
    }

    /// Runs one step of periodic housekeeping: a small one if packets may be waiting.
    fn housekeeping(&mut self, snapshot: &Snapshot, now: Instant, busy: bool);
}

/// The pipeline, its clock, and the worker's part in sweeping the connection table.
pub(crate) struct PolicyProcessor {
    pipeline: Pipeline,
    /// The same time on both clocks.
    origin: (Instant, Timestamp),
    sweep: Option<TableSweep>,
    recorder: Recorder,
    /// Set while a capture runs.
    capture: Option<Box<CaptureTap>>,
    worker: usize,
}

struct RuleUsage<'a> {
    policy: &'a PolicySet,
    worker: usize,
}

impl RuleUsage<'_> {
    /// A program has opened a connection like one that was evaluated. Where policy has changed since, the connection counts for the rule that
    /// decides now.
    fn repeated(&mut self, flow: &Flow) {
        self.policy.count(self.worker, &self.policy.evaluate(flow));
    }
}

impl Observer for RuleUsage<'_> {
    fn evaluated(&mut self, _: usize, _: &Flow, verdict: &PolicyVerdict, _: EvaluationForm, reason: EvaluationReason) {
        // One that is evaluated again was counted when it was opened.
        if reason == EvaluationReason::Opened {
            self.policy.count(self.worker, verdict);
        }
    }
}

impl Observer for (&mut Recorder, RuleUsage<'_>) {
    fn evaluated(
        &mut self,
        index: usize,
        flow: &Flow,
        verdict: &PolicyVerdict,
        form: EvaluationForm,
        reason: EvaluationReason,
    ) {
        self.0.evaluated(index, flow, verdict, form, reason);
        self.1.evaluated(index, flow, verdict, form, reason);
    }
}

struct TableSweep {
    cursor: SweepCursor,
    last: Instant,
    /// The next event of a connection that programs have opened, and when the worker last looked for some.
    heard: u64,
    hearing: Instant,
}

/// Duration of a sweep of the whole table. Expired connections are never found; the sweep frees their entries.
const SWEEP_PERIOD: Duration = Duration::from_secs(10);
/// Maximum entries per step while packets may be waiting: some 15 microseconds.
const BUSY_STEP: usize = 512;
/// Maximum entries per step otherwise: about a millisecond.
const IDLE_STEP: usize = 32_768;
/// Time between two looks at what programs have opened: they write to the same cache line.
const HEARING: Duration = Duration::from_millis(5);
/// Maximum connections that programs have opened of which a step hears while packets may be waiting: some 15 microseconds.
const BUSY_HEARING: usize = 128;
/// The same otherwise.
const IDLE_HEARING: usize = 4096;

impl PolicyProcessor {
    /// Only the first worker sweeps: others would only repeat its work.
    pub(crate) fn new(
        connections: Arc<ConnTable>,
        mode: PipelineMode,
        replies: ReplySettings,
        worker: usize,
        verdicts: Arc<VerdictLog>,
        sources: Option<Arc<dyn OriginalSources>>,
        longest: u16,
    ) -> Self {
        let now = Instant::now();
        let sweep =
            (worker == 0).then(|| TableSweep { cursor: SweepCursor::default(), last: now, heard: 0, hearing: now });
        let pipeline = Pipeline::new(connections, mode).replying(replies).leaving_open();
        let pipeline = pipeline.with_sources(sources).with_longest(longest);
        Self {
            pipeline,
            origin: (now, Timestamp::now()),
            sweep,
            recorder: Recorder::new(verdicts, worker),
            worker,
            capture: None,
        }
    }

    fn timestamp(&self, now: Instant) -> Timestamp {
        self.origin.1.plus(now.saturating_duration_since(self.origin.0))
    }

    /// [`Processor::process`], for frames of any kind.
    #[inline(always)]
    fn evaluate<F: Frames>(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
    ) {
        if self.capture.is_some() {
            return self.process_captured(snapshot, now, ingress, frames, verdicts);
        }
        let timestamp = self.timestamp(now);
        let pipeline = &mut self.pipeline;
        let mut usage = RuleUsage { policy: &snapshot.policy, worker: self.worker };
        if self.recorder.is_on() {
            let mut both = (&mut self.recorder, usage);
            pipeline.process_batch(snapshot, timestamp, ingress, frames, verdicts, &mut both);
            self.recorder.record(snapshot, pipeline.connections(), now, ingress, frames, verdicts);
        } else {
            pipeline.process_batch(snapshot, timestamp, ingress, frames, verdicts, &mut usage);
        }
    }

    /// [`Processor::process`] while a capture runs.
    #[cold]
    #[inline(never)]
    fn process_captured<F: Frames>(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
    ) {
        let timestamp = self.timestamp(now);
        let Self { pipeline, recorder, capture, worker, .. } = self;
        let Some(tap) = capture else { return };
        tap.keep(frames);
        let mut both = (&mut *recorder, RuleUsage { policy: &snapshot.policy, worker: *worker });
        pipeline.process_batch(snapshot, timestamp, ingress, frames, verdicts, &mut both);
        let connections = pipeline.connections();
        let batch = CapturedBatch { snapshot, connections, at: now, now: timestamp, ingress };
        tap.record(&batch, frames, verdicts, recorder);
        if recorder.is_on() {
            recorder.record(snapshot, connections, now, ingress, frames, verdicts);
        } else {
            recorder.forget();
        }
    }
}

impl Processor for PolicyProcessor {
    #[inline]
    fn process(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    ) {
        self.pipeline.hold_early(true);
        self.evaluate(snapshot, now, ingress, frames, verdicts);
    }

    #[cold]
    fn process_long(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        packet: &mut LongPacket,
        verdicts: &mut [Verdict; BATCH],
    ) {
        self.pipeline.hold_early(false);
        self.evaluate(snapshot, now, ingress, packet, verdicts);
    }

    #[inline]
    fn replies(&mut self) -> Option<&mut Replies> {
        Some(self.pipeline.replies())
    }

    fn fragments(&self, now: Instant) -> Option<(&Fragments, Timestamp)> {
        Some((self.pipeline.connections().fragments(), self.timestamp(now)))
    }

    fn capture(&mut self, tap: Option<Box<CaptureTap>>) -> Option<Box<CaptureTap>> {
        std::mem::replace(&mut self.capture, tap)
    }

    fn housekeeping(&mut self, snapshot: &Snapshot, now: Instant, busy: bool) {
        let timestamp = self.timestamp(now);
        let Some(sweep) = &mut self.sweep else { return };
        let connections = self.pipeline.connections();
        if now.saturating_duration_since(sweep.hearing) >= HEARING {
            sweep.hearing = now;
            // Each connection that is opened counts for these.
            connections.let_repeat(timestamp, !self.recorder.sees_opened());
            let mut usage = RuleUsage { policy: &snapshot.policy, worker: self.worker };
            let most = if busy { BUSY_HEARING } else { IDLE_HEARING };
            connections.hear(&mut sweep.heard, most, |flow, _| usage.repeated(flow));
        }
        let elapsed = now.saturating_duration_since(sweep.last);
        let due = connections.capacity() as f64 * elapsed.as_secs_f64() / SWEEP_PERIOD.as_secs_f64();
        let step = (due as usize).min(if busy { BUSY_STEP } else { IDLE_STEP });
        if step >= BUSY_STEP / 2 {
            connections.sweep(&mut sweep.cursor, step, timestamp, snapshot.epoch);
            sweep.last = now;
        }
    }
}
