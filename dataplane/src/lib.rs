//! Penstock's dataplane: everything that processes packets. It does not know Kubernetes.
//!
//! Path of a packet: [`io`] passes a batch of frames to a [`worker`], which runs the [`pipeline`]: parse ([`packet`]),
//! find the connection ([`conntrack`]), choose the backend of a Service ([`services`]), evaluate policy ([`policy`]),
//! then rewrite and forward ([`forward`]). Tables of policy, Services and forwarding are one immutable [`Snapshot`].

mod batch;
pub mod conntrack;
mod drop_reason;
mod epoch;
pub mod forward;
mod grace;
pub mod io;
pub mod limits;
pub mod names;
pub mod packet;
pub mod pipeline;
pub mod policy;
mod prefetch;
pub mod reply;
pub mod services;
mod snapshot;
pub mod worker;

pub use drop_reason::DropReason;
pub use epoch::Epoch;
pub use snapshot::Snapshot;
