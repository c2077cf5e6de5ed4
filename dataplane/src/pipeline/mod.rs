//! From a batch of frames to a verdict for each: the path shared by workers, replay, benchmarks and the fuzzer. It
//! needs no socket and no privilege.
//!
//! The stages are the modules in order: `admit` (parse, spoofing, scope), `track` (connection, otherwise policy),
//! `dispatch` (port, MTU, rewrite). Each either passes the packet on or returns the [`DropReason`]; some drops get a
//! reply (`answer`).
//!
//! Code that every packet executes is marked `inline(always)`, down to parser and connection table:
//! [`Pipeline::process_batch`] is instantiated for each type of [`Frames`] in the crate of that type, and if there are
//! several, the compiler would share the parts instead. A packet then takes a third longer.

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

/// Maximum frames in one batch.
pub const BATCH: usize = 64;

/// Packets that are parsed while a cache line is fetched from memory.
const FETCH: usize = 16;

/// Verdict on a packet. There is no default except dropping: only an explicit verdict lets a packet pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Dropped and counted.
    Drop(Cause),
    /// Rewritten in place, to be sent on this port.
    Forward(PortId),
}

/// The frames of one batch, all received on one port.
///
/// The pipeline accesses each frame's bytes by index, from the Ethernet header to the last byte received.
pub trait Frames {
    /// Number of frames in the batch; at most [`BATCH`].
    fn len(&self) -> usize;

    /// Whether the batch is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of frame `index`, which is below [`Frames::len`].
    fn bytes(&mut self, index: usize) -> &mut [u8];
}

/// How much of the pipeline runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// All of it.
    #[default]
    Full,
    /// Neither connections nor policy: every packet that can be forwarded is. Only for benchmarks.
    ForwardOnly,
}

/// Why policy was evaluated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Occasion {
    /// For the first packet of a connection.
    Opened,
    /// For a connection that was last evaluated under an older epoch.
    JudgedAgain,
}

/// Notified of every policy evaluation. Replay and logs implement it; workers without either use `()`, which costs
/// nothing.
pub trait Observer {
    /// Policy is about to be evaluated.
    #[inline]
    fn asked(&mut self) {}

    /// Policy was evaluated for `flow` (in the connection's original direction) and frame `index`.
    fn judged(&mut self, index: usize, flow: &Flow, judgement: &Judgement, occasion: Occasion);
}

impl Observer for () {
    #[inline]
    fn judged(&mut self, _: usize, _: &Flow, _: &Judgement, _: Occasion) {}
}

/// An admitted packet: its index in the batch, the packet, and its connection's hash.
#[derive(Clone)]
struct Admitted {
    index: usize,
    packet: Packet,
    hashed: Hashed,
}

/// Why a packet is dropped, with the data for its reply.
#[derive(Clone, Copy)]
struct Refusal {
    cause: Cause,
    /// If policy has ended the packet's connection with this packet, and it is TCP: the sequence number that the packet's
    /// destination expects.
    cut_at: Option<u32>,
    /// The path it would have taken.
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
    /// Storage for a batch: packets are written once and stay in place.
    slots: Vec<Admitted>,
    answers: Answers,
    open: OpenChecksum,
}

impl Pipeline {
    /// A pipeline with the connection table shared by all workers.
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

    /// Sets what happens to revoked connections.
    #[must_use]
    pub fn on_cut(self, on_cut: OnCut) -> Self {
        Self { answers: Answers::new(on_cut), ..self }
    }

    /// Leaves partial checksums to the sender of the frames.
    #[must_use]
    pub fn leaving_open(self) -> Self {
        Self { open: OpenChecksum::Leave, ..self }
    }

    /// Replies to the last batch.
    pub fn answers(&mut self) -> &mut Answers {
        &mut self.answers
    }

    /// The connection table.
    pub fn connections(&self) -> &ConnTable {
        &self.connections
    }

    /// Evaluates a batch received on port `ingress` and rewrites packets that pass in place.
    ///
    /// The verdict on frame `i` is `verdicts[i]`; frames keep their length. The caller reads `now` once per batch. A
    /// batch longer than [`BATCH`] is a caller's error; the excess is ignored.
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

    /// First pass: parses and checks every frame, and prefetches the cache lines of their connections while the others
    /// are parsed: first the tags that locate a connection, some packets later the connection. Returns the number of
    /// filled slots.
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
    /// Prefetches the connection entries of some slots, whose tags have arrived meanwhile.
    #[inline(never)]
    fn locate(&mut self, slots: Range<usize>) {
        for slot in &mut self.slots[slots] {
            self.connections.locate(&mut slot.hashed);
        }
    }
}

/// Last stage: dispatches an allowed packet, and replies to a dropped one if its sender is notified.
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
