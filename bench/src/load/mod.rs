//! Load for tests and benchmarks: a generator of small frames, a sink that counts, single frames, and where their work runs.

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

/// Puts the calling thread before others of its core (nice -20), so that what else the machine does is not taken for a delay of
/// what is measured. Needs CAP_SYS_NICE. A thread of real-time priority that never sleeps would do worse: the kernel takes
/// 50 ms of each second from it.
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
