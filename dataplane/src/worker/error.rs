//! What can go wrong when a dataplane starts or stops, each in one line.

use super::CoreId;
use crate::conntrack::OpenError;
use crate::io::UmemError;

/// The dataplane could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Nothing to run on.
    #[error("no core is given for a worker: name at least one (cores = [0])")]
    NoCores,
    /// More workers than can be numbered.
    #[error("{0} workers are too many: name at most {max} cores", max = super::MAX_WORKERS)]
    TooManyWorkers(usize),
    /// Two workers on one core would take turns.
    #[error("core {} is given twice: name each core once", .0.0)]
    CoreTwice(CoreId),
    /// The core does not exist, or this process may not use it.
    #[error("core {} does not exist or is not open to this process: choose from {}", core.0, list(available))]
    NoSuchCore {
        /// The one asked for.
        core: CoreId,
        /// Those that there are.
        available: Vec<CoreId>,
    },
    /// The UMEM could not be made.
    #[error(transparent)]
    Umem(#[from] UmemError),
    /// The connection table could not be made.
    #[error(transparent)]
    Connections(#[from] OpenError),
    /// A thread could not be started.
    #[error("cannot start the thread of worker {worker}: {source}")]
    Thread {
        /// Which worker.
        worker: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

fn list(cores: &[CoreId]) -> String {
    cores.iter().map(|core| core.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// A worker ended by itself: a fault in it, since it never should.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("worker {worker} on core {} died: {reason}; restart the dataplane", core.0)]
pub struct WorkerDied {
    /// Which worker.
    pub worker: usize,
    /// Where it ran.
    pub core: CoreId,
    /// The message of its panic.
    pub reason: String,
}
