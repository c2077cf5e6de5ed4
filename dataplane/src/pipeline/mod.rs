//! From a batch of frames to a verdict for each: the path shared by workers, replay, benchmarks and the fuzzer. It
//! needs no socket and no privilege.
//!
//! The stages are the modules in order: `admit` (parse, spoofing, scope), `track` (connection, otherwise policy),
//! `dispatch` (port, MTU, rewrite). Each either passes the packet on or returns the [`DropReason`]; some drops get a
//! reply (`reply`). Where the kernel's programs read the connection table, `offload` then leaves them the next packets.
//!
//! Code that every packet executes is marked `inline(always)`, down to parser and connection table:
//! [`Pipeline::process_batch`] is instantiated for each type of [`Frames`] in the crate of that type, and if there are
//! several, the compiler would share the parts instead. A packet then takes a third longer.

mod admit;
mod dispatch;
mod early;
mod names;
mod offload;
mod reply;
mod sources;
mod track;

use std::ops::Range;
use std::sync::Arc;

pub use crate::DropReason;
pub use crate::batch::{BATCH, Frames, MemoryFrames, StackSender};
use dispatch::PacketPath;
pub use early::EarlyFragments;
pub use offload::{keep_answers, keep_offloaded, may_leave};
pub use sources::{OriginalSources, evaluate_connection};

use crate::Snapshot;
use crate::conntrack::{ConnTable, PreparedFlow, Timestamp};
use crate::forward::{Port, PortId, PortKind};
use crate::packet::{Flow, OpenChecksum, Packet, TcpFlags, Transport, limit_segment_size};
use crate::policy::{EvaluationForm, PolicyVerdict};
use crate::reply::{Replies, ReplySettings};

/// Packets that are parsed while a cache line is fetched from memory.
const FETCH: usize = 16;

/// Verdict on a packet. There is no default except dropping: only an explicit verdict lets a packet pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Dropped and counted.
    Drop(DropReason),
    /// Rewritten in place, to be sent on this port.
    Forward(PortId),
    /// Nothing yet: a later fragment whose first is not known. Only from a pipeline that
    /// [holds early fragments](Pipeline::hold_early): the caller counts and logs nothing, keeps it with [`EarlyFragments`],
    /// and processes it again.
    Early,
}

/// How much of the pipeline runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PipelineMode {
    /// All of it.
    #[default]
    Full,
    /// Neither connections nor policy: every packet that can be forwarded is. Only for benchmarks.
    ForwardOnly,
}

/// Why policy was evaluated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EvaluationReason {
    /// For the first packet of a connection.
    Opened,
    /// For a connection that was last evaluated under an older epoch.
    Reevaluated,
}

/// Notified of every policy evaluation. Replay and logs implement it; workers without either use `()`, which costs
/// nothing.
pub trait Observer {
    /// Policy was evaluated for `flow` (in the connection's original direction) and frame `index`, in this form.
    fn evaluated(
        &mut self,
        index: usize,
        flow: &Flow,
        policy_verdict: &PolicyVerdict,
        form: EvaluationForm,
        evaluation_reason: EvaluationReason,
    );
}

impl Observer for () {
    #[inline]
    fn evaluated(&mut self, _: usize, _: &Flow, _: &PolicyVerdict, _: EvaluationForm, _: EvaluationReason) {}
}

/// An admitted packet: its index in the batch, the packet, and its connection's hash.
#[derive(Clone)]
struct AdmittedPacket {
    index: usize,
    packet: Packet,
    /// The prepared flow: of a later fragment that of its first one, once that is known.
    hashed: PreparedFlow,
    /// Whether the node's stack has forwarded it with the source that it came with; valid only in a batch from there.
    is_as_it_came: bool,
}

/// How the packets of a batch leave: what is the same for all of them.
#[derive(Clone, Copy)]
struct BatchForm {
    open: OpenChecksum,
    /// Bytes of the longest packet that a frame holds.
    longest: u16,
    /// Whether their port [is plain](Port::is_plain).
    is_plain: bool,
}

/// Why a packet is dropped, with the data for its reply.
#[derive(Clone, Copy)]
struct DroppedPacket {
    reason: DropReason,
    /// Set for TCP if this packet's evaluation revoked its connection: the sequence number that the packet's destination
    /// expects.
    revoked_at: Option<u32>,
    /// The path it would have taken.
    route: PacketPath,
    /// It is not dropped yet, but held.
    is_early: bool,
}

impl From<DropReason> for DroppedPacket {
    fn from(reason: DropReason) -> Self {
        Self { reason, revoked_at: None, route: PacketPath::Direct, is_early: false }
    }
}

/// Evaluates packets for one worker. After construction it allocates only for a port that is new (its budget of replies) and for a DNS
/// answer that has an address of a name in a policy.
pub struct Pipeline {
    connections: Arc<ConnTable>,
    mode: PipelineMode,
    /// Storage for a batch: packets are written once and stay in place.
    slots: Vec<AdmittedPacket>,
    replies: Replies,
    open: OpenChecksum,
    /// Bytes of the longest packet that a frame holds.
    longest: u16,
    sources: Option<Arc<dyn OriginalSources>>,
    holds_early: bool,
}

impl Pipeline {
    /// A pipeline with the connection table shared by all workers.
    pub fn new(connections: Arc<ConnTable>, mode: PipelineMode) -> Self {
        let packet = Packet::default();
        let slot = AdmittedPacket { index: 0, hashed: connections.prepare(&packet.flow), packet, is_as_it_came: false };
        Self {
            connections,
            mode,
            slots: vec![slot; BATCH],
            replies: Replies::new(ReplySettings::default()),
            open: OpenChecksum::Finish,
            longest: u16::MAX,
            sources: None,
            holds_early: false,
        }
    }

    /// Sets which drops get a reply.
    #[must_use]
    pub fn replying(self, settings: ReplySettings) -> Self {
        Self { replies: Replies::new(settings), ..self }
    }

    /// Leaves partial checksums to the sender of the frames.
    #[must_use]
    pub fn leaving_open(self) -> Self {
        Self { open: OpenChecksum::Leave, ..self }
    }

    /// Sets how long a packet may be that a frame holds: TCP is told where a pod's link takes longer ones.
    #[must_use]
    pub fn with_longest(self, longest: u16) -> Self {
        Self { longest, ..self }
    }

    /// Evaluates connections whose source the node has translated for their original source.
    #[must_use]
    pub fn with_sources(self, sources: Option<Arc<dyn OriginalSources>>) -> Self {
        Self { sources, ..self }
    }

    /// Whether fragments that come before their first are [`Verdict::Early`] from the next batch on. Otherwise they are dropped.
    pub fn hold_early(&mut self, holds: bool) {
        self.holds_early = holds;
    }

    /// Replies to the last batch.
    pub fn replies(&mut self) -> &mut Replies {
        &mut self.replies
    }

    /// The connection table.
    pub fn connections(&self) -> &ConnTable {
        &self.connections
    }

    /// Evaluates a batch received on port `ingress` and rewrites packets that pass in place.
    ///
    /// The verdict on frame `i` is `verdicts[i]`; frames keep their length. The caller reads `now` once per batch. A
    /// batch longer than [`BATCH`] is a caller's error; the excess is ignored. Not inlined: as parameters of a function the
    /// compiler knows that these do not alias.
    #[inline(never)]
    pub fn process_batch<F: Frames, O: Observer>(
        &mut self,
        snapshot: &Snapshot,
        now: Timestamp,
        ingress: PortId,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
        observer: &mut O,
    ) {
        self.replies.begin(ingress, now);
        let Some(port) = snapshot.forwarding.port(ingress) else {
            verdicts[..frames.len().min(BATCH)].fill(Verdict::Drop(DropReason::NotReady));
            return;
        };
        let admitted = self.admit_all(snapshot, port, frames, verdicts);
        let connections = &*self.connections;
        let from_host = port.kind == PortKind::Host;
        let sources = self.sources.as_deref();
        let mut tracker = track::Tracker {
            frames,
            sources,
            connections,
            snapshot,
            now,
            ingress,
            index: 0,
            observer,
            from_host,
            holds_early: self.holds_early,
        };
        let form = BatchForm { open: self.open, longest: self.longest, is_plain: port.is_plain() };
        for entry in &mut self.slots[..admitted] {
            let allowed = match self.mode {
                PipelineMode::Full => tracker.track(entry),
                PipelineMode::ForwardOnly => Ok(PacketPath::Direct),
            };
            let frame = tracker.frames.bytes(entry.index);
            verdicts[entry.index] =
                dispatch_or_reply(&mut self.replies, snapshot, (ingress, port), frame, entry, form, allowed);
        }
        if snapshot.policy.has_names() && self.mode == PipelineMode::Full {
            names::learn(connections, snapshot, now, frames, &self.slots[..admitted], verdicts);
        }
        if self.connections.counts() && self.mode == PipelineMode::Full {
            offload::offload(connections, snapshot, port, &self.slots[..admitted], verdicts, self.longest);
        }
    }

    /// First pass: parses and checks every frame, and prefetches the cache lines of their connections while the others
    /// are parsed: first the tags that locate a connection, some packets later the connection. Returns the number of
    /// filled slots.
    #[inline(never)]
    fn admit_all<F: Frames>(
        &mut self,
        snapshot: &Snapshot,
        port: &Port,
        frames: &mut F,
        verdicts: &mut [Verdict; BATCH],
    ) -> usize {
        let (mut admitted, mut located) = (0, 0);
        let count = frames.len().min(BATCH);
        for (index, verdict) in verdicts[..count].iter_mut().enumerate() {
            let slot = &mut self.slots[admitted];
            match admit::admit(snapshot, port, frames.bytes(index), &mut slot.packet) {
                Ok(()) => {
                    slot.index = index;
                    slot.hashed = self.connections.prepare(&slot.packet.flow);
                    admitted += 1;
                    if admitted == located + 2 * FETCH {
                        self.locate(located..located + FETCH);
                        located += FETCH;
                    }
                }
                Err(reason) => *verdict = Verdict::Drop(reason),
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
fn dispatch_or_reply(
    replies: &mut Replies,
    snapshot: &Snapshot,
    (ingress, port): (PortId, &Port),
    frame: &mut [u8],
    entry: &AdmittedPacket,
    BatchForm { open, longest, is_plain }: BatchForm,
    allowed: Result<PacketPath, DroppedPacket>,
) -> Verdict {
    let packet = &entry.packet;
    let dropped = match allowed {
        Ok(route) => match dispatch::dispatch(snapshot, (port, is_plain), frame, packet, route, open) {
            Ok(egress) => {
                let opens =
                    matches!(&packet.transport, Transport::Tcp(segment) if segment.flags.contains(TcpFlags::SYN));
                if opens && is_longer(snapshot, port, egress, longest) {
                    limit_segment_size(frame, packet, longest);
                }
                return Verdict::Forward(egress);
            }
            Err(reason) => DroppedPacket { route, ..reason.into() },
        },
        Err(dropped) if dropped.is_early => return Verdict::Early,
        Err(dropped) => dropped,
    };
    reply::reply(replies, snapshot, (ingress, port), frame, packet, dropped);
    Verdict::Drop(dropped.reason)
}

/// Whether the link at either end takes packets that no frame holds.
#[inline]
fn is_longer(snapshot: &Snapshot, from: &Port, egress: PortId, longest: u16) -> bool {
    let is_pods = |port: &Port| port.kind == PortKind::Pod && port.mtu > longest;
    is_pods(from) || snapshot.forwarding.port(egress).is_some_and(is_pods)
}
