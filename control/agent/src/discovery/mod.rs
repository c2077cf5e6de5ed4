//! Network discovery: which interface belongs to which pod, and the host veth into the node's network stack.
//!
//! [`Netlink`] reads [`NetworkState`], [`CniResults`] what CNI plugins have made; [`Bindings`] says which interface is a pod's;
//! [`pod_ports`] matches them with the pods, without I/O; [`HostVeth`] is the veth
//! pair that carries the node's own traffic with its pods. Interfaces that belong to no pod are never changed.

mod bindings;
mod cni_results;
mod host_veth;
mod matching;
mod netlink;
mod network_state;
mod own_links;
mod pod_problem;
mod private_netns;
mod sysctl;
mod worker_pairs;

pub use bindings::{Bindings, FirstBinding};
pub use cni_results::{CniResult, CniResults};
pub use host_veth::{ArpAnswers, HostVeth, Lifetime, PodRoute, SourceFilter, clear_leftovers, keep_answering_arp};
pub use matching::{PodPort, PortLimits, has_network_on, pod_ports};
pub use netlink::{Events, Netlink, NetlinkError};
pub use network_state::{HostRoute, Link, NetworkState, RemoteNetwork, Shaping};
pub use own_links::HostVethError;
pub use pod_problem::PodProblem;
pub use sysctl::{Sysctl, Sysctls};
pub use worker_pairs::{WorkerPairs, WorkerVeth};
