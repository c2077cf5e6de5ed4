//! The machine: what its cores leave to a thread, and settings that a run changes temporarily.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use penstock_bench::machine::Machine;
use penstock_bench::peers::{CONNECTIONS, Cores};
use penstock_bench::testbed::CleanupGuard;

use crate::host::scheduling_gaps;

/// Adds the scheduling gaps of threads that only spin: on one core, and on both at once.
pub(crate) fn look_for_gaps(machine: &mut Machine, cores: Cores) -> Result<()> {
    let alone = [scheduling_gaps(&[cores.generator])?, scheduling_gaps(&[cores.worker])?].join("; ");
    machine.facts.push(("Gaps of a thread that only spins, alone".to_owned(), alone));
    let both = scheduling_gaps(&[cores.generator, cores.worker])?;
    machine.facts.push(("The same, both cores at once".to_owned(), both));
    Ok(())
}

/// Machine settings that a run needs. They are restored when this is dropped, and on a signal.
pub(crate) struct MachineSettings {
    _guards: Vec<CleanupGuard>,
}

impl MachineSettings {
    /// Gives the kernel's connection tracking the same capacity as the other peers.
    pub(crate) fn new() -> Result<Self> {
        let mut guards = Vec::new();
        for (path, value) in [
            ("/proc/sys/net/netfilter/nf_conntrack_max", CONNECTIONS),
            ("/sys/module/nf_conntrack/parameters/hashsize", CONNECTIONS / 4),
        ] {
            guards.extend(raise(Path::new(path), value)?);
        }
        // Threads are weighed against each other, not by session (autogroup).
        guards.extend(set(Path::new("/proc/sys/kernel/sched_autogroup_enabled"), "0")?);
        Ok(Self { _guards: guards })
    }
}

/// Sets a value; `None` if there is no such setting or no need.
fn set(path: &Path, value: &str) -> Result<Option<CleanupGuard>> {
    let Ok(before) = fs::read_to_string(path) else { return Ok(None) };
    if before.trim() == value {
        return Ok(None);
    }
    fs::write(path, value).with_context(|| format!("cannot set {}", path.display()))?;
    let path = path.to_owned();
    Ok(Some(CleanupGuard::new(move || drop(fs::write(path, before)))))
}

/// Raises a numeric value to at least this; `None` if there is no such setting or no need.
fn raise(path: &Path, value: usize) -> Result<Option<CleanupGuard>> {
    match fs::read_to_string(path) {
        Ok(before) if before.trim().parse::<usize>().is_ok_and(|before| before >= value) => Ok(None),
        _ => set(path, &value.to_string()),
    }
}
