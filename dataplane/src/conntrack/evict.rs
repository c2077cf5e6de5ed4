//! Eviction: which connection makes room for a new one.

use super::counters::TableEvent;
use super::entry::{ControlWord, OwnerId};
use super::hash::{PreparedFlow, alternate, home, key_of};
use super::journal::Ending;
use super::state::{EvictionClass, State};
use super::table::{ConnTable, SlotRef};
use super::time::Tick;
use crate::packet::Orientation;
use crate::prefetch::prefetch;

/// Eviction order; the lowest rank is evicted first.
///
/// Expired and closing connections go first. Then a flood from one address evicts its own connections before others;
/// and connections that one side can create alone go before those that both sides have confirmed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EvictionRank {
    liveness: Liveness,
    /// Opened by another address than the new connection.
    is_of_another: bool,
    class: EvictionClass,
    /// Decreases with age: the least recently used goes first.
    freshness: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Liveness {
    Expired,
    Closing,
    Open,
}

impl ConnTable {
    /// Evicts a connection from one of the two groups of `hashed` and claims its entry; only of this owner if one is
    /// given. `None` if no connection can be evicted.
    ///
    /// A connection that was updated or replaced since it was read stays, and the search starts again.
    pub(super) fn evict(&self, hashed: &PreparedFlow, owner: Option<OwnerId>, now: Tick) -> Option<SlotRef> {
        loop {
            let (rank, slot, control) = self.victim(hashed, owner, now)?;
            let partner = self.partner((slot, control)).filter(|_| control.is_frontend());
            if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                // Without its frontend's entry, a connection's packets would open another one.
                let ending = match rank.liveness {
                    Liveness::Expired => Ending::Expired,
                    Liveness::Closing | Liveness::Open => Ending::Evicted,
                };
                let frontend = || Some(key_of(&self.entry(slot).load_claimed(control)?.key).flow(control.original()));
                partner.into_iter().for_each(|other| self.remove_entry(other, ending, frontend()));
                self.note_end(slot, control, ending, None);
                self.forget(slot);
                self.counters.count(match (rank.liveness, rank.class, owner) {
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

    fn victim(
        &self,
        hashed: &PreparedFlow,
        owner: Option<OwnerId>,
        now: Tick,
    ) -> Option<(EvictionRank, u32, ControlWord)> {
        let source = match hashed.orientation {
            Orientation::LowToHigh => [hashed.words[0], hashed.words[1]],
            Orientation::HighToLow => [hashed.words[2], hashed.words[3]],
        };
        let mut best: Option<(EvictionRank, u32, ControlWord)> = None;
        for group in [home(hashed.hash, self.groups), alternate(hashed.hash, self.groups)] {
            for slot in self.occupied(group) {
                prefetch(self.entry(slot));
            }
            for slot in self.occupied(group) {
                let control = self.entry(slot).control();
                if owner.is_some_and(|owner| owner != self.entry(slot).owner()) {
                    continue;
                }
                if let Some(rank) = self.rank(slot, control, &source, now)
                    && best.is_none_or(|(least, ..)| rank < least)
                {
                    best = Some((rank, slot, control));
                }
            }
            if best.is_some_and(|(rank, ..)| rank.liveness < Liveness::Open) {
                break;
            }
        }
        best
    }

    /// Rank of an entry for a new connection from `source`; `None` if it cannot be evicted.
    fn rank(&self, slot: u32, control: ControlWord, source: &[u64; 2], now: Tick) -> Option<EvictionRank> {
        if !control.is_live() {
            return None;
        }
        if control.is_frontend() {
            return match self.partner((slot, control)) {
                Some((other, control)) => self.rank(other, control, source, now),
                None => Some(EvictionRank {
                    liveness: Liveness::Expired,
                    is_of_another: false,
                    class: EvictionClass::Closing,
                    freshness: 0,
                }),
            };
        }
        let entry = self.entry(slot);
        let protocol = entry.protocol();
        // A revoked connection ranks by its previous state: one that both sides had confirmed is kept while either may
        // still send. Otherwise a packet of the answering side would open a connection in the other direction.
        let class = State::from_code(protocol, self.current(protocol, (slot, control)).state())?.eviction_class();
        let (liveness, class) = match class {
            _ if self.is_expired(protocol, (slot, control), now) => (Liveness::Expired, EvictionClass::Closing),
            EvictionClass::Kept => return None,
            // The entry of its frontend is about to be inserted, perhaps here.
            _ if control.is_translated() && self.partner((slot, control)).is_none() => return None,
            EvictionClass::Closing => (Liveness::Closing, class),
            EvictionClass::Unanswered | EvictionClass::Answered => (Liveness::Open, class),
        };
        let age = control.tick().age(now);
        let age = self.kernel_age(slot, now).map_or(age, |kernel| age.min(kernel));
        let is_of_another = !entry.is_opened_by(control, source);
        Some(EvictionRank { liveness, is_of_another, class, freshness: Tick::MASK - age })
    }
}
