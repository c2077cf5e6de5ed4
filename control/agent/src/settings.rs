//! Settings: all that a start decides, from the configuration, which is what was written, and this machine.
//!
//! `run`, `status` and `check` read what is decided here, and never the sections `umem` and `workers` of the configuration.

use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};
use penstock_dataplane::conntrack;
use penstock_dataplane::io::takes_long_packets;
use penstock_dataplane::pipeline::PipelineMode;
use penstock_dataplane::reply::ReplySettings;
use penstock_dataplane::worker::{self, CoreId, Priority};
use penstock_xdp_redirect::{ConnectionMaps, LARGEST_NATIVE_MTU, MAX_TCX_WORKERS, TcxOptions, TcxPrograms, quietly};

use super::config::{Config, HostRouting};
use super::connections::map_sizes;
use crate::discovery::PortLimits;
use crate::testing;

/// A configuration, with all that was decided for this start. Nothing of it changes while the daemon runs.
#[derive(Clone, Debug)]
pub(super) struct Settings<'c> {
    pub(super) config: &'c Config,
    /// The workers' cores, or why they cannot be used, which refuses the start.
    pub(super) cores: Result<Vec<u16>, String>,
    pub(super) usable_cores: Vec<u16>,
    /// Whether each core has a worker, for the packets that it sends.
    pub(super) serves_each_core: bool,
    /// Frames of the UMEM.
    pub(super) frames: u32,
    /// Entries of each ring: a worker's pair carries the packets of all pods, and may fill a third of the frames.
    pub(super) ring_size: u32,
    /// Most packets of one pod that wait in the workers' pairs. Where programs forward established connections, few packets need a
    /// worker, and the others wait the less for them. Otherwise a pod's bulk transfers go through a pair.
    pub(super) share_of_pod: u32,
    /// The workers' priority. One that shares its core with pods is woken for their first packets, and would wait for a slice of
    /// whoever computes there.
    pub(super) priority: Priority,
    /// The priority without which the log warns: where only the default asks for more, a control group without real-time
    /// scheduling is nothing to warn of.
    pub(super) least_priority: Priority,
    /// How long a worker spins at first. One that shares its core with pods leaves it to them.
    pub(super) spin: Duration,
    /// Bytes of the longest packet that workers take: of several frames, where the kernel hands them over.
    pub(super) longest_packet: u32,
    pub(super) replies: ReplySettings,
    pub(super) mode: PipelineMode,
}

/// Most entries of a ring.
const LARGEST_RING: u32 = 4096;
/// The spin time of workers with cores of their own.
const SPIN: Duration = Duration::from_micros(50);

impl<'c> Settings<'c> {
    /// Decides for this machine. Changes nothing.
    pub(super) fn decide(config: &'c Config) -> Self {
        let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
        let usable = (0..CpuSet::count()).filter(|&core| set.is_set(core).unwrap_or(false)).map(|core| core as u16);
        let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
        let online = online.and_then(|online| usize::try_from(online).ok());
        Self::of(config, usable.collect(), online)
    }

    /// Decides for a machine with so many cores online, of which this process may run on some.
    pub(super) fn of(config: &'c Config, usable_cores: Vec<u16>, online: Option<usize>) -> Self {
        let offloads = offloads(config);
        // With cores of its own, or some that are others', the process does not know where pods run.
        let serves_each_core = config.workers.cores.is_none() && offloads && online == Some(usable_cores.len());
        let default_priority = if serves_each_core { Priority::RealTime } else { Priority::Nice };
        let priority = config.workers.priority.unwrap_or(default_priority);
        let frames = config.umem.frame_count();
        let ring_size = 1 << (frames / 3).clamp(1, LARGEST_RING).ilog2();
        Self {
            config,
            cores: choose_cores(config, &usable_cores, serves_each_core),
            usable_cores,
            serves_each_core,
            frames,
            ring_size,
            share_of_pod: ring_size / if offloads { 16 } else { 4 },
            priority,
            least_priority: config.workers.priority.unwrap_or(Priority::Nice),
            spin: if serves_each_core || priority == Priority::RealTime { Duration::ZERO } else { SPIN },
            longest_packet: match takes_long_packets() {
                true => u16::MAX.into(),
                false => config.umem.frame_size.largest_packet().min(LARGEST_NATIVE_MTU),
            },
            replies: ReplySettings { on_revoke: config.conntrack.on_revoke, on_deny: config.deny.answer },
            mode: testing::mode(),
        }
    }

    /// The workers' cores; none if they cannot be used.
    pub(super) fn worker_cores(&self) -> &[u16] {
        self.cores.as_deref().unwrap_or_default()
    }

    /// Bytes of the UMEM.
    pub(super) fn umem_bytes(&self) -> u64 {
        u64::from(self.frames) * u64::from(self.config.umem.frame_size.bytes())
    }

    /// Whether the kernel's programs forward packets of established connections.
    pub(super) fn offloads(&self) -> bool {
        offloads(self.config)
    }

    /// Whether packets may pass the node's stack by, to other machines and from them.
    pub(super) fn routes_past_stack(&self) -> bool {
        self.offloads() && self.config.host_routing == HostRouting::Auto
    }

    pub(super) fn port_limits(&self) -> PortLimits<'_> {
        PortLimits { node: self.config.node.as_str(), largest: self.longest_packet }
    }

    /// The dataplane with these settings, and a connection table in this memory.
    pub(super) fn dataplane(&self, connections: conntrack::Config) -> worker::Config {
        worker::Config {
            frames: self.frames,
            frame_size: self.config.umem.frame_size.bytes(),
            ring_size: self.ring_size,
            cores: self.worker_cores().iter().map(|&core| CoreId(core.into())).collect(),
            spin: self.spin,
            priority: self.priority,
            long_packets: takes_long_packets(),
            connections,
            replies: self.replies,
            mode: self.mode,
            ..Default::default()
        }
    }
}

/// Programs that forward read the connection table in an order that x86-64 keeps without barriers.
fn offloads(config: &Config) -> bool {
    config.offload && cfg!(target_arch = "x86_64")
}

fn choose_cores(config: &Config, usable: &[u16], serves_each_core: bool) -> Result<Vec<u16>, String> {
    match (&config.workers.cores, usable.last()) {
        (Some(cores), _) => match cores.numbers().iter().find(|core| !usable.contains(core)) {
            Some(core) => Err(format!(
                "workers.cores: core {core} does not exist or is not available to this process; choose from {}",
                list(usable)
            )),
            None => Ok(cores.numbers().to_vec()),
        },
        (None, None) => Err("workers.cores: no usable core".to_owned()),
        (None, Some(_)) if serves_each_core => Ok(usable.iter().copied().take(MAX_TCX_WORKERS).collect()),
        (None, Some(&last)) => Ok(vec![last]),
    }
}

/// Loads the tcx programs, attaches them to an interface that nobody uses, and removes them again.
pub(super) fn try_tcx(offloads: bool) -> Result<(), String> {
    let sizes = map_sizes(conntrack::Config::MIN_ENTRIES);
    let maps = offloads.then(|| ConnectionMaps::open(None, &sizes)).transpose().map_err(|error| error.to_string())?;
    let loaded = quietly(|| TcxPrograms::load(&TcxOptions::default(), maps.as_ref()));
    loaded.map_err(|error| error.to_string())?.try_attaching().map_err(|error| error.to_string())
}

pub(super) fn list(cores: &[u16]) -> String {
    cores.iter().map(u16::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn each_core_has_a_worker_if_programs_forward_on_all_cores() {
        let usable = vec![0, 1, 5];
        for (more, online, expected) in [
            ("", Some(3), Ok(vec![0, 1, 5])),
            ("", Some(4), Ok(vec![5])),
            ("", None, Ok(vec![5])),
            ("offload = false", Some(3), Ok(vec![5])),
            ("workers.cores = [1]", Some(3), Ok(vec![1])),
            (
                "workers.cores = [0, 999]",
                Some(3),
                Err("workers.cores: core 999 does not exist or is not available to this process; choose from 0, 1, 5"),
            ),
        ] {
            let text = format!("node = \"a\"\n{more}\n[source]\nmanifests = \"/tmp\"\n");
            let config = Config::parse(&text, Path::new("/tmp/penstock.toml")).unwrap();
            let settings = Settings::of(&config, usable.clone(), online);
            // Programs forward nothing on other machines.
            let expected = match expected {
                Ok(cores) if cores.len() == usable.len() && !settings.offloads() => Ok(vec![5]),
                expected => expected.map_err(str::to_owned),
            };
            assert_eq!(settings.serves_each_core, expected.as_ref() == Ok(&usable), "{more} {online:?}");
            assert_eq!(settings.cores, expected, "{more} {online:?}");
        }
    }
}
