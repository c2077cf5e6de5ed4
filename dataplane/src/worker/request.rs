//! Requests to open ports.

use crate::forward::{Mac, PortId};
use crate::tag;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortRequest {
    /// Its interface, in the calling thread's network namespace.
    pub interface: String,
    pub path: PortPath,
}

/// How a port's packets reach the workers, and come back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortPath {
    /// The interface is the far end of this worker's veth pair, which has one socket for the packets of all pods.
    PairOf(usize),
    /// A pod's interface: the tc programs put its packets into the workers' pairs, with the port's number. The port's MAC
    /// addresses in a snapshot must be those of [`PortRequest::macs`].
    Pod,
    /// The node's own stack, through the workers' pairs. The interface, for messages, is the near end of one of them.
    Node,
}

impl PortRequest {
    pub fn new(interface: impl Into<String>, path: PortPath) -> Self {
        Self { interface: interface.into(), path }
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
