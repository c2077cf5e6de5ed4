//! From a batch of frames to a verdict for each: the one path that workers, replay, benchmarks and the
//! fuzzer share. It needs no socket and no privilege.
//!
//! A packet's way is the order of the modules: `admit` (parse, spoofing, scope), `track` (connection, else
//! policy), `dispatch` (port, MTU, rewrite). Each either hands it on or names the [`Cause`] of its drop; some drops are
//! answered (`answer`).

mod admit;
mod answer;
mod dispatch;
mod track;

use std::sync::Arc;

pub use crate::Cause;

use crate::Snapshot;
use crate::answer::{Answers, OnCut};
use crate::conntrack::{ConnTable, Hashed, Timestamp};
use crate::forward::PortId;
use crate::packet::{Flow, Packet};
use crate::policy::Judgement;

/// Most frames in one batch.
pub const BATCH: usize = 64;

/// What becomes of a packet. There is no default but dropping: a verdict must be reached to pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Dropped and counted.
    Drop(Cause),
    /// Rewritten in place and to be sent out of this port.
    Forward(PortId),
}

/// The frames of one batch, all received on one port.
///
/// The pipeline asks for each frame's octets by index, from the Ethernet header to the last octet received.
pub trait Frames {
    /// How many frames the batch has; at most [`BATCH`].
    fn len(&self) -> usize;

    /// Whether the batch is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The octets of frame `index`, which is below [`Frames::len`].
    fn bytes(&mut self, index: usize) -> &mut [u8];
}

/// How much of the pipeline runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// All of it.
    #[default]
    Full,
    /// Neither connections nor policy: every packet that can be forwarded is. For benchmarks alone.
    ForwardOnly,
}

/// Why the policy was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Occasion {
    /// For the first packet of a connection.
    Opened,
    /// For a connection last judged under an older epoch.
    JudgedAgain,
}

/// Told of every judgement as it is made. Replay and logs listen; workers that need neither pass `()`, which
/// costs nothing.
pub trait Observer {
    /// The policy was asked about `flow` (in the connection's original direction) for frame `index`.
    fn judged(&mut self, index: usize, flow: &Flow, judgement: &Judgement, occasion: Occasion);
}

impl Observer for () {
    #[inline]
    fn judged(&mut self, _: usize, _: &Flow, _: &Judgement, _: Occasion) {}
}

/// A packet that was admitted: which frame of the batch, what it is, and its connection's hash.
struct Admitted {
    index: usize,
    packet: Packet,
    hashed: Hashed,
}

/// Why a packet is dropped, and what its answer must know.
#[derive(Clone, Copy)]
struct Refusal {
    cause: Cause,
    /// As [`track::Tracker`] left it.
    cut_at: Option<u32>,
}

impl From<Cause> for Refusal {
    fn from(cause: Cause) -> Self {
        Self { cause, cut_at: None }
    }
}

/// What one worker needs to judge packets. It allocates nothing after it is made.
pub struct Pipeline {
    connections: Arc<ConnTable>,
    mode: Mode,
    admitted: Vec<Admitted>,
    answers: Answers,
}

impl Pipeline {
    /// A pipeline over the connection table that all workers share.
    pub fn new(connections: Arc<ConnTable>, mode: Mode) -> Self {
        let answers = Answers::new(OnCut::default());
        Self { connections, mode, admitted: Vec::with_capacity(BATCH), answers }
    }

    /// The same, but for what becomes of connections that policy ends.
    #[must_use]
    pub fn on_cut(self, on_cut: OnCut) -> Self {
        Self { answers: Answers::new(on_cut), ..self }
    }

    /// What the last batch is to be answered with.
    pub fn answers(&mut self) -> &mut Answers {
        &mut self.answers
    }

    /// The connection table.
    pub fn connections(&self) -> &ConnTable {
        &self.connections
    }

    /// Judges a batch received on port `ingress` and rewrites in place what passes.
    ///
    /// The verdict of frame `i` is `verdicts[i]`; frames keep their length. `now` is read once a batch by the
    /// caller. A batch longer than [`BATCH`] is a fault of the caller; what is beyond is not looked at.
    pub fn process_batch<F: Frames, O: Observer>(
        &mut self,
        snapshot: &Snapshot,
        now: Timestamp,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
        observer: &mut O,
    ) {
        self.answers.begin(now);
        self.admit_all(snapshot, ingress, frames, verdicts);
        if self.mode == Mode::Full {
            for entry in &mut self.admitted {
                self.connections.locate(&mut entry.hashed);
            }
        }
        let mut admitted = std::mem::take(&mut self.admitted);
        for entry in admitted.drain(..) {
            let frame = frames.bytes(entry.index);
            let outcome = self.allow(snapshot, now, ingress, frame, &entry, observer).and_then(|()| {
                dispatch::dispatch(&snapshot.forwarding, ingress, frame, &entry.packet).map_err(Refusal::from)
            });
            verdicts[entry.index] = match outcome {
                Ok(port) => Verdict::Forward(port),
                Err(refusal) => {
                    answer::answer(&mut self.answers, snapshot, frame, &entry.packet, refusal);
                    Verdict::Drop(refusal.cause)
                }
            };
        }
        self.admitted = admitted;
    }

    /// First pass: parses and checks every frame, and has the cache lines of their connections fetched while
    /// the others are parsed.
    fn admit_all<F: Frames>(
        &mut self,
        snapshot: &Snapshot,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
    ) {
        for (index, verdict) in verdicts.iter_mut().enumerate().take(frames.len()) {
            match admit::admit(&snapshot.forwarding, ingress, frames.bytes(index)) {
                Ok(packet) => {
                    let hashed = self.connections.prepare(&packet.flow);
                    self.admitted.push(Admitted { index, packet, hashed });
                }
                Err(cause) => *verdict = Verdict::Drop(cause),
            }
        }
    }

    /// Second pass, one packet: whether connection or policy lets it pass.
    #[inline]
    fn allow<O: Observer>(
        &self,
        snapshot: &Snapshot,
        now: Timestamp,
        ingress: PortId,
        frame: &[u8],
        entry: &Admitted,
        observer: &mut O,
    ) -> Result<(), Refusal> {
        if self.mode == Mode::ForwardOnly {
            return Ok(());
        }
        let (connections, index) = (&*self.connections, entry.index);
        let mut tracker = track::Tracker { connections, snapshot, now, ingress, index, observer, cut_at: None };
        let outcome = tracker.track(frame, &entry.packet, &entry.hashed);
        outcome.map_err(|cause| Refusal { cause, cut_at: tracker.cut_at })
    }
}
