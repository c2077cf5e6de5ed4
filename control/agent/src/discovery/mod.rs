//! Network discovery: which interface belongs to which pod, and the host veth into the node's network stack.
//!
//! [`Netlink`] reads [`NetworkState`], [`CniResults`] what CNI plugins have made; [`Bindings`] says which interface is a pod's;
//! [`pod_ports`] matches them with the pods, without I/O; [`WorkerPairs`] are the veth pairs to the workers. Interfaces that belong to no
//! pod are never changed.

mod bindings;
mod cni_results;
mod matching;
mod netlink;
mod network_state;
mod pod_problem;
mod sysctl;
mod worker_pairs;

pub use bindings::{Bindings, FirstBinding};
pub use cni_results::{CniResult, CniResults};
pub use matching::{PodPort, PortLimits, has_network_on, pod_ports};
pub use netlink::{Events, Netlink, NetlinkError};
pub use network_state::{HostRoute, Link, NetworkState, RemoteNetwork, Shaping};
pub use pod_problem::PodProblem;
pub use sysctl::Sysctl;
pub use worker_pairs::{WorkerPairError, WorkerPairs, WorkerVeth, clear_leftovers};
