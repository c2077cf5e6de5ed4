//! Whose entry a new connection may have when there is no free one.

use super::counters::Event;
use super::entry::{Control, OwnerId};
use super::hash::{Hashed, alternate, home};
use super::state::{State, Worth};
use super::table::{ConnTable, Held};
use super::time::Tick;
use crate::prefetch::prefetch;

/// What makes a connection a better victim than another. Ordered: the least goes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// `None` if its timeout has passed.
    worth: Option<Worth>,
    /// Counts down with age: the least recently used goes.
    freshness: u32,
}

impl ConnTable {
    /// Takes an entry in one of the two groups of `hashed` from a connection that is worth less than a new one, and
    /// of this owner if one is given; `None` if there is no such connection.
    ///
    /// A connection that was touched or re-used since it was looked at stays, and the search begins again.
    pub(super) fn evict(&self, hashed: &Hashed, owner: Option<OwnerId>, now: Tick) -> Option<Held> {
        loop {
            let (rank, slot, control) = self.victim(hashed, owner, now)?;
            if self.entry(slot).exchange(control, control.claimed()).is_ok() {
                self.unclaim_tag(slot, control);
                self.counters.count(match (rank.worth, owner) {
                    (None, _) => Event::Expired,
                    (_, Some(_)) => Event::EvictedQuota,
                    (Some(Worth::Transient), None) => Event::EvictedTransient,
                    (Some(_), None) => Event::EvictedUnreplied,
                });
                return Some((slot, control.claimed_anew()));
            }
        }
    }

    fn victim(&self, hashed: &Hashed, owner: Option<OwnerId>, now: Tick) -> Option<(Rank, u32, Control)> {
        let mut best: Option<(Rank, u32, Control)> = None;
        for group in [home(hashed.hash, self.groups), alternate(hashed.hash, self.groups)] {
            for slot in self.occupied(group) {
                prefetch(self.entry(slot));
            }
            for slot in self.occupied(group) {
                let control = self.entry(slot).control();
                if owner.is_some_and(|owner| owner != control.owner()) {
                    continue;
                }
                if let Some(rank) = self.rank(slot, control, now)
                    && best.is_none_or(|(least, ..)| rank < least)
                {
                    best = Some((rank, slot, control));
                }
            }
            if best.is_some_and(|(rank, ..)| rank.worth < Some(Worth::Unreplied)) {
                break;
            }
        }
        best
    }

    /// How good a victim an entry is; `None` if it is none.
    fn rank(&self, slot: u32, control: Control, now: Tick) -> Option<Rank> {
        if !control.is_live() {
            return None;
        }
        let protocol = self.entry(slot).protocol();
        let freshness = Tick::MASK - control.tick().age(now);
        if self.is_expired(protocol, control, now) {
            return Some(Rank { worth: None, freshness });
        }
        let worth = State::from_code(protocol, control.state())?.worth();
        (worth < Worth::Established).then_some(Rank { worth: Some(worth), freshness })
    }
}
