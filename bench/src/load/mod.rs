//! Load for tests and benchmarks: packet generators, counting sinks, TCP streams, and thread pinning.

mod bulk;
mod cores;
mod flood;
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
pub use flood::{Flood, Packets, Sources, route_beyond};
pub use generator::{Generator, UdpFlow};
pub use meter::{Count, Meter};
pub use run::Probes;
pub use search::{Found, Search};
pub use sink::Sink;
pub use station::{Outcome, PORTS, PROBE_PORT, Probing, Station, Trial, of_length};
pub use streams::{connections_at, connections_for, streams_for};
pub use traffic::{Lengths, Traffic};
pub use wire::Wire;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Raises the calling thread to nice -20, so that other processes on its core do not add latency to the measurement.
/// Needs CAP_SYS_NICE. Real-time priority would be worse for a thread that never sleeps: the kernel throttles it for 50
/// ms of each second.
pub fn go_first() -> Result<()> {
    // SAFETY: no memory is passed; 0 means the calling thread (setpriority(2), "C library/kernel differences").
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
    Errno::result(result).map(drop).context("cannot raise a thread's priority")
}

/// Pins the calling thread to one core.
pub fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set).with_context(|| format!("cannot pin a thread to core {core}"))
}
