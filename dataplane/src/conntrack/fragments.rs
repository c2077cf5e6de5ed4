//! Fragments: the later ones of a datagram have no ports, so they follow the first one's.
//!
//! The first fragment carries the ports and is judged like any packet; when it passes, it is remembered here, and the
//! later ones get its flow. A later fragment that comes before its first one, or whose first one did not pass, finds
//! nothing and is dropped. One that overlaps the first one's bytes finds nothing either: it could replace the headers
//! that were judged (RFC 1858, RFC 3128, RFC 5722). Those bytes count from where offsets count from: in IPv6 that is behind
//! the Fragment header, and extension headers may stand there before the transport header (RFC 8200 section 4.5).
//!
//! Overlaps of later fragments with each other pass. A first fragment holds all headers, so no bytes that policy judged
//! are at stake, and the receiver throws such a datagram away whole (RFC 5722; Linux does so in IPv4 too).
//!
//! A second first fragment under the same identification is judged on its own. If it passes, the later ones follow it: a
//! sender of many datagrams uses its 65,536 IPv4 identifications again within seconds. Later fragments must then begin
//! behind both, as long as the one that reached further is remembered. The pieces of two first fragments are not kept from
//! a receiver that puts a datagram together of overlapping ones, against RFC 5722; each of the two was allowed.
//!
//! Later fragments may come in any order among themselves. One that comes before its first is not held: whoever sends
//! fragments without a first one would have frames of the UMEM kept for nothing, and so take them from all other pods. Linux sends
//! a datagram's fragments in order and a veth keeps it; where a network changes it, the datagram is lost as if one of
//! its fragments were, and the drop is counted as [`Fragment`](crate::Cause::Fragment).
//!
//! The cache is shared by all workers and bounded: sets of eight entries of a cache line, read and written without
//! locks like the connection table's. When a set is full, the port that has most of it gives up its oldest datagram. So
//! a port that floods replaces its own, and ports that flood take what others have in a set only where there are as many
//! of them as the set has entries. All that comes by an uplink is of one port.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::hash::Seed;
use super::time::{Tick, Timestamp};
use crate::forward::PortId;
use crate::packet::{Flow, Packet, Protocol};

/// Datagrams under way whose first fragment has passed.
pub struct Fragments {
    sets: Box<[[Entry; WAYS]]>,
    seed: Seed,
}

const WAYS: usize = 8;
/// Sets: 4096 datagrams, 256 KiB.
const SETS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 512 };
/// Ticks that a datagram is remembered: 30 s, as long as the kernel waits for the rest of one (`ipfrag_time`).
const LIFETIME: u32 = 59;

/// All zero is a free entry. The control word: bits 0–21 tick, bit 22 set while one thread writes, bit 23 set when it
/// holds a datagram, from bit 24 on a count of writes.
#[derive(Default)]
#[repr(C, align(64))]
struct Entry {
    control: AtomicU64,
    key: [AtomicU64; 5],
    /// Source port, destination port, end of the first fragment in the datagram's payload, protocol; 16 bits each.
    value: AtomicU64,
}

const WRITING: u64 = 1 << 22;
const HELD: u64 = 1 << 23;
const WRITE: u64 = 1 << 24;

type Key = [u64; 5];
/// The word of a key that holds identification, port and protocol, and where the port begins in it.
const LAST: usize = 4;
const PORT_SHIFT: u32 = 32;

impl Fragments {
    pub(super) fn new() -> Self {
        Self { sets: (0..SETS).map(|_| Default::default()).collect(), seed: Seed::random() }
    }

    /// Remembers the first fragment of a datagram, which was let through. `port` is the one that it came in by. Any other
    /// packet is left alone.
    pub fn remember(&self, packet: &Packet, port: PortId, now: Timestamp) {
        if packet.fragment.is_none_or(|fragment| !fragment.is_first()) {
            return;
        }
        let Some(key) = key(packet, port) else { return };
        let (first, now) = (Datagram::of(packet), now.tick());
        let hash = self.seed.hash(&key);
        let set = self.set(hash);
        let Some((entry, before)) = set.iter().find_map(|entry| Some((entry, entry.read(&key, now)?))) else {
            return victim(set, port, (hash >> 32) as usize, now).write(&key, first, now);
        };
        // A longer one before it counts for as long as it would have without this one, and no longer: identifications come
        // again, and the path's MTU may have shrunk since.
        let (end, since) = if before.end > first.end { (before.end, entry.tick()) } else { (first.end, now) };
        entry.write(&key, Datagram { end, ..first }, since);
    }

    /// The flow of a later fragment, with the ports of the first one; `None` if that is not known, or if this one
    /// overlaps it.
    pub fn flow_of(&self, packet: &Packet, port: PortId, now: Timestamp) -> Option<Flow> {
        let fragment = packet.fragment.filter(|fragment| !fragment.is_first())?;
        let key = key(packet, port)?;
        let first = self.set(self.seed.hash(&key)).iter().find_map(|entry| entry.read(&key, now.tick()))?;
        let Datagram { protocol, src_port, dst_port, end } = first;
        (fragment.offset() >= end).then_some(Flow { protocol, src_port, dst_port, ..packet.flow })
    }

    fn set(&self, hash: u64) -> &[Entry; WAYS] {
        &self.sets[hash as usize % SETS]
    }
}

/// What is remembered of a datagram's first fragment.
#[derive(Clone, Copy)]
struct Datagram {
    protocol: Protocol,
    src_port: u16,
    dst_port: u16,
    /// Where later fragments may begin.
    end: u16,
}

impl Datagram {
    fn of(first: &Packet) -> Self {
        let Flow { protocol, src_port, dst_port, .. } = first.flow;
        Self { protocol, src_port, dst_port, end: first.fragment.map_or(u16::MAX, |fragment| fragment.end()) }
    }

    fn to_word(self) -> u64 {
        let Self { protocol, src_port, dst_port, end } = self;
        u64::from(src_port) | u64::from(dst_port) << 16 | u64::from(end) << 32 | u64::from(protocol.0) << 48
    }

    fn of_word(word: u64) -> Self {
        let (src_port, dst_port, end) = (word as u16, (word >> 16) as u16, (word >> 32) as u16);
        Self { protocol: Protocol((word >> 48) as u8), src_port, dst_port, end }
    }
}

/// The entry that a datagram from `port` takes: one that holds nothing, or else the oldest of the port that has most. A
/// port that has as many as any other gives up one of its own. Ticks are long, so `turn` decides among those of one.
fn victim(set: &[Entry; WAYS], port: PortId, turn: usize, now: Tick) -> &Entry {
    let holders = set.each_ref().map(Entry::port);
    let count = |port: PortId| holders.iter().filter(|holder| **holder == port).count();
    let counts = holders.map(count);
    let most = counts.into_iter().max().unwrap_or(0);
    let has_most = count(port) >= most;
    let rank = |way: usize| {
        let gives_up = if has_most { holders[way] == port } else { counts[way] == most };
        let (class, age) = match set[way].age(now) {
            Age::Free => (3, 0),
            Age::Held(age) => (if gives_up { 2 } else { 0 }, age),
            // Another worker is at it, and the write will not be made: better than to take one of another port.
            Age::Writing => (u32::from(gives_up), 0),
        };
        (class, age, (way + turn) % WAYS)
    };
    &set[(0..WAYS).max_by_key(|way| rank(*way)).unwrap_or(0)]
}

/// What all fragments of a datagram have in common: RFC 791 section 3.2, RFC 8200 section 4.5. The protocol counts in
/// IPv4 only: in IPv6 other headers may stand between the fragment's and the transport's.
fn key(packet: &Packet, port: PortId) -> Option<Key> {
    let Flow { src, dst, protocol, .. } = packet.flow;
    let protocol = if src.is_v4() { protocol.0 } else { 0 };
    let last = u64::from(packet.fragment?.id()) | u64::from(port.0) << PORT_SHIFT | u64::from(protocol) << 48;
    let halves = |bits: u128| [(bits >> 64) as u64, bits as u64];
    let ([a, b], [c, d]) = (halves(src.bits()), halves(dst.bits()));
    Some([a, b, c, d, last])
}

/// How good an entry is to write over.
enum Age {
    /// It holds nothing, or what has expired.
    Free,
    /// It holds a datagram of so many ticks.
    Held(u32),
    /// Another thread is writing it.
    Writing,
}

impl Entry {
    /// The datagram under this key, if it is held and young enough.
    fn read(&self, key: &Key, now: Tick) -> Option<Datagram> {
        let before = self.control.load(Ordering::Acquire);
        if before & (HELD | WRITING) != HELD || tick(before).age(now) > LIFETIME {
            return None;
        }
        let is_equal = self.key.iter().zip(key).all(|(word, wanted)| word.load(Ordering::Relaxed) == *wanted);
        let value = self.value.load(Ordering::Relaxed);
        // As in the connection table: what was read is whole if nobody has begun to write since.
        fence(Ordering::Acquire);
        (is_equal && self.control.load(Ordering::Relaxed) == before).then_some(Datagram::of_word(value))
    }

    fn age(&self, now: Tick) -> Age {
        let control = self.control.load(Ordering::Relaxed);
        match (control & (HELD | WRITING), tick(control).age(now)) {
            (HELD, age) if age <= LIFETIME => Age::Held(age),
            (state, _) if state & WRITING != 0 => Age::Writing,
            _ => Age::Free,
        }
    }

    /// When it was written.
    fn tick(&self) -> Tick {
        tick(self.control.load(Ordering::Relaxed))
    }

    /// The port whose datagram it holds or held last. Free entries are taken before ports are compared, so it does not
    /// matter that one that was never written names a port too.
    fn port(&self) -> PortId {
        PortId((self.key[LAST].load(Ordering::Relaxed) >> PORT_SHIFT) as u16)
    }

    /// Writes over the entry, unless another thread is doing so: then that datagram has it, and this one's later
    /// fragments find nothing.
    fn write(&self, key: &Key, first: Datagram, now: Tick) {
        let before = self.control.load(Ordering::Relaxed);
        let writing = (before & !(WRITE - 1)).wrapping_add(WRITE) | WRITING;
        if before & WRITING != 0
            || self.control.compare_exchange(before, writing, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return;
        }
        fence(Ordering::Release);
        for (word, part) in self.key.iter().zip(key) {
            word.store(*part, Ordering::Relaxed);
        }
        self.value.store(first.to_word(), Ordering::Relaxed);
        self.control.store(writing & !WRITING | HELD | u64::from(now.0), Ordering::Release);
    }
}

fn tick(control: u64) -> Tick {
    Tick(control as u32 & Tick::MASK)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::packet::{Address, Fragment, Layout, Transport};

    const NOW: Timestamp = Timestamp::from_millis(5_000_000);
    const PORT: PortId = PortId(3);

    /// A fragment of 1480 octets of datagram `id` at `offset`, from port 1000 to port 53.
    fn fragment(v6: bool, id: u32, offset: u16) -> Packet {
        let address = |n: u128| Address::from_bits(if v6 { 0xfd << 120 | n } else { 0xffff_0a00_0000 | n });
        let ports = if offset == 0 { (1000, 53) } else { (0, 0) };
        Packet {
            flow: Flow {
                src: address(1),
                dst: address(2),
                protocol: Protocol::UDP,
                src_port: ports.0,
                dst_port: ports.1,
            },
            transport: if offset == 0 { Transport::Udp } else { Transport::LaterFragment },
            layout: Layout { network: 14, transport: 34, end: 34 + 1480 },
            ttl: 64,
            fragment: Fragment::new(id, offset, true, 1480),
        }
    }

    #[test]
    fn later_fragments_get_the_flow_of_the_first() {
        for v6 in [false, true] {
            let fragments = Fragments::new();
            let (first, later) = (fragment(v6, 7, 0), fragment(v6, 7, 1480));
            assert_eq!(fragments.flow_of(&later, PORT, NOW), None, "before the first one");
            fragments.remember(&first, PORT, NOW);
            assert_eq!(fragments.flow_of(&later, PORT, NOW), Some(first.flow));
            assert_eq!(fragments.flow_of(&fragment(v6, 7, 2960), PORT, NOW), Some(first.flow));
            assert_eq!(fragments.flow_of(&fragment(v6, 8, 1480), PORT, NOW), None, "another datagram");
            assert_eq!(fragments.flow_of(&later, PortId(4), NOW), None, "another port");
            let mut other = later;
            other.flow.protocol = Protocol(60);
            let expected = v6.then_some(first.flow);
            assert_eq!(fragments.flow_of(&other, PORT, NOW), expected, "in IPv6 other headers may come first");
            other.flow.src = later.flow.dst;
            assert_eq!(fragments.flow_of(&other, PORT, NOW), None, "another sender");
        }
    }

    #[test]
    fn a_fragment_that_overlaps_the_first_is_not_let_through() {
        let fragments = Fragments::new();
        fragments.remember(&fragment(false, 7, 0), PORT, NOW);
        for (offset, passes) in [(8, false), (1472, false), (1480, true)] {
            assert_eq!(fragments.flow_of(&fragment(false, 7, offset), PORT, NOW).is_some(), passes, "at {offset}");
        }
    }

    #[test]
    fn what_overlaps_counts_from_behind_the_fragment_header_and_not_from_the_transport_header() {
        let fragments = Fragments::new();
        // 64 bytes of extension headers of 1480 behind the Fragment header.
        let mut first = fragment(true, 7, 0);
        first.layout.transport += 64;
        fragments.remember(&first, PORT, NOW);
        for (offset, passes) in [(8, false), (1416, false), (1472, false), (1480, true)] {
            assert_eq!(fragments.flow_of(&fragment(true, 7, offset), PORT, NOW).is_some(), passes, "at {offset}");
        }
    }

    /// Identifications come again, so the second is no error; its fragments are its own.
    #[test]
    fn after_a_second_first_fragment_the_later_ones_follow_it_and_begin_behind_both() {
        for v6 in [false, true] {
            let fragments = Fragments::new();
            let (long, mut short) = (fragment(v6, 7, 0), fragment(v6, 7, 0));
            short.flow.dst_port = 80;
            short.fragment = Fragment::new(7, 0, true, 16);
            let port_of = |offset: u16, now| Some(fragments.flow_of(&fragment(v6, 7, offset), PORT, now)?.dst_port);
            fragments.remember(&short, PORT, NOW);
            assert_eq!((port_of(8, NOW), port_of(16, NOW)), (None, Some(80)));
            fragments.remember(&long, PORT, NOW);
            assert_eq!((port_of(16, NOW), port_of(1480, NOW)), (None, Some(53)), "a longer one");
            let again = NOW.plus(Duration::from_secs(20));
            fragments.remember(&short, PORT, again);
            assert_eq!((port_of(16, again), port_of(1480, again)), (None, Some(80)), "a shorter one");
            let over = NOW.plus(Duration::from_secs(32));
            fragments.remember(&short, PORT, over);
            assert_eq!(port_of(16, over), Some(80), "the longer one is forgotten");
        }
    }

    #[test]
    fn only_first_fragments_are_remembered_and_not_for_ever() {
        let fragments = Fragments::new();
        fragments.remember(&fragment(false, 7, 1480), PORT, NOW);
        fragments.remember(&Packet { fragment: None, ..fragment(false, 7, 0) }, PORT, NOW);
        assert_eq!(fragments.flow_of(&fragment(false, 7, 2960), PORT, NOW), None);
        fragments.remember(&fragment(false, 7, 0), PORT, NOW);
        let later = fragment(false, 7, 1480);
        assert!(fragments.flow_of(&later, PORT, NOW.plus(Duration::from_secs(29))).is_some());
        assert!(fragments.flow_of(&later, PORT, NOW.plus(Duration::from_secs(32))).is_none());
        assert!(fragments.flow_of(&fragment(false, 7, 0), PORT, NOW).is_none(), "a first fragment has its own ports");
    }

    #[test]
    fn a_flood_of_datagrams_costs_the_oldest_ones() {
        let fragments = Fragments::new();
        let at = |id: u32| NOW.plus(Duration::from_millis(u64::from(id) / 10));
        for id in 0..100_000 {
            fragments.remember(&fragment(false, id, 0), PORT, at(id));
            assert!(fragments.flow_of(&fragment(false, id, 1480), PORT, at(id)).is_some());
        }
        let left =
            (0..100_000).filter(|id| fragments.flow_of(&fragment(false, *id, 1480), PORT, at(100_000)).is_some());
        let left: Vec<u32> = left.collect();
        assert!(left.len() <= SETS * WAYS && left.len() > SETS * WAYS * 9 / 10, "{}", left.len());
        assert!(left.iter().filter(|id| **id > 90_000).count() > left.len() * 8 / 10, "mostly the latest");
    }

    /// The number of the set that a datagram falls into.
    fn set_of(fragments: &Fragments, packet: &Packet, port: PortId) -> usize {
        fragments.seed.hash(&key(packet, port).unwrap()) as usize % SETS
    }

    #[test]
    fn a_flood_of_first_fragments_from_other_ports_leaves_each_port_its_share_of_every_set() {
        const DATAGRAMS: u32 = 400;
        const FLOOD: u32 = 200_000;
        for (flooding, share) in [(1, 4), (3, 2), (7, 1)] {
            let fragments = Fragments::new();
            let at = |n: u32| NOW.plus(Duration::from_millis(u64::from(n) / 100));
            let later = |n: u32| fragment(n.is_multiple_of(2), n, 1480);
            let mut in_set = vec![(0, 0); SETS];
            for n in 0..DATAGRAMS {
                fragments.remember(&fragment(n.is_multiple_of(2), n, 0), PORT, NOW);
                in_set[set_of(&fragments, &later(n), PORT)].0 += 1;
            }
            for n in 0..FLOOD {
                fragments.remember(&fragment(n.is_multiple_of(3), n, 0), PortId(100 + (n % flooding) as u16), at(n));
            }
            let whole: Vec<u32> =
                (0..DATAGRAMS).filter(|n| fragments.flow_of(&later(*n), PORT, at(FLOOD)).is_some()).collect();
            for n in &whole {
                in_set[set_of(&fragments, &later(*n), PORT)].1 += 1;
            }
            let is_kept = |&(had, has): &(usize, usize)| has >= had.min(share);
            assert!(in_set.iter().all(is_kept), "{flooding} ports flood: {} of {DATAGRAMS} are left", whole.len());
            assert!(whole.len() >= DATAGRAMS as usize / 2);
        }
    }

    #[test]
    fn a_port_that_is_alone_has_the_whole_of_a_set_and_gives_it_up_to_one_that_comes() {
        let fragments = Fragments::new();
        let passes = |id, port| fragments.flow_of(&fragment(false, id, 1480), port, NOW).is_some();
        // Begins so many datagrams that fall into the first set.
        let begin = |port, count| -> Vec<u32> {
            let is_first = |id: &u32| set_of(&fragments, &fragment(false, *id, 0), port) == 0;
            let ids: Vec<u32> = (0..).filter(is_first).take(count).collect();
            ids.iter().for_each(|id| fragments.remember(&fragment(false, *id, 0), port, NOW));
            ids
        };
        let left = |ids: &[u32], port| ids.iter().filter(|id| passes(**id, port)).count();
        let ours = begin(PORT, WAYS);
        assert_eq!(left(&ours, PORT), WAYS);
        let theirs = begin(PortId(4), 2 * WAYS);
        assert_eq!((left(&ours, PORT), left(&theirs, PortId(4))), (WAYS / 2, WAYS / 2), "half for each");
    }

    #[test]
    fn threads_never_see_parts_of_two_datagrams() {
        let fragments = Fragments::new();
        let packet = |id: u32| {
            let mut first = fragment(false, id, 0);
            (first.flow.src_port, first.flow.dst_port) = (id as u16, !(id as u16));
            first
        };
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let (fragments, packet) = (&fragments, &packet);
                scope.spawn(move || {
                    for n in 0..30_000u32 {
                        let id = (n * 7 + thread) % 5000;
                        fragments.remember(&packet(id), PORT, NOW);
                        let asked = (n * 11) % 5000;
                        if let Some(flow) = fragments.flow_of(&fragment(false, asked, 1480), PORT, NOW) {
                            assert_eq!((flow.src_port, flow.dst_port), (asked as u16, !(asked as u16)));
                        }
                    }
                });
            }
        });
    }
}
