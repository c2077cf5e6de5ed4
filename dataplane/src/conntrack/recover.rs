//! Recovery of a table that another process left in its file.

use std::sync::atomic::Ordering as CountOrdering;

use super::counters::TableEvent;
use super::entry::{ControlWord, EntrySnapshot, EpochTag, OwnerId};
use super::hash::{alternate, home, key_of, tag};
use super::journal::Ending;
use super::state::State;
use super::table::ConnTable;
use super::tags::{LANES, bits};
use super::tcp::Window;
use crate::packet::{Flow, Protocol};

impl ConnTable {
    /// Prepares a found table for use before other threads of this process access it: clears operations in progress, removes damaged
    /// entries, marks every connection for evaluation, and resets windows so that they begin with the next segments.
    pub(super) fn recover(&self) {
        // Not each entry of a large table: new connections may wait for this.
        let tagged = (0..self.groups).flat_map(|group| self.occupied(group));
        let untagged = self.untagged.iter().copied();
        tagged
            .chain(untagged.filter(|slot| self.tags(slot / LANES).free_lanes() >> (slot % LANES) & 1 == 1))
            .for_each(|slot| self.recover_entry(slot));
    }

    /// The slots that an earlier process had claimed and not given a tag when it ended, or when this one looked.
    pub(super) fn find_untagged(&self) -> Box<[u32]> {
        let lanes = |group: u32| bits(self.tags(group).free_lanes()).map(move |lane| group * LANES + lane);
        (0..self.groups).flat_map(lanes).filter(|&slot| !self.entry(slot).control().is_free()).collect()
    }

    fn recover_entry(&self, slot: u32) {
        let (group, lane) = (slot / LANES, slot % LANES);
        match self.sound(slot) {
            Some(loaded) => {
                let tag = tag(self.seed.hash(&loaded.key));
                // The kernel's programs may be reading a right one.
                if self.tags(group).lanes_with(tag) >> lane & 1 == 0 {
                    self.tags(group).clear(lane);
                    self.tags(group).set(lane, tag);
                }
                self.keep(slot, &loaded);
            }
            None => {
                self.tags(group).clear(lane);
                self.entry(slot).free(self.entry(slot).control());
            }
        }
    }

    /// The content of an entry, if it is consistent and at a valid position.
    fn sound(&self, slot: u32) -> Option<EntrySnapshot> {
        let loaded = self.entry(slot).load()?;
        let hash = self.seed.hash(&loaded.key);
        let is_home = [home(hash, self.groups), alternate(hash, self.groups)].contains(&(slot / LANES));
        let is_state = State::from_code(key_of(&loaded.key).protocol, loaded.control.state()).is_some();
        (loaded.control.is_live() && is_home && is_state).then_some(loaded)
    }

    fn keep(&self, slot: u32, loaded: &EntrySnapshot) {
        let (entry, control) = (self.entry(slot), loaded.control);
        // A shared table keeps the verdicts by which the kernel's programs forward. This process' epochs are later ones.
        if !self.is_shared() {
            // No other thread uses the table yet: the word cannot have changed.
            let _ = entry.exchange(control, control.with_verdict(EpochTag::NONE, !control.is_revoked()));
        }
        if key_of(&loaded.key).protocol == Protocol::TCP {
            entry.set_tracking(loaded.tracking.map(Window::unsynchronised));
        }
        _ = self.count(loaded.owner);
    }

    /// Assigns to every connection the owner that `owner` returns for the flow that opened it, and removes those
    /// without; returns how many were removed.
    ///
    /// Call it once after a table was [found](super::TableOrigin::Found), before publishing the first snapshot under
    /// which connections are inserted: owners are numbered per process, and a pod may have gone in between. Workers may
    /// use the table meanwhile. Quotas do not remove existing connections.
    pub fn assign_owners(&self, mut owner: impl FnMut(&Flow) -> Option<OwnerId>) -> usize {
        let mut removed = 0;
        for slot in (0..self.groups).flat_map(|group| self.occupied(group)) {
            // Repeat until it is done or the connection was removed: a worker may update it in between.
            while let Some(EntrySnapshot { control, key, .. }) = self.entry(slot).load()
                && control.is_live()
            {
                match owner(&key_of(&key).flow(control.original())) {
                    Some(owner) if self.give_to(slot, control, owner) => break,
                    None if self.entry(slot).exchange(control, control.claimed()).is_ok() => {
                        self.release(slot, control, Ending::Removed);
                        removed += 1;
                        break;
                    }
                    _ => {}
                }
            }
        }
        self.counters.add(TableEvent::Removed, removed as u64);
        removed
    }

    /// Assigns the connection of `control` to this owner, unless it has changed.
    fn give_to(&self, slot: u32, control: ControlWord, owner: OwnerId) -> bool {
        // Counted first, so that a thread that then removes it finds it counted.
        self.owner(owner).fetch_add(1, CountOrdering::Relaxed);
        let before = self.entry(slot).exchange_owner(control, owner);
        self.owner(before.unwrap_or(owner)).fetch_sub(1, CountOrdering::Relaxed);
        before.is_some()
    }
}
