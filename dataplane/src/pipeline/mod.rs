//! From a batch of frames to a verdict for each: the one path that workers, replay, benchmarks and the
//! fuzzer share. It needs no socket and no privilege.
//!
//! A packet's way is the order of the modules: `admit` (parse, spoofing, scope), `track` (connection, else
//! policy), `dispatch` (port, MTU, rewrite). Each either hands it on or names the [`Cause`] of its drop; some drops are
//! answered (`answer`).
//!
//! What every packet crosses is marked `inline(always)`, down to parser and connection table: [`Pipeline::process_batch`]
//! is made anew for each kind of [`Frames`] in the crate that has it, and where there are several, the compiler would
//! rather share the parts. A packet then takes a third longer.

mod admit;
mod answer;
mod dispatch;
mod timed;
mod track;

use std::ops::Range;
use std::sync::Arc;

pub use crate::Cause;
use dispatch::Route;
pub use timed::StageClocks;

use crate::Snapshot;
use crate::answer::{Answers, OnCut};
use crate::conntrack::{ConnTable, Hashed, Timestamp};
use crate::forward::{Forwarding, Port, PortId, PortKind};
use crate::packet::{Flow, OpenChecksum, Packet};
use crate::policy::Judgement;

/// Most frames in one batch.
pub const BATCH: usize = 64;

/// Packets that are parsed while a cache line comes from memory.
const FETCH: usize = 16;

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
    /// The policy is about to be asked.
    #[inline]
    fn asked(&mut self) {}

    /// The policy was asked about `flow` (in the connection's original direction) for frame `index`.
    fn judged(&mut self, index: usize, flow: &Flow, judgement: &Judgement, occasion: Occasion);
}

impl Observer for () {
    #[inline]
    fn judged(&mut self, _: usize, _: &Flow, _: &Judgement, _: Occasion) {}
}

/// A packet that was admitted: which frame of the batch, what it is, and its connection's hash.
#[derive(Clone)]
struct Admitted {
    index: usize,
    packet: Packet,
    hashed: Hashed,
}

/// Why a packet is dropped, and what its answer must know.
#[derive(Clone, Copy)]
struct Refusal {
    cause: Cause,
    /// If policy has ended the packet's connection with this packet, and it is TCP: the sequence number that the packet's
    /// destination expects.
    cut_at: Option<u32>,
    /// Which way it would have left.
    route: Route,
}

impl From<Cause> for Refusal {
    fn from(cause: Cause) -> Self {
        Self { cause, cut_at: None, route: Route::Direct }
    }
}

/// What one worker needs to judge packets. It allocates nothing after it is made.
pub struct Pipeline {
    connections: Arc<ConnTable>,
    mode: Mode,
    /// Room for a batch: packets are written where they stay until they are judged.
    slots: Vec<Admitted>,
    answers: Answers,
    open: OpenChecksum,
}

impl Pipeline {
    /// A pipeline over the connection table that all workers share.
    pub fn new(connections: Arc<ConnTable>, mode: Mode) -> Self {
        let packet = Packet::default();
        let slot = Admitted { index: 0, hashed: connections.prepare(&packet.flow), packet };
        Self {
            connections,
            mode,
            slots: vec![slot; BATCH],
            answers: Answers::new(OnCut::default()),
            open: OpenChecksum::Finish,
        }
    }

    /// The same, but for what becomes of connections that policy ends.
    #[must_use]
    pub fn on_cut(self, on_cut: OnCut) -> Self {
        Self { answers: Answers::new(on_cut), ..self }
    }

    /// The same for a sender of frames that finishes what is left open.
    #[must_use]
    pub fn leaving_open(self) -> Self {
        Self { open: OpenChecksum::Leave, ..self }
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
        let Some(port) = snapshot.forwarding.port(ingress) else {
            verdicts[..frames.len().min(BATCH)].fill(Verdict::Drop(Cause::NotReady));
            return;
        };
        let admitted = self.admit_all(&snapshot.forwarding, port, frames, verdicts);
        let connections = &*self.connections;
        let from_host = port.kind == PortKind::Host;
        let mut tracker = track::Tracker { connections, snapshot, now, ingress, index: 0, observer, from_host };
        for entry in &self.slots[..admitted] {
            let frame = frames.bytes(entry.index);
            tracker.index = entry.index;
            let allowed = match self.mode {
                Mode::Full => tracker.track(frame, &entry.packet, &entry.hashed),
                Mode::ForwardOnly => Ok(Route::Direct),
            };
            verdicts[entry.index] =
                conclude(&mut self.answers, snapshot, (ingress, port), frame, &entry.packet, self.open, allowed);
        }
    }

    /// First pass: parses and checks every frame, and has the cache lines of their connections fetched while
    /// the others are parsed: first the tags that tell where a connection is, some packets later the connection.
    /// How many slots are filled by it.
    #[inline(never)]
    fn admit_all<F: Frames>(
        &mut self,
        forwarding: &Forwarding,
        port: &Port,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
    ) -> usize {
        let (mut admitted, mut located) = (0, 0);
        for (index, verdict) in verdicts.iter_mut().enumerate().take(frames.len()) {
            let slot = &mut self.slots[admitted];
            match admit::admit(forwarding, port, frames.bytes(index), &mut slot.packet) {
                Ok(()) => {
                    slot.index = index;
                    slot.hashed = self.connections.prepare(&slot.packet.flow);
                    admitted += 1;
                    if admitted == located + 2 * FETCH {
                        self.locate(located..located + FETCH);
                        located += FETCH;
                    }
                }
                Err(cause) => *verdict = Verdict::Drop(cause),
            }
        }
        self.locate(located..admitted);
        admitted
    }
    /// Has the entries of some slots' connections fetched, whose tags have come meanwhile.
    #[inline(never)]
    fn locate(&mut self, slots: Range<usize>) {
        for slot in &mut self.slots[slots] {
            self.connections.locate(&mut slot.hashed);
        }
    }
}

/// The last stage: what may pass gets its way out; what may not is answered, if its sender is told.
#[inline(always)]
fn conclude(
    answers: &mut Answers,
    snapshot: &Snapshot,
    (ingress, port): (PortId, &Port),
    frame: &mut [u8],
    packet: &Packet,
    open: OpenChecksum,
    allowed: Result<Route, Refusal>,
) -> Verdict {
    let refusal = match allowed {
        Ok(route) => match dispatch::dispatch(&snapshot.forwarding, port, frame, packet, route, open) {
            Ok(egress) => return Verdict::Forward(egress),
            Err(cause) => Refusal { cause, cut_at: None, route },
        },
        Err(refusal) => refusal,
    };
    answer::answer(answers, snapshot, (ingress, port), frame, packet, refusal);
    Verdict::Drop(refusal.cause)
}
