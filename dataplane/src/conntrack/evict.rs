//! Eviction: which connection makes room for a new one.

use super::counters::Event;
use super::entry::{Control, OwnerId};
use super::hash::{Hashed, alternate, home};
use super::state::{EvictionClass, State};
use super::table::{ConnTable, Held};
use super::time::Tick;
use crate::packet::Orientation;
use crate::prefetch::prefetch;

/// Eviction order; the lowest rank is evicted first.
///
/// Expired and closing connections go first. Then a flood from one address evicts its own connections before others;
/// and connections that one side can create alone go before those that both sides have confirmed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    ending: Ending,
    /// Opened by another address than the new connection.
    is_of_another: bool,
    class: EvictionClass,
    /// Decreases with age: the least recently used goes first.
    freshness: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    Expired,
    Closing,
    Open,
}

impl ConnTable {
    /// Evicts a connection from one of the two groups of `hashed` and claims its entry; only of this owner if one is
    /// given. `None` if no connection can be evicted.
    ///
    /// A connection that was updated or replaced since it was read stays, and the search starts again.
    pub(super) fn evict(&self, hashed: &Hashed, owner: Option<OwnerId>, now: Tick) -> Option<Held> {
        loop {
            let (rank, slot, control) = self.victim(hashed, owner, now)?;
            if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                self.forget(slot);
                self.counters.count(match (rank.ending, rank.class, owner) {
                    (Ending::Expired, ..) => Event::Expired,
                    (_, _, Some(_)) => Event::EvictedQuota,
                    (_, EvictionClass::Closing, None) => Event::EvictedClosing,
                    (_, EvictionClass::Unanswered, None) => Event::EvictedUnanswered,
                    (_, EvictionClass::Answered | EvictionClass::Kept, None) => Event::EvictedAnswered,
                });
                return Some((slot, control.claimed_anew()));
            }
        }
    }

    fn victim(&self, hashed: &Hashed, owner: Option<OwnerId>, now: Tick) -> Option<(Rank, u32, Control)> {
        let source = match hashed.orientation {
            Orientation::LowToHigh => [hashed.words[0], hashed.words[1]],
            Orientation::HighToLow => [hashed.words[2], hashed.words[3]],
        };
        let mut best: Option<(Rank, u32, Control)> = None;
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
            if best.is_some_and(|(rank, ..)| rank.ending < Ending::Open) {
                break;
            }
        }
        best
    }

    /// Rank of an entry for a new connection from `source`; `None` if it cannot be evicted.
    fn rank(&self, slot: u32, control: Control, source: &[u64; 2], now: Tick) -> Option<Rank> {
        if !control.is_live() {
            return None;
        }
        let entry = self.entry(slot);
        let protocol = entry.protocol();
        // A revoked connection ranks by its previous state: one that both sides had confirmed is kept while either may
        // still send. Otherwise a packet of the answering side would open a connection in the other direction.
        let class = State::from_code(protocol, control.state())?.eviction_class();
        let (ending, class) = match class {
            _ if self.is_expired(protocol, control, now) => (Ending::Expired, EvictionClass::Closing),
            EvictionClass::Kept => return None,
            EvictionClass::Closing => (Ending::Closing, class),
            EvictionClass::Unanswered | EvictionClass::Answered => (Ending::Open, class),
        };
        let is_of_another = !entry.is_opened_by(control, source);
        Some(Rank { ending, is_of_another, class, freshness: Tick::MASK - control.tick().age(now) })
    }
}
