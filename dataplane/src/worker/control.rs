//! State shared by the control side and the workers, and the commands from one to the others.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::MAX_PORTS;
use super::capture::{Capture, CaptureTap};
use super::inbox::{Command, HeldFrames, WorkerPath};
use super::ports::{OpenPort, OpenSocket, PortTable};
use super::request::{PortPath, PortRequest};
use super::shared::WorkerShared;
use super::statistics::{KernelDrops, RingDepths, Traffic};
use crate::batch::BATCH;
use crate::forward::PortId;
use crate::io::{FrameAccount, GsoPort, GsoSocket, InterfaceFacts, PortError, QueueSlot, XskQueue};

/// State of the control side; used by one thread at a time.
pub(super) struct PortControl {
    pub(super) shared: Arc<WorkerShared>,
    pub(super) commands: Vec<Sender<Command>>,
    /// By worker: a channel that its thread keeps open until it ends.
    pub(super) ends: Vec<Receiver<()>>,
    pub(super) ports: PortTable,
    pub(super) closed: Traffic,
    pub(super) closed_kernel: KernelDrops,
    /// The packet socket of all pairs, once one is open.
    pub(super) gso: Option<Arc<GsoSocket>>,
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

    pub(super) fn open(&mut self, PortRequest { interface, path }: &PortRequest) -> Result<PortId, PortError> {
        let facts = InterfaceFacts::read(interface)?;
        facts.check()?;
        let published = self.shared.snapshot.load_full();
        let Some(id) = self.ports.vacant(&published) else {
            return Err(PortError::TooManyPorts { interface: interface.clone(), max: MAX_PORTS });
        };
        let socket = match *path {
            PortPath::PairOf(worker) => self.open_socket(interface, worker, id).map(Some),
            PortPath::Pod | PortPath::Node => Ok(None),
        };
        let opened = socket.and_then(|socket| {
            let (xsk, socket) = socket.unzip();
            let counters = self.workers().map(|_| Arc::default()).collect();
            self.ports.insert(id, OpenPort { interface: interface.clone(), socket, counters });
            self.attach(id, *path, facts.index, xsk)
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

    /// Opens the socket of a worker's pair.
    fn open_socket(&mut self, interface: &str, worker: usize, id: PortId) -> Result<(XskQueue, OpenSocket), PortError> {
        if self.ports.iter().any(|(_, port)| port.socket.as_ref().is_some_and(|socket| socket.worker == worker)) {
            return Err(PortError::HasPair(worker));
        }
        let slot = QueueSlot::new(id.0);
        let opened = XskQueue::open(&self.shared.umem, interface, slot, self.fill_target());
        let opened = opened.and_then(|socket| {
            let again = socket.as_fd().try_clone_to_owned().map_err(|source| PortError::Kernel {
                interface: interface.to_owned(),
                step: "duplicating a socket's descriptor",
                source,
            });
            again.map(|descriptor| (socket, OpenSocket { worker, descriptor }))
        });
        match opened {
            Ok((mut xsk, socket)) => {
                if self.shared.gso || self.shared.umem.config().long_packets {
                    // Without it segments leave one by one.
                    let _ = self.send_by(&mut xsk, interface);
                }
                Ok((xsk, socket))
            }
            Err(error) => {
                self.shared.umem.pool().reclaim(slot);
                Err(error)
            }
        }
    }

    /// Frames that a pair keeps for receiving. All pairs keep at most half of them: the others are with workers, or being sent.
    fn fill_target(&self) -> u32 {
        let (umem, workers) = (self.shared.umem.config(), self.commands.len() as u32);
        (umem.frames / (2 * workers)).clamp((BATCH as u32).min(umem.ring_size), umem.ring_size)
    }

    /// Opens the packet socket for what a pair sends in addition to its ring.
    fn send_by(&mut self, queue: &mut XskQueue, interface: &str) -> io::Result<()> {
        let socket = match &self.gso {
            Some(socket) => socket.clone(),
            None => self.gso.insert(Arc::new(GsoSocket::open()?)).clone(),
        };
        queue.send_by(GsoPort::new(socket, interface)?, self.shared.gso);
        Ok(())
    }

    /// Announces the port to all workers, and passes the socket of a pair to its own.
    fn attach(
        &mut self,
        id: PortId,
        path: PortPath,
        interface: u32,
        socket: Option<XskQueue>,
    ) -> Result<(), PortError> {
        let counters = &self.ports.get(id).expect("the port was just inserted").counters;
        let mut socket = socket.map(Box::new);
        self.ask(self.workers(), |worker, done| {
            let path = match path {
                PortPath::Pod => WorkerPath::Pod(interface),
                PortPath::Node => WorkerPath::Node,
                PortPath::PairOf(owner) => {
                    socket.take_if(|_| owner == worker).map_or(WorkerPath::OtherPair, WorkerPath::Pair)
                }
            };
            Command::Attach { port: id, path, counters: counters[worker].clone(), done }
        })?;
        Ok(())
    }

    pub(super) fn close(&mut self, id: PortId) -> Result<(), PortError> {
        self.close_all(&[id]).pop().unwrap_or(Err(PortError::NotOpen(id)))
    }

    /// Closes ports in the time that one takes.
    pub(super) fn close_all(&mut self, ids: &[PortId]) -> Vec<Result<(), PortError>> {
        let (mut sockets, mut leaving) = (Vec::new(), Vec::new());
        let mut outcomes = Vec::with_capacity(ids.len());
        for &id in ids {
            outcomes.push(match self.ports.remove(id) {
                None => Err(PortError::NotOpen(id)),
                Some(port) => {
                    let closed = self.detach(id, &port).map(|detached| sockets.extend(detached));
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
            // If the socket may still be open, keep its frames and number: the kernel may still write to them.
            if closed {
                self.reclaim(id, port);
                self.ports.retire(id);
            }
        }
        outcomes
    }

    /// Takes a port from the workers, and its socket from its own: first none sends to it any more. A dead worker closes its
    /// socket as it ends, which is waited for.
    fn detach(&self, id: PortId, port: &OpenPort) -> Result<Option<XskQueue>, PortError> {
        self.ask_each(self.workers(), |_, done| Command::Unroute { port: id, done });
        let Some(OpenSocket { worker, .. }) = port.socket else { return Ok(None) };
        match self.ask_each([worker], |_, done| Command::Detach { port: id, done }).pop() {
            Some((_, Some(socket))) => Ok(socket),
            // Nothing is ever sent: the thread holds the other end until it ends.
            _ => match self.ends[worker].recv_timeout(END) {
                Err(RecvTimeoutError::Timeout) => {
                    Err(PortError::NotClosed { port: id, interface: port.interface.clone(), worker })
                }
                _ => Ok(None),
            },
        }
    }

    /// Sends the remaining packets of detached sockets for a short time, then closes them.
    pub(super) fn settle(&self, sockets: Vec<XskQueue>) {
        let (pool, deadline) = (self.shared.umem.pool(), Instant::now() + SETTLE);
        for mut socket in sockets {
            socket.settle(deadline, pool);
        }
    }

    /// Frees all frames of a port whose worker has closed its socket, if it has one.
    pub(super) fn reclaim(&self, id: PortId, port: OpenPort) {
        if let Some(socket) = port.socket {
            // With this one both descriptors are closed, and the kernel no longer uses the frames once closing returns
            // (`xsk_release` waits for packets in flight with synchronize_net).
            drop(socket);
            self.shared.umem.pool().reclaim(QueueSlot::new(id.0));
        }
    }

    /// Gives each worker its side of a capture, or takes it away. What workers gave back is freed here.
    pub(super) fn capture(&self, capture: Option<&Capture>) -> Result<(), PortError> {
        let tap = |worker| capture.map(|capture| Box::new(CaptureTap::new(capture.clone(), worker)));
        self.ask(self.workers(), |worker, done| Command::Capture { tap: tap(worker), done }).map(drop)
    }

    pub(super) fn depths(&self) -> Result<RingDepths, PortError> {
        let held_frames = self.ask(self.workers(), |_, done| Command::Count { done })?;
        let pool = self.shared.umem.pool();
        let mut frames = FrameAccount { total: pool.total(), free: pool.available(), fill: 0, in_flight: 0 };
        for HeldFrames { cached, rings } in &held_frames {
            frames.free += cached;
            frames.fill += rings.receiving;
            frames.in_flight += rings.sending;
        }
        Ok(RingDepths { frames, workers: held_frames.into_iter().map(|held| held.rings).collect() })
    }
}
