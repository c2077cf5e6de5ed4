//! The worker threads: one per core, each with the queues of its ports.
//!
//! [`Dataplane`] is the public interface. A worker's poll iteration: handle commands, take packets handed off by other
//! workers, receive a batch from each of its queues and evaluate it, send everything for its own ports in one go per
//! port, hand the rest off to the workers that own those ports, free completed frames, refill. Without work it spins
//! for a while and then sleeps.
//!
//! Packets of a port come through queues of its own interface, or through each worker's veth pair, which carries the
//! packets of many ports ([`PortPath`]).

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
    DataplaneStatistics, KernelDrops, PortStatistics, QueueDepth, QueueDepths, Traffic, WorkerStatistics,
};
pub use verdicts::{LoggedEvaluation, LoggedOutcome, VerdictBudget, VerdictLog, VerdictRecord};
pub use waiting::WaitingPackets;

pub const MAX_WORKERS: usize = 64;

pub const MAX_PORTS: usize = 4096;

#[cfg(test)]
mod tests;
