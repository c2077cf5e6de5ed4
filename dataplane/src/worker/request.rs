//! Requests to open ports.

use std::time::Duration;

use crate::forward::{Mac, PortId};
use crate::tag;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortRequest {
    /// Its interface, in the calling thread's network namespace.
    pub interface: String,
    pub path: PortPath,
    /// How long to wait for a queue that another socket uses: the kernel frees a queue some time after closing.
    pub patience: Duration,
}

/// How a port's packets reach the workers, and come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortPath {
    /// By sockets on the interface: on this many of its RX queues, starting with the first; `None`: on all. Packets of
    /// other queues find no socket.
    Queues(Option<u32>),
    /// The interface is the far end of this worker's veth pair: by one socket, with the packets of all ports that are
    /// [`PortPath::Pairs`].
    PairOf(usize),
    /// Through the workers' pairs: the tcx programs on the interface take the packets there, with the port's number. The
    /// port's MAC addresses in a snapshot must be those of [`PortRequest::macs`].
    Pairs,
    /// The node's own stack, through the workers' pairs. The interface, for messages, is the near end of one of them.
    NodeByPairs,
}

impl PortRequest {
    /// All queues of this interface.
    pub fn new(interface: impl Into<String>) -> Self {
        Self { interface: interface.into(), path: PortPath::Queues(None), patience: Duration::from_secs(3) }
    }

    /// The MAC addresses (own, peer) by which a worker's frames reach the pod behind a port on pairs, or the node's stack
    /// if there is no pod.
    pub const fn macs(port: Option<PortId>) -> (Mac, Mac) {
        match port {
            Some(port) => (tag::FROM, tag::to_pod(port)),
            None => (tag::FROM, tag::to_node()),
        }
    }
}
