//! The threads that move packets: one a core, each with the queues of its ports.
//!
//! [`Dataplane`] is what the rest of the program sees. A worker's turn: obey commands, take what other workers handed
//! over, receive a batch from each of its queues and judge it, send everything that is to go out of its own ports in
//! one go a port, hand the rest to the workers that own those ports, free what was sent, refill. When there is
//! nothing to do it spins for a while and then sleeps.

mod config;
mod control;
mod dataplane;
mod desk;
mod error;
mod histogram;
mod mailbox;
mod ports;
mod privileges;
mod processor;
mod queue;
mod run;
mod stages;
mod statistics;
mod verdicts;

pub use config::{Config, CoreId, Polling};
pub use dataplane::{Dataplane, PortRequest, available_cores};
pub use error::{StartError, WorkerDied};
pub use histogram::Histogram;
pub use privileges::{Priority, forgo_capabilities};
pub use stages::{Stage, StageStatistics};
pub use statistics::{Depths, KernelDrops, PortStatistics, QueueDepth, Statistics, Traffic, WorkerStatistics};
pub use verdicts::{Judged, Outcome, VerdictBudget, VerdictLog, VerdictRecord};

/// Most workers of a dataplane.
pub const MAX_WORKERS: usize = 64;

/// Most ports that can be open at once.
pub const MAX_PORTS: usize = 4096;

#[cfg(test)]
mod tests;
