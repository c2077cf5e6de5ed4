//! A worker's loop.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, Cache};
use crossbeam::channel::Receiver;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use xsk_rs::FrameDesc;

use super::Polling;
use super::control::Shared;
use super::mailbox::{Command, HandOver, Holdings, Mailbox};
use super::processor::Processor;
use super::queue::PortQueue;
use super::statistics::{PortCounters, WorkerCounters};
use crate::Snapshot;
use crate::forward::PortId;
use crate::io::{FrameCache, Holder, Kick, XskQueue};
use crate::pipeline::{BATCH, Cause, Frames, Verdict};

/// How long a sleeper sleeps at most, in milliseconds, so that what must be done now and then is done.
const LONGEST_SLEEP: u16 = 250;
/// How long it sleeps at first and at most while the kernel does not take what is to be sent, in milliseconds; each time
/// twice as long as the last.
const STALLED_SLEEP: (u16, u16) = (1, 32);
/// Missing frames from which a fill ring is refilled while packets come.
const REFILL: u32 = 32;
/// Turns between two steps of what must be done now and then, while packets come.
const TEND: u32 = 64;
/// Turns between two looks at queues that have had no packet for a while, while others have.
const LOOK: u32 = 16;
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
struct Desk {
    index: usize,
    shared: Arc<Shared>,
    queues: Vec<Option<PortQueue>>,
    /// Queues that are looked at every turn, by index: those that had a packet lately. With a hundred ports, looking at
    /// all of them would cost more than a packet does.
    lively: Vec<usize>,
    /// Queues with something left to be sent, freed or refilled, by index.
    dirty: Vec<usize>,
    ports: Vec<PortEntry>,
    cache: FrameCache,
    /// What is to be handed over at the end of this turn, by worker.
    outbox: Vec<Vec<HandOver>>,
    /// Packets that found no room, and the ports that they came in by; empty between two calls.
    refused: Vec<(FrameDesc, PortId)>,
}

/// What came of one turn.
#[derive(Default)]
struct Turn {
    /// Packets were moved, or frames came back.
    busy: bool,
    /// The kernel does not take what is to be sent.
    stalled: bool,
}

pub(super) struct Worker<P> {
    desk: Desk,
    processor: P,
    snapshot: Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>,
    commands: Receiver<Command>,
    epoll: Epoll,
    polling: Polling,
    received: [FrameDesc; BATCH],
    verdicts: [Verdict; BATCH],
}

impl Desk {
    fn mailbox(&self) -> &Mailbox {
        &self.shared.mailboxes[self.index]
    }

    fn counters(&self) -> &WorkerCounters {
        &self.shared.counters[self.index]
    }

    /// Frees a frame and counts its drop for the port that it came in by.
    fn drop_frame(&mut self, frame: FrameDesc, ingress: PortId, cause: Cause) {
        match self.ports.get(ingress.index()).and_then(|entry| entry.counters.as_deref()) {
            Some(counters) => counters.drop_one(cause),
            None => self.shared.gone[self.index].drop_one(cause),
        }
        self.cache.give(frame, self.shared.umem.pool());
    }

    /// Sets a packet on its way out of a port.
    #[inline]
    fn forward(&mut self, frame: FrameDesc, port: PortId, ingress: PortId) {
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

    fn queue(&mut self, index: usize) -> &mut PortQueue {
        self.queues[index].as_mut().expect("a route leads to a queue that is there")
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
        queue.transmit(self.shared.umem.pool(), &mut self.refused);
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
    fn take_handed_over(&mut self) -> usize {
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
    fn flush(&mut self, scratch: &mut [FrameDesc; BATCH], turn: &mut Turn) {
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
            match queue.kick() {
                Some(Kick::Stalled) => turn.stalled = true,
                Some(Kick::More) => turn.busy = true,
                Some(Kick::Drained) | None => {}
            }
            if queue.xsk.outstanding() > 0 {
                turn.busy |= queue.xsk.complete(scratch, &mut self.cache, pool) > 0;
            }
            queue.xsk.refill(least, scratch, &mut self.cache, pool);
            queue.listed = queue.has_more_to_do();
            queue.listed
        });
        self.dirty = dirty;
    }

    /// Takes queues that have had no packet for a while off the list of lively ones.
    fn forget_quiet(&mut self) {
        self.lively.retain(|&index| {
            let Some(queue) = self.queues[index].as_mut() else { return false };
            if queue.quiet.is_some_and(|turns| turns >= QUIET) {
                queue.quiet = None;
            }
            queue.quiet.is_some()
        });
    }

    fn holdings(&self) -> Holdings {
        let (mut fill, mut outstanding) = (0, 0);
        for queue in self.queues.iter().flatten() {
            fill += queue.xsk.in_fill();
            outstanding += queue.xsk.outstanding();
        }
        Holdings { cached: self.cache.len() as u32, fill, outstanding }
    }
}

impl<P: Processor> Worker<P> {
    pub(super) fn new(
        index: usize,
        shared: Arc<Shared>,
        processor: P,
        commands: Receiver<Command>,
        polling: Polling,
    ) -> Result<Self, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.mailboxes[index].bell(), EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        let outbox = shared.mailboxes.iter().map(|_| Vec::with_capacity(BATCH)).collect();
        let snapshot = Cache::new(shared.snapshot.clone());
        let desk = Desk {
            index,
            shared,
            queues: Vec::new(),
            lively: Vec::new(),
            dirty: Vec::new(),
            ports: Vec::new(),
            cache: FrameCache::new(),
            outbox,
            refused: Vec::with_capacity(BATCH),
        };
        Ok(Self {
            desk,
            processor,
            snapshot,
            commands,
            epoll,
            polling,
            received: [FrameDesc::default(); BATCH],
            verdicts: [Verdict::Drop(Cause::NotReady); BATCH],
        })
    }

    /// Moves packets until it is told to stop, and then gives up its queues.
    pub(super) fn run(mut self) -> Vec<XskQueue> {
        let mut last_busy = Instant::now();
        let (mut until_tending, mut until_look) = (TEND, 0_u32);
        let mut stalled_sleep = STALLED_SLEEP.0;
        loop {
            if self.desk.mailbox().take_commanded() && !self.obey() {
                return self.give_up();
            }
            let now = Instant::now();
            let turn = self.turn(now, until_look == 0);
            until_tending -= 1;
            // After a turn without work all are looked at, so that none waits while the worker spins or before it sleeps.
            until_look = if turn.busy { until_look.checked_sub(1).unwrap_or(LOOK) } else { 0 };
            if !turn.busy || until_tending == 0 {
                self.processor.tend(now, turn.busy);
                until_tending = TEND;
            }
            if turn.busy {
                last_busy = now;
                stalled_sleep = STALLED_SLEEP.0;
                continue;
            }
            self.desk.counters().empty_rounds.add(1);
            match self.polling {
                Polling::Adaptive { spin } if now.duration_since(last_busy) >= spin => {
                    self.sleep(if turn.stalled { stalled_sleep } else { LONGEST_SLEEP });
                    stalled_sleep = (2 * stalled_sleep).min(STALLED_SLEEP.1);
                }
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// One turn: over all queues if `all` are to be looked at, else over the lively ones.
    fn turn(&mut self, now: Instant, all: bool) -> Turn {
        let mut turn = Turn { busy: self.desk.take_handed_over() > 0, stalled: false };
        if all {
            for index in 0..self.desk.queues.len() {
                turn.busy |= self.receive(index, now);
            }
        } else {
            for position in 0..self.desk.lively.len() {
                turn.busy |= self.receive(self.desk.lively[position], now);
            }
        }
        self.desk.forget_quiet();
        self.desk.flush(&mut self.received, &mut turn);
        self.desk.counters().rounds.add(1);
        turn
    }

    /// Receives and judges one batch of one queue. `false`: there was none.
    fn receive(&mut self, index: usize, now: Instant) -> bool {
        let Some(queue) = self.desk.queues[index].as_mut() else { return false };
        let (shared, ingress) = (&self.desk.shared, queue.port);
        let mut batch = queue.xsk.receive(&shared.umem, &mut self.received);
        let count = batch.len();
        if count == 0 {
            queue.quiet = queue.quiet.map(|turns| turns + 1);
            return false;
        }
        if queue.quiet.replace(0).is_none() {
            self.desk.lively.push(index);
        }
        if !queue.listed {
            queue.listed = true;
            self.desk.dirty.push(index);
        }
        self.processor.process(self.snapshot.load(), now, ingress, &mut batch, &mut self.verdicts);
        let octets: usize = self.received[..count].iter().map(|frame| frame.lengths().data()).sum();
        queue.counters.rx_packets.add(count as u64);
        queue.counters.rx_bytes.add(octets as u64);
        self.desk.counters().batches.add(1);
        for position in 0..count {
            let frame = self.received[position];
            match self.verdicts[position] {
                Verdict::Forward(port) => self.desk.forward(frame, port, ingress),
                Verdict::Drop(cause) => self.desk.drop_frame(frame, ingress, cause),
            }
        }
        true
    }

    /// Sleeps until a packet comes, somebody rings, or so many milliseconds have passed.
    fn sleep(&mut self, longest: u16) {
        if !self.desk.mailbox().lie_down() {
            return;
        }
        let before = Instant::now();
        let mut events = [EpollEvent::empty(); 16];
        // An interruption by a signal is one more reason to wake up.
        let _ = self.epoll.wait(&mut events, EpollTimeout::from(longest));
        self.desk.mailbox().get_up();
        let counters = self.desk.counters();
        counters.sleeps.add(1);
        counters.asleep_nanoseconds.add(before.elapsed().as_nanos() as u64);
    }

    /// Does what the control side asks. `false`: the worker is to end.
    fn obey(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach { port, queues, owner, counters, done } => {
                    self.attach(port, queues, owner, counters);
                    let _ = done.send(());
                }
                Command::Unroute { port, done } => {
                    if let Some(entry) = self.desk.ports.get_mut(port.index()) {
                        *entry = PortEntry::default();
                    }
                    let _ = done.send(());
                }
                Command::Detach { port, done } => {
                    let _ = done.send(self.detach(port));
                }
                Command::Count { done } => {
                    self.desk.flush(&mut self.received, &mut Turn::default());
                    let _ = done.send(self.desk.holdings());
                }
                Command::Stop => return false,
            }
        }
        true
    }

    fn attach(&mut self, port: PortId, queues: Vec<XskQueue>, owner: usize, counters: Arc<PortCounters>) {
        let mut route = Route::Other(owner);
        for xsk in queues {
            let vacant = self.desk.queues.iter().position(Option::is_none);
            let index = vacant.unwrap_or_else(|| {
                self.desk.queues.push(None);
                self.desk.queues.len() - 1
            });
            let event = EpollEvent::new(EpollFlags::EPOLLIN, 0);
            self.epoll.add(xsk.as_fd(), event).expect("an open socket can be waited for");
            self.desk.queues[index] = Some(PortQueue::new(port, xsk, counters.clone()));
            route = Route::Own(index);
        }
        if self.desk.ports.len() <= port.index() {
            self.desk.ports.resize(port.index() + 1, PortEntry::default());
        }
        self.desk.ports[port.index()] = PortEntry { route, counters: Some(counters) };
    }

    fn detach(&mut self, port: PortId) -> Vec<XskQueue> {
        self.empty_mailbox();
        let leaving =
            self.desk.queues.iter_mut().filter(|queue| queue.as_ref().is_some_and(|queue| queue.port == port));
        let taken: Vec<XskQueue> = leaving.filter_map(Option::take).map(PortQueue::into_xsk).collect();
        self.desk.lively.retain(|&index| self.desk.queues[index].is_some());
        self.desk.dirty.retain(|&index| self.desk.queues[index].is_some());
        for xsk in &taken {
            let _ = self.epoll.delete(xsk.as_fd());
        }
        taken
    }

    /// Deals with all that was handed over before now, sends it, and frees what was sent.
    fn empty_mailbox(&mut self) {
        for _ in 0..=Mailbox::CAPACITY / HANDED_OVER {
            let taken = self.desk.take_handed_over();
            self.desk.flush(&mut self.received, &mut Turn::default());
            if taken < HANDED_OVER {
                break;
            }
        }
    }

    fn give_up(mut self) -> Vec<XskQueue> {
        self.empty_mailbox();
        let queues = self.desk.queues.drain(..).flatten().map(PortQueue::into_xsk).collect();
        self.desk.cache.empty_into(self.desk.shared.umem.pool());
        queues
    }
}
