//! The connection table: one for all workers, of fixed size, lock-free.
//!
//! - A connection has **one entry** for the packets of both directions: the key is canonical, and the entry records
//!   which direction opened it. An entry is a cache line of atomic words.
//! - Lookup, insertion, update and expiry take **no lock**, allocate nothing and never wait. A thread that stalls
//!   occupies at most one entry.
//! - The table is **set-associative**: a key hashes (with a random seed) to a home group of 32 entries and to an
//!   alternate group that is used when the home group is crowded. A cache line of tags selects the candidates among the
//!   32.
//! - If both groups are full, closing connections are evicted first, then those of which only one side has sent, least
//!   recently used first; never those that both sides have confirmed. An owner (pod) has a share, limited to what
//!   others leave free, within which it evicts its own connections; and one of what others open to it, where the source
//!   that holds most gives first.
//!
//! For a batch: [`ConnTable::prepare`] every packet, [`ConnTable::locate`] every packet, then [`ConnTable::find`] for
//! each. On a hit, evaluate policy again unless it was [evaluated under the current epoch](Conn::is_evaluated_under),
//! then [update](Conn::update) the connection. On a miss, evaluate policy and [insert](ConnTable::insert) the
//! connection.

mod answers;
mod config;
mod conn;
mod counters;
mod ended;
mod entry;
mod evict;
mod find;
mod fragments;
mod groups;
mod hash;
#[cfg_attr(all(test, feature = "loom"), expect(dead_code, reason = "only `mapping` uses all of it"))]
mod header;
mod held_syn;
mod insert;
mod journal;
mod kernel_maps;
#[cfg(not(all(test, feature = "loom")))]
mod mapping;
mod name;
mod opener;
mod origin;
mod path;
mod pressure;
mod recover;
mod repeat;
mod sctp;
mod seqlock;
#[cfg_attr(all(test, feature = "loom"), expect(dead_code, reason = "only `mapping` uses all of it"))]
mod shared;
mod state;
mod sweep;
mod sync;
mod table;
mod tags;
mod tcp;
mod time;
mod track;
mod victim;

pub use config::{Config, ConfigError, MidStreamPickup, TableMemory, Timeouts};
pub use conn::{Conn, Reevaluation, Update};
pub use counters::ConnTableStatistics;
pub use entry::OwnerId;
pub use fragments::{DatagramKey, Fragments};
pub use hash::PreparedFlow;
pub use insert::{InsertError, Insertion, NewConnection};
pub use journal::{EndedConnection, Ending};
pub use kernel_maps::{KernelMapFds, KernelMaps};
pub use name::ConnectionName;
pub use origin::{OpenError, TableOrigin, UnusableFile};
pub use path::Traffic;
pub(crate) use path::{BY_NODE, ForwardedConnection};
pub use shared::KernelMapSizes;
pub use state::{EvictionClass, SctpState, State, TcpState};
pub use sweep::{ConnectionInfo, SweepCursor, SweepResult};
pub use table::ConnTable;
pub use time::Timestamp;

#[cfg(all(test, not(feature = "loom")))]
mod model;
#[cfg(all(test, not(feature = "loom")))]
mod tests;

#[cfg(all(test, feature = "loom"))]
mod interleavings;
