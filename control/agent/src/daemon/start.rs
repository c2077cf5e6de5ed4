//! Starts the daemon's parts as configured.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Pid, gettid};
use penstock_dataplane::conntrack::{KernelMapFds, KernelMaps, TableMemory};
use penstock_dataplane::io::takes_long_packets;
use penstock_dataplane::packet::{Address, Flow, Protocol};
use penstock_dataplane::pipeline::{OriginalSources, PipelineMode};
use penstock_dataplane::worker::{self, CoreId, Dataplane, StartError, WaitingPackets};
use penstock_xdp_redirect::{
    ConnectionMaps, LoadError, MAX_TCX_PORTS, PinError, Pins, ServiceAddresses, TcxOptions, TcxPrograms,
    TranslatedSources, WaitingArray, quietly,
};

use crate::config::{Config, FailMode, TableMapping};
use crate::connections::{self, ClearingJobs, map_sizes};
use crate::discovery::{Netlink, NetworkState, WorkerPairError, WorkerPairs};
use crate::publisher::Publisher;
use crate::settings::Settings;
use crate::testing;
use crate::trial::{TrialContext, TrialFeed};
use crate::{RunError, logging, privileges};

/// Logs one line about what starts here. Not before the last check: what is refused is said in one line of its own.
pub(super) fn log_start(settings: &Settings<'_>) {
    let config = settings.config;
    tracing::info!(
        target: logging::MILESTONES,
        node = %config.node,
        cores = ?settings.worker_cores(),
        source = config.source.location().to_string(),
        admin = %config.admin.socket,
        metrics = %config.metrics.listen,
        "penstock {} starts",
        env!("CARGO_PKG_VERSION")
    );
    if settings.mode == PipelineMode::ForwardOnly {
        tracing::warn!("FORWARD_ONLY: NO POLICY IS ENFORCED; use this for benchmarks only");
    }
}

/// Starts the workers, and moves the other threads off their cores.
pub(super) fn start_workers(settings: &Settings<'_>, maps: &SharedMaps) -> Result<Dataplane, RunError> {
    // Threads that exist before the workers: manifest reader and API server client.
    leave_cores_to_workers(settings, &other_threads());
    let dataplane = start_dataplane(settings, maps)?;
    let others: Vec<Pid> = dataplane.other_threads().chain([gettid()]).collect();
    leave_cores_to_workers(settings, &others);
    Ok(dataplane)
}

/// Starts the thread that judges what is staged, once something is.
pub(super) fn start_trial_thread(
    config: &Config,
    dataplane: &Arc<Dataplane>,
    publisher: &Arc<Publisher>,
) -> io::Result<(TrialFeed, JoinHandle<()>)> {
    let (trial, messages) = TrialFeed::new();
    let context = TrialContext::new(config.node.as_str(), dataplane, publisher, &trial);
    let thread = context.start(messages)?;
    publisher.subscribe(|_| (trial.clone(), ()));
    Ok((trial, thread))
}

/// Starts the thread that removes connections of released addresses. It drops all capabilities and reads no clock.
pub(super) fn start_clearing_thread(
    jobs: ClearingJobs,
    config: &Config,
    dataplane: &Dataplane,
    publisher: &Arc<Publisher>,
) -> io::Result<JoinHandle<()>> {
    let (mapping, table) = (config.conntrack.mapping.clone(), Arc::clone(dataplane.connections()));
    let publisher = Arc::downgrade(publisher);
    thread::Builder::new().name("connections".to_owned()).spawn(move || {
        privileges::drop_all();
        jobs.run(&mapping, &table, |addresses| {
            if let Some(publisher) = publisher.upgrade() {
                publisher.cleared(addresses);
            }
        });
    })
}

/// Where links are pinned, if they are. Removes what an earlier daemon pinned where this one pins none.
pub(super) fn pins(config: &Config) -> Result<Option<Pins>, RunError> {
    let root = &config.fail.pins;
    match config.fail.mode {
        FailMode::Closed => {
            Ok(Some(Pins::open(root).map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))?))
        }
        FailMode::Open => {
            clear_pins(root).map_err(RunError::bad_input)?;
            Ok(None)
        }
    }
}

/// The pins of the daemon that runs. It has them locked.
fn pins_beside(config: &Config) -> Result<Pins, RunError> {
    Pins::at(&config.fail.pins).map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))
}

/// A daemon that takes over has this ready before the other one stops: programs that the kernel has verified, and the maps that
/// they share with those of the other one.
pub(super) struct Prepared {
    pub(super) maps: SharedMaps,
    pub(super) programs: Option<TcxPrograms>,
}

impl Prepared {
    /// Loads the programs, which takes about a second, while another daemon serves the node. Changes nothing that this one uses.
    /// `None` if it has no such maps: they are made once it has stopped.
    pub(super) fn beside_another(settings: &Settings<'_>) -> Result<Option<Self>, RunError> {
        let config = settings.config;
        if config.fail.mode != FailMode::Closed {
            return Ok(None);
        }
        let pins = pins_beside(config)?;
        let Some(maps) = SharedMaps::find(settings, &pins)? else { return Ok(None) };
        let programs = load_tcx(settings, settings.worker_cores().len(), &maps).map_err(RunError::bad_input)?;
        Ok(Some(Self { maps, programs: Some(programs) }))
    }
}

/// The pins, and the maps: those that are prepared beside another daemon, which has the connection table locked; otherwise they are made,
/// or found as an earlier daemon left them, and the table is locked.
pub(super) fn open_maps(
    settings: &Settings<'_>,
    prepared: Option<Prepared>,
) -> Result<(Option<Pins>, Prepared, Option<File>), RunError> {
    let config = settings.config;
    let pins = if prepared.is_some() { Some(pins_beside(config)?) } else { pins(config)? };
    connections::make_directory(&config.conntrack.mapping)?;
    if let Some(prepared) = prepared {
        return Ok((pins, prepared, None));
    }
    let table_lock = connections::lock(&config.conntrack.mapping, settings.offloads())?;
    let maps = SharedMaps::open(settings, pins.as_ref())?;
    Ok((pins, Prepared { maps, programs: None }, table_lock))
}

/// Loads the programs, and creates the workers' pairs; under other names if another daemon runs. On an error neither is left.
pub(super) async fn open_programs(
    settings: &Settings<'_>,
    netlink: &Netlink,
    netstate: &NetworkState,
    (workers, is_beside): (&[CoreId], bool),
    pins: Option<Pins>,
    Prepared { maps, programs }: Prepared,
) -> Result<(TcxPrograms, WorkerPairs), RunError> {
    let mtu = pair_mtu(settings, netstate);
    let failed = |error| match error {
        WorkerPairError::Running => RunError::Occupied(error.to_string()),
        WorkerPairError::NameTaken(_) => RunError::bad_input(error),
        other => RunError::failed(other),
    };
    let pairs = match is_beside {
        true => WorkerPairs::create_beside(netlink, workers.len(), mtu).await,
        false => WorkerPairs::create(netlink, workers.len(), mtu).await,
    };
    let pairs = pairs.map_err(failed)?;
    let indices: Vec<u32> = pairs.pairs().iter().map(|pair| pair.node.index).collect();
    let cpus: Vec<usize> = match settings.serves_each_core {
        true => workers.iter().map(|core| core.0).collect(),
        false => Vec::new(),
    };
    let load = || -> Result<TcxPrograms, RunError> {
        let tcx = match programs {
            Some(programs) => programs,
            None => load_tcx(settings, workers.len(), &maps).map_err(RunError::bad_input)?,
        };
        let tcx = tcx.with_pins(pins);
        watch_filters(&tcx, settings.priority)?;
        tcx.set_pairs(&indices, &cpus).map_err(RunError::failed)?;
        Ok(tcx)
    };
    match load() {
        Ok(programs) => Ok((programs, pairs)),
        Err(error) => {
            pairs.remove().await.unwrap_or_else(|error| tracing::warn!(%error, "cannot remove the workers' pairs"));
            Err(error)
        }
    }
}

/// Where programs are filters, which anybody may delete: a thread that puts them back at once.
fn watch_filters(tcx: &TcxPrograms, priority: worker::Priority) -> Result<(), RunError> {
    let Some(watch) = tcx.filter_watch() else { return Ok(()) };
    let watcher = watch.watcher().map_err(RunError::failed)?;
    let run = move || {
        worker::raise_priority(priority);
        if let Err(error) = privileges::drop_to_filters() {
            tracing::error!(%error, "the thread that puts filters back keeps capabilities that it does not need");
        }
        watcher();
    };
    thread::Builder::new().name("filters".to_owned()).spawn(run).map_err(RunError::failed)?;
    Ok(())
}

fn load_tcx(settings: &Settings<'_>, workers: usize, maps: &SharedMaps) -> Result<TcxPrograms, LoadError> {
    let options = TcxOptions {
        workers,
        open_without_workers: settings.config.fail.mode == FailMode::Open,
        sources: Some(maps.sources.clone()),
        services: Some(maps.services.clone()),
        host_routing: settings.routes_past_stack(),
        waiting: Some((maps.waiting.clone(), settings.share_of_pod)),
    };
    let load = |options: &TcxOptions| TcxPrograms::load(options, maps.connections.as_ref());
    if !options.host_routing {
        return load(&options);
    }
    // It reads structures of the kernel that differ between versions; without it nothing is missing but speed.
    quietly(|| load(&options)).or_else(|error| {
        tracing::warn!(%error, "host_routing: not with this kernel; packets to other machines take the node's stack");
        load(&TcxOptions { host_routing: false, ..options })
    })
}

/// Removes all links that are pinned for this network namespace. Returns how many.
pub(crate) fn clear_pins(root: &Path) -> Result<usize, PinError> {
    // Filters need no pin.
    let pins = if root.is_dir() { Pins::open(root)? } else { Pins::at(root)? };
    let links = pins.links();
    links.iter().for_each(|&pinned| pins.remove(pinned));
    pins.remove_connection_maps();
    pins.remove_translated_sources();
    pins.close();
    Ok(links.len())
}

/// BPF maps that programs and workers share.
pub(super) struct SharedMaps {
    connections: Option<ConnectionMaps>,
    sources: TranslatedSources,
    pub(super) services: ServiceAddresses,
    waiting: WaitingArray,
}

impl SharedMaps {
    fn open(settings: &Settings<'_>, pins: Option<&Pins>) -> Result<Self, RunError> {
        // Without its connection table nothing else is worth keeping.
        let lasting = pins.filter(|_| matches!(settings.config.conntrack.mapping, TableMapping::File(_)));
        let sources = TranslatedSources::open(lasting).map_err(RunError::bad_input)?;
        let connections = connection_maps(settings, pins)?;
        let services = ServiceAddresses::create().map_err(RunError::bad_input)?;
        Ok(Self { connections, sources, services, waiting: waiting_array()? })
    }

    /// Those that another daemon has pinned, if they are as this one needs them.
    fn find(settings: &Settings<'_>, pins: &Pins) -> Result<Option<Self>, RunError> {
        let config = settings.config;
        if !settings.offloads() || !matches!(config.conntrack.mapping, TableMapping::File(_)) {
            return Ok(None);
        }
        let sizes = map_sizes(config.conntrack.entries as usize);
        let found = ConnectionMaps::find(pins, &sizes).zip(TranslatedSources::find(pins));
        let Some((connections, sources)) = found else { return Ok(None) };
        let (services, waiting) = (ServiceAddresses::create().map_err(RunError::bad_input)?, waiting_array()?);
        Ok(Some(Self { connections: Some(connections), sources, services, waiting }))
    }

    fn waiting(&self) -> Result<WaitingPackets, RunError> {
        let mapped = self.waiting.descriptor().and_then(|array| WaitingPackets::map(&array, MAX_TCX_PORTS.into()));
        mapped.map_err(RunError::failed)
    }
}

fn waiting_array() -> Result<WaitingArray, RunError> {
    WaitingArray::create(WaitingPackets::ELEMENT).map_err(RunError::bad_input)
}

/// The senders that the programs note, for the workers.
#[derive(Debug)]
struct NotedSources(TranslatedSources);

impl OriginalSources for NotedSources {
    fn source_of(&self, flow: &Flow) -> Option<Address> {
        // The programs know no ports of other protocols.
        let has_ports = matches!(flow.protocol, Protocol::TCP | Protocol::UDP | Protocol::SCTP);
        let end = |address: Address, port| SocketAddr::new(address.into(), if has_ports { port } else { 0 });
        let (from, to) = (end(flow.src, flow.src_port), end(flow.dst, flow.dst_port));
        self.0.source_of(flow.protocol.0, from, to).map(Address::from)
    }
}

/// The BPF maps of the connection table, where the tcx programs forward packets of established connections. Removes what an
/// earlier daemon pinned where this one has none.
fn connection_maps(settings: &Settings<'_>, pins: Option<&Pins>) -> Result<Option<ConnectionMaps>, RunError> {
    let config = settings.config;
    if !settings.offloads() {
        if let Some(pins) = pins {
            pins.remove_connection_maps();
        }
        return Ok(None);
    }
    let sizes = map_sizes(config.conntrack.entries as usize);
    let pins = pins.filter(|_| matches!(config.conntrack.mapping, TableMapping::File(_)));
    Ok(Some(ConnectionMaps::open(pins, &sizes).map_err(RunError::bad_input)?))
}

fn start_dataplane(settings: &Settings<'_>, maps: &SharedMaps) -> Result<Dataplane, RunError> {
    let config = settings.config;
    let mut connections = config.conntrack.settings(config.fail.mode).map_err(RunError::bad_input)?;
    connections.ended = config.flow_records.queue();
    connections.repeats = testing::repeats().then(|| config.fail.repeat_answers.duration());
    if let Some(maps) = &maps.connections {
        let [table, tags, entries, uses] = maps.descriptors().map_err(RunError::failed)?;
        connections.memory = TableMemory::Kernel(KernelMaps(Arc::new(KernelMapFds { table, tags, entries, uses })));
    }
    let parameters = worker::Config {
        sources: Some(Arc::new(NotedSources(maps.sources.clone()))),
        waiting: Some(maps.waiting()?),
        ..settings.dataplane(connections)
    };
    let dataplane = Dataplane::start(parameters).map_err(|error| match error {
        StartError::Thread { .. } | StartError::Grace(_) => RunError::failed(error),
        _ => RunError::bad_input(error),
    })?;
    let (has, reason) =
        (dataplane.priority(), "CAP_SYS_NICE, or a control group with real-time scheduling, is missing");
    if has < settings.least_priority {
        tracing::warn!(wanted = ?settings.least_priority, ?has, "other threads may delay the workers, and packets be lost meanwhile: {reason}");
    }
    Ok(dataplane)
}

/// Moves these threads, and those that they start later, off the workers' cores if other cores are usable. On a
/// worker's core a thread of ordinary priority gets a hundredth of the time under load: replacing 10,000 policies took
/// more than six seconds.
fn leave_cores_to_workers(settings: &Settings<'_>, threads: &[Pid]) {
    let workers = settings.worker_cores();
    let mut others = CpuSet::new();
    for &core in settings.usable_cores.iter().filter(|core| !workers.contains(core)) {
        // A usable core is always in the set's range.
        let _ = others.set(core.into());
    }
    for thread in threads {
        // The kernel rejects an empty set, and the affinity stays as it is.
        let _ = sched_setaffinity(*thread, &others);
    }
}

/// The threads of this process except the calling one.
fn other_threads() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    threads.filter(|thread| *thread != gettid()).collect()
}

/// The pair's MTU: of any packet, where the kernel hands over those that are longer than a frame, since pods with a longer MTU may
/// come. Otherwise the largest of the pods' interfaces, at least 1500, at most what a frame holds.
fn pair_mtu(settings: &Settings<'_>, netstate: &NetworkState) -> u32 {
    if takes_long_packets() {
        return settings.longest_packet;
    }
    let behind = netstate.behind();
    let pods = behind.values().filter_map(|index| netstate.links.get(index)).filter(|link| link.veth);
    let largest = pods.map(|link| link.mtu).chain([1500]).max().unwrap_or(1500);
    largest.min(settings.longest_packet)
}
