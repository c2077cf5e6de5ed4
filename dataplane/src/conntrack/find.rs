//! Finding the connection of a packet.

use super::conn::Conn;
use super::hash::PreparedFlow;
use super::table::ConnTable;
use super::time::Timestamp;
use crate::packet::Flow;

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
}
