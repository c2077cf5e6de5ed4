//! What a worker does with a batch of packets.

use std::time::Instant;

use crate::Snapshot;
use crate::forward::PortId;
use crate::io::RxBatch;
use crate::pipeline::{BATCH, Cause, Verdict};

/// What a worker does with a batch of packets: the pipeline, and in this module's tests something simpler.
pub(crate) trait Processor: Send + 'static {
    /// Judges a batch received on `ingress`; the verdict of frame `i` goes to `verdicts[i]`.
    fn process(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    );

    /// Does a small step of what must be done now and then.
    fn tend(&mut self, now: Instant);
}

/// Judges nothing, and so lets nothing pass.
pub(crate) struct NotReady;

impl Processor for NotReady {
    fn process(&mut self, _: &Snapshot, _: Instant, _: PortId, _: &mut RxBatch<'_>, verdicts: &mut [Verdict; BATCH]) {
        verdicts.fill(Verdict::Drop(Cause::NotReady));
    }

    fn tend(&mut self, _: Instant) {}
}
