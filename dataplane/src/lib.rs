//! Penstock's dataplane: everything that processes packets. It does not know Kubernetes.
//!
//! Path of a packet: `io` passes a batch of frames to a `worker`, which runs the [`pipeline`]: parse ([`packet`]),
//! find the connection ([`conntrack`]), evaluate policy ([`policy`]),
//! then rewrite and forward ([`forward`]). Tables of policy, Services and forwarding are one immutable [`Snapshot`].
//!
//! Sockets and workers are behind the feature `af-xdp`. Without it this is the packet core, which links no C library.

// Only sockets and workers use some of what the core has for them.
#![cfg_attr(not(feature = "af-xdp"), expect(dead_code, unused_imports))]

mod batch;
mod capabilities;
pub mod conntrack;
mod drop_reason;
mod epoch;
pub mod filter_program;
pub mod forward;
mod grace;
#[cfg(feature = "af-xdp")]
pub mod io;
pub mod limits;
pub mod names;
pub mod packet;
pub mod pipeline;
pub mod policy;
mod prefetch;
mod program_outcome;
pub mod reply;
mod snapshot;
mod tag;
#[cfg(feature = "af-xdp")]
pub mod worker;

pub use capabilities::{drop_capabilities, without_capabilities};
pub use drop_reason::DropReason;
pub use epoch::Epoch;
pub use program_outcome::ProgramOutcome;
pub use snapshot::Snapshot;
