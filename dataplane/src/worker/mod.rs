//! The worker threads: one per core, each with the AF_XDP socket of its veth pair.
//!
//! [`Dataplane`] is the public interface. A worker's poll iteration: handle commands, receive a batch and evaluate it, send
//! what passes, free completed frames, refill. Without work it spins for a while and then sleeps.
//!
//! A pair carries the packets of all ports, and each worker has one: a packet leaves by the pair that it came by, and no
//! worker needs another one ([`PortPath`]).

mod capture;
mod config;
mod control;
mod core_sharing;
mod counter;
mod dataplane;
mod early;
mod error;
mod grace;
mod histogram;
mod inbox;
mod long;
mod moderation;
mod ports;
mod priority;
mod processor;
mod queue;
mod request;
mod run;
mod shared;
mod spin;
mod staged;
mod state;
mod statistics;
mod verdicts;
mod waiting;

pub use capture::{Capture, CaptureFilter, CaptureQueue, CapturedPacket, CapturedPod};
pub use config::{Config, CoreId};
pub use dataplane::{Dataplane, available_cores};
pub use error::{StartError, WorkerDied};
pub use histogram::Histogram;
pub use priority::{Hurry, Priority, raise_priority};
pub use request::{PortPath, PortRequest};
pub use staged::{NamedVerdict, StagedLog, StagedRecord, StagedSet, VerdictChange};
pub use statistics::{
    DataplaneStatistics, KernelDrops, PortStatistics, RingDepth, RingDepths, Traffic, WorkerStatistics,
};
pub use verdicts::{LoggedEvaluation, LoggedOutcome, VerdictBudget, VerdictLog, VerdictRecord};
pub use waiting::WaitingPackets;

pub const MAX_WORKERS: usize = 64;

pub const MAX_PORTS: usize = 4096;

#[cfg(test)]
mod tests;
