//! Load for tests and benchmarks: a generator of small frames, a sink that counts, single frames, and where their work runs.

mod bulk;
mod cores;
mod generator;
mod meter;
mod run;
mod search;
mod sink;
mod station;
mod streams;
mod traffic;
mod wire;

pub use bulk::{Receipt, transfer, transfer_for};
pub use cores::CoreTimes;
pub use generator::{Generator, UdpFlow};
pub use meter::{Count, Meter};
pub use run::Probes;
pub use search::{Found, Search};
pub use sink::Sink;
pub use station::{Outcome, PORTS, PROBE_PORT, Probing, Station, Trial, of_length};
pub use streams::{connections_for, streams_for};
pub use traffic::{Lengths, Traffic};
pub use wire::Wire;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Pins the calling thread to one core.
pub fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot pin a thread to core {core}"))
}
