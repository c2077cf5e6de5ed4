//! What the control side and the workers share, and how the one speaks to the others.

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use crossbeam::channel::{Receiver, Sender, bounded};

use super::mailbox::{Command, Mailbox};
use super::ports::{OpenPort, OpenQueue, PortTable};
use super::statistics::{Depths, PortCounters, Traffic, WorkerCounters};
use super::{MAX_PORTS, WorkerDied};
use crate::Snapshot;
use crate::forward::PortId;
use crate::io::{FrameAccount, GsoPort, GsoSocket, GsoSockets, InterfaceFacts, PortError, Umem, XskQueue};

/// What all threads share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) umem: Umem,
    pub(super) tx_budget: u32,
    pub(super) gso: bool,
    pub(super) snapshot: Arc<ArcSwap<Snapshot>>,
    /// By worker.
    pub(super) mailboxes: Vec<Mailbox>,
    /// By worker.
    pub(super) counters: Vec<WorkerCounters>,
    /// By worker: drops of packets whose ingress port is not open any more.
    pub(super) gone: Vec<PortCounters>,
    pub(super) started: Instant,
    /// The first worker that died, if any did.
    pub(super) died: OnceLock<WorkerDied>,
}

/// The control side's own: one thread at a time has it.
pub(super) struct Control {
    pub(super) shared: Arc<Shared>,
    pub(super) commands: Vec<Sender<Command>>,
    pub(super) ports: PortTable,
    pub(super) closed: Traffic,
    pub(super) gso: GsoSockets,
}

/// How long closing waits for packets that are being sent.
const SETTLE: Duration = Duration::from_millis(50);

impl Control {
    pub(super) fn send(&self, worker: usize, command: Command) {
        // A worker that has died leaves its answer's channel closed, which is how the caller learns of it.
        let _ = self.commands[worker].send(command);
        self.shared.mailboxes[worker].command();
    }

    /// Asks workers for an answer each and waits for all of them.
    fn ask<T>(
        &self,
        workers: impl IntoIterator<Item = usize>,
        mut question: impl FnMut(usize, Sender<T>) -> Command,
    ) -> Result<Vec<T>, PortError> {
        let asked: Vec<(usize, Receiver<T>)> = workers
            .into_iter()
            .map(|worker| {
                let (answer, answered) = bounded(1);
                self.send(worker, question(worker, answer));
                (worker, answered)
            })
            .collect();
        asked.into_iter().map(|(worker, answered)| answered.recv().map_err(|_| PortError::WorkerDied(worker))).collect()
    }

    fn workers(&self) -> std::ops::Range<usize> {
        0..self.commands.len()
    }

    pub(super) fn open(&mut self, interface: &str, queues: Option<u32>) -> Result<PortId, PortError> {
        let facts = InterfaceFacts::read(interface)?;
        facts.check(self.shared.umem.config().frame_size)?;
        let published = self.shared.snapshot.load_full();
        let Some(id) = self.ports.vacant(&published) else {
            return Err(PortError::TooManyPorts { interface: interface.to_owned(), max: MAX_PORTS });
        };
        let opened = self.open_queues(&facts, queues.unwrap_or(facts.queues).max(1)).and_then(|(sockets, open)| {
            let counters = self.workers().map(|_| Arc::default()).collect();
            self.ports.insert(id, OpenPort { interface: interface.to_owned(), queues: open, counters });
            self.attach(id, sockets)
        });
        match opened {
            Ok(()) => Ok(id),
            Err(error) => {
                // Ends what was begun, if anything was.
                if self.close(id).is_err() {
                    self.ports.retire(id);
                }
                Err(error)
            }
        }
    }

    /// Opens every queue's socket, or none. Each worker gets as many queues as the others.
    fn open_queues(
        &mut self,
        facts: &InterfaceFacts,
        count: u32,
    ) -> Result<(Vec<XskQueue>, Vec<OpenQueue>), PortError> {
        let (mut sockets, mut open) = (Vec::new(), Vec::new());
        // With several queues the kernel would choose one for what leaves as one, by the core: segments could overtake others.
        let joins = self.shared.gso && (facts.queues, facts.tx_queues) == (1, 1);
        for queue in 0..count {
            let result = match self.ports.take_slot() {
                Some(slot) => self.open_queue(&facts.name, queue, slot, joins),
                None => Err(PortError::TooManyPorts { interface: facts.name.clone(), max: MAX_PORTS }),
            };
            match result {
                Ok((socket, entry)) => {
                    sockets.push(socket);
                    open.push(entry);
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
        slot: crate::io::Slot,
        joins: bool,
    ) -> Result<(XskQueue, OpenQueue), PortError> {
        let opened =
            XskQueue::open(&self.shared.umem, interface, queue, slot, self.shared.tx_budget).and_then(|socket| {
                let again = socket.as_fd().try_clone_to_owned().map_err(|source| PortError::Kernel {
                    interface: interface.to_owned(),
                    step: "duplicating a socket's descriptor",
                    source,
                });
                again.map(|again| (socket, again))
            });
        match opened {
            Ok((mut socket, again)) => {
                let gso = joins.then(|| self.join_segments(&mut socket, interface));
                let worker = self.least_loaded(queue);
                Ok((socket, OpenQueue { queue, worker, slot, socket: again, gso }))
            }
            Err(error) => {
                self.shared.umem.pool().reclaim(slot);
                self.ports.give_slot(slot);
                Err(error)
            }
        }
    }

    /// Has segments leave by a queue of this interface as one.
    fn join_segments(&mut self, queue: &mut XskQueue, interface: &str) -> io::Result<Arc<GsoSocket>> {
        let socket = self.gso.open(queue.as_fd())?;
        queue.join_segments(GsoPort::new(socket.clone(), interface)?);
        Ok(socket)
    }

    /// The worker with the fewest queues; queues of one port that are opened together go round.
    fn least_loaded(&self, queue: u32) -> usize {
        let mut load: Vec<(usize, usize)> = self.workers().map(|worker| (0, worker)).collect();
        for open in self.ports.iter().flat_map(|(_, port)| &port.queues) {
            load[open.worker].0 += 1;
        }
        load.sort_unstable();
        load[queue as usize % load.len()].1
    }

    /// Gives the workers their queues, and tells all of them where the port is.
    fn attach(&mut self, id: PortId, sockets: Vec<XskQueue>) -> Result<(), PortError> {
        let port = self.ports.get(id).expect("the port was just inserted");
        let owners: Vec<usize> = port.queues.iter().map(|queue| queue.worker).collect();
        let mut own: Vec<Vec<XskQueue>> = self.workers().map(|_| Vec::new()).collect();
        for (socket, &worker) in sockets.into_iter().zip(&owners) {
            own[worker].push(socket);
        }
        let counters = port.counters.clone();
        self.ask(self.workers(), |worker, done| Command::Attach {
            port: id,
            queues: std::mem::take(&mut own[worker]),
            owner: owners[worker % owners.len()],
            counters: counters[worker].clone(),
            done,
        })?;
        Ok(())
    }

    pub(super) fn close(&mut self, id: PortId) -> Result<(), PortError> {
        let Some(port) = self.ports.remove(id) else { return Err(PortError::NotOpen(id)) };
        // First nobody sends to it any more; then what is under way to its owners is dealt with; then they let go.
        let unrouted = self.ask(self.workers(), |_, done| Command::Unroute { port: id, done });
        let owners: std::collections::BTreeSet<usize> = port.queues.iter().map(|queue| queue.worker).collect();
        let detached = self.ask(owners, |_, done| Command::Detach { port: id, done });
        let sockets = detached?.into_iter().flatten().collect();
        unrouted?;
        for counters in &port.counters {
            self.closed.add(counters);
        }
        self.close_queues(sockets, port.queues);
        self.ports.retire(id);
        Ok(())
    }

    /// Closes sockets that no worker has any more, and frees all frames that they held.
    pub(super) fn close_queues(&mut self, sockets: Vec<XskQueue>, open: Vec<OpenQueue>) {
        let pool = self.shared.umem.pool();
        for mut socket in sockets {
            socket.settle(SETTLE, pool);
        }
        // Both descriptors of every socket are closed by now, and the kernel is done with their frames when closing
        // returns (`xsk_release` waits for packets in flight by synchronize_net).
        let slots: Vec<_> = open.into_iter().map(|queue| queue.slot).collect();
        for slot in slots {
            pool.reclaim(slot);
            self.ports.give_slot(slot);
        }
    }

    pub(super) fn depths(&self) -> Result<Depths, PortError> {
        let holdings = self.ask(self.workers(), |_, done| Command::Count { done })?;
        let pool = self.shared.umem.pool();
        let mut frames = FrameAccount { total: pool.total(), free: pool.available(), fill: 0, in_flight: 0 };
        let mut queues = Vec::new();
        for holding in holdings {
            frames.free += holding.cached;
            for queue in holding.queues {
                frames.fill += queue.receiving;
                frames.in_flight += queue.sending;
                queues.push(queue);
            }
        }
        let handed_over: Vec<usize> = self.shared.mailboxes.iter().map(|mailbox| mailbox.packets.len()).collect();
        frames.in_flight += handed_over.iter().sum::<usize>() as u32;
        Ok(Depths { frames, queues, handed_over })
    }
}
