//! State shared by all threads.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use arc_swap::ArcSwap;

use super::inbox::WorkerInbox;
use super::statistics::{PortCounters, WorkerCounters};
use super::{WaitingPackets, WorkerDied};
use crate::Snapshot;
use crate::io::Umem;

#[derive(Debug)]
pub(super) struct WorkerShared {
    pub(super) umem: Umem,
    pub(super) gso: bool,
    pub(super) waiting: Option<WaitingPackets>,
    pub(super) snapshot: Arc<ArcSwap<Snapshot>>,
    pub(super) inboxes: Vec<WorkerInbox>,
    pub(super) counters: Vec<WorkerCounters>,
    /// By worker: drops of packets whose ingress port is closed.
    pub(super) gone: Vec<PortCounters>,
    pub(super) started: Instant,
    pub(super) died: OnceLock<WorkerDied>,
}
