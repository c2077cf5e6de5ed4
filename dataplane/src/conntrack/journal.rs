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

use super::entry::{ControlWord, EntrySnapshot};
use super::hash::key_of;
use super::path::{Noted, Traffic};
use super::state::State;
use super::table::ConnTable;
use super::time::{TICK, Tick, Timestamp};
use crate::packet::{Flow, Orientation, TcpFlags};

/// Why a connection left the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ending {
    /// By its timeout, which is short in states in which both ends have closed it.
    Expired,
    /// It made room for another one.
    Evicted,
    /// A packet has opened a new connection with the same addresses and ports.
    Replaced,
    /// The backend that it was translated to is not the Service's any more.
    BackendGone,
    /// A pod's address was released, or the packet that opened it could not be forwarded.
    Removed,
}

impl Ending {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Expired, Self::Evicted, Self::Replaced, Self::BackendGone, Self::Removed];
}

/// A connection that has ended.
#[derive(Clone, Copy, Debug)]
pub struct EndedConnection {
    /// The flow of the packet that opened it; of a connection to a Service that between client and backend.
    pub original: Flow,
    /// Of a connection to a Service: the same packet's flow as the client sent it, to the cluster address.
    pub frontend: Option<Flow>,
    /// Whether its packets traversed the node's own stack.
    pub via_host: bool,
    /// Its last state.
    pub state: State,
    /// Why it ended.
    pub ending: Ending,
    /// When it was opened; `None`: by an earlier process.
    pub begun: Option<Timestamp>,
    /// What the opener sent, and what the other end sent.
    pub traffic: [Traffic; 2],
    /// The flags of all TCP segments that workers forwarded, and those of SYN-ACK and FIN if a program forwarded one.
    pub flags: TcpFlags,
    last: Tick,
}

impl EndedConnection {
    /// Time since its last packet, to within a second.
    pub fn idle(&self, now: Timestamp) -> Duration {
        TICK * self.last.age(now.tick())
    }
}

/// The queue, and what stands beside the entries.
pub(super) struct Journal {
    queue: ArrayQueue<EndedConnection>,
    lost: AtomicU64,
    uncounted: AtomicU64,
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
    fn beside(&self, slot: u32) -> (Option<Timestamp>, TcpFlags) {
        let word = self.beside[slot as usize].load(Ordering::Relaxed);
        ((word >> FLAGS_BITS).checked_sub(1).map(Timestamp::from_millis), TcpFlags(word as u8))
    }

    fn push(&self, ended: EndedConnection) {
        if self.queue.push(ended).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl ConnTable {
    /// Takes the connection that ended first among those that were not taken yet. Always `None` without
    /// [`Config::ended`](super::Config::ended).
    pub fn take_ended(&self) -> Option<EndedConnection> {
        self.journal.as_ref()?.queue.pop()
    }

    /// Ended connections that were lost because nobody took the others fast enough.
    pub fn ended_lost(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.lost.load(Ordering::Relaxed))
    }

    /// Packets that were forwarded and are in no connection's counts, because theirs was removed in the same batch.
    pub fn uncounted(&self) -> u64 {
        self.journal.as_ref().map_or(0, |journal| journal.uncounted.load(Ordering::Relaxed))
    }

    /// When the connection of this entry was opened, and the flags of its segments; neither without a journal.
    pub(super) fn beside(&self, slot: u32) -> (Option<Timestamp>, TcpFlags) {
        let Some(journal) = &self.journal else { return (None, TcpFlags::default()) };
        let (begun, mut flags) = journal.beside(slot);
        let noted = self.uses().map_or_else(Noted::default, |uses| uses[slot as usize].noted());
        if noted.finished.contains(&true) {
            flags = flags.with(TcpFlags::FIN);
        }
        // Of TCP: a datagram's answer has none.
        if noted.answered && flags.contains(TcpFlags::SYN) {
            flags = flags.with(TcpFlags::ACK);
        }
        (begun, flags)
    }

    /// Notes that the connection of `control`, whose entry this thread has claimed, has ended. `frontend`: if it is known
    /// already.
    pub(super) fn note_end(&self, slot: u32, control: ControlWord, ending: Ending, frontend: Option<Flow>) {
        if let Some(journal) = &self.journal
            && control.is_live()
            && !control.is_frontend()
            && let Some(ended) = self.ended((slot, control), ending, frontend)
        {
            journal.push(ended);
        }
    }

    #[cold]
    fn ended(
        &self,
        (slot, control): (u32, ControlWord),
        ending: Ending,
        frontend: Option<Flow>,
    ) -> Option<EndedConnection> {
        let EntrySnapshot { key, .. } = self.entry(slot).load_claimed(control)?;
        let key = key_of(&key);
        let original = control.original();
        let kernel_use = &self.uses()?[slot as usize];
        let (begun, flags) = self.beside(slot);
        let traffic = in_order(kernel_use.traffic(), original);
        // Its first packet was dropped behind the table: nothing came of it.
        if begun.is_some() && traffic.iter().all(|direction| direction.packets == 0) {
            return None;
        }
        let later = |last: Tick, tick: Tick| if last.age(tick) > 0 { tick } else { last };
        Some(EndedConnection {
            original: key.flow(original),
            frontend: frontend.or_else(|| self.frontend_at((slot, control))),
            via_host: control.is_via_host(),
            state: State::of(key.protocol, self.current(key.protocol, (slot, control)))?,
            ending,
            begun,
            traffic,
            flags,
            last: kernel_use.ticks().fold(control.tick(), later),
        })
    }
}

/// What the opener sent, and what the other end sent, of what the lower end and the higher end sent.
pub(super) fn in_order(traffic: [Traffic; 2], original: Orientation) -> [Traffic; 2] {
    [original, original.opposite()].map(|direction| traffic[direction as usize])
}
