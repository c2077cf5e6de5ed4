//! Who opened a connection whose source the node's stack has translated: kept beside the entry as long as that is in use, so that policy
//! is evaluated for the same opener whenever it changes.

use super::conn::Conn;
use super::entry::SlotRef;
use super::table::ConnTable;
use crate::packet::Address;

impl ConnTable {
    /// Keeps who opened a connection that was just entered; `None` if the node has translated its source and nobody knows which it was.
    pub(crate) fn set_opener(&self, connection: &Conn<'_>, opener: Option<Address>) {
        let (slot, control) = connection.place();
        let Some(place) = self.storage.openers().get(slot as usize) else { return };
        place.set(opener.map_or(0, |address| address.bits()));
        self.storage.links()[slot as usize].set_own(control);
    }

    /// Who opened a connection, if that is kept beside it.
    pub(crate) fn opener_of(&self, connection: &Conn<'_>) -> Option<Option<Address>> {
        self.opener_at(connection.place())
    }

    pub(super) fn opener_at(&self, (slot, control): SlotRef) -> Option<Option<Address>> {
        let is_own = || self.storage.links().get(slot as usize).is_some_and(|link| link.is_own(control));
        if !is_own() {
            return None;
        }
        let bits = self.storage.openers()[slot as usize].bits();
        // Otherwise the next connection's may have been read.
        let is_same = is_own() && self.entry(slot).control().is_same_generation(control);
        is_same.then(|| (bits != 0).then(|| Address::from_bits(bits)))
    }
}
