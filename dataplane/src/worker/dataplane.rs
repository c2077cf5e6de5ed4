//! The interface of the dataplane.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use crossbeam::channel::{Receiver, Sender, bounded, unbounded};

use super::capture::Capture;
use super::control::PortControl;
use super::grace::GraceThreads;
use super::inbox::{Command, WorkerInbox};
use super::ports::PortTable;
use super::priority::{Priority, raise_priority};
use super::processor::{PolicyProcessor, Processor};
use super::request::PortRequest;
use super::run::Worker;
use super::shared::WorkerShared;
use super::statistics::{
    DataplaneStatistics, KernelDrops, PortCounters, PortStatistics, RingDepths, Traffic, WorkerCounters,
    WorkerStatistics,
};
use super::verdicts::VerdictLog;
use super::{Config, CoreId, MAX_WORKERS, StartError, WorkerDied};
use crate::conntrack::ConnTable;
use crate::forward::PortId;
use crate::io::{FrameAccount, Pages, PortError, Umem, UmemConfig, UmemError, XskQueue, largest_mtu};
use crate::pipeline::OriginalSources;
use crate::{Epoch, Snapshot, drop_capabilities};

/// How long the kernel's programs may take to be brought to the last snapshot.
const HALT: Duration = Duration::from_secs(1);

/// Running workers and their ports. Dropping it stops them.
///
/// All methods may be called from any thread. Those that change ports are serialised and wait for the workers, which
/// takes well below a millisecond, except for closing, which waits for packets in flight.
pub struct Dataplane {
    shared: Arc<WorkerShared>,
    connections: Arc<ConnTable>,
    /// Where the kernel's programs forward, too: when they do so under the published epoch.
    grace: Option<GraceThreads>,
    control: Mutex<PortControl>,
    /// Snapshots that a worker may still use. They are dropped here, so that no worker has to free one. Behind a
    /// separate lock, so that publishing never waits for a port that is being opened.
    retired: Mutex<Vec<Arc<Snapshot>>>,
    threads: Vec<JoinHandle<Option<XskQueue>>>,
    cores: Vec<CoreId>,
    priorities: Vec<Priority>,
    verdicts: Arc<VerdictLog>,
    /// Senders whose source the node's stack has translated.
    sources: Option<Arc<dyn OriginalSources>>,
}

impl fmt::Debug for Dataplane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataplane").field("cores", &self.cores).finish_non_exhaustive()
    }
}

/// The cores that this process may pin a worker to, in order.
pub fn available_cores() -> Vec<CoreId> {
    let mut cores: Vec<CoreId> =
        core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| CoreId(core.id)).collect();
    cores.sort_unstable();
    cores
}

impl Dataplane {
    /// Maps the UMEM, creates the connection table and starts a worker on each core. No packet passes until a snapshot
    /// is published.
    pub fn start(config: Config) -> Result<Self, StartError> {
        let (mode, replies, sources) = (config.mode, config.replies, config.sources.clone());
        let verdicts = Arc::new(VerdictLog::new(config.cores.len()));
        let (log, kept) = (verdicts.clone(), sources.clone());
        let in_frame = u16::try_from(largest_mtu(config.frame_size)).unwrap_or(u16::MAX);
        let takes_long = config.long_packets;
        let evaluate = move |worker, connections: &Arc<ConnTable>| {
            // Where programs forward the segments of established connections, their length does not matter.
            let longest = if takes_long && connections.is_shared() { u16::MAX } else { in_frame };
            PolicyProcessor::new(connections.clone(), mode, replies, worker, log.clone(), sources.clone(), longest)
        };
        let mut this = Self::start_with(config, evaluate)?;
        (this.verdicts, this.sources) = (verdicts, kept);
        Ok(this)
    }

    pub(super) fn start_with<P: Processor>(
        config: Config,
        mut processor: impl FnMut(usize, &Arc<ConnTable>) -> P,
    ) -> Result<Self, StartError> {
        check_cores(&config.cores)?;
        let umem = Umem::new(UmemConfig {
            frames: config.frames,
            frame_size: config.frame_size,
            ring_size: config.ring_size,
            long_packets: config.long_packets,
        })?;
        let connections = Arc::new(ConnTable::new(&config.connections)?);
        let grace = connections.is_shared().then(|| GraceThreads::start(&connections));
        let grace = grace.transpose().map_err(StartError::Grace)?;
        let shared = Arc::new(share(umem, &config)?);
        let control = PortControl {
            shared: shared.clone(),
            commands: Vec::new(),
            ends: Vec::new(),
            ports: PortTable::default(),
            closed: Traffic::default(),
            closed_kernel: KernelDrops::default(),
            gso: None,
        };
        let mut this = Self {
            shared: shared.clone(),
            connections,
            grace,
            control: Mutex::new(control),
            retired: Mutex::default(),
            threads: Vec::new(),
            cores: config.cores.clone(),
            priorities: Vec::new(),
            verdicts: Arc::new(VerdictLog::new(0)),
            sources: None,
        };
        let (begun, all_begun) = unbounded();
        for (index, &core) in config.cores.iter().enumerate() {
            let ((sender, receiver), (ending, end)) = (unbounded(), bounded(0));
            let worker = ThreadArguments { index, core, commands: receiver, begun: begun.clone(), ending };
            let thread = spawn(worker, shared.clone(), processor(index, &this.connections), &config)?;
            let mut control = this.control();
            control.commands.push(sender);
            control.ends.push(end);
            drop(control);
            this.threads.push(thread);
        }
        drop(begun);
        // Returns when every thread has replied; threads that are pinned already continue meanwhile.
        for (core, worker) in all_begun {
            match worker {
                Some(priority) => this.priorities.push(priority),
                None => return Err(StartError::NoSuchCore { core, available: available_cores() }),
            }
        }
        Ok(this)
    }

    fn control(&self) -> MutexGuard<'_, PortControl> {
        // After a caller's panic at most one port is half closed; the others are intact.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a port: when this returns, all workers have it, and the socket of a pair is bound and has frames to receive into.
    ///
    /// Afterwards attach the XDP program to the socket of a pair ([`Dataplane::with_socket`]), and put other ports into a snapshot.
    /// Its number does not occur in the last published snapshot.
    pub fn open_port(&self, request: &PortRequest) -> Result<PortId, PortError> {
        self.control().open(request)
    }

    /// Passes the socket of a pair to a function. Do not keep copies of the descriptor: the socket must be closed with the port, since
    /// frames of an open socket are not free.
    ///
    /// # Errors
    /// The port is not open, or has no socket.
    pub fn with_socket<R>(&self, port: PortId, show: impl FnOnce(BorrowedFd<'_>) -> R) -> Result<R, PortError> {
        let control = self.control();
        let socket = control.ports.get(port).and_then(|open| open.socket.as_ref()).ok_or(PortError::NotOpen(port))?;
        Ok(show(socket.descriptor.as_fd()))
    }

    /// Passes every file that the kernel must close before a pair is completely gone; the pairs share the packet socket.
    pub fn each_descriptor<E>(
        &self,
        port: PortId,
        mut show: impl FnMut(BorrowedFd<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let control = self.control();
        if let Some(socket) = control.ports.get(port).and_then(|open| open.socket.as_ref()) {
            show(socket.descriptor.as_fd())?;
        }
        control.gso.iter().try_for_each(|gso| show(gso.as_fd()))
    }

    /// Closes a port; all its frames are free when this returns. Detach the XDP program and publish a snapshot without
    /// the port first. Packets still in transit to it are dropped as
    /// [`DropReason::PortGone`](crate::pipeline::DropReason::PortGone). If a worker has died, it returns once that
    /// worker's sockets are closed, or reports that they are not.
    pub fn close_port(&self, port: PortId) -> Result<(), PortError> {
        self.control().close(port)
    }

    /// Closes several ports in the time that one takes; results are in the order of `ports`.
    pub fn close_ports(&self, ports: &[PortId]) -> Vec<Result<(), PortError>> {
        self.control().close_all(ports)
    }

    /// Publishes a snapshot; each worker adopts it in its next poll iteration.
    pub fn publish(&self, snapshot: Snapshot) {
        let snapshot = Arc::new(snapshot);
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.push(self.shared.snapshot.swap(Arc::clone(&snapshot)));
        retired.retain(|old| Arc::strong_count(old) > 1);
        drop(retired);
        if let Some(grace) = &self.grace {
            grace.published(snapshot);
        }
    }

    /// The kernel's programs are this process' from now on: those of connections that the last process allowed, and that
    /// no worker has evaluated since, go to a worker once.
    pub fn take_over_offload(&self) {
        self.connections.take_over();
        if let Some(grace) = &self.grace {
            grace.published(self.shared.snapshot.load_full());
        }
    }

    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.shared.snapshot.load_full()
    }

    pub fn statistics(&self) -> DataplaneStatistics {
        let control = self.control();
        let running = self.shared.started.elapsed();
        let mut closed = control.closed;
        for gone in &self.shared.gone {
            closed.add(gone);
        }
        let ports = control.ports.iter().map(|(id, port)| {
            let by_worker: Vec<Traffic> = port.counters.iter().map(|counters| traffic(counters)).collect();
            let mut total = Traffic::default();
            by_worker.iter().for_each(|traffic| total.add_all(traffic));
            let kernel = port.kernel_drops();
            PortStatistics { port: id, interface: port.interface.clone(), traffic: total, by_worker, kernel }
        });
        let workers = self.shared.counters.iter().map(|counters| WorkerStatistics::read(counters, running));
        let closed_kernel = control.closed_kernel;
        DataplaneStatistics { ports: ports.collect(), closed, closed_kernel, workers: workers.collect() }
    }

    /// Where all frames are. Exact when no packet moves. Queries the workers and wakes them if they sleep.
    pub fn frames(&self) -> Result<FrameAccount, PortError> {
        self.depths().map(|depths| depths.frames)
    }

    /// Queue depths; queries the workers like [`Dataplane::frames`].
    pub fn depths(&self) -> Result<RingDepths, PortError> {
        self.control().depths()
    }

    /// By worker: the epoch in effect. From now on it evaluates no packet under an older one; packets that it evaluated
    /// before may still be in transit.
    ///
    /// A worker that is awake reports the epoch in every poll iteration, some microseconds after publication. One that
    /// sleeps adopts the newest snapshot when it wakes up, before it reads a packet: so the published snapshot is in
    /// force on it.
    pub fn in_force(&self) -> Vec<Epoch> {
        let published = self.shared.snapshot.load().epoch;
        let workers = self.shared.inboxes.iter().zip(&self.shared.counters);
        workers.map(|(inbox, counters)| if inbox.is_asleep() { published } else { counters.epoch() }).collect()
    }

    /// The epoch in effect in the kernel's programs, if they forward: they leave every packet of a connection that was
    /// evaluated under an older one to the workers.
    pub fn offload_in_force(&self) -> Option<Epoch> {
        self.grace.as_ref().map(GraceThreads::in_force)
    }

    /// Has this called after each change of [`Dataplane::offload_in_force`], by a thread that must not be held up. Only the first
    /// call of this has an effect, and only where the kernel's programs forward.
    pub fn on_offload_in_force(&self, tell: impl Fn() + Send + Sync + 'static) {
        if let Some(grace) = &self.grace {
            grace.tell(Box::new(tell));
        }
    }

    /// Its threads that are no workers: they need no core of their own.
    pub fn other_threads(&self) -> impl Iterator<Item = nix::unistd::Pid> {
        self.grace.iter().flat_map(GraceThreads::ids)
    }

    /// Whether this published epoch, or a later one, is in effect on every worker and in the kernel's programs.
    pub fn is_in_force(&self, epoch: Epoch) -> bool {
        // The default is that of no snapshot.
        let has = |in_force: Epoch| in_force != Epoch::default() && !in_force.is_before(epoch);
        self.in_force().into_iter().chain(self.offload_in_force()).all(has)
    }

    /// The same counted by frame owners, for tests: the two must agree.
    #[cfg(test)]
    pub(super) fn census(&self) -> FrameAccount {
        self.shared.umem.pool().census()
    }

    /// The scheduling priority that the kernel grants every worker.
    pub fn priority(&self) -> Priority {
        let all = self.priorities.iter().copied();
        all.min().unwrap_or_default()
    }

    /// The cores that the workers are pinned to, by worker.
    pub fn cores(&self) -> &[CoreId] {
        &self.cores
    }

    pub fn connections(&self) -> &Arc<ConnTable> {
        &self.connections
    }

    /// The log of single packets; empty unless it has a budget.
    pub fn verdicts(&self) -> &Arc<VerdictLog> {
        &self.verdicts
    }

    /// Captures packets from now on: of each batch that a worker receives after this returns. Replaces the capture that
    /// runs, if one does. `None` ends it.
    ///
    /// # Errors
    /// A worker has died; the others have the capture.
    pub fn capture(&self, capture: Option<&Capture>) -> Result<(), PortError> {
        self.control().capture(capture)
    }

    /// The senders of connections whose source the node's stack has translated, as workers know them.
    pub fn original_sources(&self) -> Option<&Arc<dyn OriginalSources>> {
        self.sources.as_ref()
    }

    /// The kind of pages that the UMEM uses.
    pub fn pages(&self) -> Pages {
        self.shared.umem.pages()
    }

    /// The first worker that died, if any. Its ports no longer receive.
    pub fn failed(&self) -> Option<WorkerDied> {
        self.shared.died.get().cloned()
    }

    /// Makes a worker panic, to test what happens when one dies. [`Dataplane::failed`] reports it afterwards.
    pub fn kill_worker(&self, worker: usize) {
        self.control().send(worker, Command::Panic);
    }

    /// Ends the workers, and waits until nothing of this process writes to the connection table: another one may have it now. Publish nothing
    /// any more. Ports stay open until [`Dataplane::stop`].
    pub fn halt(&self) {
        self.control().halt();
        let published = self.shared.snapshot.load().epoch;
        let until = Instant::now() + HALT;
        // The programs are brought to the last snapshot first.
        while self.grace.is_some() && self.connections.is_published(published) == Some(false) && Instant::now() < until
        {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the workers and closes all ports. The returned account is counted by frame owners: all frames are free.
    pub fn stop(mut self) -> Result<FrameAccount, WorkerDied> {
        self.end();
        match self.failed() {
            Some(died) => Err(died),
            None => Ok(self.shared.umem.pool().census()),
        }
    }

    fn end(&mut self) {
        let control = self.control.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (commands, inbox) in control.commands.iter().zip(&self.shared.inboxes) {
            let _ = commands.send(Command::Stop);
            inbox.command();
        }
        let mut sockets = Vec::new();
        for thread in self.threads.drain(..) {
            sockets.extend(thread.join().unwrap_or_default());
        }
        control.settle(sockets);
        let ids: Vec<PortId> = control.ports.iter().map(|(id, _)| id).collect();
        for id in ids {
            if let Some(port) = control.ports.remove(id) {
                control.reclaim(id, port);
            }
        }
    }
}

impl Drop for Dataplane {
    fn drop(&mut self) {
        self.end();
    }
}

fn traffic(counters: &PortCounters) -> Traffic {
    let mut traffic = Traffic::default();
    traffic.add(counters);
    traffic
}

fn check_cores(cores: &[CoreId]) -> Result<(), StartError> {
    let available = available_cores();
    if cores.is_empty() {
        return Err(StartError::NoCores);
    }
    if cores.len() > MAX_WORKERS {
        return Err(StartError::TooManyWorkers(cores.len()));
    }
    for (index, &core) in cores.iter().enumerate() {
        if !available.contains(&core) {
            return Err(StartError::NoSuchCore { core, available });
        }
        if cores[..index].contains(&core) {
            return Err(StartError::CoreTwice(core));
        }
    }
    Ok(())
}

fn share(umem: Umem, config: &Config) -> Result<WorkerShared, UmemError> {
    let workers = config.cores.len();
    let inboxes: Result<Vec<WorkerInbox>, _> = (0..workers).map(|_| WorkerInbox::new()).collect();
    Ok(WorkerShared {
        umem,
        gso: config.gso,
        waiting: config.waiting.clone(),
        snapshot: Arc::new(ArcSwap::from_pointee(Snapshot::default())),
        inboxes: inboxes.map_err(|error| UmemError::Kernel { step: "making an eventfd", source: error.into() })?,
        counters: (0..workers).map(|_| WorkerCounters::default()).collect(),
        gone: (0..workers).map(|_| PortCounters::default()).collect(),
        started: Instant::now(),
        died: OnceLock::new(),
    })
}

/// How much longer than it asks for a worker may sleep, in nanoseconds.
const TIMER_SLACK: u64 = 1000;

struct ThreadArguments {
    index: usize,
    core: CoreId,
    commands: Receiver<Command>,
    /// Notified when it has started.
    begun: Sender<(CoreId, Option<Priority>)>,
    /// Dropped when it ends.
    ending: Sender<()>,
}

fn spawn<P: Processor>(
    thread: ThreadArguments,
    shared: Arc<WorkerShared>,
    processor: P,
    config: &Config,
) -> Result<JoinHandle<Option<XskQueue>>, StartError> {
    let ThreadArguments { index, core, commands, begun, ending } = thread;
    let failed = |source| StartError::Thread { worker: index, source };
    let priority = config.priority;
    let worker =
        Worker::new(index, shared.clone(), processor, commands, config.spin).map_err(|error| failed(error.into()))?;
    let body = move || {
        let is_pinned = core_affinity::set_for_current(core_affinity::CoreId { id: core.0 });
        let priority = raise_priority(priority);
        let _ = begun.send((core, is_pinned.then_some(priority)));
        drop(begun);
        // For naps; ordinary threads may sleep 50 µs longer than they asked for.
        let _ = nix::sys::prctl::set_timerslack(TIMER_SLACK);
        // Its input comes from pods, and its socket is opened for it: it needs no capabilities.
        drop_capabilities();
        let socket = catch_unwind(AssertUnwindSafe(|| worker.run(priority))).unwrap_or_else(|panic| {
            let _ = shared.died.set(WorkerDied { worker: index, core, reason: reason(&*panic) });
            None
        });
        // After a panic its socket is closed by now.
        drop(ending);
        socket
    };
    thread::Builder::new().name(format!("{}-{index}", config.thread_name)).spawn(body).map_err(failed)
}

fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it panicked".to_owned())
}
