//! Eviction: which connection makes room for a new one.

use super::counters::TableEvent;
use super::entry::{ControlWord, OwnerId};
use super::hash::{PreparedFlow, alternate, home, key_of};
use super::journal::Ending;
use super::state::{EvictionClass, State};
use super::table::{ConnTable, SlotRef};
use super::tags::LANES;
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

/// A connection that may be evicted, and its rank.
type Victim = (EvictionRank, u32, ControlWord);

/// The connections of one owner, in two groups, that come from one network.
#[derive(Clone, Copy, Default)]
struct Crowd {
    network: [u64; 2],
    connections: u32,
    /// The datagram stream that was not used for longest, with its freshness.
    oldest: Option<(u32, u32, ControlWord)>,
}

impl ConnTable {
    /// Evicts a connection from one of the two groups of `hashed` and claims its entry; only of this owner if one is
    /// given. `None` if no connection can be evicted.
    ///
    /// A connection that was updated or replaced since it was read stays, and the search starts again.
    pub(super) fn evict(&self, hashed: &PreparedFlow, owner: Option<OwnerId>, now: Tick) -> Option<SlotRef> {
        loop {
            let victim = self.victim(hashed, owner, now);
            let (rank, slot, control) = match owner {
                None => victim,
                Some(owner) => self.stream_of_the_crowd(hashed, owner, now, victim).or(victim),
            }?;
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

    /// Where an owner is at its quota: a datagram stream of the source that has most of its connections in the two groups of
    /// `hashed`. A stream costs its source two packets, so one machine could fill a pod's share for good; TCP and SCTP cost it a
    /// handshake, and stay.
    ///
    /// What one side alone can make still goes `instead`, since it comes from any number of sources that do not exist. Only a source
    /// that has more than half gives a stream of its own, and not what others have just opened.
    ///
    /// The groups are a random sample of the share, some sixteen of its connections where it is a quarter of the table.
    fn stream_of_the_crowd(
        &self,
        hashed: &PreparedFlow,
        owner: OwnerId,
        now: Tick,
        instead: Option<Victim>,
    ) -> Option<Victim> {
        if instead.is_some_and(|(rank, ..)| rank.liveness < Liveness::Open) {
            return None;
        }
        let own = network_of(source_of(hashed));
        let mut crowds = [Crowd::default(); 2 * LANES as usize];
        let mut known = 0;
        for group in [home(hashed.hash, self.groups), alternate(hashed.hash, self.groups)] {
            for slot in self.occupied(group) {
                let (entry, control) = (self.entry(slot), self.entry(slot).control());
                if entry.owner() != owner || !control.is_live() || control.is_frontend() {
                    continue;
                }
                let network = network_of(entry.opened_by(control));
                let place = crowds[..known].iter().position(|crowd| crowd.network == network).unwrap_or(known);
                known = known.max(place + 1);
                let Some(crowd) = crowds.get_mut(place) else { continue };
                crowd.network = network;
                crowd.connections += 1;
                if let Some(freshness) = self.freshness_of_stream((slot, control), now)
                    && crowd.oldest.is_none_or(|(least, ..)| freshness < least)
                {
                    crowd.oldest = Some((freshness, slot, control));
                }
            }
        }
        let largest = crowds[..known].iter().filter(|crowd| crowd.oldest.is_some());
        // Of two that have as many, the one that wants another.
        let largest = largest.max_by_key(|crowd| (crowd.connections, crowd.network == own))?;
        let all: u32 = crowds[..known].iter().map(|crowd| crowd.connections).sum();
        let gives = match instead {
            Some(_) => largest.network == own && 2 * largest.connections > all,
            None => largest.connections > 1,
        };
        let (freshness, slot, control) = largest.oldest.filter(|_| gives)?;
        let is_of_another = largest.network != own;
        let rank = EvictionRank { liveness: Liveness::Open, is_of_another, class: EvictionClass::Kept, freshness };
        Some((rank, slot, control))
    }

    /// How lately a datagram stream was used; `None` for everything else.
    fn freshness_of_stream(&self, (slot, control): SlotRef, now: Tick) -> Option<u32> {
        let protocol = self.entry(slot).protocol();
        let is_stream = State::of(protocol, control) == Some(State::Assured);
        // The entry of its frontend is about to be inserted, perhaps here.
        let is_whole = || !control.is_translated() || self.partner((slot, control)).is_some();
        (is_stream && is_whole()).then(|| self.freshness((slot, control), now))
    }

    fn freshness(&self, (slot, control): SlotRef, now: Tick) -> u32 {
        let age = control.tick().age(now);
        Tick::MASK - self.kernel_age(slot, now).map_or(age, |kernel| age.min(kernel))
    }

    fn victim(&self, hashed: &PreparedFlow, owner: Option<OwnerId>, now: Tick) -> Option<Victim> {
        let source = source_of(hashed);
        let mut best: Option<Victim> = None;
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
        let is_of_another = !entry.is_opened_by(control, source);
        Some(EvictionRank { liveness, is_of_another, class, freshness: self.freshness((slot, control), now) })
    }
}

/// The address that a flow comes from, as key words.
fn source_of(hashed: &PreparedFlow) -> [u64; 2] {
    match hashed.orientation {
        Orientation::LowToHigh => [hashed.words[0], hashed.words[1]],
        Orientation::HighToLow => [hashed.words[2], hashed.words[3]],
    }
}

/// What one machine can choose its addresses from: of IPv6 the first 64 bits (RFC 4291 section 2.5.1).
fn network_of(address: [u64; 2]) -> [u64; 2] {
    let [high, low] = address;
    let is_v4 = high == 0 && low >> 32 == 0xffff;
    if is_v4 { address } else { [high, 0] }
}
