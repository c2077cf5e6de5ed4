//! The journal: what connections were when they ended, for records of flows.
//!
//! Whoever frees an entry puts a copy of it into a lock-free queue, with its last counts: at that moment nobody else changes
//! it. A walk of the table that sees a connection missing would know counts of its last visit only, and nothing of a
//! connection that lived shorter than that. What does not fit the queue is counted, and nobody waits.
//!
//! Beside each entry stands what its 64 bytes have no room for: when it was opened, and the TCP flags seen. A table without
//! a journal has neither, and pays nothing for either.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::queue::ArrayQueue;

use super::path::Traffic;
use super::state::State;
use super::time::{TICK, Tick, Timestamp};
use crate::packet::{Flow, TcpFlags};

/// Why a connection left the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// By its timeout, which is short in states in which both ends have closed it.
    Expired,
    /// It made room for another one.
    Evicted,
    /// A packet has opened a new connection with the same addresses and ports.
    Replaced,
    /// A pod's address was released, or the packet that opened it could not be forwarded.
    Removed,
}

impl Ending {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Expired, Self::Evicted, Self::Replaced, Self::Removed];
}

/// A connection that has ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedConnection {
    /// The flow of the packet that opened it.
    pub original: Flow,
    /// Whether its packets traversed the node's own stack.
    pub via_host: bool,
    /// Its last state.
    pub state: State,
    /// Why it ended.
    pub ending: Ending,
    /// When it was opened; `None`: by an earlier process.
    pub begun: Option<Timestamp>,
    /// The opener's traffic, and the other end's.
    pub traffic: [Traffic; 2],
    /// The flags of all TCP segments that workers forwarded, and those of SYN-ACK and FIN if a program forwarded one.
    pub flags: TcpFlags,
    pub(super) last: Tick,
}

impl EndedConnection {
    /// Time since its last packet, to within a second.
    pub fn idle(&self, now: Timestamp) -> Duration {
        TICK * self.last.age(now.tick())
    }
}

/// The queue, and what stands beside the entries.
pub(super) struct Journal {
    pub(super) queue: ArrayQueue<EndedConnection>,
    pub(super) lost: AtomicU64,
    pub(super) uncounted: AtomicU64,
    /// One more than the time in milliseconds at which the connection was opened, 0 if that is not known; and flags in the
    /// low eight bits.
    beside: Box<[AtomicU64]>,
}

const FLAGS_BITS: u32 = 8;

impl Journal {
    /// For a table of this capacity; `None` if no ended connection is wanted.
    pub(super) fn new(waiting: usize, capacity: usize) -> Option<Self> {
        (waiting > 0).then(|| Self {
            queue: ArrayQueue::new(waiting),
            lost: AtomicU64::new(0),
            uncounted: AtomicU64::new(0),
            beside: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// A connection is about to be written into this entry.
    pub(super) fn begin(&self, slot: u32, now: Timestamp) {
        self.beside[slot as usize].store((now.as_millis() + 1) << FLAGS_BITS, Ordering::Relaxed);
    }

    /// A packet of it is forwarded.
    #[inline]
    pub(super) fn see(&self, slot: u32, flags: TcpFlags) {
        let beside = &self.beside[slot as usize];
        if u64::from(flags.0) & !beside.load(Ordering::Relaxed) != 0 {
            beside.fetch_or(flags.0.into(), Ordering::Relaxed);
        }
    }

    /// A packet was forwarded whose connection had just ended.
    pub(super) fn miss(&self) {
        self.uncounted.fetch_add(1, Ordering::Relaxed);
    }

    /// When the connection of this entry was opened, and the flags of its segments.
    pub(super) fn beside(&self, slot: u32) -> (Option<Timestamp>, TcpFlags) {
        let word = self.beside[slot as usize].load(Ordering::Relaxed);
        ((word >> FLAGS_BITS).checked_sub(1).map(Timestamp::from_millis), TcpFlags(word as u8))
    }

    pub(super) fn push(&self, ended: EndedConnection) {
        if self.queue.push(ended).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}
