//! Which of several connections gives its entry to a new one: the choice alone, without the table.

use std::cmp::Reverse;

use super::entry::{ControlWord, SlotRef};
use super::state::EvictionClass;
use super::tags::LANES;

/// Two groups, of which each entry may be a candidate.
const MOST: usize = 2 * LANES as usize;
/// Both sides have agreed to such a connection: only who holds that many of the candidates gives one.
const HOARD: u8 = 2;

/// The address that opened a connection, as the words of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Source(pub(super) [u64; 2]);

/// A connection that might go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) place: SlotRef,
    pub(super) liveness: Liveness,
    pub(super) class: EvictionClass,
    pub(super) source: Source,
    /// Decreases with age: the least recently used goes first.
    pub(super) freshness: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Liveness {
    Expired,
    Closing,
    Open,
}

/// Whose connections the new one may take the place of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Among {
    /// Those of one opener, or of all owners where the table is full: nothing goes that both sides have agreed to.
    All,
    /// Those that others have opened to one pod: who holds most gives, whatever it is.
    OpenedToOne,
}

/// The candidates that were found.
pub(super) struct Candidates {
    list: [Candidate; MOST],
    found: usize,
}

/// Eviction order; the lowest goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    liveness: Liveness,
    holder: Holder,
    /// How many the source's network holds, and how many the source.
    holds: Reverse<(u8, u8)>,
    class: EvictionClass,
    freshness: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    /// Who opens the new connection.
    Own,
    Another,
    /// As far as it has agreed with the pod: it can be held to what it holds, since nobody else has made it in its name.
    Proven,
}

impl Source {
    /// The addresses that one machine may well have all of: an IPv4 address, 64 bits of an IPv6 one.
    const fn network(self) -> [u64; 2] {
        let Self([high, low]) = self;
        if high == 0 { [high, low] } else { [high, 0] }
    }
}

impl Candidates {
    pub(super) fn new() -> Self {
        let none = Candidate {
            place: (0, ControlWord(0)),
            liveness: Liveness::Open,
            class: EvictionClass::Kept,
            source: Source::default(),
            freshness: 0,
        };
        Self { list: [none; MOST], found: 0 }
    }

    /// One more, if there is room.
    pub(super) fn push(&mut self, candidate: Candidate) {
        if let Some(place) = self.list.get_mut(self.found) {
            *place = candidate;
            self.found += 1;
        }
    }

    pub(super) fn all(&self) -> &[Candidate] {
        &self.list[..self.found]
    }

    /// Whether one of them has ended, so that there is no need to look further.
    pub(super) fn has_ended(&self) -> bool {
        self.all().iter().any(|candidate| candidate.liveness < Liveness::Open)
    }

    /// The one that goes for a connection that `from` opens; `None`: all of them stay.
    pub(super) fn victim(&self, from: Source, among: Among) -> Option<Candidate> {
        let own = self.of_network(from);
        let holds_most = among == Among::OpenedToOne && self.all().iter().all(|it| self.of_network(it.source) <= own);
        let rank = |it: &Candidate| match among {
            Among::All => it.rank(from),
            Among::OpenedToOne => {
                it.rank_by_source(from, holds_most, (self.of_network(it.source), self.of_source(it.source)))
            }
        };
        let ranked = self.all().iter().filter_map(|it| Some((rank(it)?, it)));
        ranked.min_by_key(|(rank, _)| *rank).map(|(_, candidate)| *candidate)
    }

    fn of_network(&self, source: Source) -> u8 {
        self.open().filter(|other| other.network() == source.network()).count() as u8
    }

    fn of_source(&self, source: Source) -> u8 {
        self.open().filter(|other| *other == source).count() as u8
    }

    /// Who opened those that are open.
    fn open(&self) -> impl Iterator<Item = Source> {
        self.all().iter().filter(|it| it.liveness == Liveness::Open).map(|it| it.source)
    }
}

impl Candidate {
    /// A flood from one address takes its own place before others'; what one side can create alone goes before what both have confirmed,
    /// which stays.
    fn rank(&self, from: Source) -> Option<Rank> {
        let Self { liveness, class, freshness, source, .. } = *self;
        let holder = if source == from { Holder::Own } else { Holder::Another };
        (class != EvictionClass::Kept).then_some(Rank { liveness, holder, holds: Reverse((0, 0)), class, freshness })
    }

    /// The same in a share that others fill. Who holds most gives its own for more, but nothing that both sides have agreed to while
    /// there is anything that only one has: addresses of that are easily forged, so that any number may be one machine's.
    fn rank_by_source(&self, from: Source, holds_most: bool, held: (u8, u8)) -> Option<Rank> {
        let Self { liveness, class, freshness, source, .. } = *self;
        if liveness < Liveness::Open {
            return self.rank(from);
        }
        let is_own = holds_most && source.network() == from.network();
        let holder = match class {
            EvictionClass::Kept if held.0 < HOARD => return None,
            EvictionClass::Kept => Holder::Proven,
            _ if is_own => Holder::Own,
            EvictionClass::Answered => Holder::Proven,
            EvictionClass::Closing | EvictionClass::Unanswered => Holder::Another,
        };
        let holds = Reverse(if holder == Holder::Proven { held } else { (0, 0) });
        Some(Rank { liveness, holder, holds, class, freshness })
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const V4: u64 = 0xffff_c000_0200;

    /// Three IPv4 addresses, and three of one IPv6 network with one of another.
    fn any_source() -> impl Strategy<Value = Source> {
        let v4 = (0..3u64).prop_map(|host| Source([0, V4 + host]));
        let v6 = (0..3u64).prop_map(|host| Source([0xfd00 << 48, host]));
        prop_oneof![4 => v4, 3 => v6, 1 => Just(Source([0xfd01 << 48, 1]))]
    }

    fn any_candidate() -> impl Strategy<Value = Candidate> {
        let class = prop_oneof![
            1 => Just(EvictionClass::Unanswered),
            1 => Just(EvictionClass::Answered),
            3 => Just(EvictionClass::Kept),
        ];
        let ended = prop_oneof![40 => Just(Liveness::Open), 1 => Just(Liveness::Closing), 1 => Just(Liveness::Expired)];
        (any_source(), class, ended).prop_map(|(source, class, liveness)| {
            let class = if liveness == Liveness::Open { class } else { EvictionClass::Closing };
            Candidate { place: (0, ControlWord(0)), liveness, class, source, freshness: 0 }
        })
    }

    fn candidates(list: &[Candidate]) -> Candidates {
        let mut candidates = Candidates::new();
        list.iter().for_each(|candidate| candidates.push(*candidate));
        candidates
    }

    /// Keeps those with the least of a figure.
    fn least<K: Ord>(left: &mut Vec<Candidate>, figure: impl Fn(&Candidate) -> K) {
        if let Some(best) = left.iter().map(&figure).min() {
            left.retain(|candidate| figure(candidate) == best);
        }
    }

    fn network(source: Source) -> u128 {
        match source.0 {
            [0, low] => low.into(),
            [high, _] => u128::from(high) << 64,
        }
    }

    /// The place in time of the one that goes, found step by step.
    fn expected(list: &[Candidate], from: Source) -> Option<u32> {
        let of = |wanted: &dyn Fn(&Candidate) -> bool| list.iter().copied().filter(wanted).collect::<Vec<_>>();
        let mut left = of(&|it| it.liveness != Liveness::Open);
        if !left.is_empty() {
            least(&mut left, |it| it.liveness);
            least(&mut left, |it| it.source != from);
            return left.iter().map(|it| it.freshness).min();
        }
        let held = |net: u128| list.iter().filter(|it| network(it.source) == net).count();
        let mine = held(network(from));
        if list.iter().all(|it| held(network(it.source)) <= mine) {
            let mut own = of(&|it| network(it.source) == network(from) && it.class != EvictionClass::Kept);
            least(&mut own, |it| it.class);
            if !own.is_empty() {
                return own.iter().map(|it| it.freshness).min();
            }
        }
        let unanswered = of(&|it| it.class == EvictionClass::Unanswered);
        if !unanswered.is_empty() {
            return unanswered.iter().map(|it| it.freshness).min();
        }
        let mut left = of(&|it| it.class == EvictionClass::Answered || held(network(it.source)) > 1);
        least(&mut left, |it| usize::MAX - held(network(it.source)));
        least(&mut left, |it| usize::MAX - list.iter().filter(|other| other.source == it.source).count());
        least(&mut left, |it| it.class);
        left.iter().map(|it| it.freshness).min()
    }

    proptest! {
        #[test]
        fn who_holds_most_of_a_pods_share_gives_first(
            list in prop::collection::vec(any_candidate(), 0..MOST),
            ages in Just((0..MOST as u32).collect::<Vec<_>>()).prop_shuffle(),
            from in any_source(),
        ) {
            let list: Vec<Candidate> =
                list.into_iter().zip(ages).map(|(candidate, freshness)| Candidate { freshness, ..candidate }).collect();
            let chosen = candidates(&list).victim(from, Among::OpenedToOne).map(|victim| victim.freshness);
            prop_assert_eq!(chosen, expected(&list, from));
            let of_all = candidates(&list).victim(from, Among::All);
            prop_assert!(of_all.is_none_or(|victim| victim.class != EvictionClass::Kept));
            prop_assert_eq!(of_all.is_none(), list.iter().all(|it| it.class == EvictionClass::Kept));
        }
    }

    #[test]
    fn streams_of_one_source_give_way_to_another_source() {
        let of = |source: u64, class, freshness| Candidate {
            place: (0, ControlWord(0)),
            liveness: Liveness::Open,
            class,
            source: Source([0, V4 + source]),
            freshness,
        };
        let streams = |source, count: u32| (0..count).map(move |age| of(source, EvictionClass::Kept, 10 + age));
        for (name, list, from, gives) in [
            ("the flood's for another's", streams(1, 15).chain(streams(2, 1)).collect::<Vec<_>>(), 2, Some(1)),
            ("the flood's for its own", streams(1, 15).chain(streams(2, 1)).collect(), 1, Some(1)),
            ("one each: none", (0..16).flat_map(|source| streams(source, 1)).collect(), 20, None),
            (
                "what one side has made, before any stream",
                streams(1, 15).chain([of(3, EvictionClass::Unanswered, 99)]).collect(),
                2,
                Some(3),
            ),
            (
                "an exchange of one packet each stays where a flood holds more",
                streams(1, 9).chain([of(3, EvictionClass::Answered, 1)]).collect(),
                2,
                Some(1),
            ),
        ] {
            let victim = candidates(&list).victim(Source([0, V4 + from]), Among::OpenedToOne);
            assert_eq!(victim.map(|it| it.source), gives.map(|source| Source([0, V4 + source])), "{name}");
        }
    }
}
