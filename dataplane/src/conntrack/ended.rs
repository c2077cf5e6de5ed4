//! Noting that a connection has ended, and with which counts.

use std::sync::atomic::Ordering;

use super::entry::{ControlWord, EntrySnapshot, SlotRef};
use super::hash::key_of;
use super::journal::{EndedConnection, Ending};
use super::path::{Noted, Traffic};
use super::state::State;
use super::table::ConnTable;
use super::time::{Tick, Timestamp};
use crate::packet::{Orientation, TcpFlags};

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
        // For TCP alone: a datagram's answer has none.
        if noted.answered && flags.contains(TcpFlags::SYN) {
            flags = flags.with(TcpFlags::ACK);
        }
        (begun, flags)
    }

    /// Notes that the connection of `control`, whose entry this thread has claimed, has ended.
    pub(super) fn note_end(&self, slot: u32, control: ControlWord, ending: Ending) {
        if let Some(journal) = &self.journal
            && control.is_live()
            && let Some(ended) = self.ended((slot, control), ending)
        {
            journal.push(ended);
        }
    }

    #[cold]
    fn ended(&self, (slot, control): SlotRef, ending: Ending) -> Option<EndedConnection> {
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

/// The opener's traffic and the other end's, from the lower end's and the higher end's.
pub(super) fn in_order(traffic: [Traffic; 2], original: Orientation) -> [Traffic; 2] {
    [original, original.opposite()].map(|direction| traffic[direction as usize])
}
