//! A worker's main loop.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, Cache};
use crossbeam::channel::Receiver;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use xsk_rs::FrameDesc;

use super::Polling;
use super::control::WorkerShared;
use super::inbox::Command;
use super::processor::Processor;
use super::stages::{StageTimer, TimedIteration};
use super::state::{PollIteration, WorkerState};
use crate::Snapshot;
use crate::io::XskQueue;
use crate::pipeline::{BATCH, DropReason, Frames, StageClocks, Verdict};

/// Maximum sleep in milliseconds, so that housekeeping runs regularly.
const LONGEST_SLEEP: u16 = 250;
/// First and maximum sleep while the kernel does not accept packets to send, in milliseconds; doubled each time.
const STALLED_SLEEP: (u16, u16) = (1, 32);
/// Maximum sleep while the kernel has no room to watch one of the queues, in milliseconds.
const UNWATCHED_SLEEP: u16 = 1;
/// Poll iterations between housekeeping steps while packets arrive.
const HOUSEKEEPING: u32 = 64;
/// Poll iterations between polls of inactive queues while others are active.
const POLL_ALL: u32 = 16;

/// A worker: its state, its packet processing, and its sleep logic.
pub(super) struct Worker<P> {
    state: WorkerState,
    processor: P,
    snapshot: Cache<Arc<ArcSwap<Snapshot>>, Arc<Snapshot>>,
    commands: Receiver<Command>,
    epoll: Epoll,
    polling: Polling,
    timer: StageTimer,
    received: [FrameDesc; BATCH],
    verdicts: [Verdict; BATCH],
}

impl<P: Processor> Worker<P> {
    pub(super) fn new(
        index: usize,
        shared: Arc<WorkerShared>,
        processor: P,
        commands: Receiver<Command>,
        polling: Polling,
        timer: StageTimer,
    ) -> Result<Self, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.inboxes[index].wake_fd(), EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        let snapshot = Cache::new(shared.snapshot.clone());
        let state = WorkerState::new(index, shared);
        Ok(Self {
            state,
            processor,
            snapshot,
            commands,
            epoll,
            polling,
            timer,
            received: [FrameDesc::default(); BATCH],
            verdicts: [Verdict::Drop(DropReason::NotReady); BATCH],
        })
    }

    /// Moves packets until a stop command, then returns its queues.
    pub(super) fn run(mut self) -> Vec<XskQueue> {
        let mut last_busy = Instant::now();
        let (mut until_housekeeping, mut until_poll_all) = (HOUSEKEEPING, 0_u32);
        let mut stalled_sleep = STALLED_SLEEP.0;
        let mut busy_since: Option<Instant> = None;
        loop {
            if self.state.inbox().take_command_pending() && !self.handle_commands() {
                return self.state.release_all(&mut self.received);
            }
            let timed = self.timer.begin();
            // The only clock read of an iteration: the previous iteration ends where this one begins.
            let now = Instant::now();
            if let Some(since) = busy_since.take() {
                self.state.counters().busy_iterations.record(now.duration_since(since));
            }
            let epoch = self.snapshot.load().epoch;
            self.state.counters().set_epoch(epoch);
            self.state.timed = timed;
            let iteration = self.poll_once(now, until_poll_all == 0);
            until_housekeeping -= 1;
            // After an iteration without work all queues are polled, so that none waits while the worker spins or
            // before it sleeps.
            until_poll_all = if iteration.busy { until_poll_all.checked_sub(1).unwrap_or(POLL_ALL) } else { 0 };
            if !iteration.busy || until_housekeeping == 0 {
                self.processor.housekeeping(epoch, now, iteration.busy);
                self.state.unwatch_busy(&self.epoll);
                until_housekeeping = HOUSEKEEPING;
            }
            if iteration.busy {
                last_busy = now;
                busy_since = Some(now);
                stalled_sleep = STALLED_SLEEP.0;
                continue;
            }
            self.state.counters().empty_rounds.add(1);
            match self.polling {
                Polling::Adaptive { spin } if now.duration_since(last_busy) >= spin => {
                    self.sleep(if iteration.stalled { stalled_sleep } else { LONGEST_SLEEP });
                    stalled_sleep = (2 * stalled_sleep).min(STALLED_SLEEP.1);
                }
                _ => std::hint::spin_loop(),
            }
        }
    }

    /// One poll iteration: over all queues if `all`, otherwise over the active ones.
    fn poll_once(&mut self, now: Instant, all: bool) -> PollIteration {
        let mut iteration = PollIteration { busy: self.state.take_handed_off() > 0, ..PollIteration::default() };
        if all {
            for index in 0..self.state.queues.len() {
                iteration.busy |= self.receive(index, now);
            }
        } else {
            for position in 0..self.state.active.len() {
                iteration.busy |= self.receive(self.state.active[position], now);
            }
        }
        self.state.deactivate_quiet();
        self.state.flush(&mut self.received, &mut iteration);
        let timed = self.state.timed.take();
        let counters = self.state.counters();
        counters.rounds.add(1);
        self.timer.end(timed, iteration.busy, &counters.stages);
        iteration
    }

    /// Receives and evaluates one batch of one queue. `false`: there was none.
    fn receive(&mut self, index: usize, now: Instant) -> bool {
        let Some(queue) = self.state.queues[index].as_mut() else { return false };
        let (shared, ingress) = (&self.state.shared, queue.port);
        let before = self.state.timed.as_mut().map_or(0, TimedIteration::read_clock);
        let mut batch = queue.xsk.receive(&shared.umem, &mut self.received, now);
        let count = batch.len();
        if count == 0 {
            queue.quiet = queue.quiet.map(|iterations| iterations + 1);
            return false;
        }
        // Counted first: meanwhile the headers are fetched from the sender's core.
        queue.counters.rx_packets.add(count as u64);
        queue.counters.rx_bytes.add(batch.bytes());
        self.state.counters().count_batch(count);
        let snapshot = self.snapshot.load();
        match &mut self.state.timed {
            None => self.processor.process(snapshot, now, ingress, &mut batch, &mut self.verdicts, None),
            Some(iteration) => {
                let ring_read = iteration.read_clock().saturating_sub(before);
                let mut stages = StageClocks::default();
                let wanted = Some(&mut stages);
                self.processor.process(snapshot, now, ingress, &mut batch, &mut self.verdicts, wanted);
                iteration.received(count, ring_read, stages);
            }
        }
        self.state.mark_active(index);
        for position in 0..count {
            let frame = self.received[position];
            match self.verdicts[position] {
                Verdict::Forward(port) => self.state.forward(frame, port, ingress),
                Verdict::Drop(reason) => self.state.drop_frame(frame, ingress, reason),
            }
        }
        if let Some(replies) = self.processor.replies() {
            self.state.counters().replies_suppressed.add(replies.take_suppressed());
            for (port, bytes) in replies.take() {
                self.state.reply(bytes, port, ingress);
            }
        }
        true
    }

    /// Sleeps until a packet arrives, the worker is woken, or this many milliseconds have passed.
    fn sleep(&mut self, longest: u16) {
        let longest = if self.state.watch_all(&self.epoll) { longest } else { UNWATCHED_SLEEP };
        if !self.state.inbox().prepare_sleep() {
            return;
        }
        let before = Instant::now();
        let mut events = [EpollEvent::empty(); 16];
        // An interruption by a signal is just another wake-up.
        let _ = self.epoll.wait(&mut events, EpollTimeout::from(longest));
        self.state.inbox().resume();
        let counters = self.state.counters();
        counters.sleeps.add(1);
        counters.asleep_nanoseconds.add(before.elapsed().as_nanos() as u64);
    }

    /// Executes commands of the control side. `false`: the worker must end.
    fn handle_commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach { port, queues, owner, counters, done } => {
                    self.state.attach(port, queues, owner, counters);
                    let _ = done.send(());
                }
                Command::Unroute { port, done } => {
                    self.state.unroute(port);
                    let _ = done.send(());
                }
                Command::Detach { port, done } => {
                    let queues = self.state.detach(port, &mut self.received);
                    for xsk in &queues {
                        let _ = self.epoll.delete(xsk.as_fd());
                    }
                    let _ = done.send(queues);
                }
                Command::Count { done } => {
                    self.state.flush(&mut self.received, &mut PollIteration::default());
                    let _ = done.send(self.state.held_frames());
                }
                Command::Panic => panic!("panic requested by a test"),
                Command::Stop => return false,
            }
        }
        true
    }
}
