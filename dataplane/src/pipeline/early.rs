//! Fragments that come before the first of their datagram, where policy needs its ports: they are held until it has passed.
//!
//! The kernel's connection tracking puts datagrams together before it looks at them, and so waits for the first fragment as
//! long as for any (`ipfrag_time`, 30 s). Held here is a copy for [`EarlyFragments::LONGEST_HOLD`]: networks and hosts of
//! several queues reorder packets within milliseconds, and datagrams whose first fragment policy denies leave all others here
//! until then. Then, or when there is no room, a fragment is tried one last time, which drops it as
//! [`Fragment`](crate::DropReason::Fragment).
//!
//! Each pod has a share of what can be held, so that its fragments take no other pod's place: where there is no room, the pod
//! that holds most loses its oldest. A pod alone may use all of it.

use crate::Snapshot;
use crate::batch::StackSender;
use crate::conntrack::{DatagramKey, Fragments, Timestamp};
use crate::forward::{PortId, PortKind};
use crate::packet::Packet;

/// Fragments that are held, in the order in which they came. What is kept of each is the caller's. It allocates nothing after
/// construction.
#[derive(Debug)]
pub struct EarlyFragments<T> {
    held: Vec<HeldFragment<T>>,
    capacity: usize,
    /// How many first fragments were known when they were last compared.
    seen: u64,
}

#[derive(Debug)]
struct HeldFragment<T> {
    datagram: DatagramKey,
    /// On whose share it counts.
    holder: PortId,
    since: Timestamp,
    item: T,
}

impl<T> EarlyFragments<T> {
    /// Most fragments that a worker holds.
    pub const MOST: usize = 64;
    /// Milliseconds for which a fragment is held.
    pub const LONGEST_HOLD: u64 = 1000;

    /// Room for so many fragments, at least one.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Self { held: Vec::with_capacity(capacity), capacity, seen: 0 }
    }

    /// Whether none is held.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Whose share a fragment counts on: its sender's, or of what comes from the node's stack or another machine the pod's to
    /// which it goes.
    pub fn holder(snapshot: &Snapshot, ingress: PortId, sender: StackSender, packet: &Packet) -> PortId {
        let is_pods = |port: PortId| snapshot.forwarding.port(port).is_some_and(|port| port.kind == PortKind::Pod);
        match sender {
            _ if is_pods(ingress) => ingress,
            StackSender::Leaving { port, .. } => PortId(port),
            _ => snapshot.pod_port(packet.flow.dst).unwrap_or(ingress),
        }
    }

    /// Holds a fragment. Returns the one that it takes the place of, which is to be tried a last time.
    pub fn hold(&mut self, datagram: DatagramKey, holder: PortId, now: Timestamp, item: T) -> Option<T> {
        let evicted = (self.held.len() >= self.capacity).then(|| self.held.remove(self.victim(holder)).item);
        self.held.push(HeldFragment { datagram, holder, since: now, item });
        evicted
    }

    /// The oldest of the port that holds most; of this one, if none holds more.
    fn victim(&self, holder: PortId) -> usize {
        let count = |of: PortId| self.held.iter().filter(|held| held.holder == of).count();
        let own = count(holder);
        let most = match 2 * own > self.capacity {
            true => own,
            false => self.held.iter().map(|held| count(held.holder)).max().unwrap_or(0),
        };
        let gives_up =
            |held: &HeldFragment<T>| if own >= most { held.holder == holder } else { count(held.holder) == most };
        self.held.iter().position(gives_up).unwrap_or(0)
    }

    /// Whether some may be due: first fragments have passed since the last call, at this worker or another, or time is over.
    pub fn may_be_due(&mut self, fragments: &Fragments, now: Timestamp) -> bool {
        let remembered = fragments.remembered();
        let has_news = std::mem::replace(&mut self.seen, remembered) != remembered;
        has_news || self.held.first().is_some_and(|oldest| oldest.is_over(now))
    }

    /// Takes the next one that is to be tried again, from this place on: its first fragment has passed, or its time is over.
    pub fn take_due(&mut self, from: &mut usize, fragments: &Fragments, now: Timestamp) -> Option<T> {
        let is_due = |held: &HeldFragment<T>| held.is_over(now) || fragments.has_first(&held.datagram, now);
        *from += self.held.get(*from..)?.iter().position(is_due)?;
        Some(self.held.remove(*from).item)
    }

    pub fn take_oldest(&mut self) -> Option<T> {
        (!self.held.is_empty()).then(|| self.held.remove(0).item)
    }

    /// Takes those on the share of a port that is closed.
    pub fn take_of(&mut self, port: PortId) -> impl Iterator<Item = T> + '_ {
        self.held.extract_if(.., move |held| held.holder == port).map(|held| held.item)
    }
}

impl<T> HeldFragment<T> {
    fn is_over(&self, now: Timestamp) -> bool {
        now.as_millis().saturating_sub(self.since.as_millis()) >= EarlyFragments::<T>::LONGEST_HOLD
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::conntrack::{Config, ConnTable};
    use crate::packet::{Flow, Fragment, Protocol};

    const A: PortId = PortId(1);
    const B: PortId = PortId(2);
    const C: PortId = PortId(3);

    fn at(milliseconds: u64) -> Timestamp {
        Timestamp::from_millis(5_000_000 + milliseconds)
    }

    fn fragment(id: u32, offset: u16) -> Packet {
        let [src, dst] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse::<IpAddr>().unwrap().into());
        Packet {
            flow: Flow { src, dst, protocol: Protocol::UDP, src_port: 0, dst_port: 0 },
            fragment: Fragment::new(id, offset, true, 1480),
            ..Packet::default()
        }
    }

    fn key(id: u32) -> DatagramKey {
        DatagramKey::of(&fragment(id, 1480), A).unwrap()
    }

    fn table() -> ConnTable {
        ConnTable::new(&Config { entries: 1024, ..Config::default() }).unwrap()
    }

    fn due(early: &mut EarlyFragments<u32>, table: &ConnTable, now: Timestamp) -> Vec<u32> {
        if !early.may_be_due(table.fragments(), now) {
            return Vec::new();
        }
        let mut from = 0;
        std::iter::from_fn(|| early.take_due(&mut from, table.fragments(), now)).collect()
    }

    #[test]
    fn a_held_fragment_is_due_once_any_worker_has_seen_its_first() {
        let (table, mut early) = (table(), EarlyFragments::new(8));
        for id in [1, 2, 1, 3] {
            assert_eq!(early.hold(key(id), A, at(0), id), None);
        }
        assert_eq!(due(&mut early, &table, at(1)), [0; 0]);
        // By another worker: the cache is shared.
        table.fragments().remember(&fragment(1, 0), A, at(2));
        assert_eq!(due(&mut early, &table, at(3)), [1, 1]);
        table.fragments().remember(&fragment(3, 0), B, at(4));
        assert_eq!(due(&mut early, &table, at(5)), [0; 0], "of another port");
        table.fragments().remember(&fragment(3, 0), A, at(6));
        assert_eq!(due(&mut early, &table, at(7)), [3]);
    }

    #[test]
    fn a_held_fragment_is_due_when_its_time_is_over() {
        let (table, mut early) = (table(), EarlyFragments::new(8));
        early.hold(key(1), A, at(0), 1);
        early.hold(key(2), A, at(500), 2);
        assert_eq!(due(&mut early, &table, at(999)), [0; 0]);
        assert_eq!(due(&mut early, &table, at(1000)), [1]);
        assert_eq!((due(&mut early, &table, at(1500)), early.is_empty()), (vec![2], true));
    }

    #[test]
    fn two_ports_that_flood_leave_a_third_its_share() {
        let mut early = EarlyFragments::new(64);
        let of = |port: PortId, n: u32| (u32::from(port.0) << 16) | n;
        for n in 0..20 {
            assert_eq!(early.hold(key(n), C, at(0), of(C, n)), None);
        }
        for n in 0..10_000 {
            let port = if n % 3 == 0 { A } else { B };
            let evicted = early.hold(key(n), port, at(1), of(port, n));
            assert!(evicted.is_none_or(|it| it >> 16 != u32::from(C.0)), "{n}: {evicted:?}");
        }
        // A port alone takes all that is left, and gives it up for another one.
        for n in 0..22 {
            let evicted = early.hold(key(n), C, at(2), of(C, n)).unwrap();
            assert_eq!(evicted >> 16 == u32::from(C.0), n > 1, "{n}: {evicted:#x}");
        }
        let of_c: Vec<u32> = early.take_of(C).collect();
        assert_eq!((of_c.len(), of_c.last()), (22, Some(&of(C, 21))), "its oldest ones went");
        assert!(early.take_of(C).next().is_none() && !early.is_empty());
    }
}
