//! The network around the workers: which interface is which pod's, and the way into the node's own stack.
//!
//! [`Netlink`] reads [`Facts`]; [`pod_ports`] matches them with the pods, free of I/O; [`HostPort`] is the veth pair
//! that the node's traffic with its pods crosses. Interfaces that are no pod's are never touched.

mod facts;
mod host_port;
mod matching;
mod netlink;
mod refuge;
mod sysctl;

pub use facts::{Facts, HostRoute, Link};
pub use host_port::{HostPort, HostPortError, Lifetime, PodRoute, clear_left, keep_answering_arp};
pub use matching::{PodPort, Problem, pod_ports};
pub use netlink::{Events, Netlink, NetlinkError};
pub use sysctl::{Sysctl, Sysctls};
