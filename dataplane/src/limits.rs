//! Limits of a pod's connections: how many are opened in a second, and how many are open.
//!
//! Only who opens a connection of such a pod touches this: a worker, with each. Programs open none of its connections
//! (`may_repeat` in `pipeline/offload.rs`), so that what they do not know is not passed by.
//!
//! Nobody is told when a connection ends; the table alone knows. So a limit of open connections is a list of so many places, each with
//! the name of a connection. A new one takes a place that is empty, or whose connection is open no more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::DropReason;
use crate::conntrack::{ConnTable, ConnectionName, Timestamp};
use crate::forward::PortId;
use crate::policy::{Direction, FlowEnds};

/// Most places that a worker tries for one connection.
const MOST_LOOKS: usize = 1024;
/// So many milliseconds after nothing was found nobody looks again: a pod at its limit costs its worker no more than that.
const REST: u64 = 5;
const SECOND: u64 = 1_000_000_000;
/// In a place: a connection is about to be entered.
const TAKEN: u64 = 1;

/// How many connections a pod may have in one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limit {
    pub each_second: Option<u32>,
    pub open: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Refused {
    /// Packets that would have opened a connection too many in a second.
    pub each_second: u64,
    /// Packets that would have opened one beside as many as may be open.
    pub open: u64,
}

/// The limits of a pod, and what counts against them. It outlives the snapshots that it is in.
#[derive(Debug)]
pub struct PodLimits {
    egress: Direct,
    ingress: Direct,
}

#[derive(Debug)]
struct Direct {
    limit: Limit,
    rate: Option<Rate>,
    open: Option<OpenList>,
    refused: [AtomicU64; 2],
}

/// As many at once as in a second, and then one by one (the generic cell rate algorithm, ITU-T I.371).
#[derive(Debug)]
struct Rate {
    /// Nanoseconds for one.
    interval: u64,
    /// When all that were opened have had their time.
    until: AtomicU64,
}

/// The connections that are open, at most as many as there are places.
#[derive(Debug)]
struct OpenList {
    places: Box<[AtomicU64]>,
    next: AtomicU32,
    /// Nobody looks for a place before, in milliseconds.
    rests_until: AtomicU64,
}

/// The count of a connection that is about to be opened against one pod's limits, unless it is dropped.
struct Held<'a> {
    of: &'a Direct,
    place: Option<usize>,
}

/// The same at both ends. Dropped, it gives back what it has taken.
pub(crate) struct Admission<'a>([Option<Held<'a>>; 2]);

impl PodLimits {
    /// Limits of what the pod opens, and of what others open to it.
    pub fn new(egress: Limit, ingress: Limit) -> Self {
        Self { egress: Direct::new(egress), ingress: Direct::new(ingress) }
    }

    fn of(&self, direction: Direction) -> &Direct {
        match direction {
            Direction::Egress => &self.egress,
            Direction::Ingress => &self.ingress,
        }
    }

    /// As they were set.
    pub fn limit(&self, direction: Direction) -> Limit {
        self.of(direction).limit
    }

    /// Connections that they have refused since they are there.
    pub fn refused(&self, direction: Direction) -> Refused {
        let [each_second, open] = self.of(direction).refused.each_ref().map(|count| count.load(Ordering::Relaxed));
        Refused { each_second, open }
    }

    /// How many connections count as open; `None` where that is not limited.
    pub fn open(&self, direction: Direction, table: &ConnTable, now: Timestamp) -> Option<usize> {
        let list = self.of(direction).open.as_ref()?;
        Some(list.names().filter(|name| table.is_open(*name, now)).count())
    }

    /// Counts connections that were opened before the limit was there.
    pub fn adopt(&self, direction: Direction, connections: impl IntoIterator<Item = ConnectionName>) {
        let Some(list) = &self.of(direction).open else { return };
        let known: FxHashSet<u64> = list.names().map(ConnectionName::word).collect();
        let mut places = list.places.iter();
        for name in connections.into_iter().map(ConnectionName::word).filter(|name| !known.contains(name)) {
            let takes =
                |place: &AtomicU64| place.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed).is_ok();
            if !places.by_ref().any(takes) {
                return;
            }
        }
    }
}

impl Direct {
    fn new(limit: Limit) -> Self {
        let rate = |most: u32| Rate { interval: SECOND / u64::from(most.max(1)), until: AtomicU64::new(0) };
        let list = |most: u32| OpenList {
            places: (0..most).map(|_| AtomicU64::new(0)).collect(),
            next: AtomicU32::new(0),
            rests_until: AtomicU64::new(0),
        };
        Self { limit, rate: limit.each_second.map(rate), open: limit.open.map(list), refused: Default::default() }
    }

    /// Counts a connection that is about to be opened.
    fn admit(&self, table: &ConnTable, now: Timestamp) -> Result<Held<'_>, DropReason> {
        let place = self.open.as_ref().map(|list| list.take(table, now).ok_or(DropReason::TooManyConnections));
        let place = place.transpose().inspect_err(|_| _ = self.refused[1].fetch_add(1, Ordering::Relaxed))?;
        if self.rate.as_ref().is_some_and(|rate| !rate.take(now)) {
            self.free(place);
            self.refused[0].fetch_add(1, Ordering::Relaxed);
            return Err(DropReason::ConnectionRate);
        }
        Ok(Held { of: self, place })
    }

    fn free(&self, place: Option<usize>) {
        if let Some((list, place)) = self.open.as_ref().zip(place) {
            list.places[place].store(0, Ordering::Relaxed);
        }
    }
}

impl Rate {
    fn take(&self, now: Timestamp) -> bool {
        let now = now.as_millis() * (SECOND / 1000);
        let one_more = |until: u64| {
            let after = until.max(now) + self.interval;
            (after <= now + SECOND).then_some(after)
        };
        self.until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    fn give_back(&self) {
        self.until.fetch_sub(self.interval, Ordering::Relaxed);
    }
}

impl OpenList {
    fn names(&self) -> impl Iterator<Item = ConnectionName> {
        self.places.iter().filter_map(|place| ConnectionName::from_word(place.load(Ordering::Relaxed)))
    }

    fn take(&self, table: &ConnTable, now: Timestamp) -> Option<usize> {
        if now.as_millis() < self.rests_until.load(Ordering::Relaxed) {
            return None;
        }
        for _ in 0..self.places.len().min(MOST_LOOKS) {
            let index = self.next.fetch_add(1, Ordering::Relaxed) as usize % self.places.len();
            let (place, word) = (&self.places[index], self.places[index].load(Ordering::Relaxed));
            let is_used = ConnectionName::from_word(word).is_some_and(|name| table.is_open(name, now));
            if word != TAKEN
                && !is_used
                && place.compare_exchange(word, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            {
                return Some(index);
            }
        }
        self.rests_until.store(now.as_millis() + REST, Ordering::Relaxed);
        None
    }
}

impl Admission<'_> {
    pub(crate) fn opened(mut self, name: ConnectionName) {
        for held in self.0.iter_mut().filter_map(Option::take) {
            if let Some((list, place)) = held.of.open.as_ref().zip(held.place) {
                list.places[place].store(name.word(), Ordering::Relaxed);
            }
        }
    }

    /// Whether a limit counts it among those that are open: then it must have an entry.
    pub(crate) fn is_listed(&self) -> bool {
        self.0.iter().flatten().any(|held| held.place.is_some())
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        for held in self.0.iter().flatten() {
            held.of.free(held.place);
            held.of.rate.iter().for_each(Rate::give_back);
        }
    }
}

/// The local pods that have limits, by their ports.
#[derive(Clone, Debug, Default)]
pub struct LimitedPods(Option<Arc<FxHashMap<PortId, Arc<PodLimits>>>>);

impl LimitedPods {
    pub fn new(pods: impl IntoIterator<Item = (PortId, Arc<PodLimits>)>) -> Self {
        let pods: FxHashMap<_, _> = pods.into_iter().collect();
        Self((!pods.is_empty()).then(|| Arc::new(pods)))
    }

    /// Whether the same pods have the same limits, which count the same connections.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let pods = |limits: &Self| limits.0.as_ref().map_or(0, |pods| pods.len());
        let mut own = self.0.iter().flat_map(|pods| pods.iter());
        let is_others = |(port, limits): (&PortId, &Arc<PodLimits>)| {
            other.of(Some(*port)).is_some_and(|other| std::ptr::eq(other, &**limits))
        };
        pods(self) == pods(other) && own.all(is_others)
    }

    fn of(&self, port: Option<PortId>) -> Option<&PodLimits> {
        self.0.as_ref()?.get(&port?).map(Arc::as_ref)
    }

    pub(crate) fn count(&self, ends: FlowEnds<'_>) -> bool {
        self.0.is_some() && (self.of(ends.src.port()).is_some() || self.of(ends.dst.port()).is_some())
    }

    /// Counts a connection between these ends that is about to be opened, at those of them that count it. `None`: no limit is about it.
    ///
    /// # Errors
    /// The limit that it would exceed.
    #[inline(always)]
    pub(crate) fn admit(
        &self,
        ends: FlowEnds<'_>,
        [of_source, of_destination]: [bool; 2],
        table: &ConnTable,
        now: Timestamp,
    ) -> Result<Option<Admission<'_>>, DropReason> {
        if self.0.is_none() {
            return Ok(None);
        }
        let source = self.of(ends.src.port()).filter(|_| of_source).map(|limits| &limits.egress);
        let destination = self.of(ends.dst.port()).filter(|_| of_destination).map(|limits| &limits.ingress);
        let mut admission = Admission([None, None]);
        for (held, limit) in admission.0.iter_mut().zip([source, destination]) {
            *held = limit.map(|limit| limit.admit(table, now)).transpose()?;
        }
        Ok(admission.0.iter().any(Option::is_some).then_some(admission))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Epoch;
    use crate::conntrack::{Config, Insertion, NewConnection, OwnerId};
    use crate::packet::{Address, Flow, Protocol, Transport};

    /// Opens a connection that nobody has answered yet.
    fn open(table: &ConnTable, port: u16, now: Timestamp) -> ConnectionName {
        let [src, dst] = [1, 2].map(|last| Address::from_v4_bytes([10, 0, 0, last]));
        let flow = Flow { src, dst, protocol: Protocol::UDP, src_port: port, dst_port: 53 };
        let (hashed, transport) = (&table.prepare(&flow), &Transport::Udp);
        let owner = OwnerId::opens(1);
        let new = NewConnection { hashed, transport, owner, via_host: false, opener: None, epoch: Epoch(1), now };
        let Ok(Insertion::Created(connection)) = table.insert(&new) else { panic!("there is room") };
        connection.name()
    }

    fn answer(table: &ConnTable, port: u16, now: Timestamp) {
        let [src, dst] = [2, 1].map(|last| Address::from_v4_bytes([10, 0, 0, last]));
        let flow = Flow { src, dst, protocol: Protocol::UDP, src_port: 53, dst_port: port };
        let hashed = table.prepare(&flow);
        table.find(&hashed, now).unwrap().update(hashed.orientation(), &Transport::Udp, now);
    }

    #[test]
    fn places_go_to_those_that_are_open_and_come_back() {
        const MOST: u16 = 100;
        let table = ConnTable::new(&Config { entries: 4096, ..Config::default() }).unwrap();
        let limits = PodLimits::new(Limit { each_second: None, open: Some(MOST.into()) }, Limit::default());
        let admit = |now| limits.egress.admit(&table, now).map(|held| Admission([Some(held), None]));
        let at = Timestamp::from_millis;
        for port in 1..=MOST {
            admit(at(10_000)).unwrap().opened(open(&table, port, at(10_000)));
            if port > 10 {
                answer(&table, port, at(10_000));
            }
        }
        assert_eq!(admit(at(10_001)).err(), Some(DropReason::TooManyConnections));
        assert_eq!(limits.open(Direction::Egress, &table, at(10_001)), Some(MOST.into()));
        // Ten were never answered.
        for port in MOST + 1..=MOST + 10 {
            admit(at(12_000)).unwrap().opened(open(&table, port, at(12_000)));
            answer(&table, port, at(12_000));
        }
        assert!(admit(at(12_001)).is_err());
        assert!(admit(at(12_003)).is_err(), "nobody looks again so soon");
        table.remove_addresses(&[Address::from_v4_bytes([10, 0, 0, 1])]);
        let held: Vec<_> = (0..MOST).map(|_| admit(at(12_100)).unwrap()).collect();
        assert!(admit(at(12_100)).is_err());
        drop(held);
        assert!(admit(at(12_200)).is_ok(), "what was not opened gives its place back");
        assert_eq!(limits.refused(Direction::Egress), Refused { each_second: 0, open: 4 });
        // Known twice, it counts once.
        let name = open(&table, 500, at(13_000));
        limits.adopt(Direction::Egress, [name]);
        limits.adopt(Direction::Egress, [name, open(&table, 501, at(13_000))]);
        assert_eq!(limits.open(Direction::Egress, &table, at(13_000)), Some(2));
    }

    #[test]
    fn so_many_are_opened_at_once_and_in_a_second() {
        for most in [1, 3, 7, 1000, 1_000_000] {
            let rate = Direct::new(Limit { each_second: Some(most), open: None }).rate.unwrap();
            let at = |millis, tries| (0..tries).filter(|_| rate.take(Timestamp::from_millis(millis))).count() as u32;
            assert_eq!(at(10_000, 2 * most), most);
            assert_eq!(at(9_990, 10), 0, "a worker whose clock is behind gives nothing back");
            let half = at(10_500, 2 * most);
            assert!(half.abs_diff(most / 2) <= 1, "{half} of {most} in half a second");
            assert_eq!(at(20_000, 2 * most), most);
            rate.give_back();
            assert_eq!(at(20_000, 2), 1, "what was not opened does not count");
        }
    }
}
