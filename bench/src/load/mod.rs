//! Load for the benchmarks: a generator of small frames, a sink that counts, and where their work runs.

mod bulk;
mod generator;
mod sink;

pub use bulk::{Receipt, transfer, transfer_for};
pub use generator::{Generator, UdpFlow};
pub use sink::Sink;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Pins the calling thread to one core.
pub fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot pin a thread to core {core}"))
}
