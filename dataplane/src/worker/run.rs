//! A worker's main loop.

use std::sync::Arc;
use std::time::Instant;

use arc_swap::{ArcSwap, Cache};
use crossbeam::channel::Receiver;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use xsk_rs::FrameDesc;

use super::Polling;
use super::control::Shared;
use super::desk::{Desk, Turn};
use super::mailbox::Command;
use super::processor::Processor;
use super::stages::{StageTimer, TimedTurn};
use crate::Snapshot;
use crate::io::XskQueue;
use crate::pipeline::{BATCH, Cause, Frames, Verdict};

/// Maximum sleep in milliseconds, so that housekeeping runs regularly.
const LONGEST_SLEEP: u16 = 250;
/// First and maximum sleep while the kernel does not accept packets to send, in milliseconds; doubled each time.
const STALLED_SLEEP: (u16, u16) = (1, 32);
/// Maximum sleep while the kernel has no room to watch one of the queues, in milliseconds.
const UNWATCHED_SLEEP: u16 = 1;
/// Poll iterations between housekeeping steps while packets arrive.
const TEND: u32 = 64;
/// Poll iterations between polls of inactive queues while others are active.
const LOOK: u32 = 16;

/// A worker: its state, its packet processing, and its sleep logic.
pub(super) struct Worker<P> {
    desk: Desk,
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
        shared: Arc<Shared>,
        processor: P,
        commands: Receiver<Command>,
        polling: Polling,
        timer: StageTimer,
    ) -> Result<Self, Errno> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.mailboxes[index].bell(), EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        let snapshot = Cache::new(shared.snapshot.clone());
        let desk = Desk::new(index, shared);
        Ok(Self {
            desk,
            processor,
            snapshot,
            commands,
            epoll,
            polling,
            timer,
            received: [FrameDesc::default(); BATCH],
            verdicts: [Verdict::Drop(Cause::NotReady); BATCH],
        })
    }

    /// Moves packets until it is told to stop, then returns its queues.
    pub(super) fn run(mut self) -> Vec<XskQueue> {
        let mut last_busy = Instant::now();
        let (mut until_tending, mut until_look) = (TEND, 0_u32);
        let mut stalled_sleep = STALLED_SLEEP.0;
        let mut busy_since: Option<Instant> = None;
        loop {
            if self.desk.mailbox().take_commanded() && !self.obey() {
                return self.desk.give_up(&mut self.received);
            }
            let timed = self.timer.begin();
            // The only clock read of an iteration: the previous iteration ends where this one begins.
            let now = Instant::now();
            if let Some(since) = busy_since.take() {
                self.desk.counters().busy_turns.note(now.duration_since(since));
            }
            let epoch = self.snapshot.load().epoch;
            self.desk.counters().note_epoch(epoch);
            self.desk.timed = timed;
            let turn = self.turn(now, until_look == 0);
            until_tending -= 1;
            // After an iteration without work all queues are polled, so that none waits while the worker spins or
            // before it sleeps.
            until_look = if turn.busy { until_look.checked_sub(1).unwrap_or(LOOK) } else { 0 };
            if !turn.busy || until_tending == 0 {
                self.processor.housekeeping(epoch, now, turn.busy);
                self.desk.unwatch_busy(&self.epoll);
                until_tending = TEND;
            }
            if turn.busy {
                last_busy = now;
                busy_since = Some(now);
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

    /// One poll iteration: over all queues if `all`, otherwise over the active ones.
    fn turn(&mut self, now: Instant, all: bool) -> Turn {
        let mut turn = Turn { busy: self.desk.take_handed_over() > 0, ..Turn::default() };
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
        let timed = self.desk.timed.take();
        let counters = self.desk.counters();
        counters.rounds.add(1);
        self.timer.end(timed, turn.busy, &counters.stages);
        turn
    }

    /// Receives and evaluates one batch of one queue. `false`: there was none.
    fn receive(&mut self, index: usize, now: Instant) -> bool {
        let Some(queue) = self.desk.queues[index].as_mut() else { return false };
        let (shared, ingress) = (&self.desk.shared, queue.port);
        let before = self.desk.timed.as_mut().map_or(0, TimedTurn::look);
        let mut batch = queue.xsk.receive(&shared.umem, &mut self.received, now);
        let count = batch.len();
        if count == 0 {
            queue.quiet = queue.quiet.map(|turns| turns + 1);
            return false;
        }
        // Counted first: meanwhile the headers are fetched from the sender's core.
        queue.counters.rx_packets.add(count as u64);
        queue.counters.rx_bytes.add(batch.octets());
        self.desk.counters().note_batch(count);
        let snapshot = self.snapshot.load();
        match &mut self.desk.timed {
            None => self.processor.process(snapshot, now, ingress, &mut batch, &mut self.verdicts),
            Some(turn) => {
                let ring_read = turn.look().saturating_sub(before);
                let stages = self.processor.process_timed(snapshot, now, ingress, &mut batch, &mut self.verdicts);
                turn.received(count, ring_read, stages);
            }
        }
        self.desk.note_packets(index);
        for position in 0..count {
            let frame = self.received[position];
            match self.verdicts[position] {
                Verdict::Forward(port) => self.desk.forward(frame, port, ingress),
                Verdict::Drop(cause) => self.desk.drop_frame(frame, ingress, cause),
            }
        }
        if let Some(answers) = self.processor.answers() {
            self.desk.counters().answers_withheld.add(answers.take_withheld());
            for (port, octets) in answers.take() {
                self.desk.answer(octets, port, ingress);
            }
        }
        true
    }

    /// Sleeps until a packet arrives, the worker is woken, or this many milliseconds have passed.
    fn sleep(&mut self, longest: u16) {
        let longest = if self.desk.watch_all(&self.epoll) { longest } else { UNWATCHED_SLEEP };
        if !self.desk.mailbox().lie_down() {
            return;
        }
        let before = Instant::now();
        let mut events = [EpollEvent::empty(); 16];
        // An interruption by a signal is just another wake-up.
        let _ = self.epoll.wait(&mut events, EpollTimeout::from(longest));
        self.desk.mailbox().get_up();
        let counters = self.desk.counters();
        counters.sleeps.add(1);
        counters.asleep_nanoseconds.add(before.elapsed().as_nanos() as u64);
    }

    /// Executes commands of the control side. `false`: the worker must end.
    fn obey(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Attach { port, queues, owner, counters, done } => {
                    self.desk.attach(port, queues, owner, counters);
                    let _ = done.send(());
                }
                Command::Unroute { port, done } => {
                    self.desk.unroute(port);
                    let _ = done.send(());
                }
                Command::Detach { port, done } => {
                    let queues = self.desk.detach(port, &mut self.received);
                    for xsk in &queues {
                        let _ = self.epoll.delete(xsk.as_fd());
                    }
                    let _ = done.send(queues);
                }
                Command::Count { done } => {
                    self.desk.flush(&mut self.received, &mut Turn::default());
                    let _ = done.send(self.desk.holdings());
                }
                Command::Panic => panic!("told to, to see what holds then"),
                Command::Stop => return false,
            }
        }
        true
    }
}
