//! The daemon: starts its parts (`start`), keeps ports and routes up to date (`reconcile`), answers queries (`queries`)
//! and shuts down in order.

mod captures;
mod problem_log;
mod queries;
mod reconcile;
mod source;
mod start;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use penstock_dataplane::worker::{Dataplane, Hurry};
use penstock_policy::model::{Object, ObjectKey};
use penstock_sources::api_server::PodNotEnforced;
use penstock_xdp_redirect::Pins;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use super::close_first::CloseFirstFds;
use super::config::{Config, ConfigLayers, FailMode, LoadedConfig, OnExit};
use super::connections::{self, ClearingQueue};
use super::flow_records::{FlowRecorder, Sinks};
use super::handover::{Handover, HandoverListener, Predecessor};
use super::haste::Haste;
use super::last_good::RejectedConfig;
use super::learnt_names::{self, LearntNamesFile};
use super::objects::NodeObjects;
use super::operation::{Listeners, Operation};
use super::pod_bindings::PodBindings;
use super::policy_thread::PolicyThread;
use super::ports::OpenPorts;
use super::preflight::{self, Level, PreflightFinding};
use super::publisher::Publisher;
use super::recorded_objects::{ObjectFile, RecordedLines, StaleObjects};
use super::settings::Settings;
use super::signals::{Signal, Signals};
use super::trial::TrialFeed;
use super::{RunError, StartMode, last_good, logging};
use crate::discovery::{Events, Netlink, NetworkState, WorkerPairs, has_network_on};
use crate::privileges;
use crate::testing;
use problem_log::ProblemLog;
use source::{OpenedSource, first_objects, follow, node_writer, open_source};
pub(super) use start::clear_pins;
use start::{
    Prepared, log_start, open_maps, open_programs, pins, start_clearing_thread, start_trial_thread, start_workers,
};

/// How long a start waits for answers of pods on bridges, and how often it looks for them.
const FIRST_ANSWERS: Duration = Duration::from_millis(300);
const ANSWER_POLL: Duration = Duration::from_millis(20);
/// How often the network is read without an event, to catch changes that no event reported.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(3);
/// How often the workers are checked for a panic.
const WORKER_CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// One network change raises several events: those within this time are handled together.
const DEBOUNCE: Duration = Duration::from_millis(2);
/// The debounce time is also this multiple of the last read's duration, up to a limit. In a storm of events the reads
/// do not keep a core busy, and policy does not wait for them long.
const DEBOUNCE_FACTOR: u32 = 3;
const MAX_DEBOUNCE: Duration = Duration::from_millis(20);
pub(super) enum Ended {
    BySignal,
    HandedOver(Handover),
}

/// Runs until a signal ends it, another daemon takes over, or a worker dies. Restores the node, unless `fail` says otherwise
/// or another daemon takes over.
pub(super) async fn run(
    layers: &ConfigLayers,
    loaded: &LoadedConfig,
    settings: &Settings<'_>,
    rejected: Option<RejectedConfig>,
    mode: StartMode,
) -> Result<Ended, RunError> {
    let config = settings.config;
    let mut signals = Signals::listen().context("cannot listen to signals")?;
    let (netlink, events) = Netlink::open().map_err(RunError::bad_input)?;
    fail_on_errors(preflight::network())?;
    let predecessor = if mode == StartMode::TakeOver { Predecessor::find(&config.admin.socket) } else { None };
    let record = ObjectFile::of(config);
    // Before the source, which may take long to open; or once a daemon that runs has closed its own.
    let sockets = if predecessor.is_some() { None } else { Some(Sockets::open(loaded).await?) };
    // That daemon has in effect what is recorded, and serves until this one knows all.
    let recorded = record.as_ref().filter(|_| predecessor.is_none());
    let (ready, tell_events, writer) = node_writer(config);
    let Some(OpenedSource { source, objects, stale }) = open_source(config, writer, recorded, &mut signals).await?
    else {
        return Ok(Ended::BySignal);
    };
    let (predecessor, prepared) = prepare_beside(settings, predecessor).await?;
    let sockets = match sockets {
        // It has them still.
        None if predecessor.is_some() => Sockets { listeners: Listeners::closed(), handovers: None },
        None => Sockets::open(loaded).await?,
        Some(opened) => opened,
    };
    let Sockets { listeners, handovers } = sockets;
    let (health, is_good, started) = (source.health(), rejected.is_none(), Instant::now());
    let lines = record.as_ref().map(|_| RecordedLines::of(&objects)).unwrap_or_default();
    let operation = |dataplane: &Dataplane| Operation::start(listeners, layers, loaded, rejected, health, dataplane);
    let mut daemon = Daemon::start(settings, netlink, (objects, stale), prepared, tell_events, operation).await?;
    daemon.operation.ready = Some(ready);
    // The first policy has all changes until now.
    let followed = follow(source, record, lines, stale.is_some(), Arc::clone(&daemon.publisher));
    let mut policy_thread = match followed {
        Ok(policy_thread) => policy_thread,
        Err(error) => return Err(daemon.abandon(RunError::failed(error)).await),
    };
    let handovers = match daemon.go_live(predecessor, handovers, started).await {
        Ok(handovers) => handovers,
        Err(error) => {
            policy_thread.end();
            return Err(daemon.abandon(error).await);
        }
    };
    if is_good {
        keep_as_last_good(layers, loaded);
    }
    let mut outcome = daemon.serve(&mut policy_thread, &events, &mut signals, handovers).await;
    if let Ok(Ended::HandedOver(handover)) = &mut outcome {
        daemon.leave_table();
        handover.tell_stopped();
    }
    policy_thread.end();
    daemon.finish(outcome).await
}

fn warn_of_closed_pods() {
    tracing::warn!(
        "pods' interfaces stay closed to new connections until the next start, or `penstock cleanup`; established ones go on"
    );
}

struct Sockets {
    listeners: Listeners,
    /// `None` while another daemon has them.
    handovers: Option<HandoverListener>,
}

impl Sockets {
    async fn open(loaded: &LoadedConfig) -> Result<Self, RunError> {
        let listeners = Listeners::open(loaded).await?;
        let handovers = HandoverListener::listen(&loaded.config.admin.socket)?;
        Ok(Self { listeners, handovers: Some(handovers) })
    }
}

/// Prepares what can be beside the daemon that runs, if one does; if nothing can, that one stops first.
async fn prepare_beside(
    settings: &Settings<'_>,
    predecessor: Option<Predecessor>,
) -> Result<(Option<Predecessor>, Option<Prepared>), RunError> {
    let Some(predecessor) = predecessor else { return Ok((None, None)) };
    if let Some(prepared) = Prepared::beside_another(settings)? {
        return Ok((Some(predecessor), Some(prepared)));
    }
    predecessor.stop_workers().await?.released().await?;
    Ok((None, None))
}

/// All that is known before the node is touched.
struct Known {
    netstate: NetworkState,
    names: Option<LearntNamesFile>,
    objects: NodeObjects,
    bindings: PodBindings,
}

impl Known {
    async fn read(
        settings: &Settings<'_>,
        netlink: &Netlink,
        initial: Vec<Object>,
        stale: Option<StaleObjects>,
    ) -> Result<Self, RunError> {
        let _hurry = Hurry::begin();
        let config = settings.config;
        let netstate = netlink.network_state().await.map_err(RunError::failed)?;
        let initial = match stale {
            Some(_) => connections::without_moved_pods(config, &netstate, initial),
            None => initial,
        };
        let names = LearntNamesFile::open(config);
        let objects = first_objects(settings, &netstate, initial, names.as_ref());
        let (mut bindings, resolved) = (PodBindings::open(config), objects.resolved_pods());
        let bound = bindings.follow(&netstate, &resolved.0);
        let local = resolved.0.iter().filter(|pod| has_network_on(pod, config.node.as_str()));
        let hidden = local.filter(|pod| bound.bridge_of_hidden(&netstate, pod).is_some());
        reconcile::solicit(netlink, &netstate, hidden).await;
        Ok(Self { netstate, names, objects, bindings })
    }
}

/// Keeps the configuration for a start with one that is refused.
fn keep_as_last_good(layers: &ConfigLayers, loaded: &LoadedConfig) {
    if let Err(error) = last_good::keep(layers, loaded) {
        tracing::warn!("cannot keep the configuration for a start with a bad one: {error}");
    }
}

pub(super) fn fail_on_errors(findings: Vec<PreflightFinding>) -> Result<(), RunError> {
    let (errors, others): (Vec<_>, Vec<_>) = findings.into_iter().partition(|finding| finding.level == Level::Error);
    for finding in others.into_iter().filter(|finding| finding.level == Level::Warning) {
        tracing::warn!("{}", finding.line);
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(RunError::BadInput(errors.into_iter().map(|error| error.line).collect()))
    }
}

struct Daemon<'a> {
    config: &'a Config,
    settings: &'a Settings<'a>,
    netlink: Netlink,
    netstate: NetworkState,
    /// How long the last read of the network took.
    read_took: Duration,
    publisher: Arc<Publisher>,
    /// Removes the connections of released addresses.
    clearing_thread: JoinHandle<()>,
    trial: TrialFeed,
    /// Judges what is staged.
    trial_thread: JoinHandle<()>,
    dataplane: Arc<Dataplane>,
    ports: OpenPorts,
    pairs: WorkerPairs,
    problems: ProblemLog,
    /// Which interfaces are pods'.
    bindings: PodBindings,
    /// Pods on which policy is not enforced, for Events.
    tell_events: mpsc::Sender<PodNotEnforced>,
    operation: Operation,
    /// If records of flows are wanted.
    records: Option<FlowRecorder>,
    close_first: CloseFirstFds,
    /// The domain names that pods learn, if these are followed.
    names: Option<LearntNamesFile>,
    /// Pods that may be behind any port of their bridge that belongs to nobody.
    hidden: BTreeSet<ObjectKey>,
    /// The first state is not reconciled yet.
    is_starting: bool,
    /// Another daemon runs, and has the node.
    is_beside: bool,
    /// The next daemon has the connection table, and this one's workers have ended.
    has_left: bool,
    /// An earlier daemon, or that one, has left programs: a failed start must not open pods.
    was_closed: bool,
    /// Held as long as this process uses the connection table in the kernel.
    table_lock: Option<std::fs::File>,
    /// Locks the pins where another daemon had them.
    pins_lock: Option<Pins>,
}

impl<'a> Daemon<'a> {
    async fn start(
        settings: &'a Settings<'a>,
        netlink: Netlink,
        (initial, stale): (Vec<Object>, Option<StaleObjects>),
        prepared: Option<Prepared>,
        tell_events: mpsc::Sender<PodNotEnforced>,
        operation: impl FnOnce(&Dataplane) -> Result<Operation, RunError>,
    ) -> Result<Self, RunError> {
        let config = settings.config;
        let Known { netstate, names, objects, bindings } = Known::read(settings, &netlink, initial, stale).await?;
        log_start(settings);
        let is_beside = prepared.is_some();
        let (pins, prepared, table_lock) = open_maps(settings, prepared)?;
        let was_closed = pins.as_ref().is_some_and(|pins| !pins.links().is_empty());
        let (dataplane, services) = (start_workers(settings, &prepared.maps)?, prepared.maps.services.clone());
        let operation = operation(&dataplane)?;
        let sinks = Sinks::open(config).map_err(RunError::bad_input)?;
        let haste = Haste::begin();
        let (programs, pairs) =
            open_programs(settings, &netlink, &netstate, (dataplane.cores(), is_beside), pins, prepared).await?;
        // Threads that begin here stay.
        drop(haste);
        // An interface that nobody is known to have may be a pod's whose manifest can't be read.
        let unknown = NetworkState::default();
        let known = if objects.are_incomplete() { &unknown } else { &netstate };
        let ports = OpenPorts::new(programs, config, known, is_beside);
        let (clearing, jobs) = ClearingQueue::new();
        let dataplane = Arc::new(dataplane);
        let publisher = Arc::new(Publisher::new(config, (objects, stale), services, &dataplane, clearing));
        let clearing_thread = start_clearing_thread(jobs, config, &dataplane, &publisher).map_err(RunError::failed)?;
        let (trial, trial_thread) = start_trial_thread(config, &dataplane, &publisher).map_err(RunError::failed)?;
        let records = sinks.map(|sinks| FlowRecorder::start(sinks, config, &dataplane, &publisher));
        let records = records.transpose().map_err(RunError::failed)?;
        let mut daemon = Self {
            config,
            settings,
            netlink,
            netstate,
            read_took: Duration::ZERO,
            publisher,
            clearing_thread,
            trial,
            trial_thread,
            dataplane,
            ports,
            pairs,
            problems: ProblemLog::default(),
            bindings,
            tell_events,
            operation,
            records,
            close_first: CloseFirstFds::default(),
            names,
            hidden: BTreeSet::new(),
            is_starting: true,
            is_beside,
            has_left: false,
            was_closed,
            table_lock,
            pins_lock: None,
        };
        match daemon.prepare().await {
            Ok(()) => Ok(daemon),
            Err(error) => Err(daemon.abandon(error).await),
        }
    }

    /// Ends a run with this outcome, once no policy comes any more.
    async fn finish(mut self, outcome: Result<Ended, RunError>) -> Result<Ended, RunError> {
        self.report();
        self.write_verdicts();
        self.count_use();
        self.operation.usage.finish();
        let leaves = match (&outcome, self.config.fail.on_exit) {
            (Ok(Ended::BySignal), on_exit) => on_exit,
            (Ok(Ended::HandedOver(_)), _) => OnExit::Keep,
            (Err(_), _) => self.after_failure(),
        };
        if leaves == OnExit::Keep && !matches!(outcome, Ok(Ended::HandedOver(_))) {
            warn_of_closed_pods();
        }
        let stopped = self.stop(leaves).await;
        outcome.and_then(|ended| stopped.map(|()| ended))
    }

    /// Ends a start that has failed with this error. If an earlier daemon left pods closed, that does not open them.
    async fn abandon(self, error: RunError) -> RunError {
        let leaves = if self.was_closed { self.after_failure() } else { OnExit::Restore };
        if leaves == OnExit::Keep && !self.is_beside {
            warn_of_closed_pods();
        }
        self.stop(leaves).await.unwrap_or_else(|error| tracing::error!(%error, "could not restore everything"));
        error
    }

    /// Opens the workers' pairs, then the pods' ports, and compiles policy. Programs of an earlier daemon, or one that runs, stay.
    async fn prepare(&mut self) -> Result<(), RunError> {
        let _haste = Haste::begin();
        // Read again: now the pairs exist.
        self.netstate = self.netlink.network_state().await.map_err(RunError::failed)?;
        self.wait_for_neighbours().await?;
        self.ports.open_pairs(&self.dataplane, self.pairs.pairs()).map_err(RunError::bad_input)?;
        self.arrange_close_order().context("cannot duplicate a descriptor").map_err(RunError::Failed)?;
        self.reconcile("first state", Instant::now()).await?;
        self.is_starting = false;
        Ok(())
    }

    /// Waits until neighbours have named the interface of each pod on a bridge, but not for long. They were solicited before the programs were
    /// loaded: the kernel does not know all pods that are older than the first start.
    async fn wait_for_neighbours(&mut self) -> Result<(), RunError> {
        let pods = self.publisher.inputs().objects.resolved_pods().0;
        let end = Instant::now() + FIRST_ANSWERS;
        loop {
            let bindings = self.bindings.follow(&self.netstate, &pods);
            let local = pods.iter().filter(|pod| has_network_on(pod, self.config.node.as_str()));
            let mut hidden = local.filter(|pod| bindings.bridge_of_hidden(&self.netstate, pod).is_some());
            if hidden.next().is_none() || Instant::now() > end {
                return Ok(());
            }
            tokio::time::sleep(ANSWER_POLL).await;
            self.netstate = self.netlink.network_state().await.map_err(RunError::failed)?;
        }
    }

    /// From now on this daemon has the node. Its programs come first, so that packets for workers wait in its own rings until the connection table
    /// and the first policy are there; before them the programs of an earlier daemon go on by themselves, and those of one that runs with its
    /// workers. Returns the listener for the next daemon, which it opens itself where that one had it.
    async fn go_live(
        &mut self,
        predecessor: Option<Predecessor>,
        handovers: Option<HandoverListener>,
        started: Instant,
    ) -> Result<HandoverListener, RunError> {
        if predecessor.is_some() {
            // Pods have come and gone meanwhile.
            self.refresh("last state", Instant::now()).await?;
        }
        let hurry = Hurry::begin();
        self.ports.take_over_pinned(&self.netstate);
        self.ports.take_over_programs().map_err(RunError::failed)?;
        let stopped = match predecessor {
            Some(predecessor) => {
                let stopped = predecessor.stop_workers().await?;
                self.names.iter().for_each(LearntNamesFile::read);
                Some(stopped)
            }
            None => None,
        };
        self.is_beside = false;
        self.publisher.begin("first state", started);
        self.dataplane.take_over_offload();
        drop(hurry);
        let handovers = match stopped {
            Some(stopped) => {
                stopped.released().await?;
                self.take_what_is_released().await?
            }
            None => handovers.expect("it listens where no other daemon did"),
        };
        privileges::drop_to_runtime().map_err(RunError::failed)?;
        let inputs = self.publisher.inputs();
        let problem = inputs.progress.not_enforced().iter().find(|one| one.pod.is_none());
        tracing::info!(
            target: logging::MILESTONES,
            "{}ready: {} pods, {} policies, epoch {}{}{}",
            if problem.is_some() { "NOT " } else { "" },
            self.ports.pods(),
            inputs.objects.policies(),
            inputs.epoch.0,
            if inputs.stale.is_some() { ", by the objects of the last run" } else { "" },
            problem.map(|problem| format!("; {}", problem.reason)).unwrap_or_default()
        );
        Ok(handovers)
    }

    /// Locks, sockets and names of the daemon that ran.
    async fn take_what_is_released(&mut self) -> Result<HandoverListener, RunError> {
        let config = self.config;
        self.table_lock = connections::lock(&config.conntrack.mapping, self.settings.offloads())?;
        self.pins_lock = pins(config)?;
        self.pairs.replace_others().await.map_err(RunError::failed)?;
        self.operation.listen().await?;
        Ok(HandoverListener::listen(&config.admin.socket)?)
    }

    /// Leaves the connection table to the next daemon: workers end, and nothing is published any more.
    fn leave_table(&mut self) {
        let _hurry = Hurry::begin();
        self.has_left = true;
        self.publisher.hold();
        self.dataplane.halt();
        if let Some(names) = self.names.as_ref().filter(|names| names.table().changes() > 0) {
            names.finish();
        }
    }

    /// With `fail.mode = "open"`, the kernel must open the node at once when the daemon dies. It then closes first what
    /// the rest depends on: the pairs' sockets, and before them the socket that the programs check.
    fn arrange_close_order(&mut self) -> io::Result<()> {
        if self.config.fail.mode == FailMode::Open {
            self.ports.add_close_first(&self.dataplane, &mut self.close_first)?;
        }
        Ok(())
    }

    /// Keeps ports in line with pods and network, and answers queries. Policy changes do not wait for this loop.
    async fn serve(
        &mut self,
        policy_thread: &mut PolicyThread,
        events: &Events,
        signals: &mut Signals,
        mut handovers: HandoverListener,
    ) -> Result<Ended, RunError> {
        let publisher = Arc::clone(&self.publisher);
        let mut reconcile = tokio::time::interval(RECONCILE_INTERVAL);
        let mut heartbeat = tokio::time::interval(WORKER_CHECK_INTERVAL);
        let mut keep_names = tokio::time::interval(learnt_names::INTERVAL);
        for ticks in [&mut reconcile, &mut heartbeat, &mut keep_names] {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        testing::inject_faults(&self.dataplane);
        loop {
            tokio::select! {
                biased;
                signal = signals.next() => match signal {
                    Signal::Terminate(name) => {
                        tracing::info!(signal = name, "ending");
                        return Ok(Ended::BySignal);
                    }
                    Signal::Statistics => self.report(),
                    Signal::Reload => self.reload(),
                },
                handover = handovers.asked() => {
                    tracing::info!("another daemon takes over: this one stops its workers");
                    return Ok(Ended::HandedOver(handover?));
                }
                _ = heartbeat.tick() => self.check_workers()?,
                _ = keep_names.tick(), if self.names.is_some() => self.names.iter_mut().for_each(LearntNamesFile::keep),
                () = policy_thread.ended() => {
                    return Err(RunError::Failed(anyhow!("the policy thread has ended; restart penstock")));
                }
                // Before pods and network: if those were always ready, nobody could query the daemon.
                next = self.operation.next() => self.operate(next).await,
                () = publisher.pods.notified() => self.refresh("pods", Instant::now()).await?,
                () = events.changed() => {
                    let seen = Instant::now();
                    tokio::time::sleep((DEBOUNCE_FACTOR * self.read_took).clamp(DEBOUNCE, MAX_DEBOUNCE)).await;
                    self.refresh("network", seen).await?;
                }
                _ = reconcile.tick() => self.refresh("reconcile", Instant::now()).await?,
            }
        }
    }

    fn check_workers(&self) -> Result<(), RunError> {
        self.dataplane.failed().map_or(Ok(()), |died| Err(RunError::failed(died)))
    }

    /// Decides what stays when the daemon cannot continue: the same as if it had been killed.
    fn after_failure(&self) -> OnExit {
        match self.config.fail.mode {
            FailMode::Closed => OnExit::Keep,
            FailMode::Open => OnExit::Restore,
        }
    }

    /// Ends all threads. Then either restores everything, or leaves it to the next daemon, with programs that drop because they have no
    /// sockets.
    async fn stop(self, leaves: OnExit) -> Result<(), RunError> {
        let Self {
            dataplane,
            ports,
            pairs,
            close_first,
            publisher,
            clearing_thread,
            trial,
            trial_thread,
            names,
            records,
            is_beside,
            ..
        } = self;
        drop(close_first);
        // Before the objects go, by which it names what it records last.
        drop(records);
        publisher.end();
        trial.end();
        // Pods are forgotten with the publisher; workers learn until they are stopped.
        let learnt = names.as_ref().map(|names| names.table().hold());
        // A panic has been reported on standard error.
        let _ = clearing_thread.join();
        let _ = trial_thread.join();
        drop(publisher);
        let removed = match leaves {
            OnExit::Keep => {
                ports.renew_allowed_to_leave(&dataplane.snapshot());
                ports.keep();
                // The daemon that runs has its own.
                if is_beside { pairs.remove().await } else { Ok(()) }
            }
            OnExit::Restore => {
                let removed = pairs.remove().await;
                ports.restore();
                removed
            }
        };
        let stopped = Arc::into_inner(dataplane).expect("no other thread holds the dataplane").stop();
        removed.map_err(RunError::failed)?;
        if let Some(names) = names {
            names.finish();
        }
        drop(learnt);
        let frames = stopped.map_err(RunError::failed)?;
        tracing::info!(target: logging::MILESTONES, ?frames, "ended");
        Ok(())
    }
}
