//! The pipeline with clock reads between its stages, for one batch in many.

use super::{
    BATCH, DropReason, EvaluationReason, Frames, Observer, PipelineMode, PortId, Snapshot, Timestamp, Verdict,
};
use super::{PacketPath, Pipeline, conclude, track};
use crate::clocks;
use crate::forward::PortKind;
use crate::packet::Flow;
use crate::policy::PolicyVerdict;

/// Clocks of the stages of a batch, on the CPU's time stamp counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageClocks {
    /// Parsing, source checks, and prefetching the connection table.
    pub parse: u64,
    /// Finding, updating and opening connections.
    pub connection: u64,
    /// Evaluating policy.
    pub policy: u64,
    /// Finding the next hop and rewriting headers.
    pub rewrite: u64,
    /// Number of policy evaluations. Each cost two clock reads, one included in `policy` and one in `connection`. The
    /// other fields include one clock read each.
    pub evaluations: u64,
}

/// An observer that also measures policy evaluations.
struct Timing<'a, O> {
    inner: &'a mut O,
    began: u64,
    took: u64,
    evaluations: u64,
}

impl<O: Observer> Observer for Timing<'_, O> {
    fn before_evaluation(&mut self) {
        self.began = clocks::now();
    }

    fn evaluated(
        &mut self,
        index: usize,
        flow: &Flow,
        policy_verdict: &PolicyVerdict,
        evaluation_reason: EvaluationReason,
    ) {
        self.took += clocks::now().saturating_sub(self.began);
        self.evaluations += 1;
        self.inner.evaluated(index, flow, policy_verdict, evaluation_reason);
    }
}

impl Pipeline {
    /// Like [`Pipeline::process_batch`], with the same result, but stage by stage over the whole batch, so that the
    /// clock is read once per stage and not once per packet.
    pub fn process_batch_timed<F: Frames, O: Observer>(
        &mut self,
        snapshot: &Snapshot,
        now: Timestamp,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
        observer: &mut O,
    ) -> StageClocks {
        self.replies.begin(now);
        let Some(port) = snapshot.forwarding.port(ingress) else {
            verdicts[..frames.len().min(BATCH)].fill(Verdict::Drop(DropReason::NotReady));
            return StageClocks::default();
        };
        let start = clocks::now();
        let admitted = self.admit_all(snapshot, port, frames, verdicts);
        let parsed = clocks::now();
        let mut observer = Timing { inner: observer, began: 0, took: 0, evaluations: 0 };
        let connections = &*self.connections;
        let observer_of_tracker = &mut observer;
        let mut tracker = track::Tracker {
            connections,
            snapshot,
            now,
            ingress,
            index: 0,
            observer: observer_of_tracker,
            from_host: port.kind == PortKind::Host,
        };
        let mut outcomes = [Ok(PacketPath::Direct); BATCH];
        for (entry, outcome) in self.slots[..admitted].iter().zip(&mut outcomes) {
            tracker.index = entry.index;
            if self.mode == PipelineMode::Full {
                *outcome = tracker.track(frames.bytes(entry.index), &entry.packet, &entry.hashed);
            }
        }
        let tracked = clocks::now();
        for (entry, allowed) in self.slots[..admitted].iter().zip(outcomes) {
            let frame = frames.bytes(entry.index);
            verdicts[entry.index] =
                conclude(&mut self.replies, snapshot, (ingress, port), frame, &entry.packet, self.open, allowed);
        }
        let took = |from: u64, to: u64| to.saturating_sub(from);
        StageClocks {
            parse: took(start, parsed),
            connection: took(parsed, tracked).saturating_sub(observer.took),
            policy: observer.took,
            rewrite: took(tracked, clocks::now()),
            evaluations: observer.evaluations,
        }
    }
}
