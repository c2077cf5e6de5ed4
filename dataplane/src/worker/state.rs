//! A worker's state: its queues, its frames, and packets to be sent.

use std::sync::Arc;

use nix::sys::epoll::Epoll;
use xsk_rs::FrameDesc;

use super::inbox::{HandOff, HeldFrames, WorkerInbox, WorkerPath};
use super::long::LongPacket;
use super::queue::{PairTraffic, PortQueue};
use super::shared::WorkerShared;
use super::statistics::{PortCounters, QueueDepth, WorkerCounters};
use super::waiting::WaitingSweep;
use crate::DropReason;
use crate::batch::{BATCH, Frames};
use crate::forward::PortId;
use crate::io::{FrameCache, FrameOwner, GsoPort, Kick, RxBatch, XskQueue};
use crate::tag::{self, FrameTag};

/// Missing frames at which a fill ring is refilled while packets arrive.
const REFILL: u32 = 32;
/// Poll iterations without a packet after which a queue is no longer polled in every iteration.
const QUIET: u16 = 64;
const HAND_OFF_LIMIT: usize = 4 * BATCH;

#[derive(Clone, Copy, Default)]
enum PortRoute {
    #[default]
    Gone,
    /// Through a queue of this worker, by index.
    Own(usize),
    /// Through the worker that owns it.
    Other(usize),
}

#[derive(Clone, Default)]
struct PortEntry {
    route: PortRoute,
    counters: Option<Arc<PortCounters>>,
    /// Index of its interface, if it is a pod's that is reached through the pair.
    interface: Option<u32>,
    /// It is the node's stack, reached through the pair.
    is_node: bool,
    /// For packets that do not fit a frame.
    sender: Option<Arc<GsoPort>>,
}

/// All state of a worker except its processor and its sleep logic.
pub(super) struct WorkerState {
    index: usize,
    pub(super) shared: Arc<WorkerShared>,
    pub(super) queues: Vec<Option<PortQueue>>,
    /// Indices of active queues, which are polled in every iteration: those with recent packets. With a hundred ports,
    /// polling all of them would cost more than a packet does.
    pub(super) active: Vec<usize>,
    /// Indices of queues with packets to send, frames to free or a fill ring to refill.
    dirty: Vec<usize>,
    ports: Vec<PortEntry>,
    /// Index of the queue of this worker's pair, if it has one.
    pair: Option<usize>,
    cache: FrameCache,
    /// Packets to hand off at the end of this iteration, by worker.
    hand_off_queues: Vec<Vec<HandOff>>,
    /// Packets that were rejected by a full queue, with their ingress ports; empty between calls.
    rejected: Vec<(FrameDesc, PortId)>,
    pub(super) waiting: WaitingSweep,
}

#[derive(Default)]
pub(super) struct PollIteration {
    /// Packets were moved, or frames were completed.
    pub(super) busy: bool,
    pub(super) received: u32,
    /// The kernel does not accept packets to send.
    pub(super) stalled: bool,
}

impl WorkerState {
    pub(super) fn new(index: usize, shared: Arc<WorkerShared>) -> Self {
        let waiting = WaitingSweep::new(shared.waiting.clone());
        let hand_off_queues = shared.inboxes.iter().map(|_| Vec::with_capacity(BATCH)).collect();
        Self {
            index,
            shared,
            queues: Vec::new(),
            active: Vec::new(),
            dirty: Vec::new(),
            ports: Vec::new(),
            pair: None,
            cache: FrameCache::new(),
            hand_off_queues,
            rejected: Vec::with_capacity(BATCH),
            waiting,
        }
    }

    pub(super) fn inbox(&self) -> &WorkerInbox {
        &self.shared.inboxes[self.index]
    }

    pub(super) fn counters(&self) -> &WorkerCounters {
        &self.shared.counters[self.index]
    }

    /// Frees a frame and counts its drop on its ingress port.
    pub(super) fn drop_frame(&mut self, frame: FrameDesc, ingress: PortId, reason: DropReason) {
        self.count_drop(frame.lengths().data(), ingress, reason);
        self.cache.free(frame, self.shared.umem.pool());
    }

    /// Counts a dropped packet of this many bytes on its ingress port.
    pub(super) fn count_drop(&self, length: usize, ingress: PortId, reason: DropReason) {
        let counters = self.ports.get(ingress.index()).and_then(|entry| entry.counters.as_deref());
        counters.unwrap_or(&self.shared.gone[self.index]).drop_one(reason, length);
    }

    /// Adds a frame to the packet that it is a part of, and frees it.
    pub(super) fn take_part(&mut self, batch: &mut RxBatch<'_>, index: usize, packet: &mut LongPacket) {
        packet.push(batch.bytes(index));
        let mut frame = batch.frame(index);
        frame.set_options(0);
        self.cache.free(frame, self.shared.umem.pool());
    }

    /// Sends a packet that does not fit a frame, behind what is waiting for the same port.
    pub(super) fn send_long(&mut self, frame: &[u8], port: PortId, ingress: PortId) {
        let route = self.ports.get(port.index()).map_or(PortRoute::Gone, |entry| entry.route);
        let sent = match route {
            PortRoute::Own(index) => {
                self.transmit(index);
                let Some(queue) = self.queues[index].as_mut() else { return };
                queue.send_long(frame)
            }
            PortRoute::Other(_) => {
                let sender = self.ports[port.index()].sender.as_ref();
                sender.is_some_and(|sender| sender.send_whole(frame).is_ok())
            }
            PortRoute::Gone => return self.count_drop(frame.len(), ingress, DropReason::PortGone),
        };
        if !sent {
            return self.count_drop(frame.len(), ingress, DropReason::TxRingFull);
        }
        if let Some(counters) = self.ports[port.index()].counters.as_deref() {
            counters.tx_packets.add(1);
            counters.tx_bytes.add(frame.len() as u64);
        }
    }

    #[inline]
    pub(super) fn forward(&mut self, frame: FrameDesc, port: PortId, ingress: PortId) {
        match self.ports.get(port.index()).map_or(PortRoute::Gone, |entry| entry.route) {
            PortRoute::Own(index) => {
                let full = self.queue(index).push(frame, port, ingress);
                self.schedule(index);
                if full {
                    self.transmit(index);
                }
            }
            PortRoute::Other(worker) => {
                self.hand_off_queues[worker].push(HandOff { frame, port, ingress });
                if self.hand_off_queues[worker].len() >= BATCH {
                    self.hand_off(worker);
                }
            }
            PortRoute::Gone => self.drop_frame(frame, ingress, DropReason::PortGone),
        }
    }

    /// Sends a packet generated by the node on a port, in reply to one received on `ingress`. Without a free frame it
    /// is not sent: replies are best effort.
    pub(super) fn reply(&mut self, bytes: &[u8], port: PortId, ingress: PortId) {
        if self.forward_copy(bytes, port, ingress) {
            self.counters().replies.add(1);
        }
    }

    /// Queues a packet outside of the UMEM, which fits a frame, for sending on a port. `false`: there is no free frame.
    pub(super) fn forward_copy(&mut self, bytes: &[u8], port: PortId, ingress: PortId) -> bool {
        let Some(mut frame) = self.cache.take(self.shared.umem.pool()) else { return false };
        // SAFETY: a frame from the cache belongs to this worker until it is passed on.
        unsafe { self.shared.umem.write(&mut frame, bytes) };
        self.forward(frame, port, ingress);
        true
    }

    pub(super) fn free(&mut self, frame: FrameDesc) {
        self.cache.free(frame, self.shared.umem.pool());
    }

    fn queue(&mut self, index: usize) -> &mut PortQueue {
        self.queues[index].as_mut().expect("a route leads to a queue that is there")
    }

    /// Marks a queue as active after it received packets, and schedules its refill at the end of this iteration.
    #[inline]
    pub(super) fn mark_active(&mut self, index: usize) {
        let queue = self.queue(index);
        queue.count_batch();
        if queue.quiet.replace(0).is_none() {
            self.active.push(index);
        }
        self.schedule(index);
    }

    /// Schedules a queue for processing at the end of the iteration.
    #[inline]
    fn schedule(&mut self, index: usize) {
        let queue = self.queue(index);
        if !queue.listed {
            queue.listed = true;
            self.dirty.push(index);
        }
    }

    /// Puts a queue's packets into its TX ring; packets that do not fit are dropped.
    fn transmit(&mut self, index: usize) {
        let Some(queue) = self.queues[index].as_mut() else { return };
        let joined = queue.transmit(&self.shared.umem, &mut self.cache, &mut self.rejected);
        self.shared.counters[self.index].joined.add(joined as u64);
        for (port, bytes) in queue.pair.iter_mut().flat_map(PairTraffic::take_sent) {
            if let Some(counters) = self.ports.get(port.index()).and_then(|entry| entry.counters.as_deref()) {
                counters.tx_packets.add(1);
                counters.tx_bytes.add(bytes as u64);
            }
        }
        if !self.rejected.is_empty() {
            let reason = if queue.xsk.is_dead() { DropReason::PortGone } else { DropReason::TxRingFull };
            self.drop_rejected(reason);
        }
    }

    /// Hands packets off to the worker that owns their ports.
    fn hand_off(&mut self, worker: usize) {
        let inbox = &self.shared.inboxes[worker];
        self.counters().handed_over.add(self.hand_off_queues[worker].len() as u64);
        for packet in self.hand_off_queues[worker].drain(..) {
            self.shared.umem.pool().mark(&packet.frame, FrameOwner::HandOff);
            if let Err(packet) = inbox.packets.push(packet) {
                self.rejected.push((packet.frame, packet.ingress));
            }
        }
        inbox.wake();
        self.drop_rejected(DropReason::HandOffFull);
    }

    fn drop_rejected(&mut self, reason: DropReason) {
        while let Some((frame, ingress)) = self.rejected.pop() {
            self.drop_frame(frame, ingress, reason);
        }
    }

    /// Takes packets that other workers handed off. Limited, so that they cannot keep this worker from its own queues.
    pub(super) fn take_handed_off(&mut self) -> usize {
        let mut count = 0;
        while count < HAND_OFF_LIMIT {
            let Some(packet) = self.inbox().packets.pop() else { break };
            match self.ports.get(packet.port.index()).map_or(PortRoute::Gone, |entry| entry.route) {
                // A port that moved to yet another worker was closed in between: the packet was for the old port.
                PortRoute::Other(_) | PortRoute::Gone => {
                    self.drop_frame(packet.frame, packet.ingress, DropReason::PortGone)
                }
                PortRoute::Own(_) => self.forward(packet.frame, packet.port, packet.ingress),
            }
            count += 1;
        }
        count
    }

    /// Sends, hands off, frees and refills: the second half of an iteration.
    pub(super) fn flush(&mut self, scratch: &mut [FrameDesc; BATCH], iteration: &mut PollIteration) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for &index in &dirty {
            self.transmit(index);
        }
        for worker in 0..self.hand_off_queues.len() {
            if !self.hand_off_queues[worker].is_empty() {
                self.hand_off(worker);
            }
        }
        let least = if iteration.busy { REFILL } else { 1 };
        dirty.retain(|&index| {
            let pool = self.shared.umem.pool();
            let Some(queue) = self.queues[index].as_mut() else { return false };
            match queue.kick() {
                Some(Kick::Stalled) => iteration.stalled = true,
                Some(Kick::More) => iteration.busy = true,
                Some(Kick::Drained) | None => {}
            }
            if queue.xsk.outstanding() > 0 {
                iteration.busy |= queue.xsk.complete(scratch, &mut self.cache, pool) > 0;
            }
            queue.xsk.refill(least, scratch, &mut self.cache, pool);
            queue.listed = queue.has_more_to_do(pool);
            queue.listed
        });
        self.dirty = dirty;
    }

    /// Makes a packet on any queue end the next sleep. `false`: the kernel has no room to watch one of them.
    pub(super) fn watch_all(&mut self, epoll: &Epoll) -> bool {
        self.queues.iter_mut().flatten().filter_map(|queue| queue.watch(epoll).err()).count() == 0
    }

    pub(super) fn unwatch_busy(&mut self, epoll: &Epoll) {
        self.queues.iter_mut().flatten().for_each(|queue| queue.unwatch_if_busy(epoll));
    }

    /// Removes queues without recent packets from the active ones.
    pub(super) fn deactivate_quiet(&mut self) {
        self.active.retain(|&index| {
            let Some(queue) = self.queues[index].as_mut() else { return false };
            if queue.quiet.is_some_and(|iterations| iterations >= QUIET) {
                queue.quiet = None;
            }
            queue.quiet.is_some()
        });
    }

    pub(super) fn held_frames(&self) -> HeldFrames {
        let depth = |queue: &PortQueue| QueueDepth {
            port: queue.port,
            receiving: queue.xsk.in_fill(),
            sending: queue.xsk.outstanding(),
            ring: queue.xsk.ring_size(),
        };
        HeldFrames { cached: self.cache.len() as u32, queues: self.queues.iter().flatten().map(depth).collect() }
    }

    /// Adds a port that is reached on this path.
    pub(super) fn attach(
        &mut self,
        port: PortId,
        path: WorkerPath,
        sender: Option<Arc<GsoPort>>,
        counters: Arc<PortCounters>,
    ) {
        let (mut interface, mut is_node) = (None, false);
        let route = match path {
            WorkerPath::Own(queues) => {
                let last = queues.into_iter().map(|xsk| self.add_queue(port, xsk, &counters, None)).last();
                last.map_or(PortRoute::Gone, PortRoute::Own)
            }
            WorkerPath::Other(owner) => PortRoute::Other(owner),
            WorkerPath::Pair(xsk) => {
                let index = self.add_queue(port, *xsk, &counters, Some(PairTraffic::new()));
                self.pair = Some(index);
                PortRoute::Own(index)
            }
            WorkerPath::PodThroughPair(at) => {
                interface = Some(at);
                self.waiting.add(port);
                self.through_pair()
            }
            WorkerPath::NodeThroughPair => {
                is_node = true;
                self.through_pair()
            }
        };
        if self.ports.len() <= port.index() {
            self.ports.resize(port.index() + 1, PortEntry::default());
        }
        self.ports[port.index()] = PortEntry { route, counters: Some(counters), interface, is_node, sender };
    }

    fn through_pair(&self) -> PortRoute {
        self.pair.map_or(PortRoute::Gone, PortRoute::Own)
    }

    /// Adds a queue; returns its index.
    fn add_queue(
        &mut self,
        port: PortId,
        xsk: XskQueue,
        counters: &Arc<PortCounters>,
        pair: Option<PairTraffic>,
    ) -> usize {
        let vacant = self.queues.iter().position(Option::is_none);
        let index = vacant.unwrap_or_else(|| {
            self.queues.push(None);
            self.queues.len() - 1
        });
        self.queues[index] = Some(PortQueue::new(port, xsk, counters.clone(), pair));
        // Reserve capacity, so that neither list has to grow while packets move.
        self.active.reserve(self.queues.len() - self.active.len());
        self.dirty.reserve(self.queues.len() - self.dirty.len());
        index
    }

    #[inline]
    pub(super) fn is_pair(&self, index: usize) -> bool {
        self.pair == Some(index)
    }

    /// The port that a tagged frame is a packet of, if the tag is of an open port: for what the node's stack sends to a
    /// pod that is `host`.
    #[inline]
    pub(super) fn ingress_of(&self, tag: FrameTag, host: Option<PortId>) -> Option<PortId> {
        let entry = self.ports.get(tag.port.index())?;
        let is_current = entry.interface == Some(tag.interface);
        if !is_current {
            None
        } else if tag.from_node {
            host
        } else {
            Some(tag.port)
        }
    }

    /// Counts packets of a port that have arrived through the pair: they wait no longer.
    #[inline]
    pub(super) fn count_waiting(&self, port: Option<PortId>, packets: u64) {
        if let (Some(waiting), Some(port)) = (self.waiting.packets(), port) {
            waiting.received(port, packets);
        }
    }

    /// Before a frame is sent to the node's stack through the pair: makes it a packet of the pod's port that it came from.
    #[inline]
    pub(super) fn set_origin(&self, frame: &mut [u8], port: PortId, ingress: PortId) {
        if let Some(entry) = self.ports.get(port.index())
            && entry.is_node
        {
            tag::set_port(frame, ingress);
        }
    }

    /// Counts packets that were received through the pair for this port.
    #[inline]
    pub(super) fn count_received(&self, port: PortId, packets: usize, bytes: u64) {
        if let Some(counters) = self.ports.get(port.index()).and_then(|entry| entry.counters.as_deref()) {
            counters.rx_packets.add(packets as u64);
            counters.rx_bytes.add(bytes);
        }
    }

    pub(super) fn unroute(&mut self, port: PortId) {
        if let Some(entry) = self.ports.get_mut(port.index()) {
            *entry = PortEntry::default();
        }
    }

    /// Detaches a port's queues; packets handed off for them earlier are processed first.
    pub(super) fn detach(&mut self, port: PortId, scratch: &mut [FrameDesc; BATCH]) -> Vec<XskQueue> {
        self.drain_inbox(scratch);
        let leaving = self.queues.iter_mut().filter(|queue| queue.as_ref().is_some_and(|queue| queue.port == port));
        let taken = leaving.filter_map(Option::take).map(PortQueue::into_xsk).collect();
        self.active.retain(|&index| self.queues[index].is_some());
        self.dirty.retain(|&index| self.queues[index].is_some());
        self.pair = self.pair.filter(|&index| self.queues[index].is_some());
        taken
    }

    /// Processes all packets handed off so far, sends them, and frees completed frames.
    fn drain_inbox(&mut self, scratch: &mut [FrameDesc; BATCH]) {
        for _ in 0..=WorkerInbox::CAPACITY / HAND_OFF_LIMIT {
            let taken = self.take_handed_off();
            self.flush(scratch, &mut PollIteration::default());
            if taken < HAND_OFF_LIMIT {
                break;
            }
        }
    }

    pub(super) fn release_all(&mut self, scratch: &mut [FrameDesc; BATCH]) -> Vec<XskQueue> {
        self.drain_inbox(scratch);
        self.cache.empty_into(self.shared.umem.pool());
        self.queues.drain(..).flatten().map(PortQueue::into_xsk).collect()
    }
}
