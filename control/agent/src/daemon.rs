//! The daemon: starts the parts (`parts`), keeps them in step (`step`) and answers (`operate`), ends them in order.

mod operate;
mod parts;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use nix::unistd::gettid;
use penstock_dataplane::worker::Dataplane;
use penstock_policy::model::{Change, Object};
use penstock_privileges as privileges;
use penstock_sources::Source;
use tokio::time::MissedTickBehavior;

use super::config::{Config, FailMode, Layers, Loaded, Mode, OnExit};
use super::connections::{self, Clearing};
use super::first_closed::FirstClosed;
use super::follow::Follower;
use super::objects::Objects;
use super::operation::{Doors, Operation};
use super::ports::Ports;
use super::preflight::{self, Finding, Level};
use super::publisher::Publisher;
use super::signals::{Signal, Signals};
use super::{RunError, logging};
use crate::discovery::{Events, Facts, HostPort, HostPortError, Lifetime, Netlink, Problem};
pub(super) use parts::clear_pins;
use parts::{go_through, leave_cores_to_workers, other_threads, pair_mtu, redirect, start_dataplane};

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

    fn workers_live(&self) -> Result<(), RunError> {
        self.dataplane.failed().map_or(Ok(()), |died| Err(RunError::failed(died)))
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
