//! The parts that a daemon starts, made as its configuration says.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::{Pid, gettid};
use penstock_dataplane::pipeline;
use penstock_dataplane::worker::{self, CoreId, Dataplane, StartError};
use penstock_privileges as privileges;
use penstock_xdp_redirect::{PinError, Pins, Redirect};

use crate::config::{Config, FailMode, HugePages, Mode, OnCut, Polling, Priority};
use crate::connections::Walks;
use crate::discovery::Facts;
use crate::publisher::Publisher;
use crate::{RunError, preflight};

/// Starts the thread that removes connections. It has no capability, and reads no clock.
pub(super) fn go_through(
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
pub(super) fn redirect(config: &Config) -> Result<Redirect, RunError> {
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
pub(crate) fn clear_pins(root: &Path) -> Result<usize, PinError> {
    if !root.is_dir() {
        return Ok(0);
    }
    let pins = Pins::open(root)?;
    let links = pins.links();
    links.iter().for_each(|&pinned| pins.remove(pinned));
    pins.close();
    Ok(links.len())
}

pub(super) fn start_dataplane(config: &Config) -> Result<Dataplane, RunError> {
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
pub(super) fn leave_cores_to_workers(config: &Config, threads: &[Pid]) {
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
pub(super) fn other_threads() -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    threads.filter(|thread| *thread != gettid()).collect()
}

/// The pair carries what the pods' interfaces carry: the largest MTU of those that there are, at least Ethernet's.
pub(super) fn pair_mtu(config: &Config, facts: &Facts) -> u32 {
    let behind = facts.behind();
    let pods = behind.values().filter_map(|index| facts.links.get(index)).filter(|link| link.veth);
    let largest = pods.map(|link| link.mtu).chain([1500]).max().unwrap_or(1500);
    largest.min(config.umem.frame_size.largest_packet())
}
