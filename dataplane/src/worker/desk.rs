//! What a worker has of its own: its queues, its frames, and what is on its way out.

use std::sync::Arc;

use nix::sys::epoll::Epoll;
use xsk_rs::FrameDesc;

use super::control::Shared;
use super::mailbox::{HandOver, Holdings, Mailbox};
use super::queue::PortQueue;
use super::stages::TimedTurn;
use super::statistics::{PortCounters, QueueDepth, WorkerCounters};
use crate::forward::PortId;
use crate::io::{FrameCache, Holder, Kick, XskQueue};
use crate::pipeline::{BATCH, Cause};

/// Missing frames from which a fill ring is refilled while packets come.
const REFILL: u32 = 32;
/// Turns without a packet after which a queue is no longer looked at every turn.
const QUIET: u16 = 64;
/// Most packets of other workers that are taken in a turn.
const HANDED_OVER: usize = 4 * BATCH;

/// Where a packet goes that is to leave by a port.
#[derive(Clone, Copy, Default)]
enum Route {
    /// The port is not open, or not any more.
    #[default]
    Gone,
    /// By a queue of this worker, by index.
    Own(usize),
    /// To the worker that owns it.
    Other(usize),
}

/// What a worker knows of a port.
#[derive(Clone, Default)]
struct PortEntry {
    route: Route,
    counters: Option<Arc<PortCounters>>,
}

/// All that a worker has of its own, apart from its processor and its way of sleeping.
pub(super) struct Desk {
    index: usize,
    pub(super) shared: Arc<Shared>,
    pub(super) queues: Vec<Option<PortQueue>>,
    /// Queues that are looked at every turn, by index: those that had a packet lately. With a hundred ports, looking at
    /// all of them would cost more than a packet does.
    pub(super) lively: Vec<usize>,
    /// Queues with something left to be sent, freed or refilled, by index.
    dirty: Vec<usize>,
    ports: Vec<PortEntry>,
    cache: FrameCache,
    /// What is to be handed over at the end of this turn, by worker.
    outbox: Vec<Vec<HandOver>>,
    /// Packets that found no room, and the ports that they came in by; empty between two calls.
    refused: Vec<(FrameDesc, PortId)>,
    /// This turn, if it is one of those that are timed.
    pub(super) timed: Option<TimedTurn>,
}

/// What came of one turn.
#[derive(Default)]
pub(super) struct Turn {
    /// Packets were moved, or frames came back.
    pub(super) busy: bool,
    /// The kernel does not take what is to be sent.
    pub(super) stalled: bool,
}

impl Desk {
    pub(super) fn new(index: usize, shared: Arc<Shared>) -> Self {
        let outbox = shared.mailboxes.iter().map(|_| Vec::with_capacity(BATCH)).collect();
        Self {
            index,
            shared,
            queues: Vec::new(),
            lively: Vec::new(),
            dirty: Vec::new(),
            ports: Vec::new(),
            cache: FrameCache::new(),
            outbox,
            refused: Vec::with_capacity(BATCH),
            timed: None,
        }
    }

    pub(super) fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.index]
    }

    pub(super) fn counters(&self) -> &WorkerCounters {
        &self.shared.counters[self.index]
    }

    /// Frees a frame and counts its drop for the port that it came in by.
    pub(super) fn drop_frame(&mut self, frame: FrameDesc, ingress: PortId, cause: Cause) {
        let counters = self.ports.get(ingress.index()).and_then(|entry| entry.counters.as_deref());
        counters.unwrap_or(&self.shared.gone[self.index]).drop_one(cause, frame.lengths().data());
        self.cache.give(frame, self.shared.umem.pool());
    }

    /// Sets a packet on its way out of a port.
    #[inline]
    pub(super) fn forward(&mut self, frame: FrameDesc, port: PortId, ingress: PortId) {
        match self.ports.get(port.index()).map_or(Route::Gone, |entry| entry.route) {
            Route::Own(index) => {
                let full = self.queue(index).push(frame, ingress);
                self.list(index);
                if full {
                    self.transmit(index);
                }
            }
            Route::Other(worker) => {
                self.outbox[worker].push(HandOver { frame, port, ingress });
                if self.outbox[worker].len() >= BATCH {
                    self.hand_over(worker);
                }
            }
            Route::Gone => self.drop_frame(frame, ingress, Cause::PortGone),
        }
    }

    /// Sends a packet of the node's own making out of a port, in answer to one that came in by `ingress`. Without a free
    /// frame it is not sent: nobody relies on it.
    pub(super) fn answer(&mut self, octets: &[u8], port: PortId, ingress: PortId) {
        let Some(mut frame) = self.cache.take(self.shared.umem.pool()) else { return };
        // SAFETY: a frame from the cache is this worker's alone until it is passed on.
        unsafe { self.shared.umem.write(&mut frame, octets) };
        self.counters().answers.add(1);
        self.forward(frame, port, ingress);
    }

    fn queue(&mut self, index: usize) -> &mut PortQueue {
        self.queues[index].as_mut().expect("a route leads to a queue that is there")
    }

    /// A queue has had packets: it is looked at every turn for a while, and refilled at the end of this one.
    #[inline]
    pub(super) fn note_packets(&mut self, index: usize) {
        let queue = self.queue(index);
        queue.note_batch();
        if queue.quiet.replace(0).is_none() {
            self.lively.push(index);
        }
        self.list(index);
    }

    /// Sees to it that a queue is dealt with at the end of the turn.
    #[inline]
    fn list(&mut self, index: usize) {
        let queue = self.queue(index);
        if !queue.listed {
            queue.listed = true;
            self.dirty.push(index);
        }
    }

    /// Puts what a queue is to send into its ring; what finds no room is dropped.
    fn transmit(&mut self, index: usize) {
        let Some(queue) = self.queues[index].as_mut() else { return };
        let joined = queue.transmit(&self.shared.umem, &mut self.cache, &mut self.timed, &mut self.refused);
        self.shared.counters[self.index].joined.add(joined as u64);
        if !self.refused.is_empty() {
            let cause = if queue.xsk.is_dead() { Cause::PortGone } else { Cause::TxRingFull };
            self.drop_refused(cause);
        }
    }

    /// Gives another worker what is for its ports.
    fn hand_over(&mut self, worker: usize) {
        let mailbox = &self.shared.mailboxes[worker];
        self.counters().handed_over.add(self.outbox[worker].len() as u64);
        for letter in self.outbox[worker].drain(..) {
            self.shared.umem.pool().mark(&letter.frame, Holder::HandOver);
            if let Err(letter) = mailbox.packets.push(letter) {
                self.refused.push((letter.frame, letter.ingress));
            }
        }
        mailbox.ring();
        self.drop_refused(Cause::HandOffFull);
    }

    fn drop_refused(&mut self, cause: Cause) {
        while let Some((frame, ingress)) = self.refused.pop() {
            self.drop_frame(frame, ingress, cause);
        }
    }

    /// Takes what other workers handed over. Bounded, so that they cannot keep this one from its own queues.
    pub(super) fn take_handed_over(&mut self) -> usize {
        let mut count = 0;
        while count < HANDED_OVER {
            let Some(letter) = self.mailbox().packets.pop() else { break };
            match self.ports.get(letter.port.index()).map_or(Route::Gone, |entry| entry.route) {
                // A port that moved to yet another worker was closed in between: the packet was for the old one.
                Route::Other(_) | Route::Gone => self.drop_frame(letter.frame, letter.ingress, Cause::PortGone),
                Route::Own(_) => self.forward(letter.frame, letter.port, letter.ingress),
            }
            count += 1;
        }
        count
    }

    /// Sends, hands over, frees and refills: the second half of a turn.
    pub(super) fn flush(&mut self, scratch: &mut [FrameDesc; BATCH], turn: &mut Turn) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for &index in &dirty {
            self.transmit(index);
        }
        for worker in 0..self.outbox.len() {
            if !self.outbox[worker].is_empty() {
                self.hand_over(worker);
            }
        }
        let least = if turn.busy { REFILL } else { 1 };
        dirty.retain(|&index| {
            let pool = self.shared.umem.pool();
            let Some(queue) = self.queues[index].as_mut() else { return false };
            match queue.kick(&mut self.timed) {
                Some(Kick::Stalled) => turn.stalled = true,
                Some(Kick::More) => turn.busy = true,
                Some(Kick::Drained) | None => {}
            }
            if queue.xsk.outstanding() > 0 {
                turn.busy |= queue.xsk.complete(scratch, &mut self.cache, pool) > 0;
            }
            queue.xsk.refill(least, scratch, &mut self.cache, pool);
            queue.listed = queue.has_more_to_do(pool);
            queue.listed
        });
        self.dirty = dirty;
    }

    /// Sees to it that a packet on any queue ends the next sleep. `false`: the kernel has no room to watch one of them.
    pub(super) fn watch_all(&mut self, epoll: &Epoll) -> bool {
        self.queues.iter_mut().flatten().filter_map(|queue| queue.watch(epoll).err()).count() == 0
    }

    /// Stops watching queues that many packets pass through.
    pub(super) fn unwatch_busy(&mut self, epoll: &Epoll) {
        self.queues.iter_mut().flatten().for_each(|queue| queue.unwatch_if_busy(epoll));
    }

    /// Takes queues that have had no packet for a while off the list of lively ones.
    pub(super) fn forget_quiet(&mut self) {
        self.lively.retain(|&index| {
            let Some(queue) = self.queues[index].as_mut() else { return false };
            if queue.quiet.is_some_and(|turns| turns >= QUIET) {
                queue.quiet = None;
            }
            queue.quiet.is_some()
        });
    }

    pub(super) fn holdings(&self) -> Holdings {
        let depth = |queue: &PortQueue| QueueDepth {
            port: queue.port,
            receiving: queue.xsk.in_fill(),
            sending: queue.xsk.outstanding(),
        };
        Holdings { cached: self.cache.len() as u32, queues: self.queues.iter().flatten().map(depth).collect() }
    }

    /// Takes on a port: with queues of its own, or by way of the worker that owns it.
    pub(super) fn attach(&mut self, port: PortId, queues: Vec<XskQueue>, owner: usize, counters: Arc<PortCounters>) {
        let mut route = Route::Other(owner);
        for xsk in queues {
            let vacant = self.queues.iter().position(Option::is_none);
            let index = vacant.unwrap_or_else(|| {
                self.queues.push(None);
                self.queues.len() - 1
            });
            self.queues[index] = Some(PortQueue::new(port, xsk, counters.clone()));
            route = Route::Own(index);
        }
        // So that neither list has to grow while packets move.
        self.lively.reserve(self.queues.len() - self.lively.len());
        self.dirty.reserve(self.queues.len() - self.dirty.len());
        if self.ports.len() <= port.index() {
            self.ports.resize(port.index() + 1, PortEntry::default());
        }
        self.ports[port.index()] = PortEntry { route, counters: Some(counters) };
    }

    /// Sends nothing out of a port any more.
    pub(super) fn unroute(&mut self, port: PortId) {
        if let Some(entry) = self.ports.get_mut(port.index()) {
            *entry = PortEntry::default();
        }
    }

    /// Gives up a port's queues; what was handed over for them before is dealt with first.
    pub(super) fn detach(&mut self, port: PortId, scratch: &mut [FrameDesc; BATCH]) -> Vec<XskQueue> {
        self.empty_mailbox(scratch);
        let leaving = self.queues.iter_mut().filter(|queue| queue.as_ref().is_some_and(|queue| queue.port == port));
        let taken = leaving.filter_map(Option::take).map(PortQueue::into_xsk).collect();
        self.lively.retain(|&index| self.queues[index].is_some());
        self.dirty.retain(|&index| self.queues[index].is_some());
        taken
    }

    /// Deals with all that was handed over before now, sends it, and frees what was sent.
    fn empty_mailbox(&mut self, scratch: &mut [FrameDesc; BATCH]) {
        for _ in 0..=Mailbox::CAPACITY / HANDED_OVER {
            let taken = self.take_handed_over();
            self.flush(scratch, &mut Turn::default());
            if taken < HANDED_OVER {
                break;
            }
        }
    }

    /// Gives up all queues and all frames.
    pub(super) fn give_up(&mut self, scratch: &mut [FrameDesc; BATCH]) -> Vec<XskQueue> {
        self.empty_mailbox(scratch);
        self.cache.empty_into(self.shared.umem.pool());
        self.queues.drain(..).flatten().map(PortQueue::into_xsk).collect()
    }
}
