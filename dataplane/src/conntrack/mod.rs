//! The connection table: one for all workers, fixed in size, without locks.
//!
//! - A connection has **one entry**, found by the packets of both its directions: the key is canonical, and the
//!   entry knows which direction opened it. An entry is a cache line of atomic words.
//! - Finding, entering, updating and expiring take **no lock**, allocate nothing and wait for nobody. A thread that
//!   stops in the middle holds at most one entry, which the others do without.
//! - The table is **set-associative**: a key hashes (with a seed that is random at each start) to a home group of 32
//!   entries and to an alternate one for when the home is crowded. A line of tags says which of the 32 to look at.
//! - When both groups are full, connections that are ending make room first, then those of which one side alone was heard,
//!   the least recently used first; never one that both sides have agreed to. An owner (pod) has a share, no more than what
//!   others leave free, within which it evicts its own.
//!
//! The usual course for a batch: [`ConnTable::prepare`] every packet, [`ConnTable::locate`] every packet, then for
//! each [`ConnTable::find`]; for a hit policy is asked again if it is not [of the current epoch](Conn::is_of_epoch), then it
//! is [updated](Conn::update); for a miss policy is asked and the connection [inserted](ConnTable::insert).

mod config;
mod conn;
mod counters;
mod entry;
mod evict;
mod fragments;
mod hash;
#[cfg(not(all(test, feature = "loom")))]
mod mapping;
mod opened;
mod recover;
mod sctp;
mod state;
mod sweep;
mod sync;
mod table;
mod tags;
mod tcp;
mod time;
mod track;

pub use config::{Config, ConfigError, PickUp, Timeouts};
pub use conn::{Conn, Judged, Update};
pub use counters::Statistics;
pub use entry::OwnerId;
pub use fragments::Fragments;
pub use hash::Hashed;
pub use opened::{OpenError, Opened, Unusable};
pub use state::{EvictionClass, SctpState, State, TcpState};
pub use sweep::{Connection, SweepCursor, Swept};
pub use table::{ConnTable, Insertion, NewConn, Refused};
pub use time::Timestamp;

#[cfg(all(test, not(feature = "loom")))]
mod model;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

#[cfg(all(test, feature = "loom"))]
mod interleavings;
