//! Eviction: which connection makes room for a new one.

use super::counters::TableEvent;
use super::entry::{OwnerId, SlotRef};
use super::hash::{PreparedFlow, alternate, home};
use super::journal::Ending;
use super::state::{EvictionClass, State};
use super::table::ConnTable;
use super::time::Tick;
use super::victim::{Among, Candidate, Candidates, Liveness, Source};
use crate::packet::Orientation;
use crate::prefetch::prefetch;

/// So many connections of a pod tell which source holds most of its share…
const ENOUGH: usize = 8;
/// … and in so many groups they are looked for, where the share is a small part of the table.
const FAR: u32 = 16;

impl ConnTable {
    /// Evicts a connection and claims its entry: from one of the two groups of `hashed`, of any owner, or one of this owner. One that
    /// others have opened to a pod may be found in another group. `None` if no connection can be evicted.
    ///
    /// A connection that was updated or replaced since it was read stays, and the search starts again.
    pub(super) fn evict(&self, hashed: &PreparedFlow, owner: Option<OwnerId>, now: Tick) -> Option<SlotRef> {
        loop {
            let Candidate { place: (slot, control), liveness, class, .. } = self.victim(hashed, owner, now)?;
            if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                let ending = match liveness {
                    Liveness::Expired => Ending::Expired,
                    Liveness::Closing | Liveness::Open => Ending::Evicted,
                };
                self.note_end(slot, control, ending);
                self.forget(slot);
                self.counters.count(match (liveness, class, owner) {
                    (Liveness::Expired, ..) => TableEvent::Expired,
                    (_, _, Some(_)) => TableEvent::EvictedQuota,
                    (_, EvictionClass::Closing, None) => TableEvent::EvictedClosing,
                    (_, EvictionClass::Unanswered, None) => TableEvent::EvictedUnanswered,
                    (_, EvictionClass::Answered | EvictionClass::Kept, None) => TableEvent::EvictedAnswered,
                });
                return Some((slot, control.claimed_anew()));
            }
        }
    }

    fn victim(&self, hashed: &PreparedFlow, owner: Option<OwnerId>, now: Tick) -> Option<Candidate> {
        let from = Source(match hashed.orientation {
            Orientation::LowToHigh => [hashed.words[0], hashed.words[1]],
            Orientation::HighToLow => [hashed.words[2], hashed.words[3]],
        });
        let (first, second) = (home(hashed.hash, self.groups), alternate(hashed.hash, self.groups));
        let (among, far) = match owner {
            Some(owner) if owner.is_opened_to() => (Among::OpenedToOne, FAR.min(self.groups)),
            _ => (Among::All, 1),
        };
        let others = (1..far).map(|distance| (first + distance) % self.groups).filter(|group| *group != second);
        let mut found = Candidates::new();
        for (index, group) in [first, second].into_iter().chain(others).enumerate() {
            if index > 1
                && found.all().len() >= ENOUGH
                && let Some(victim) = found.victim(from, among)
            {
                return Some(victim);
            }
            for slot in self.occupied(group) {
                prefetch(self.entry(slot));
            }
            for slot in self.occupied(group) {
                let control = self.entry(slot).control();
                if owner.is_none_or(|owner| owner == self.entry(slot).owner())
                    && let Some(candidate) = self.candidate((slot, control), now)
                {
                    found.push(candidate);
                }
            }
            if found.has_ended() {
                break;
            }
        }
        found.victim(from, among)
    }

    /// An entry as a candidate; `None` if it has no connection that can go.
    fn candidate(&self, (slot, control): SlotRef, now: Tick) -> Option<Candidate> {
        if !control.is_live() {
            return None;
        }
        let place = (slot, control);
        let entry = self.entry(slot);
        let protocol = entry.protocol();
        let class = State::from_code(protocol, self.current(protocol, place).state())?.eviction_class();
        let (liveness, class) = match class {
            _ if self.is_expired(protocol, place, now) => (Liveness::Expired, EvictionClass::Closing),
            // Otherwise its pod could flood the table until the entry is gone, and the answering side's next packet
            // would open a connection in the other direction.
            _ if control.is_revoked() => return None,
            EvictionClass::Closing => (Liveness::Closing, class),
            EvictionClass::Unanswered | EvictionClass::Answered | EvictionClass::Kept => (Liveness::Open, class),
        };
        let age = control.tick().age(now);
        let age = self.kernel_age(slot, now).map_or(age, |kernel| age.min(kernel));
        let source = match self.opener_at(place) {
            Some(opener) => {
                opener.map_or_else(Source::default, |it| Source([(it.bits() >> 64) as u64, it.bits() as u64]))
            }
            None => Source(entry.opener_words(control)),
        };
        Some(Candidate { place, liveness, class, source, freshness: Tick::MASK - age })
    }
}
