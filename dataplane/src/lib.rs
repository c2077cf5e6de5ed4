//! Penstock's dataplane: all that touches a packet, and nothing that knows of Kubernetes.
//!
//! A packet's way: [`io`] hands a batch of frames to a [`worker`], which runs [`pipeline`]:
//! parse ([`packet`]), find the connection ([`conntrack`]), else ask the policy ([`policy`]), then rewrite and
//! forward ([`forward`]). What the workers must know of the world is one immutable [`Snapshot`].

pub mod answer;
mod cause;
mod clocks;
pub mod conntrack;
pub mod forward;
pub mod io;
pub mod packet;
pub mod pipeline;
pub mod policy;
mod prefetch;
mod snapshot;
pub mod worker;

pub use cause::Cause;
pub use snapshot::{Epoch, Snapshot};
