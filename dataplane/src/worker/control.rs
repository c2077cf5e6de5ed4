//! State shared by the control side and the workers, and the commands from one to the others.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::MAX_PORTS;
use super::capture::{Capture, CaptureTap};
use super::inbox::{Command, WorkerPath};
use super::ports::{OpenPort, OpenQueue, PortTable};
use super::request::{PortPath, PortRequest};
use super::shared::WorkerShared;
use super::statistics::{KernelDrops, QueueDepths, Traffic};
use crate::forward::PortId;
use crate::io::{FrameAccount, GsoPort, GsoSocket, GsoSockets, InterfaceFacts, PortError, XskQueue};

/// State of the control side; used by one thread at a time.
pub(super) struct PortControl {
    pub(super) shared: Arc<WorkerShared>,
    pub(super) commands: Vec<Sender<Command>>,
    /// By worker: a channel that its thread keeps open until it ends.
    pub(super) ends: Vec<Receiver<()>>,
    pub(super) ports: PortTable,
    pub(super) closed: Traffic,
    pub(super) closed_kernel: KernelDrops,
    pub(super) gso: GsoSockets,
}

/// How long closing waits for packets that are being sent.
const SETTLE: Duration = Duration::from_millis(50);
/// How long closing waits for a dead worker to end: the time the kernel may need to close all its sockets.
const END: Duration = Duration::from_secs(10);

impl PortControl {
    pub(super) fn send(&self, worker: usize, command: Command) {
        // A dead worker drops its reply channel, which the caller notices.
        let _ = self.commands[worker].send(command);
        self.shared.inboxes[worker].command();
    }

    pub(super) fn halt(&self) {
        self.workers().for_each(|worker| self.send(worker, Command::Stop));
        for end in &self.ends {
            // Nothing is sent: it ends with the worker.
            let _ = end.recv_timeout(END);
        }
    }

    /// Sends a request to workers and waits for all replies.
    fn ask<T>(
        &self,
        workers: impl IntoIterator<Item = usize>,
        question: impl FnMut(usize, Sender<T>) -> Command,
    ) -> Result<Vec<T>, PortError> {
        let replies = self.ask_each(workers, question).into_iter();
        replies.map(|(worker, reply)| reply.ok_or(PortError::WorkerDied(worker))).collect()
    }

    /// The same, with `None` for workers that have died.
    fn ask_each<T>(
        &self,
        workers: impl IntoIterator<Item = usize>,
        mut question: impl FnMut(usize, Sender<T>) -> Command,
    ) -> Vec<(usize, Option<T>)> {
        let evaluations: Vec<(usize, Receiver<T>)> = workers
            .into_iter()
            .map(|worker| {
                let (reply, answered) = bounded(1);
                self.send(worker, question(worker, reply));
                (worker, answered)
            })
            .collect();
        evaluations.into_iter().map(|(worker, answered)| (worker, answered.recv().ok())).collect()
    }

    fn workers(&self) -> std::ops::Range<usize> {
        0..self.commands.len()
    }

    pub(super) fn open(&mut self, request: &PortRequest) -> Result<PortId, PortError> {
        let PortRequest { interface, path, patience } = request;
        let facts = InterfaceFacts::read(interface)?;
        facts.check()?;
        let published = self.shared.snapshot.load_full();
        let Some(id) = self.ports.vacant(&published) else {
            return Err(PortError::TooManyPorts { interface: interface.clone(), max: MAX_PORTS });
        };
        let opened = match *path {
            PortPath::Queues(count) => self.open_queues(&facts, count.unwrap_or(facts.queues).max(1), None, *patience),
            PortPath::PairOf(worker) => self.open_queues(&facts, 1, Some(worker), *patience),
            PortPath::Pairs | PortPath::NodeByPairs => Ok((Vec::new(), Vec::new())),
        };
        let opened = opened.and_then(|(sockets, open)| {
            let counters = self.workers().map(|_| Arc::default()).collect();
            let sender = sockets.first().and_then(XskQueue::sender);
            self.ports.insert(id, OpenPort { interface: interface.clone(), queues: open, sender, counters });
            self.attach(id, *path, facts.index, sockets)
        });
        match opened {
            Ok(()) => Ok(id),
            Err(error) => {
                // Reverts what was done, if anything.
                if let Err(PortError::NotOpen(_)) = self.close(id) {
                    self.ports.retire(id);
                }
                Err(error)
            }
        }
    }

    /// Opens every queue's socket, or none. Queues are distributed evenly over the workers, unless one is given.
    fn open_queues(
        &mut self,
        facts: &InterfaceFacts,
        count: u32,
        worker: Option<usize>,
        patience: Duration,
    ) -> Result<(Vec<XskQueue>, Vec<OpenQueue>), PortError> {
        let (mut sockets, mut open) = (Vec::new(), Vec::new());
        // With several queues the kernel would choose one by the core for GSO packets: segments could be reordered.
        let joins = self.shared.gso && (facts.queues, facts.tx_queues) == (1, 1);
        for queue in 0..count {
            let result = match self.ports.take_slot() {
                Some(slot) => self.open_queue(&facts.name, queue, slot, joins, patience),
                None => Err(PortError::TooManyPorts { interface: facts.name.clone(), max: MAX_PORTS }),
            };
            match result {
                Ok((socket, entry)) => {
                    sockets.push(socket);
                    open.push(OpenQueue { worker: worker.unwrap_or(entry.worker), ..entry });
                }
                Err(error) => {
                    self.close_queues(sockets, open);
                    return Err(error);
                }
            }
        }
        Ok((sockets, open))
    }

    fn open_queue(
        &mut self,
        interface: &str,
        queue: u32,
        slot: crate::io::QueueSlot,
        joins: bool,
        patience: Duration,
    ) -> Result<(XskQueue, OpenQueue), PortError> {
        let bound = XskQueue::open(&self.shared.umem, interface, queue, slot, patience);
        let opened = bound.and_then(|socket| {
            let again = socket.as_fd().try_clone_to_owned().map_err(|source| PortError::Kernel {
                interface: interface.to_owned(),
                step: "duplicating a socket's descriptor",
                source,
            });
            again.map(|again| (socket, again))
        });
        match opened {
            Ok((mut socket, again)) => {
                let opened = (joins || self.shared.umem.config().long_packets)
                    .then(|| self.send_by(&mut socket, interface, joins));
                let gso = opened.filter(|_| joins);
                let worker = self.least_loaded(queue);
                Ok((socket, OpenQueue { worker, slot, socket: again, gso }))
            }
            Err(error) => {
                self.shared.umem.pool().reclaim(slot);
                self.ports.give_slot(slot);
                Err(error)
            }
        }
    }

    /// Opens the packet socket for what a queue of this interface sends beside its ring.
    fn send_by(&mut self, queue: &mut XskQueue, interface: &str, joins: bool) -> io::Result<Arc<GsoSocket>> {
        let socket = self.gso.open()?;
        queue.send_by(Arc::new(GsoPort::new(socket.clone(), interface)?), joins);
        Ok(socket)
    }

    /// The worker with the fewest queues; queues of one port that are opened together are distributed in turn.
    fn least_loaded(&self, queue: u32) -> usize {
        let mut load: Vec<(usize, usize)> = self.workers().map(|worker| (0, worker)).collect();
        for open in self.ports.iter().flat_map(|(_, port)| &port.queues) {
            load[open.worker].0 += 1;
        }
        load.sort_unstable();
        load[queue as usize % load.len()].1
    }

    /// Passes the queues to the workers and announces the port to all of them.
    fn attach(&mut self, id: PortId, path: PortPath, interface: u32, sockets: Vec<XskQueue>) -> Result<(), PortError> {
        let port = self.ports.get(id).expect("the port was just inserted");
        let owners: Vec<usize> = port.queues.iter().map(|queue| queue.worker).collect();
        let mut own: Vec<Vec<XskQueue>> = self.workers().map(|_| Vec::new()).collect();
        for (socket, &worker) in sockets.into_iter().zip(&owners) {
            own[worker].push(socket);
        }
        let mut path_of = |worker: usize| match path {
            PortPath::Pairs => WorkerPath::PodThroughPair(interface),
            PortPath::NodeByPairs => WorkerPath::NodeThroughPair,
            PortPath::PairOf(_) if !own[worker].is_empty() => WorkerPath::Pair(Box::new(own[worker].remove(0))),
            _ if own[worker].is_empty() => WorkerPath::Other(owners[worker % owners.len()]),
            _ => WorkerPath::Own(std::mem::take(&mut own[worker])),
        };
        let counters = port.counters.clone();
        let sender = port.sender.clone();
        self.ask(self.workers(), |worker, done| Command::Attach {
            port: id,
            path: path_of(worker),
            sender: sender.clone(),
            counters: counters[worker].clone(),
            done,
        })?;
        Ok(())
    }

    pub(super) fn close(&mut self, id: PortId) -> Result<(), PortError> {
        self.close_all(&[id]).pop().unwrap_or(Err(PortError::NotOpen(id)))
    }

    /// Closes ports in the time that one takes. A dead worker closes its sockets as it ends, which is waited for.
    pub(super) fn close_all(&mut self, ids: &[PortId]) -> Vec<Result<(), PortError>> {
        let (mut sockets, mut leaving) = (Vec::new(), Vec::new());
        let mut outcomes = Vec::with_capacity(ids.len());
        for &id in ids {
            outcomes.push(match self.ports.remove(id) {
                None => Err(PortError::NotOpen(id)),
                Some(port) => {
                    let (detached, dead) = self.detach(id, &port);
                    sockets.extend(detached);
                    let closed = self.await_ends(id, &port, dead);
                    leaving.push((id, port, closed.is_ok()));
                    closed
                }
            });
        }
        self.settle(sockets);
        for (id, port, closed) in leaving {
            for counters in &port.counters {
                self.closed.add(counters);
            }
            self.closed_kernel.add_all(&port.kernel_drops());
            // If a socket may still be open, keep its frames, number and slots: the kernel may still write to them.
            if closed {
                self.reclaim(port.queues);
                self.ports.retire(id);
            }
        }
        outcomes
    }

    /// Removes a port's sockets from its workers: first stop sending to it, then let the owners process packets in
    /// flight, then detach. Also returns the owners that have died.
    fn detach(&self, id: PortId, port: &OpenPort) -> (Vec<XskQueue>, Vec<usize>) {
        self.ask_each(self.workers(), |_, done| Command::Unroute { port: id, done });
        let owners: BTreeSet<usize> = port.queues.iter().map(|queue| queue.worker).collect();
        let (mut sockets, mut dead) = (Vec::new(), Vec::new());
        for (worker, reply) in self.ask_each(owners, |_, done| Command::Detach { port: id, done }) {
            match reply {
                Some(queues) => sockets.extend(queues),
                None => dead.push(worker),
            }
        }
        (sockets, dead)
    }

    /// Waits until dead workers have closed their sockets, which happens when their threads end.
    fn await_ends(&self, id: PortId, port: &OpenPort, dead: Vec<usize>) -> Result<(), PortError> {
        let deadline = Instant::now() + END;
        for worker in dead {
            // Nothing is ever sent: the thread holds the other end until it ends.
            if self.ends[worker].recv_deadline(deadline) == Err(RecvTimeoutError::Timeout) {
                return Err(PortError::NotClosed { port: id, interface: port.interface.clone(), worker });
            }
        }
        Ok(())
    }

    /// Sends the remaining packets of detached sockets for a short time, then closes them.
    fn settle(&self, sockets: Vec<XskQueue>) {
        let (pool, deadline) = (self.shared.umem.pool(), Instant::now() + SETTLE);
        for mut socket in sockets {
            socket.settle(deadline, pool);
        }
    }

    pub(super) fn close_queues(&mut self, sockets: Vec<XskQueue>, open: Vec<OpenQueue>) {
        self.settle(sockets);
        self.reclaim(open);
    }

    /// Frees all frames of detached sockets.
    fn reclaim(&mut self, open: Vec<OpenQueue>) {
        // Both descriptors of every socket are closed by now, and the kernel no longer uses their frames once closing
        // returns (`xsk_release` waits for packets in flight with synchronize_net).
        let slots: Vec<_> = open.into_iter().map(|queue| queue.slot).collect();
        for slot in slots {
            self.shared.umem.pool().reclaim(slot);
            self.ports.give_slot(slot);
        }
    }

    /// Gives each worker its side of a capture, or takes it away. What workers gave back is freed here.
    pub(super) fn capture(&self, capture: Option<&Capture>) -> Result<(), PortError> {
        let tap = |worker| capture.map(|capture| Box::new(CaptureTap::new(capture.clone(), worker)));
        self.ask(self.workers(), |worker, done| Command::Capture { tap: tap(worker), done }).map(drop)
    }

    pub(super) fn depths(&self) -> Result<QueueDepths, PortError> {
        let held_frames = self.ask(self.workers(), |_, done| Command::Count { done })?;
        let pool = self.shared.umem.pool();
        let mut frames = FrameAccount { total: pool.total(), free: pool.available(), fill: 0, in_flight: 0 };
        let mut queues = Vec::new();
        for holding in held_frames {
            frames.free += holding.cached;
            for queue in holding.queues {
                frames.fill += queue.receiving;
                frames.in_flight += queue.sending;
                queues.push(queue);
            }
        }
        let handed_over: Vec<usize> = self.shared.inboxes.iter().map(|inbox| inbox.packets.len()).collect();
        frames.in_flight += handed_over.iter().sum::<usize>() as u32;
        Ok(QueueDepths { frames, queues, handed_over })
    }
}
