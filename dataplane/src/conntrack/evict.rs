//! Whose entry a new connection may have when there is no free one.

use super::counters::Event;
use super::entry::{Control, OwnerId};
use super::hash::{Hashed, alternate, home};
use super::state::{EvictionClass, State};
use super::table::{ConnTable, Held};
use super::time::Tick;
use crate::packet::Orientation;
use crate::prefetch::prefetch;

/// What makes a connection a better victim than another. Ordered: the least goes.
///
/// What is ending goes first. Then a flood from one address takes from itself before it takes from others; and what anyone
/// can make alone goes before what two sides have agreed to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    ending: Ending,
    /// Opened by another address than the new connection.
    is_of_another: bool,
    class: EvictionClass,
    /// Counts down with age: the least recently used goes.
    freshness: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    Expired,
    Closing,
    Open,
}

impl ConnTable {
    /// Takes an entry in one of the two groups of `hashed` from a connection that goes for a new one, and of this owner if
    /// one is given; `None` if there is no such connection.
    ///
    /// A connection that was touched or re-used since it was read stays, and the search begins again.
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

    /// How good a victim an entry is for a connection from `source`; `None` if it is none.
    fn rank(&self, slot: u32, control: Control, source: &[u64; 2], now: Tick) -> Option<Rank> {
        if !control.is_live() {
            return None;
        }
        let entry = self.entry(slot);
        let protocol = entry.protocol();
        // By the state that it was in, also if policy has ended it: one that both sides had agreed to is remembered while
        // either may still send, or a packet of the side that answered would open it the other way.
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
