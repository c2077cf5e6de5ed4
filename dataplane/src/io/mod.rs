//! Frame I/O: the UMEM and its account, and the socket of a worker's pair.
//!
//! One [`Umem`] holds the frames of all workers. Every frame is in exactly one place at any time; the account says how many
//! are where.

mod account;
mod batch;
mod error;
mod gso;
mod interface;
mod umem;
mod xsk;

pub use account::FrameAccount;
pub(crate) use account::{FrameCache, FrameOwner, FramePool, QueueSlot};
pub use batch::RxBatch;
pub use error::{PortError, UmemError};
pub(crate) use gso::{GsoPort, GsoSocket};
pub(crate) use interface::longest_frame;
pub use interface::{InterfaceFacts, Offloads, has_ipv4_address, largest_mtu, takes_long_packets};
pub use umem::{Pages, Umem, UmemConfig};
pub(crate) use xsk::{Kick, XskQueue, XskStatistics};
