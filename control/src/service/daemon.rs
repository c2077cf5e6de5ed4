//! The daemon: starts the parts, keeps them in step, ends them in order.

mod operate;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Pid, gettid};
use penstock_dataplane::forward::PortId;
use penstock_dataplane::pipeline;
use penstock_dataplane::worker::{self, CoreId, Dataplane, StartError};
use penstock_xdp_redirect::{PinError, Pins, Redirect};
use tokio::time::MissedTickBehavior;

use super::config::{Config, FailMode, HugePages, Layers, Loaded, Mode, OnCut, OnExit, Polling, Priority};
use super::connections::{self, Clearing, Walks};
use super::first_closed::FirstClosed;
use super::follow::Follower;
use super::objects::Objects;
use super::operation::{Doors, Operation};
use super::ports::Ports;
use super::preflight::{self, Finding, Level};
use super::publisher::Publisher;
use super::signals::{Signal, Signals};
use super::surroundings::NodeNetwork;
use super::{RunError, logging, report};
use crate::discovery::{Events, Facts, HostPort, HostPortError, Lifetime, Netlink, Problem, pod_ports};
use crate::model::{Change, Object, ObjectKey, Pod};
use crate::privileges;
use crate::source::Source;

/// How often the kernel is looked at without an event: what events missed is caught then.
const RECONCILE: Duration = Duration::from_secs(3);
/// How often it is seen whether the workers live.
const HEARTBEAT: Duration = Duration::from_millis(250);
/// What belongs to one change of the network comes in several events: those within this time are taken together.
const SETTLE: Duration = Duration::from_millis(2);
/// … and within this many times what the last look took, up to a limit: in a storm of events it is not the looks that
/// keep a core busy, and policy does not wait for them long.
const SETTLE_BY_LOOK: u32 = 3;
const LONGEST_SETTLE: Duration = Duration::from_millis(20);
/// How long until a port is tried again whose queue is busy.
const RETRY: Duration = Duration::from_millis(20);

/// Runs until a signal ends it or a worker dies. All that was changed on the node is put back in either case.
pub(super) async fn run(layers: &Layers, loaded: &Loaded) -> Result<(), RunError> {
    let config = &loaded.config;
    let mut signals = Signals::listen().context("signals cannot be listened to")?;
    let (netlink, events) = Netlink::open(config.host_port.table).map_err(RunError::bad_input)?;
    refuse(preflight::network(config, &netlink).await)?;
    // Before the source, which may be long in coming.
    let doors = Doors::open(loaded).await?;
    let Some((source, objects)) = open_source(config, &mut signals).await? else { return Ok(()) };
    let health = source.health();
    let operation = |dataplane: &Dataplane| Operation::start(doors, layers, loaded, health, dataplane);
    let mut daemon = Daemon::start(config, netlink, objects, operation).await?;
    let outcome = match Follower::start(source, Arc::clone(&daemon.publisher)) {
        Ok(mut follower) => {
            let outcome = daemon.serve(&mut follower, &events, &mut signals).await;
            follower.end();
            outcome
        }
        Err(error) => Err(RunError::failed(error)),
    };
    daemon.report();
    daemon.write_verdicts();
    let leaves = match (&outcome, config.fail.on_exit) {
        (Ok(()), on_exit) => on_exit,
        (Err(_), _) => daemon.after_failure(),
    };
    let ended = daemon.stop(leaves).await;
    outcome.and(ended)
}

/// Opens the source and reads all objects; `None` if a signal ended the wait for that.
async fn open_source(config: &Config, signals: &mut Signals) -> Result<Option<(Source, Vec<Object>)>, RunError> {
    let location = config.source.location();
    let mut opening = std::pin::pin!(Source::open(&location));
    loop {
        tokio::select! {
            biased;
            signal = signals.next() => if let Signal::End(name) = signal {
                tracing::info!(signal = name, "ended before there was anything to enforce");
                return Ok(None);
            },
            opened = &mut opening => return match opened {
                Ok(opened) => Ok(Some(opened)),
                Err(error) => Err(RunError::BadInput(error.to_string().lines().map(str::to_owned).collect())),
            },
        }
    }
}

/// Warnings go to the log, errors end it.
pub(super) fn refuse(findings: Vec<Finding>) -> Result<(), RunError> {
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
    netlink: Netlink,
    facts: Facts,
    /// How long reading them took.
    look_took: Duration,
    publisher: Arc<Publisher>,
    /// Goes through the connection table.
    walker: JoinHandle<()>,
    dataplane: Arc<Dataplane>,
    ports: Ports,
    host_port: HostPort,
    problems: BTreeSet<Problem>,
    /// Pods' addresses that the kernel did not route, with the reason that was logged.
    unrouted: BTreeMap<IpAddr, String>,
    operation: Operation,
    first_closed: FirstClosed,
}

impl<'a> Daemon<'a> {
    async fn start(
        config: &'a Config,
        netlink: Netlink,
        initial: Vec<Object>,
        operation: impl FnOnce(&Dataplane) -> Result<Operation, RunError>,
    ) -> Result<Self, RunError> {
        let started = Instant::now();
        let facts = netlink.facts().await.map_err(RunError::failed)?;
        let mut objects = Objects::new(config.node.as_str(), &config.node_addresses);
        objects.apply(initial.into_iter().map(Change::Set), &facts.addresses);
        // What else stands in a pod's way is told, and may pass.
        let unfit = preflight::pods(config, &facts, objects.tenants());
        refuse(unfit.into_iter().filter(|finding| finding.level == Level::Error).collect())?;
        if config.dataplane.mode == Mode::Forward {
            tracing::warn!("dataplane.mode = \"forward\": NO POLICY IS ENFORCED; use this for benchmarks only");
        }
        if let Some(after) = config.debug.worker_panics_after {
            tracing::warn!("debug.worker_panics_after: a worker will panic after {:?}", after.duration());
        }
        let redirect = redirect(config)?;
        let was_closed = redirect.pins().is_some_and(|pins| !pins.links().is_empty());
        connections::make_directory(&config.conntrack.mapping)?;
        // Those that are there before the workers: what reads manifests, or follows the API server.
        leave_cores_to_workers(config, &other_threads());
        let dataplane = start_dataplane(config)?;
        leave_cores_to_workers(config, &[gettid()]);
        let operation = operation(&dataplane)?;
        let lifetime = match config.fail.mode {
            FailMode::Closed => Lifetime::Node,
            FailMode::Open => Lifetime::Daemon,
        };
        let host_port = HostPort::create(&netlink, &config.host_port, pair_mtu(config, &facts), lifetime).await;
        let host_port = host_port.map_err(|error| match error {
            HostPortError::Running | HostPortError::NameTaken(_) => RunError::bad_input(error),
            other => RunError::failed(other),
        })?;
        let ports = Ports::new(redirect, config, &facts, host_port.follows());
        let (clearing, walks) = Clearing::new();
        let dataplane = Arc::new(dataplane);
        let publisher = Arc::new(Publisher::new(config, objects, &dataplane, clearing));
        let walker = go_through(walks, config, &dataplane, &publisher).map_err(RunError::failed)?;
        let mut daemon = Self {
            config,
            netlink,
            facts,
            look_took: Duration::ZERO,
            publisher,
            walker,
            dataplane,
            ports,
            host_port,
            problems: BTreeSet::new(),
            unrouted: BTreeMap::new(),
            operation,
            first_closed: FirstClosed::default(),
        };
        match daemon.begin(started).await {
            Ok(()) => Ok(daemon),
            Err(error) => {
                // Where an earlier daemon left all closed, a start that fails does not open it.
                let leaves = if was_closed { daemon.after_failure() } else { OnExit::Restore };
                daemon.stop(leaves).await.unwrap_or_else(|error| tracing::error!(%error, "not all was put back"));
                Err(error)
            }
        }
    }

    /// Opens the ports that are always there, then those of the pods, and publishes for the first time.
    async fn begin(&mut self, started: Instant) -> Result<(), RunError> {
        // Read again: the pair is there now.
        self.facts = self.netlink.facts().await.map_err(RunError::failed)?;
        let (workers, node) = (self.host_port.workers().clone(), self.host_port.node().clone());
        let inside = self.host_port.beside_workers().map_err(RunError::failed)?;
        let opened = self.ports.open_host(&self.dataplane, &workers, &node);
        drop(inside);
        opened.map_err(RunError::failed)?;
        self.ports.check_sources(&node).map_err(RunError::bad_input)?;
        self.hold_what_opens().context("a descriptor cannot be duplicated").map_err(RunError::Failed)?;
        for name in &self.config.uplinks {
            let link = self.facts.link(name.as_str()).cloned();
            let link = link.ok_or_else(|| RunError::bad_input(format!("uplinks: interface {name} does not exist")))?;
            self.ports.open_uplink(&self.dataplane, &link).map_err(RunError::bad_input)?;
        }
        self.settle("first state", started).await?;
        self.ports.take_over_rest(&self.facts);
        self.ports.wait_no_more();
        privileges::settle().map_err(RunError::failed)?;
        let content = self.publisher.content();
        tracing::info!(
            target: logging::MILESTONES,
            "ready: {} pods, {} policies, epoch {}",
            self.ports.pods(),
            content.objects.policies(),
            content.epoch.0
        );
        Ok(())
    }

    /// Where all is to be open when the daemon dies, what that depends on is closed first: the pair's namespace, the socket
    /// in it, and before them what the programs go by.
    fn hold_what_opens(&mut self) -> io::Result<()> {
        if let Some(namespace) = self.host_port.namespace() {
            self.first_closed.hold(namespace)?;
            self.ports.hold_host(&self.dataplane, &mut self.first_closed)?;
        }
        Ok(())
    }

    /// Keeps the ports in step with pods and network, and answers who asks. Policy does not wait for it.
    async fn serve(&mut self, follower: &mut Follower, events: &Events, signals: &mut Signals) -> Result<(), RunError> {
        let publisher = Arc::clone(&self.publisher);
        let mut reconcile = tokio::time::interval(RECONCILE);
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        for ticks in [&mut reconcile, &mut heartbeat] {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        let mut fault = self.config.debug.worker_panics_after.map(|after| Instant::now() + after.duration());
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(fault.unwrap_or_else(Instant::now).into()), if fault.is_some() => {
                    fault = None;
                    self.dataplane.kill_worker(0);
                }
                signal = signals.next() => match signal {
                    Signal::End(name) => {
                        tracing::info!(signal = name, "ending");
                        return Ok(());
                    }
                    Signal::Statistics => self.report(),
                    Signal::Reload => self.reload(),
                },
                _ = heartbeat.tick() => self.workers_live()?,
                () = follower.ended() => {
                    return Err(RunError::Failed(anyhow!("the source is not followed any more; restart penstock")));
                }
                // Before the rest: were that always ready, nobody could look in.
                next = self.operation.next() => self.operate(next).await,
                () = publisher.pods.notified() => self.look("pods", Instant::now()).await?,
                () = tokio::time::sleep(RETRY), if self.ports.has_busy() => self.settle("retry", Instant::now()).await?,
                () = events.changed() => {
                    let seen = Instant::now();
                    tokio::time::sleep((SETTLE_BY_LOOK * self.look_took).clamp(SETTLE, LONGEST_SETTLE)).await;
                    self.look("network", seen).await?;
                }
                _ = reconcile.tick() => self.look("reconcile", Instant::now()).await?,
            }
        }
    }

    /// Looks at the network again.
    async fn look(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        if self.read_facts().await { self.settle(why, seen).await } else { Ok(()) }
    }

    /// Reads the facts; keeps the last ones where the kernel does not tell (it is asked again soon).
    async fn read_facts(&mut self) -> bool {
        let began = Instant::now();
        match self.netlink.facts().await {
            Ok(facts) => {
                self.facts = facts;
                self.look_took = began.elapsed();
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the network could not be looked at; trying again");
                false
            }
        }
    }

    /// Makes ports, forwarding and routes what pods and facts ask for, in this order: a new pod's port is open before it is
    /// published, and one that goes is closed after a snapshot without it. Each of these steps may wait for the kernel:
    /// none is taken while the [`Publisher`]'s content is held.
    async fn settle(&mut self, why: &str, seen: Instant) -> Result<(), RunError> {
        // Neither end is there without the other.
        if !self.facts.links.contains_key(&self.host_port.node().index) {
            return Err(RunError::failed(HostPortError::Gone(self.host_port.node().name.clone())));
        }
        self.ports.close_new(&self.facts);
        let largest = self.config.umem.frame_size.largest_packet();
        let (pods, mut problems) = self.publisher.content().objects.tenants();
        let (wanted, more) = pod_ports(&self.facts, &pods, self.config.node.as_str(), largest);
        problems.extend(more);
        self.seek(&pods, &problems).await;
        self.tell(problems);
        self.ports.update(&self.dataplane, &self.facts, wanted);
        let gone = self.ports.take_gone(&self.facts);
        let unserved = self.publisher.content().objects.pod_addresses();
        self.ports.announce(&unserved);
        self.publisher.place(self.ports.layout(), NodeNetwork::of(&self.facts), why, seen);
        self.close(gone);
        self.ports.retract();
        self.route().await;
        Ok(())
    }

    fn close(&self, gone: Vec<(PortId, String)>) {
        let ids: Vec<PortId> = gone.iter().map(|(id, _)| *id).collect();
        for ((id, interface), closed) in gone.into_iter().zip(self.dataplane.close_ports(&ids)) {
            match closed {
                Ok(()) => tracing::info!(interface, port = %id, "closed"),
                Err(error) => tracing::error!(interface, port = %id, %error, "port could not be closed"),
            }
        }
    }

    async fn route(&mut self) {
        let refused = match self.host_port.set_routes(&self.ports.pod_routes()).await {
            Ok(refused) => refused,
            Err(error) => return tracing::warn!(%error, "the node's routes could not be looked at; trying again"),
        };
        let refused: BTreeMap<IpAddr, String> =
            refused.into_iter().map(|(address, error)| (address, error.to_string())).collect();
        for (address, reason) in refused.iter().filter(|(address, reason)| self.unrouted.get(address) != Some(reason)) {
            tracing::error!(%address, reason, "the node reaches this pod past its policies; trying again");
        }
        self.unrouted = refused;
    }

    /// Has the kernel ask on bridges for the pods that nothing leads to.
    async fn seek(&self, pods: &[Pod], problems: &BTreeSet<Problem>) {
        let lost = problems.iter().filter(|problem| matches!(problem, Problem::NoRoute { .. }));
        let lost: BTreeSet<&ObjectKey> = lost.flat_map(Problem::pods).collect();
        for pod in pods.iter().filter(|pod| lost.contains(&pod.key)) {
            for &address in &pod.addresses {
                if let Some(bridge) = self.facts.bridge_of(address) {
                    self.netlink.solicit(bridge, address).await;
                }
            }
        }
    }

    /// Logs problems that are new, and those that are no more.
    fn tell(&mut self, problems: BTreeSet<Problem>) {
        for problem in problems.difference(&self.problems) {
            match problem {
                // As it is with every pod for a moment, when it comes and when it goes.
                Problem::NoRoute { .. } | Problem::NoMac { .. } => tracing::info!("{problem}"),
                _ => tracing::warn!("{problem}"),
            }
        }
        for problem in self.problems.difference(&problems) {
            tracing::info!("no longer so: {problem}");
        }
        self.publisher.content().progress.note_problems(&problems);
        self.problems = problems;
    }

    fn workers_live(&self) -> Result<(), RunError> {
        self.dataplane.failed().map_or(Ok(()), |died| Err(RunError::failed(died)))
    }

    fn report(&self) {
        let mut text = report::statistics(&self.dataplane.statistics(), &self.ports.counted(), &self.ports.waiting());
        match self.dataplane.frames() {
            Ok(frames) => text.push_str(&report::frames(&frames)),
            Err(error) => tracing::warn!(%error, "the frames could not be counted"),
        }
        if !logging::print(text) {
            tracing::warn!("the statistics are not printed: nobody reads the last ones");
        }
    }

    /// What is left where the daemon cannot go on: as if it had been killed.
    fn after_failure(&self) -> OnExit {
        match self.config.fail.mode {
            FailMode::Closed => OnExit::Keep,
            FailMode::Open => OnExit::Restore,
        }
    }

    /// Ends all threads, and either puts everything back (rules, routes and the pair first, so that the node's own
    /// traffic is the kernel's again) or leaves it to the next daemon: programs without sockets drop.
    async fn stop(self, leaves: OnExit) -> Result<(), RunError> {
        let Self { dataplane, ports, host_port, first_closed, publisher, walker, .. } = self;
        drop(first_closed);
        publisher.end();
        // A panic has been told on standard error by then.
        let _ = walker.join();
        drop(publisher);
        let removed = match leaves {
            OnExit::Keep => {
                ports.keep();
                tracing::warn!("pods' interfaces stay closed until the next start, or `penstock cleanup`");
                Ok(())
            }
            OnExit::Restore => {
                let removed = host_port.remove().await;
                ports.restore();
                removed
            }
        };
        let stopped = Arc::into_inner(dataplane).expect("no other thread has it any more").stop();
        removed.map_err(RunError::failed)?;
        let frames = stopped.map_err(RunError::failed)?;
        tracing::info!(target: logging::MILESTONES, ?frames, "ended");
        Ok(())
    }
}

/// Starts the thread that removes connections. It has no capability, and reads no clock.
fn go_through(
    walks: Walks,
    config: &Config,
    dataplane: &Dataplane,
    publisher: &Arc<Publisher>,
) -> io::Result<JoinHandle<()>> {
    let (mapping, table) = (config.conntrack.mapping.clone(), Arc::clone(dataplane.connections()));
    let publisher = Arc::downgrade(publisher);
    thread::Builder::new().name("connections".to_owned()).spawn(move || {
        privileges::forgo();
        walks.run(&mapping, &table, |addresses| {
            if let Some(publisher) = publisher.upgrade() {
                publisher.cleared(addresses);
            }
        });
    })
}

/// The loader of XDP programs. Links that an earlier daemon pinned are taken over, or cleared where this one pins none.
fn redirect(config: &Config) -> Result<Redirect, RunError> {
    let root = &config.fail.pins;
    match config.fail.mode {
        FailMode::Closed => {
            let pins = Pins::open(root).map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))?;
            Redirect::pinned(pins).map_err(RunError::bad_input)
        }
        FailMode::Open => {
            clear_pins(root).map_err(RunError::bad_input)?;
            Redirect::new().map_err(RunError::bad_input)
        }
    }
}

/// Takes away all links that are pinned for this network namespace.
pub(super) fn clear_pins(root: &Path) -> Result<usize, PinError> {
    if !root.is_dir() {
        return Ok(0);
    }
    let pins = Pins::open(root)?;
    let links = pins.links();
    links.iter().for_each(|&pinned| pins.remove(pinned));
    pins.close();
    Ok(links.len())
}

fn start_dataplane(config: &Config) -> Result<Dataplane, RunError> {
    let cores = preflight::worker_cores(config).map_err(RunError::bad_input)?;
    let settings = worker::Config {
        frames: config.umem.frame_count(),
        frame_size: config.umem.frame_size.octets(),
        ring_size: config.umem.ring_size.entries(),
        huge_pages: match config.umem.huge_pages {
            HugePages::Auto => penstock_dataplane::io::HugePages::Auto,
            HugePages::Never => penstock_dataplane::io::HugePages::Never,
        },
        cores: cores.iter().map(|&core| CoreId(core.into())).collect(),
        polling: match config.workers.polling {
            Polling::Adaptive => worker::Polling::Adaptive { spin: config.workers.spin.duration() },
            Polling::Busy => worker::Polling::Busy,
        },
        priority: match config.workers.priority {
            Priority::RealTime => worker::Priority::RealTime,
            Priority::Nice => worker::Priority::Nice,
        },
        time_stages: config.workers.time_stages,
        tx_budget: config.workers.send_budget,
        gso: config.workers.gso,
        connections: config.conntrack.settings(config.fail.mode).map_err(RunError::bad_input)?,
        on_revoke: match config.conntrack.on_cut {
            OnCut::Drop => penstock_dataplane::reply::OnRevoke::Drop,
            OnCut::Reset => penstock_dataplane::reply::OnRevoke::Reset,
        },
        mode: match config.dataplane.mode {
            Mode::Full => pipeline::PipelineMode::Full,
            Mode::Forward => pipeline::PipelineMode::ForwardOnly,
        },
        ..Default::default()
    };
    let wanted = settings.priority;
    let dataplane = Dataplane::start(settings).map_err(|error| match error {
        StartError::Thread { .. } => RunError::failed(error),
        _ => RunError::bad_input(error),
    })?;
    let (has, reason) =
        (dataplane.priority(), "CAP_SYS_NICE, or a control group with real-time scheduling, is missing");
    if has < wanted {
        tracing::warn!(?wanted, ?has, "workers may wait for others' threads, and packets be lost meanwhile: {reason}");
    }
    Ok(dataplane)
}

/// These threads, and those that they start from now on, run elsewhere if there is another core. On a worker's core a thread of
/// ordinary priority gets a hundredth of it while packets come: 10,000 policies that were replaced were not in force after
/// six seconds.
fn leave_cores_to_workers(config: &Config, threads: &[Pid]) {
    let Ok(workers) = preflight::worker_cores(config) else { return };
    let mut others = CpuSet::new();
    for core in preflight::usable_cores().into_iter().filter(|core| !workers.contains(core)) {
        // A core that is usable is in the set's range.
        let _ = others.set(core.into());
    }
    for thread in threads {
        // An empty set is refused, and all stays as it is.
        let _ = sched_setaffinity(*thread, &others);
    }
}

/// The threads of this process but the calling one.
fn other_threads() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    threads.filter(|thread| *thread != gettid()).collect()
}

/// The pair carries what the pods' interfaces carry: the largest MTU of those that there are, at least Ethernet's.
fn pair_mtu(config: &Config, facts: &Facts) -> u32 {
    let behind = facts.behind();
    let pods = behind.values().filter_map(|index| facts.links.get(index)).filter(|link| link.veth);
    let largest = pods.map(|link| link.mtu).chain([1500]).max().unwrap_or(1500);
    largest.min(config.umem.frame_size.largest_packet())
}
