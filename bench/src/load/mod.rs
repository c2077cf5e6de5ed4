//! Load for tests and benchmarks: packet generators, counting sinks, TCP streams, and thread pinning.

mod bulk;
mod cores;
mod flood;
mod generator;
mod harness;
mod meter;
mod ports;
mod run;
mod search;
mod sink;
mod streams;
mod traffic;
mod transactions;
mod trial;

pub use bulk::segments;
pub use bulk::{TransferReport, transfer, transfer_for};
pub use cores::CoreTimes;
pub use flood::{Flood, FloodPackets, FloodSources, route_default_to};
pub use generator::{Generator, PacketSocket, UdpFlow};
pub use harness::Harness;
pub use meter::{DatagramCounts, UdpMeter};
pub use ports::{ALL_PORTS, DATAGRAM_SERVERS, PORTS, PROBE_PORT};
pub use search::{RateSearch, RateSearchResult};
pub use sink::UdpSink;
pub use streams::{connections_at, connections_for, datagrams_for, streams_for};
pub use traffic::{FrameLengths, Traffic, UdpFrames};
pub use transactions::{TransactionEnds, connected_transactions, datagram_transactions, handshakes, round_trips};
pub use trial::{ProbeMode, ProbeStats, Trial, TrialResult, of_length};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Raises the calling thread to nice -20, so that other processes on its core do not add latency to the measurement.
/// Needs CAP_SYS_NICE. Real-time priority would be worse for a thread that never sleeps: the kernel throttles it for 50
/// ms of each second.
pub fn raise_priority() -> Result<()> {
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
