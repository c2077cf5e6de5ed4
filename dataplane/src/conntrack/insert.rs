//! Inserting a connection: room for it, and one entry where several workers insert it at once.

use super::config::MidStreamPickup;
use super::conn::Conn;
use super::counters::TableEvent;
use super::entry::{ControlWord, EntryContents, EpochTag, OwnerId, SlotRef};
use super::hash::{PreparedFlow, alternate, home};
use super::sync::{Ordering, fence};
use super::table::ConnTable;
use super::tags::{LANES, bits};
use super::time::Timestamp;
use super::track;
use crate::epoch::Epoch;
use crate::packet::{Address, Transport};

/// A connection to insert.
#[derive(Clone, Copy, Debug)]
pub struct NewConnection<'a> {
    /// The prepared flow of the first packet; its direction becomes the original one.
    pub hashed: &'a PreparedFlow,
    /// The first packet.
    pub transport: &'a Transport,
    /// Owner whose quota it counts against.
    pub owner: OwnerId,
    /// Whether its packets traverse the node's own stack, in both directions.
    pub via_host: bool,
    /// Who opens it, where the node's stack has translated that one's address; `Some(None)` if nobody knows who it is.
    pub opener: Option<Option<Address>>,
    /// The snapshot under which policy allowed it.
    pub epoch: Epoch,
    /// Current time.
    pub now: Timestamp,
}

/// Result of [`ConnTable::insert`].
pub enum Insertion<'t> {
    /// The connection was inserted, with the state of its first packet.
    Created(Conn<'t>),
    /// It was inserted by another thread meanwhile: handle it as if it had been found.
    Found(Conn<'t>),
}

/// Why a connection was not inserted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum InsertError {
    /// Both of its groups are full of connections that cannot be evicted.
    #[error("the connection table is full")]
    Full,
    /// Its owner is at its quota, and nothing in its groups can be evicted.
    #[error("the owner's share of the connection table is used up")]
    Quota,
    /// Such a packet cannot open a connection.
    #[error("the packet cannot open a connection")]
    CannotOpen,
}

/// If the home group has more entries than this, new ones go to the alternate group if that has fewer. Below it entries
/// are in the group that is searched first.
const CROWDED: u32 = LANES * 3 / 4;

impl ConnTable {
    /// Inserts a connection. If two workers insert the same one concurrently, from either direction, one entry remains.
    ///
    /// # Errors
    /// Why it was rejected; each reason is counted.
    pub fn insert(&self, new: &NewConnection<'_>) -> Result<Insertion<'_>, InsertError> {
        let hashed = new.hashed;
        let now = new.now.tick();
        let midstream_pickup = self.allows_pickup(new.owner, new.now);
        let opening = track::open(hashed.protocol(), hashed.orientation, new.transport, midstream_pickup, now);
        let Some((state, tracking)) = opening else {
            self.counters.count(TableEvent::RefusedCannotOpen);
            return Err(InsertError::CannotOpen);
        };
        let contents = EntryContents { owner: new.owner, tracking };
        loop {
            if let Some((slot, control)) = self.lookup(hashed) {
                if !self.is_expired(hashed.protocol(), (slot, control), new.now.tick()) {
                    self.counters.count(TableEvent::Raced);
                    return Ok(Insertion::Found(Conn::new(self, hashed, slot, control)));
                }
                // Check again whether it was removed or updated, or another thread is removing it.
                self.expire(slot, control, now);
                continue;
            }
            let (slot, claimed) = self.make_room(new)?;
            let epoch = EpochTag::of(new.epoch);
            let control = ControlWord::tentative(claimed, state.code(), hashed.orientation, epoch, now);
            let control = control.with_via_host(new.via_host).with_opener(new.opener.is_some());
            if let Some(journal) = &self.journal {
                journal.begin(slot, new.now);
            }
            if let Some(opener) = new.opener {
                self.storage.openers()[slot as usize].set(opener);
            }
            self.publish((slot, control), hashed, contents);
            match self.confirm_one(hashed, (slot, control)) {
                Some((winner, found)) if winner == slot && found.is_same_generation(control) => {
                    return Ok(Insertion::Created(Conn::new(self, hashed, slot, found)));
                }
                Some((winner, found)) => {
                    self.counters.count(TableEvent::Raced);
                    return Ok(Insertion::Found(Conn::new(self, hashed, winner, found)));
                }
                None => self.counters.count(TableEvent::Retried),
            }
        }
    }

    /// Whether a mid-stream packet may currently open a connection for this owner.
    fn allows_pickup(&self, owner: OwnerId, now: Timestamp) -> bool {
        let is_time = match self.midstream_pickup {
            MidStreamPickup::Never => false,
            MidStreamPickup::AfterLoss(end) | MidStreamPickup::Until(end) => now < end,
            MidStreamPickup::Always => true,
        };
        is_time && self.len_of(owner) < (self.limit() / 2).max(1)
    }

    /// A claimed entry for a new connection, counted for its owner.
    fn make_room(&self, new: &NewConnection<'_>) -> Result<SlotRef, InsertError> {
        let now = new.now.tick();
        let limit = self.limit();
        if self.count(new.owner) >= limit {
            let Some((slot, claimed)) = self.evict(new.hashed, Some(new.owner), now) else {
                self.uncount(new.owner);
                self.counters.count(TableEvent::RefusedQuota);
                return Err(InsertError::Quota);
            };
            // The table has filled up since its owner got so many connections: evict one more of them.
            if self.counted(new.owner) > self.limit()
                && let Some((slot, claimed)) = self.evict(new.hashed, Some(new.owner), now)
            {
                self.entry(slot).free(claimed);
            }
            let group = slot / LANES;
            if group == home(new.hashed.hash, self.groups) || group == alternate(new.hashed.hash, self.groups) {
                return Ok((slot, claimed));
            }
            self.entry(slot).free(claimed);
        }
        let found = self.claim_free(new.hashed).or_else(|| self.evict(new.hashed, None, now));
        found.ok_or_else(|| {
            self.uncount(new.owner);
            self.counters.count(TableEvent::RefusedFull);
            InsertError::Full
        })
    }

    /// Claims a free entry in the home group, or in the alternate one if the home group is crowded and the other is
    /// less so.
    fn claim_free(&self, hashed: &PreparedFlow) -> Option<SlotRef> {
        let (first, second) = (home(hashed.hash, self.groups), alternate(hashed.hash, self.groups));
        let crowded = self.tags(first).occupancy();
        let groups = if crowded > CROWDED && self.tags(second).occupancy() < crowded {
            [second, first]
        } else {
            [first, second]
        };
        groups.into_iter().find_map(|group| {
            bits(self.tags(group).free_lanes()).find_map(|lane| {
                let slot = group * LANES + lane;
                Some((slot, self.entry(slot).claim()?))
            })
        })
    }

    /// Writes a connection into a claimed entry and publishes it to other inserts as tentative.
    pub(super) fn publish(&self, (slot, control): SlotRef, hashed: &PreparedFlow, contents: EntryContents) {
        // The tag first: a thread that sees the written entry and scans the tags finds it.
        self.tags(slot / LANES).set(slot % LANES, hashed.tag());
        if let Some(uses) = self.uses() {
            uses[slot as usize].reset(control.generation());
        }
        self.entry(slot).publish(control, &hashed.words, contents);
    }

    /// Confirms one tentative entry of this key as the visible connection and removes all others. Returns the confirmed
    /// entry, which another insert may have made, or `None` if `candidate` was removed without a replacement.
    ///
    /// Why two entries of a key are never live: let P confirm p and Q confirm q, where p is the lower slot. Each
    /// scanned after its candidate was published, with a sequentially consistent fence between, so one of the two scans
    /// saw the other's candidate.
    /// 1. Q saw p tentative: it gave up q for p, the lower one. Q saw p live: it gave up q.
    /// 2. P saw q tentative: it removed q, the higher one, so that Q's confirmation fails; or it could not because q
    ///    had become live, and gave up p. P saw q live: it gave up p.
    ///
    /// No thread waits: one that finds another's candidate completes that insert instead.
    fn confirm_one(&self, hashed: &PreparedFlow, mut candidate: SlotRef) -> Option<SlotRef> {
        'candidates: loop {
            // Between the publication of the candidate (ours, or another's that we have seen) and the scan.
            fence(Ordering::SeqCst);
            let (slot, control) = candidate;
            for (other, found) in self.written(hashed) {
                if other == slot {
                    continue;
                }
                if found.is_live() {
                    return Some(self.withdraw(candidate).err().unwrap_or((other, found)));
                }
                if other < slot {
                    if let Err(confirmed) = self.withdraw(candidate) {
                        return Some(confirmed);
                    }
                    candidate = (other, found);
                    continue 'candidates;
                }
                if let Err(confirmed) = self.withdraw((other, found)) {
                    return Some(self.withdraw(candidate).err().unwrap_or(confirmed));
                }
            }
            return match self.entry(slot).exchange(control, control.confirmed()) {
                Ok(()) => {
                    // Counted here and not by the thread that made the candidate, since it may be removed before that
                    // thread continues.
                    self.counters.count(TableEvent::Created);
                    Some((slot, control.confirmed()))
                }
                Err(found) if found.is_same_generation(control) => Some((slot, found)),
                Err(_) => None,
            };
        }
    }

    /// Removes a tentative entry.
    ///
    /// # Errors
    /// The entry, if it has become live; it stays.
    fn withdraw(&self, (slot, control): SlotRef) -> Result<(), SlotRef> {
        match self.entry(slot).exchange(control, control.claimed()) {
            Ok(()) => {
                self.forget(slot);
                self.entry(slot).free(control.claimed());
                Ok(())
            }
            Err(found) if found.is_same_generation(control) => Err((slot, found)),
            Err(_) => Ok(()),
        }
    }
}
