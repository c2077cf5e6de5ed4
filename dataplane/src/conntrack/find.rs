//! Finding the connection of a packet, and who opened a connection.

use super::conn::Conn;
use super::entry::SlotRef;
use super::hash::PreparedFlow;
use super::table::ConnTable;
use super::time::Timestamp;
use crate::packet::{Address, Flow};

impl ConnTable {
    /// The connection of this packet, in either direction. Expired ones are not found.
    #[inline(always)]
    pub fn find(&self, hashed: &PreparedFlow, now: Timestamp) -> Option<Conn<'_>> {
        let (slot, control) = self.lookup(hashed)?;
        if self.is_expired(hashed.protocol(), (slot, control), now.tick()) {
            return None;
        }
        Some(Conn::new(self, hashed, slot, control))
    }

    /// The connection of the packet quoted by an ICMP error. Its state is not changed.
    pub fn related(&self, quoted: &Flow, now: Timestamp) -> Option<Conn<'_>> {
        self.find(&self.prepare(quoted), now)
    }

    /// Who opened a connection, if that is kept beside it.
    pub(crate) fn opener_of(&self, connection: &Conn<'_>) -> Option<Option<Address>> {
        self.opener_at(connection.place())
    }

    pub(super) fn opener_at(&self, (slot, control): SlotRef) -> Option<Option<Address>> {
        let opener = self.storage.openers().get(slot as usize).filter(|_| control.has_opener())?.get();
        // Otherwise the next connection's may have been read.
        self.entry(slot).control().is_same_generation(control).then_some(opener)
    }
}
