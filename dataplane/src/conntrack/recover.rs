//! Taking over a table that another process left in its file.

use std::sync::atomic::Ordering as CountOrdering;

use super::counters::Event;
use super::entry::{Control, EpochTag, Loaded, OwnerId};
use super::hash::{alternate, home, key_of, tag};
use super::state::State;
use super::table::ConnTable;
use super::tags::LANES;
use super::tcp::Window;
use crate::packet::{Flow, Protocol};

impl ConnTable {
    /// Makes a table that was found fit for use, before any other thread has it: what was under way is cleared, what is
    /// damaged removed, every connection left is to be judged again, and its windows begin with its next segments.
    pub(super) fn recover(&mut self) {
        for slot in 0..self.capacity() as u32 {
            let (group, lane) = (slot / LANES, slot % LANES);
            match self.sound(slot) {
                Some(loaded) => {
                    let hash = self.seed.hash(&loaded.key);
                    self.tags(group).clear(lane);
                    self.tags(group).set(lane, tag(hash));
                    self.take_over(slot, &loaded);
                }
                None => {
                    self.tags(group).clear(lane);
                    self.entry(slot).free(self.entry(slot).control());
                }
            }
        }
    }

    /// What is in an entry, if a connection is there whole and where it belongs.
    fn sound(&self, slot: u32) -> Option<Loaded> {
        let loaded = self.entry(slot).load()?;
        let hash = self.seed.hash(&loaded.key);
        let is_home = [home(hash, self.groups), alternate(hash, self.groups)].contains(&(slot / LANES));
        let is_state = State::from_code(key_of(&loaded.key).protocol, loaded.control.state()).is_some();
        (loaded.control.is_live() && is_home && is_state).then_some(loaded)
    }

    fn take_over(&self, slot: u32, loaded: &Loaded) {
        let (entry, control) = (self.entry(slot), loaded.control);
        // No other thread has the table yet: nothing can have changed the word.
        let _ = entry.exchange(control, control.with_verdict(EpochTag::NONE, !control.is_revoked()));
        if key_of(&loaded.key).protocol == Protocol::TCP {
            entry.set_tracking(loaded.tracking.map(Window::unsynchronised));
        }
        _ = self.count(loaded.owner);
    }

    /// Gives every connection to the owner that `owner` names for the flow that opened it, and removes those for which
    /// it names none; how many those were.
    ///
    /// To be called once after a table was [found](super::Opened::Found), before the first snapshot is published under
    /// which connections are entered: owners are numbered anew by every process, and a pod may have gone in between.
    /// Workers may use the table meanwhile. Quotas do not remove what is there.
    pub fn assign_owners(&self, mut owner: impl FnMut(&Flow) -> Option<OwnerId>) -> usize {
        let mut removed = 0;
        for slot in (0..self.groups).flat_map(|group| self.occupied(group)) {
            // Until it is done or the connection is gone: a worker may touch it in between.
            while let Some(Loaded { control, key, .. }) = self.entry(slot).load()
                && control.is_live()
            {
                match owner(&key_of(&key).flow(control.original())) {
                    Some(owner) if self.give_to(slot, control, owner) => break,
                    None if self.entry(slot).exchange(control, control.claimed()).is_ok() => {
                        self.release(slot, control);
                        removed += 1;
                        break;
                    }
                    _ => {}
                }
            }
        }
        self.counters.add(Event::Removed, removed as u64);
        removed
    }

    /// Gives the connection that `control` shows to this owner, unless it has changed.
    fn give_to(&self, slot: u32, control: Control, owner: OwnerId) -> bool {
        // Counted first, so that whoever removes it then finds it counted.
        self.owner(owner).fetch_add(1, CountOrdering::Relaxed);
        let before = self.entry(slot).exchange_owner(control, owner);
        self.owner(before.unwrap_or(owner)).fetch_sub(1, CountOrdering::Relaxed);
        before.is_some()
    }
}
