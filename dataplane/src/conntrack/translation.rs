//! Connections to Services: two entries that live and die together.
//!
//! A translated connection has the ordinary entry under its *inner* flow, between client and backend, with state and
//! verdict; replies find it. A second entry stands under the *frontend* flow, between client and cluster address, and has
//! neither: it only leads to the first. Both have the flag of translated connections, and a [`Link`] in each names the
//! other by slot and generation. They belong together only while each names the other, so that neither needs to be removed
//! together with the other: an entry whose partner is gone is not found, and is removed by the next who sees it.
//!
//! A packet always leaves with the flow of the partner: a packet of the client leaves under the inner flow, one of the backend
//! under the frontend flow turned round.

use super::beside::{IS_LINK, Link};
use super::conn::Conn;
use super::counters::TableEvent;
use super::entry::{ControlWord, EntryContents, EpochTag, FRONTEND, SlotRef};
use super::hash::{PreparedFlow, key_of};
use super::insert::{InsertError, Insertion, NewConnection};
use super::journal::Ending;
use super::table::ConnTable;
use super::time::Timestamp;
use crate::packet::{Address, Flow};
use crate::services::{Affinity, Backend};

/// A translated connection as one of its packets found it.
pub(crate) struct Translated<'t> {
    /// The ordinary entry.
    pub(crate) connection: Conn<'t>,
    /// The packet's flow between client and backend.
    pub(crate) inner: PreparedFlow,
    /// The flow of the packet that opened it, as the client sent it.
    pub(crate) frontend: Flow,
    /// Whether the packet was found under the frontend flow.
    pub(crate) by_frontend: bool,
}

impl ConnTable {
    /// The translated connection that a found entry with the flag is part of. `None` if the connection has ended.
    pub(crate) fn translated<'t>(&'t self, found: &Conn<'t>, now: Timestamp) -> Option<Translated<'t>> {
        let (slot, control) = found.place();
        let (other, other_control) = self.partner((slot, control))?;
        let partner = self.entry(other).load().filter(|partner| partner.control.is_same_generation(other_control))?;
        let key = key_of(&partner.key);
        let orientation = found.hashed().orientation();
        if !control.is_frontend() {
            let frontend = key.flow(partner.control.original());
            return Some(Translated { connection: *found, inner: *found.hashed(), frontend, by_frontend: false });
        }
        // A client's packet is in the original direction of both.
        let is_original = orientation == control.original();
        let original = partner.control.original();
        let inner = key.flow(if is_original { original } else { original.opposite() });
        let inner = self.prepare(&inner);
        if self.is_expired(inner.protocol(), (other, partner.control), now.tick()) {
            return None;
        }
        let connection = Conn::new(self, &inner, other, partner.control);
        Some(Translated { connection, inner, frontend: found.original_flow(), by_frontend: true })
    }

    /// The frontend flow of a connection, as the client sent it; `None` if it is not translated.
    pub(crate) fn frontend_of(&self, connection: &Conn<'_>) -> Option<Flow> {
        if connection.is_translated() { self.frontend_at(connection.place()) } else { None }
    }

    /// The frontend flow of the translated connection whose ordinary entry this is.
    pub(super) fn frontend_at(&self, place: SlotRef) -> Option<Flow> {
        let (other, control) = self.partner(place)?;
        let frontend = self.entry(other).load().filter(|frontend| frontend.control.is_same_generation(control))?;
        Some(key_of(&frontend.key).flow(frontend.control.original()))
    }

    /// The other entry of a translated connection, if each names the other.
    pub(super) fn partner(&self, place: SlotRef) -> Option<SlotRef> {
        let links = self.storage.links();
        let word = links.get(place.0 as usize)?.word();
        let other = word as u32;
        let back = links.get(other as usize)?.word();
        let control = self.entry(other).control();
        let is_mutual = word & IS_LINK != 0
            && back == Link::to(place)
            && control.is_live()
            && control.is_translated()
            && control.is_frontend() != place.1.is_frontend()
            && word == Link::to((other, control));
        is_mutual.then_some((other, control))
    }

    /// Inserts a connection that is translated: `new` is its first packet under the inner flow, `frontend` the flow under
    /// which the client sent it.
    ///
    /// # Errors
    /// As for [`ConnTable::insert`]. [`TranslatedInsertError::InUse`]: another connection has one of the two flows.
    pub(crate) fn insert_translated(
        &self,
        new: &NewConnection<'_>,
        frontend: &PreparedFlow,
    ) -> Result<Conn<'_>, TranslatedInsertError> {
        let inner = match self.insert_flagged(new, true)? {
            Insertion::Created(inner) => inner,
            Insertion::Found(_) => return Err(TranslatedInsertError::InUse),
        };
        self.insert_frontend(new, frontend, inner.place()).inspect_err(|_| _ = inner.remove())?;
        self.counters.count(TableEvent::Translated);
        Ok(inner)
    }

    /// A client of a Service with affinity has opened a connection to a backend, which it has `kept` if it had it before.
    pub(crate) fn remember_backend(
        &self,
        client: Address,
        (affinity, backend, kept): &(Affinity, Backend, bool),
        now: Timestamp,
    ) {
        self.affinities().remember(affinity, client, backend, now);
        if *kept {
            self.counters.count(TableEvent::AffinityKept);
        }
    }

    fn insert_frontend(
        &self,
        new: &NewConnection<'_>,
        frontend: &PreparedFlow,
        inner: SlotRef,
    ) -> Result<(), TranslatedInsertError> {
        let new = &NewConnection { hashed: frontend, ..*new };
        loop {
            if let Some(found) = self.lookup(frontend) {
                if !self.has_ended(found, new) {
                    return Err(TranslatedInsertError::InUse);
                }
                self.remove_entry(found, Ending::Evicted, None);
                continue;
            }
            let (slot, claimed) = self.make_room(new)?;
            let (epoch, tick) = (EpochTag::of(new.epoch), new.now.tick());
            let control = ControlWord::tentative(claimed, FRONTEND, frontend.orientation, epoch, tick);
            let control = control.with_translated(true);
            self.publish((slot, control), frontend, EntryContents { owner: new.owner, tracking: [0, 0] });
            // Before it can be found: without its partner it would count as one that is left over.
            let links = self.storage.links();
            links[slot as usize].set(inner);
            links[inner.0 as usize].set((slot, control));
            match self.confirm_one(frontend, (slot, control)) {
                Some((winner, found)) if winner == slot && found.is_same_generation(control) => {
                    return Ok(());
                }
                Some(_) => return Err(TranslatedInsertError::InUse),
                None => self.counters.count(TableEvent::Retried),
            }
        }
    }

    /// Whether an entry is what a connection to a Service has left that has ended, or has expired and was not swept yet.
    fn has_ended(&self, frontend: SlotRef, new: &NewConnection<'_>) -> bool {
        if !frontend.1.is_frontend() {
            return false;
        }
        match self.partner(frontend) {
            Some((slot, control)) => self.expire(slot, control, new.now.tick()),
            None => true,
        }
    }

    /// Ends a translated connection.
    pub(crate) fn remove_translated(&self, connection: &Conn<'_>) {
        let place = connection.place();
        let frontend = self.journal.as_ref().and_then(|_| self.frontend_at(place));
        if let Some(other) = self.partner(place) {
            self.storage.links()[place.0 as usize].clear(other);
            self.remove_entry(other, Ending::BackendGone, None);
        }
        connection.remove_as(Ending::BackendGone, frontend);
    }

    /// Removes the entry of this control word, unless it has changed. `frontend`: of a connection whose frontend's entry is
    /// claimed already.
    pub(super) fn remove_entry(&self, (slot, control): SlotRef, ending: Ending, frontend: Option<Flow>) {
        if self.entry(slot).exchange(control, control.claimed()).is_ok() {
            self.release_with((slot, control), ending, frontend);
            self.counters.count(TableEvent::Removed);
        }
    }

    /// Removes what is translated and has no partner: a process may end between its steps. Only before other threads use
    /// the table.
    pub(super) fn recover_translated(&self) {
        let occupied = (0..self.groups).flat_map(|group| self.occupied(group));
        for slot in occupied {
            let control = self.entry(slot).control();
            if control.is_live() && control.is_translated() && self.partner((slot, control)).is_none() {
                self.remove_entry((slot, control), Ending::Evicted, None);
            }
        }
    }
}

/// Why a translated connection was not inserted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TranslatedInsertError {
    /// As for any connection.
    Other(InsertError),
    /// Another connection has one of its flows.
    InUse,
}

impl From<InsertError> for TranslatedInsertError {
    fn from(error: InsertError) -> Self {
        Self::Other(error)
    }
}
