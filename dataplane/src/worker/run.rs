//! A worker's main loop.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, Cache};
use crossbeam::channel::Receiver;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use xsk_rs::FrameDesc;

use super::Priority;
use super::core_sharing::CoreSharing;
use super::early::{self, EarlyPacket, EarlyPackets};
use super::inbox::Command;
use super::long::LongPacket;
use super::moderation::Moderation;
use super::processor::Processor;
use super::queue::PairQueue;
use super::shared::WorkerShared;
use super::spin::Spin;
use super::state::{PollIteration, WorkerState};
use super::waiting;
use crate::batch::{BATCH, Frames};
use crate::conntrack::Timestamp;
use crate::forward::PortId;
use crate::io::{RxBatch, XskQueue, longest_frame};
use crate::packet::finish_open;
use crate::pipeline::Verdict;
use crate::tag::FrameTag;
use crate::{DropReason, Epoch, Snapshot};

/// Maximum sleep in milliseconds, so that housekeeping runs regularly.
const LONGEST_SLEEP: u16 = 250;
/// First and maximum sleep while the kernel does not accept packets to send, in milliseconds; doubled each time.
const STALLED_SLEEP: (u16, u16) = (1, 32);
/// Maximum sleep while the kernel has no room to watch the socket, in milliseconds.
const UNWATCHED_SLEEP: u16 = 1;
/// Maximum sleep before the first snapshot, whose publishing wakes nobody, in milliseconds.
const UNPUBLISHED_SLEEP: u16 = 1;
/// The event by which epoll names the inbox's descriptor; for the socket it is [`PairQueue::READY`].
const WAKE: u64 = PairQueue::READY + 1;
/// Poll iterations between housekeeping steps while packets arrive.
const HOUSEKEEPING: u32 = 64;

/// A worker: its packets' way, and its sleep logic.
pub(super) struct Worker<P> {
    path: PacketPath<P>,
    commands: Receiver<Command>,
    epoll: Epoll,
    /// `None`: it never sleeps.
    spin: Spin,
    moderation: Moderation,
    /// For a worker with real-time priority.
    core_sharing: Option<CoreSharing>,
    shared: Arc<WorkerShared>,
    /// The batch that is being processed, apart from what processes it.
    received: [FrameDesc; BATCH],
}

/// Processes a batch: evaluates it and passes its frames on.
struct PacketPath<P> {
    state: WorkerState,
    processor: P,
    snapshot: Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>,
    verdicts: [Verdict; BATCH],
    /// The last packet that came in several frames.
    long: LongPacket,
    early: EarlyPackets,
}

impl<P: Processor> Worker<P> {
    pub(super) fn new(
        index: usize,
        shared: Arc<WorkerShared>,
        processor: P,
        commands: Receiver<Command>,
        spin: Duration,
    ) -> Result<Self, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.inboxes[index].wake_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        let snapshot = Cache::new(shared.snapshot.clone());
        let state = WorkerState::new(index, shared.clone());
        let verdicts = [Verdict::Drop(DropReason::NotReady); BATCH];
        let early = EarlyPackets::new(longest_frame(shared.umem.config().frame_size));
        Ok(Self {
            path: PacketPath { state, processor, snapshot, verdicts, long: LongPacket::new(), early },
            commands,
            epoll,
            spin: Spin::new(spin),
            moderation: Moderation::default(),
            core_sharing: None,
            shared,
            received: [FrameDesc::default(); BATCH],
        })
    }

    /// Moves packets until a stop command, with the priority that its thread has, then returns its socket.
    pub(super) fn run(mut self, priority: Priority) -> Option<XskQueue> {
        let mut last_busy = Instant::now();
        self.core_sharing = (priority == Priority::RealTime).then(|| CoreSharing::new(last_busy));
        let mut until_housekeeping = HOUSEKEEPING;
        let mut stalled_sleep = STALLED_SLEEP.0;
        let mut busy_since: Option<Instant> = None;
        loop {
            if self.path.state.inbox().take_command_pending() && !self.handle_commands() {
                return self.path.state.release_all();
            }
            // The only clock read of an iteration: the previous iteration ends where this one begins.
            let now = Instant::now();
            if let Some(since) = busy_since.take() {
                self.path.state.counters().busy_iterations.record(now.duration_since(since));
            }
            if let Some(due) = self.core_sharing.as_mut().and_then(|sharing| sharing.due(now)) {
                self.count_sleep(due);
                thread::sleep(due);
                continue;
            }
            let epoch = self.path.snapshot.load().epoch;
            if epoch == Epoch::default() {
                self.wait_for_policy();
                continue;
            }
            self.path.state.counters().set_epoch(epoch);
            let iteration = self.poll_once(now);
            until_housekeeping -= 1;
            if !iteration.busy || until_housekeeping == 0 {
                let PacketPath { processor, snapshot, .. } = &mut self.path;
                processor.housekeeping(snapshot.load(), now, iteration.busy);
                if let Some(queue) = &mut self.path.state.queue {
                    queue.unwatch_if_busy(&self.epoll);
                }
                self.path.state.waiting.sweep(now);
                until_housekeeping = HOUSEKEEPING;
            }
            if iteration.busy {
                self.moderation.received(iteration.received);
                self.spin.received(now.duration_since(last_busy));
                last_busy = now;
                busy_since = Some(now);
                stalled_sleep = STALLED_SLEEP.0;
                continue;
            }
            self.path.state.counters().empty_rounds.add(1);
            if self.spin.is_over(now.duration_since(last_busy)) {
                self.spin.slept();
                self.sleep(if iteration.stalled { stalled_sleep } else { self.longest_sleep() });
                stalled_sleep = (2 * stalled_sleep).min(STALLED_SLEEP.1);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// How long it may sleep while no packet arrives, in milliseconds.
    fn longest_sleep(&self) -> u16 {
        match (self.path.early.is_empty(), self.path.state.waiting.may_wait()) {
            (false, _) => early::SLEEP,
            (true, true) => waiting::SLEEP,
            (true, false) => LONGEST_SLEEP,
        }
    }

    /// Before the first snapshot nothing is decided: packets wait in their rings, and the table may be another process' still.
    fn wait_for_policy(&mut self) {
        if self.path.state.inbox().prepare_sleep() {
            let rung = self.wait(UNPUBLISHED_SLEEP);
            self.path.state.inbox().resume(rung);
        }
    }

    fn poll_once(&mut self, now: Instant) -> PollIteration {
        let received = self.receive(now);
        let mut iteration = PollIteration { received, busy: received > 0, ..PollIteration::default() };
        if !self.path.early.is_empty() {
            iteration.busy |= self.path.try_early(now);
        }
        self.path.state.flush(&mut self.received, &mut iteration);
        self.path.state.counters().rounds.add(1);
        iteration
    }

    /// Receives and processes one batch; returns its packets.
    fn receive(&mut self, now: Instant) -> u32 {
        let Some(queue) = self.path.state.queue.as_mut() else { return 0 };
        let batch = queue.xsk.receive(&self.shared.umem, &mut self.received);
        let count = batch.len();
        if count == 0 {
            return 0;
        }
        // Counted first: meanwhile the headers are fetched from the sender's core.
        let parts = batch.parts();
        queue.counters.rx_packets.add((count - parts) as u64);
        queue.counters.rx_bytes.add(batch.total_bytes());
        queue.count_batch();
        let pair = queue.port;
        self.path.state.counters().count_batch(count);
        if parts > 0 {
            self.path.process_parts(batch, pair, now);
        } else {
            self.path.process_tagged(batch, pair, now);
        }
        count as u32
    }

    /// Sleeps until a packet arrives, the worker is woken, or this many milliseconds have passed; or naps.
    fn sleep(&mut self, longest: u16) {
        let nap = self.moderation.nap();
        let queue = self.path.state.queue.as_mut();
        let is_watched = nap.is_some() || queue.is_none_or(|queue| queue.watch(&self.epoll).is_ok());
        if !self.path.state.inbox().prepare_sleep() {
            return;
        }
        let before = Instant::now();
        let signalled = match nap {
            Some(nap) => {
                thread::sleep(nap);
                false
            }
            None => self.wait(if is_watched { longest } else { UNWATCHED_SLEEP }),
        };
        let asleep = before.elapsed();
        self.moderation.slept(asleep);
        if let Some(sharing) = &mut self.core_sharing {
            sharing.slept(asleep);
        }
        self.path.state.inbox().resume(signalled);
        self.count_sleep(asleep);
    }

    fn count_sleep(&self, asleep: Duration) {
        let counters = self.path.state.counters();
        counters.sleeps.add(1);
        counters.asleep_nanoseconds.add(asleep.as_nanos() as u64);
    }

    /// Waits for a packet or a wake-up; `true`: it was woken.
    fn wait(&self, longest: u16) -> bool {
        let mut events = [EpollEvent::empty(); 16];
        // An interruption by a signal is just another wake-up.
        let count = self.epoll.wait(&mut events, EpollTimeout::from(longest)).unwrap_or(0);
        events[..count].iter().any(|event| event.data() == WAKE)
    }

    /// Executes commands of the control side. `false`: the worker must end.
    fn handle_commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach { port, path, counters, done } => {
                    self.path.state.attach(port, path, counters);
                    let _ = done.send(());
                }
                Command::Unroute { port, done } => {
                    self.path.forget_early(port);
                    self.path.state.unroute(port);
                    let _ = done.send(());
                }
                Command::Detach { port, done } => {
                    self.path.forget_early(port);
                    let socket = self.path.state.detach(port);
                    if let Some(socket) = &socket {
                        let _ = self.epoll.delete(socket.as_fd());
                    }
                    let _ = done.send(socket);
                }
                Command::Count { done } => {
                    self.path.state.flush(&mut self.received, &mut PollIteration::default());
                    let _ = done.send(self.path.state.held_frames());
                }
                Command::Capture { tap, done } => {
                    // Freed by who asked, not here.
                    let _ = done.send(self.path.processor.capture(tap));
                }
                Command::Panic => panic!("panic requested by a test"),
                Command::Stop => return false,
            }
        }
        true
    }
}

impl<P: Processor> PacketPath<P> {
    /// Processes a batch of a pair with packets that came in several frames; all in their order.
    #[cold]
    #[inline(never)]
    fn process_parts(&mut self, mut batch: RxBatch<'_>, pair: PortId, now: Instant) {
        let umem = self.state.shared.clone();
        let mut packet = std::mem::take(&mut self.long);
        loop {
            let whole = batch.whole_at_start();
            let (run, mut rest) = batch.split(whole);
            if whole > 0 {
                self.process_tagged(run, pair, now);
            }
            if rest.is_empty() {
                break;
            }
            packet.clear();
            let (mut taken, mut continues) = (0, true);
            while continues && taken < rest.len() {
                continues = rest.continues(taken);
                self.state.take_part(&mut rest, taken, &mut packet);
                taken += 1;
            }
            let mut frame = [FrameDesc::default()];
            while continues {
                let Some(queue) = self.state.queue.as_mut() else { break };
                let mut part = queue.xsk.receive_part(&umem.umem, &mut frame);
                if part.is_empty() {
                    packet.cut();
                    break;
                }
                continues = part.continues(0);
                self.state.take_part(&mut part, 0, &mut packet);
            }
            self.process_long(&mut packet, pair, now);
            batch = rest.split(taken).1;
        }
        self.long = packet;
    }

    /// Evaluates a packet that came in several frames, and sends it on.
    fn process_long(&mut self, packet: &mut LongPacket, pair: PortId, now: Instant) {
        let snapshot = self.snapshot.load();
        let length = packet.bytes(0).len();
        let tag = FrameTag::read(packet.bytes(0));
        self.state.count_waiting(tag.map(|tag| tag.port), 1);
        let host = snapshot.forwarding.host();
        let ingress = tag.and_then(|tag| self.state.ingress_of(tag, host)).unwrap_or(pair);
        if ingress != pair {
            self.state.count_received(ingress, 1, length as u64);
        }
        if !packet.is_whole() {
            return self.state.count_drop(length, ingress, DropReason::Malformed);
        }
        self.processor.process_long(snapshot, now, ingress, packet, &mut self.verdicts);
        match self.verdicts[0] {
            Verdict::Forward(to) => {
                self.state.set_origin(packet.bytes(0), to, ingress);
                finish_open(packet.bytes(0));
                self.state.send_long(packet.bytes(0), to, ingress);
            }
            Verdict::Drop(reason) => self.state.count_drop(length, ingress, reason),
            Verdict::Early => self.state.count_drop(length, ingress, DropReason::Fragment),
        }
        self.send_replies(ingress);
    }

    /// Processes a batch of a pair, in which each packet has a frame: by port, those of one port in their order. Frames without the tag of an open port are
    /// dropped as the pair's own.
    fn process_tagged(&mut self, mut batch: RxBatch<'_>, pair: PortId, now: Instant) {
        let host = self.snapshot.load().forwarding.host();
        let mut ports = [pair.0; BATCH];
        let ports = &mut ports[..batch.len()];
        let (mut last, mut run) = (None, 0);
        for (index, port) in ports.iter_mut().enumerate() {
            let tag = FrameTag::read(batch.bytes(index));
            let of = tag.map(|tag| tag.port);
            if of != last {
                self.state.count_waiting(last, run);
                (last, run) = (of, 0);
            }
            run += 1;
            *port = tag.and_then(|tag| self.state.ingress_of(tag, host)).unwrap_or(pair).0;
        }
        self.state.count_waiting(last, run);
        if ports.iter().any(|port| *port != ports[0]) {
            batch.sort_by(ports);
        }
        for of_port in ports.chunk_by(|one, next| one == next) {
            let (part, rest) = batch.split(of_port.len());
            let ingress = PortId(of_port[0]);
            if ingress != pair {
                self.state.count_received(ingress, part.len(), part.total_bytes());
            }
            self.process(part, ingress, now);
            batch = rest;
        }
    }

    /// Evaluates a batch received on `ingress` and passes its frames on.
    fn process(&mut self, mut batch: RxBatch<'_>, ingress: PortId, now: Instant) {
        let count = batch.len();
        let snapshot = self.snapshot.load();
        self.processor.process(snapshot, now, ingress, &mut batch, &mut self.verdicts);
        let mut has_early = false;
        for position in 0..count {
            match self.verdicts[position] {
                Verdict::Forward(port) => {
                    self.state.set_origin(batch.bytes(position), port, ingress);
                    self.state.forward(batch.frame(position), port, ingress);
                }
                Verdict::Drop(reason) => self.state.drop_frame(batch.frame(position), ingress, reason),
                Verdict::Early => has_early = true,
            }
        }
        self.send_replies(ingress);
        if has_early {
            self.hold_early(batch, ingress, now);
        }
    }

    /// Holds copies of the fragments of an evaluated batch that came before their first.
    #[cold]
    #[inline(never)]
    fn hold_early(&mut self, mut batch: RxBatch<'_>, ingress: PortId, now: Instant) {
        let verdicts = self.verdicts;
        for position in (0..batch.len()).filter(|&position| verdicts[position] == Verdict::Early) {
            let time = self.processor.fragments(now).map_or_else(Timestamp::default, |(_, time)| time);
            let held = self.early.hold(self.snapshot.load(), ingress, (&mut batch, position), time);
            match held {
                Ok(evicted) => {
                    self.state.free(batch.frame(position));
                    evicted.into_iter().for_each(|evicted| self.try_again(evicted, now));
                }
                Err(reason) => self.state.drop_frame(batch.frame(position), ingress, reason),
            }
        }
    }

    /// Tries the held fragments again whose first has passed, or whose time is over. Returns whether there were some.
    #[cold]
    #[inline(never)]
    fn try_early(&mut self, now: Instant) -> bool {
        let Some((fragments, time)) = self.processor.fragments(now) else { return false };
        if !self.early.may_be_due(fragments, time) {
            return false;
        }
        let (mut from, mut has_tried) = (0, false);
        while let Some((fragments, time)) = self.processor.fragments(now)
            && let Some(due) = self.early.take_due(&mut from, fragments, time)
        {
            self.try_again(due, now);
            has_tried = true;
        }
        has_tried
    }

    /// Evaluates a held fragment as if it came now, and sends it on.
    fn try_again(&mut self, EarlyPacket { ingress, mut packet }: EarlyPacket, now: Instant) {
        self.processor.process_long(self.snapshot.load(), now, ingress, &mut packet, &mut self.verdicts);
        let frame = packet.bytes(0);
        let dropped = match self.verdicts[0] {
            Verdict::Forward(to) => {
                self.state.set_origin(frame, to, ingress);
                (!self.state.forward_copy(frame, to, ingress)).then_some(DropReason::TxRingFull)
            }
            Verdict::Drop(reason) => Some(reason),
            Verdict::Early => Some(DropReason::Fragment),
        };
        if let Some(reason) = dropped {
            self.state.count_drop(frame.len(), ingress, reason);
        }
        self.early.give_back(packet);
        self.send_replies(ingress);
    }

    /// Drops the held fragments of a port that is closed: its number may be another's soon.
    fn forget_early(&mut self, port: PortId) {
        let state = &self.state;
        self.early.forget(port, |ingress, length| state.count_drop(length, ingress, DropReason::PortGone));
    }

    fn send_replies(&mut self, ingress: PortId) {
        if let Some(replies) = self.processor.replies() {
            self.state.counters().replies_suppressed.add(replies.take_suppressed());
            for (port, bytes) in replies.take() {
                self.state.reply(bytes, port, ingress);
            }
        }
    }
}
