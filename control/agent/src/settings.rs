//! Settings: the configuration, which is what was written, and what a start decides where it leaves something open.

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};
use penstock_dataplane::conntrack;
use penstock_dataplane::io::takes_long_packets;
use penstock_xdp_redirect::{ConnectionMaps, LARGEST_NATIVE_MTU, MAX_TCX_WORKERS, TcxOptions, TcxPrograms, quietly};

use super::config::{Config, HostRouting};
use super::connections::map_sizes;
use crate::discovery::PortLimits;

/// A configuration, with what was decided for this start. Nothing of it changes while the daemon runs.
#[derive(Clone, Debug)]
pub(super) struct Settings<'c> {
    pub(super) config: &'c Config,
    /// The workers' cores, or why they cannot be used, which refuses the start.
    pub(super) cores: Result<Vec<u16>, String>,
    pub(super) usable_cores: Vec<u16>,
    /// Whether each core has a worker, for the packets that it sends.
    pub(super) serves_each_core: bool,
}

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
        let cores = Err(String::new());
        let mut settings = Self { config, cores, usable_cores, serves_each_core: false };
        // With cores of its own, or some that are others', the process does not know where pods run.
        settings.serves_each_core =
            config.workers.cores.is_none() && settings.offloads() && online == Some(settings.usable_cores.len());
        settings.cores = settings.choose_cores();
        settings
    }

    fn choose_cores(&self) -> Result<Vec<u16>, String> {
        let usable = &self.usable_cores;
        match (&self.config.workers.cores, usable.last()) {
            (Some(cores), _) => match cores.numbers().iter().find(|core| !usable.contains(core)) {
                Some(core) => Err(format!(
                    "workers.cores: core {core} does not exist or is not available to this process; choose from {}",
                    list(usable)
                )),
                None => Ok(cores.numbers().to_vec()),
            },
            (None, None) => Err("workers.cores: no usable core".to_owned()),
            (None, Some(_)) if self.serves_each_core => Ok(usable.iter().copied().take(MAX_TCX_WORKERS).collect()),
            (None, Some(&last)) => Ok(vec![last]),
        }
    }

    /// The workers' cores; none if they cannot be used.
    pub(super) fn worker_cores(&self) -> &[u16] {
        self.cores.as_deref().unwrap_or_default()
    }

    /// Whether the kernel's programs forward packets of established connections. They read the connection table in an
    /// order that x86-64 keeps without barriers.
    pub(super) fn offloads(&self) -> bool {
        self.config.offload && cfg!(target_arch = "x86_64")
    }

    /// Whether packets may pass the node's stack by, to other machines and from them.
    pub(super) fn routes_past_stack(&self) -> bool {
        self.offloads() && self.config.host_routing == HostRouting::Auto
    }

    /// Bytes of the longest packet that workers take: of several frames, where the kernel hands them over.
    pub(super) fn longest_packet(&self) -> u32 {
        match takes_long_packets() {
            true => u16::MAX.into(),
            false => self.config.umem.frame_size.largest_packet().min(LARGEST_NATIVE_MTU),
        }
    }

    pub(super) fn port_limits(&self) -> PortLimits<'_> {
        PortLimits { node: self.config.node.as_str(), largest: self.longest_packet() }
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
