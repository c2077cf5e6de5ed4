//! Errors of starting and stopping a dataplane, each in one line.

use super::CoreId;
use crate::conntrack::OpenError;
use crate::io::UmemError;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("no core is given for a worker: name at least one (cores = [0])")]
    NoCores,
    #[error("{0} workers are too many: name at most {max} cores", max = super::MAX_WORKERS)]
    TooManyWorkers(usize),
    /// Two workers on one core would compete for it.
    #[error("core {} is given twice: name each core once", .0.0)]
    CoreTwice(CoreId),
    /// The core does not exist, or this process may not use it.
    #[error("core {} does not exist or is not open to this process: choose from {}", core.0, list(available))]
    NoSuchCore { core: CoreId, available: Vec<CoreId> },
    /// The UMEM could not be created.
    #[error(transparent)]
    Umem(#[from] UmemError),
    #[error(transparent)]
    Connections(#[from] OpenError),
    /// The thread that waits for the kernel's programs could not be started.
    #[error("cannot start the thread that waits for the kernel's programs: {0}")]
    Grace(std::io::Error),
    #[error("cannot start the thread of worker {worker}: {source}")]
    Thread { worker: usize, source: std::io::Error },
}

fn list(cores: &[CoreId]) -> String {
    cores.iter().map(|core| core.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// A worker ended by itself, which is a bug.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("worker {worker} on core {} died: {reason}; restart the dataplane", core.0)]
pub struct WorkerDied {
    pub worker: usize,
    pub core: CoreId,
    pub reason: String,
}
