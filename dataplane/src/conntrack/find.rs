//! Finding the connection of a packet.

use super::conn::Conn;
use super::entry::ControlWord;
use super::hash::PreparedFlow;
use super::table::ConnTable;
use super::time::Timestamp;
use crate::packet::Flow;

/// Where a packet's connection is. The pipeline decides by it before it has the whole [`Conn`].
#[derive(Clone, Copy)]
pub(crate) struct ConnPlace {
    slot: u32,
    control: ControlWord,
}

impl ConnPlace {
    /// Whether it is one of the two entries of a connection to a Service.
    #[inline(always)]
    pub(crate) fn is_translated(self) -> bool {
        self.control.is_translated()
    }
}

impl ConnTable {
    /// The connection of this packet, in either direction. Expired ones are not found.
    #[inline(always)]
    pub fn find(&self, hashed: &PreparedFlow, now: Timestamp) -> Option<Conn<'_>> {
        self.find_place(hashed, now).map(|place| self.connection(hashed, place))
    }

    /// Where the connection of this packet is.
    #[inline(always)]
    pub(crate) fn find_place(&self, hashed: &PreparedFlow, now: Timestamp) -> Option<ConnPlace> {
        let (slot, control) = self.lookup(hashed)?;
        if self.is_expired(hashed.protocol(), (slot, control), now.tick()) {
            return None;
        }
        Some(ConnPlace { slot, control })
    }

    /// The connection that was found for this packet.
    #[inline(always)]
    pub(crate) fn connection(&self, hashed: &PreparedFlow, place: ConnPlace) -> Conn<'_> {
        Conn::new(self, hashed, place.slot, place.control)
    }

    /// The connection of the packet quoted by an ICMP error. Its state is not changed.
    pub fn related(&self, quoted: &Flow, now: Timestamp) -> Option<Conn<'_>> {
        self.find(&self.prepare(quoted), now)
    }
}
