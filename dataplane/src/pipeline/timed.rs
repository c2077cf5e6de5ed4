//! The pipeline with a look at the clock between its stages, for one batch in many.

use super::{BATCH, Cause, Frames, Mode, Observer, Occasion, PortId, Snapshot, Timestamp, Verdict};
use super::{Pipeline, Route, conclude, track};
use crate::clocks;
use crate::forward::PortKind;
use crate::packet::Flow;
use crate::policy::Judgement;

/// What the stages of a batch took, in clocks of the processor's counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageClocks {
    /// Parsing, checking the source, and fetching what is needed of the connection table.
    pub parse: u64,
    /// Finding and updating connections, opening those that are new.
    pub connection: u64,
    /// Asking the policy.
    pub policy: u64,
    /// Finding the next hop and rewriting headers.
    pub rewrite: u64,
    /// How often the policy was asked: each time cost two looks at the clock, one of them in `policy` and one in
    /// `connection`. The other times have one look each.
    pub asked: u64,
}

/// An observer that also takes the time of judgements.
struct Timing<'a, O> {
    inner: &'a mut O,
    began: u64,
    took: u64,
    asked: u64,
}

impl<O: Observer> Observer for Timing<'_, O> {
    fn asked(&mut self) {
        self.began = clocks::now();
    }

    fn judged(&mut self, index: usize, flow: &Flow, judgement: &Judgement, occasion: Occasion) {
        self.took += clocks::now().saturating_sub(self.began);
        self.asked += 1;
        self.inner.judged(index, flow, judgement, occasion);
    }
}

impl Pipeline {
    /// Does what [`Pipeline::process_batch`] does, with the same outcome, stage by stage over the whole batch, so that the
    /// clock is looked at once a stage and not once a packet.
    pub fn process_batch_timed<F: Frames, O: Observer>(
        &mut self,
        snapshot: &Snapshot,
        now: Timestamp,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
        observer: &mut O,
    ) -> StageClocks {
        self.answers.begin(now);
        let Some(port) = snapshot.forwarding.port(ingress) else {
            verdicts[..frames.len().min(BATCH)].fill(Verdict::Drop(Cause::NotReady));
            return StageClocks::default();
        };
        let start = clocks::now();
        let admitted = self.admit_all(&snapshot.forwarding, port, frames, verdicts);
        let parsed = clocks::now();
        let mut observer = Timing { inner: observer, began: 0, took: 0, asked: 0 };
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
        let mut outcomes = [Ok(Route::Direct); BATCH];
        for (entry, outcome) in self.slots[..admitted].iter().zip(&mut outcomes) {
            tracker.index = entry.index;
            if self.mode == Mode::Full {
                *outcome = tracker.track(frames.bytes(entry.index), &entry.packet, &entry.hashed);
            }
        }
        let tracked = clocks::now();
        for (entry, allowed) in self.slots[..admitted].iter().zip(outcomes) {
            let frame = frames.bytes(entry.index);
            verdicts[entry.index] =
                conclude(&mut self.answers, snapshot, (ingress, port), frame, &entry.packet, self.open, allowed);
        }
        let took = |from: u64, to: u64| to.saturating_sub(from);
        StageClocks {
            parse: took(start, parsed),
            connection: took(parsed, tracked).saturating_sub(observer.took),
            policy: observer.took,
            rewrite: took(tracked, clocks::now()),
            asked: observer.asked,
        }
    }
}
