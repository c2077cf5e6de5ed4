//! Fragments: later fragments of a datagram have no ports and follow its first fragment.
//!
//! The first fragment contains the ports and is evaluated like any packet. If it passes, it is recorded here, and the
//! later fragments get its flow. A later fragment that overlaps the first one's bytes is dropped, since it could replace
//! the headers that were evaluated (RFC 1858, RFC 3128, RFC 5722). Overlap is computed from where fragment offsets count:
//! in IPv6 behind the Fragment header, where extension headers may precede the transport header (RFC 8200 section 4.5).
//!
//! Later fragments that overlap each other pass. The first fragment contains all headers, so no evaluated bytes are
//! affected, and the receiver discards such a datagram (RFC 5722; Linux does so in IPv4 too).
//!
//! A second first fragment with the same identification is evaluated separately. If it passes, the later ones follow
//! it: a fast sender reuses its 65,536 IPv4 identifications within seconds. Later fragments must then begin behind both
//! first fragments, as long as the longer one is recorded. A receiver that reassembles overlapping fragments against
//! RFC 5722 may combine fragments of both; each of the two was allowed.
//!
//! Later fragments may arrive in any order. One that finds no record, since its first fragment is still on its way or was
//! dropped, is [early](crate::pipeline::EarlyFragments): whoever received it holds a copy and tries it again.
//!
//! The cache is shared by all workers and bounded: sets of eight entries of one cache line each, read and written
//! without locks like the connection table. If a set is full, the port with most entries in it loses its oldest
//! datagram. A flooding port therefore replaces its own entries, and flooding ports can only take all of a set if there
//! are as many of them as entries. Everything received on an uplink belongs to one port.

use crossbeam::utils::CachePadded;

use super::hash::Seed;
use super::seqlock::{Control, SeqLock};
use super::sync::{AtomicU64, Ordering};
use super::time::{Tick, Timestamp};
use crate::forward::PortId;
use crate::packet::{Flow, Packet, Protocol};

/// Datagrams in transit whose first fragment has passed.
pub struct Fragments {
    sets: Box<[[FragmentEntry; WAYS]]>,
    seed: Seed,
    /// How many were recorded. Apart: all workers write it.
    remembered: CachePadded<AtomicU64>,
}

const WAYS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 8 };
/// Number of sets: 4096 datagrams, 256 KiB.
const SETS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 512 };
/// Ticks that a datagram is kept: 30 s, the kernel's reassembly timeout (`ipfrag_time`).
const LIFETIME: u32 = 59;

/// All zero is a free entry.
#[derive(Default)]
#[repr(C, align(64))]
struct FragmentEntry(SeqLock<FragmentControl, FragmentWords>);

#[derive(Default)]
#[repr(C)]
struct FragmentWords {
    key: [AtomicU64; 5],
    /// Source port, destination port, end of the first fragment in the datagram's payload, protocol; 16 bits each.
    value: AtomicU64,
}

/// Bits 0–21 tick, bit 22 set while one thread writes, bit 23 set if it contains a datagram, from bit 24 on a write
/// counter.
#[derive(Clone, Copy, PartialEq, Default)]
struct FragmentControl(u64);

const WRITING: u64 = 1 << 22;
const HELD: u64 = 1 << 23;
const WRITE: u64 = 1 << 24;

impl FragmentControl {
    fn is_held(self) -> bool {
        self.0 & (HELD | WRITING) == HELD
    }

    fn is_writing(self) -> bool {
        self.0 & WRITING != 0
    }

    fn tick(self) -> Tick {
        Tick(self.0 as u32 & Tick::MASK)
    }

    /// Claimed by one thread for the next write.
    fn claimed(self) -> Self {
        Self((self.0 & !(WRITE - 1)).wrapping_add(WRITE) | WRITING)
    }

    /// The same write, completed at this time.
    fn held(self, now: Tick) -> Self {
        Self(self.0 & !WRITING | HELD | u64::from(now.0))
    }
}

impl Control for FragmentControl {
    fn from_word(word: u64) -> Self {
        Self(word)
    }

    fn word(self) -> u64 {
        self.0
    }

    fn is_same_write(self, other: Self) -> bool {
        self.is_held() && self == other
    }
}

type Key = [u64; 5];
/// Index of the key word with identification, port and protocol, and the shift of the port in it.
const LAST: usize = 4;
const PORT_SHIFT: u32 = 32;

/// The fields that all fragments of a datagram share, and the port that received them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DatagramKey(Key);

impl DatagramKey {
    /// The datagram of a fragment; `port` is its ingress port.
    pub fn of(fragment: &Packet, port: PortId) -> Option<Self> {
        key(fragment, port).map(Self)
    }
}

impl Fragments {
    pub(super) fn new() -> Self {
        let sets = (0..SETS).map(|_| Default::default()).collect();
        Self { sets, seed: Seed::random(), remembered: CachePadded::new(AtomicU64::new(0)) }
    }

    /// Records the first fragment of a datagram that has passed; `port` is its ingress port. Other packets are ignored.
    pub fn remember(&self, packet: &Packet, port: PortId, now: Timestamp) {
        if packet.fragment.is_none_or(|fragment| !fragment.is_first()) {
            return;
        }
        let Some(key) = key(packet, port) else { return };
        let (first, now) = (FirstFragment::of(packet), now.tick());
        let hash = self.seed.hash(&key);
        let set = self.set(hash);
        match set.iter().find_map(|entry| Some((entry, entry.read(&key, now)?))) {
            None => victim(set, port, (hash >> 32) as usize, now).write(&key, first, now),
            Some((entry, before)) => {
                // An earlier, longer one keeps its original expiry: identifications are reused, and the path MTU may have
                // shrunk since.
                let (end, since) = if before.end > first.end { (before.end, entry.tick()) } else { (first.end, now) };
                entry.write(&key, FirstFragment { end, ..first }, since);
            }
        }
        // Whoever sees this count sees the record.
        self.remembered.fetch_add(1, Ordering::Release);
    }

    /// How many first fragments all workers have recorded.
    pub(crate) fn remembered(&self) -> u64 {
        self.remembered.load(Ordering::Acquire)
    }

    /// Whether the first fragment of this datagram is recorded.
    pub(crate) fn has_first(&self, datagram: &DatagramKey, now: Timestamp) -> bool {
        self.first(&datagram.0, now).is_some()
    }

    /// The flow of a later fragment, with the ports of the first one; `None` if that is unknown or this one overlaps
    /// it.
    pub fn flow_of(&self, packet: &Packet, port: PortId, now: Timestamp) -> Option<Flow> {
        let fragment = packet.fragment.filter(|fragment| !fragment.is_first())?;
        let FirstFragment { protocol, src_port, dst_port, end } = self.first(&key(packet, port)?, now)?;
        (fragment.offset() >= end).then_some(Flow { protocol, src_port, dst_port, ..packet.flow })
    }

    fn first(&self, key: &Key, now: Timestamp) -> Option<FirstFragment> {
        self.set(self.seed.hash(key)).iter().find_map(|entry| entry.read(key, now.tick()))
    }

    fn set(&self, hash: u64) -> &[FragmentEntry; WAYS] {
        &self.sets[hash as usize % SETS]
    }
}

/// Record of a datagram's first fragment.
#[derive(Clone, Copy)]
struct FirstFragment {
    protocol: Protocol,
    src_port: u16,
    dst_port: u16,
    /// Lowest valid offset of later fragments.
    end: u16,
}

impl FirstFragment {
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

/// The entry to use for a datagram from `port`: a free one, or the oldest of the port with most entries. A port that
/// has as many as any other replaces its own. Ticks are long, so `turn` selects among entries of the same tick.
fn victim(set: &[FragmentEntry; WAYS], port: PortId, turn: usize, now: Tick) -> &FragmentEntry {
    let holders = set.each_ref().map(FragmentEntry::port);
    let count = |port: PortId| holders.iter().filter(|holder| **holder == port).count();
    let counts = holders.map(count);
    let most = counts.into_iter().max().unwrap_or(0);
    let has_most = count(port) >= most;
    let rank = |way: usize| {
        let gives_up = if has_most { holders[way] == port } else { counts[way] == most };
        let (class, age) = match set[way].age(now) {
            EntryAge::Free => (3, 0),
            EntryAge::Held(age) => (if gives_up { 2 } else { 0 }, age),
            // Another worker is writing it, and this write is skipped: better than evicting another port's entry.
            EntryAge::Writing => (u32::from(gives_up), 0),
        };
        (class, age, (way + turn) % WAYS)
    };
    &set[(0..WAYS).max_by_key(|way| rank(*way)).unwrap_or(0)]
}

/// The fields shared by all fragments of a datagram: RFC 791 section 3.2, RFC 8200 section 4.5. The protocol only
/// counts in IPv4: in IPv6 other headers may precede the transport header.
fn key(packet: &Packet, port: PortId) -> Option<Key> {
    let Flow { src, dst, protocol, .. } = packet.flow;
    let protocol = if src.is_v4() { protocol.0 } else { 0 };
    let last = u64::from(packet.fragment?.id()) | u64::from(port.0) << PORT_SHIFT | u64::from(protocol) << 48;
    let halves = |bits: u128| [(bits >> 64) as u64, bits as u64];
    let ([a, b], [c, d]) = (halves(src.bits()), halves(dst.bits()));
    Some([a, b, c, d, last])
}

/// Whether an entry can be replaced.
enum EntryAge {
    /// Free or expired.
    Free,
    /// In use, with an age in ticks.
    Held(u32),
    /// Another thread is writing it.
    Writing,
}

impl FragmentEntry {
    /// The datagram with this key, if it is recorded and has not expired.
    fn read(&self, key: &Key, now: Tick) -> Option<FirstFragment> {
        let before = self.0.control();
        if !before.is_held() || before.tick().age(now) > LIFETIME {
            return None;
        }
        let read = |words: &FragmentWords| {
            let is_equal = words.key.iter().zip(key).all(|(word, wanted)| word.load(Ordering::Relaxed) == *wanted);
            is_equal.then(|| FirstFragment::of_word(words.value.load(Ordering::Relaxed)))
        };
        self.0.read(before, read).flatten()
    }

    fn age(&self, now: Tick) -> EntryAge {
        let control = self.0.control();
        match control.tick().age(now) {
            _ if control.is_writing() => EntryAge::Writing,
            age if control.is_held() && age <= LIFETIME => EntryAge::Held(age),
            _ => EntryAge::Free,
        }
    }

    /// When it was written.
    fn tick(&self) -> Tick {
        self.0.control().tick()
    }

    /// The port of its current or last datagram. Free entries are used before ports are compared, so the port of an
    /// entry that was never written does not matter.
    fn port(&self) -> PortId {
        PortId((self.0.words().key[LAST].load(Ordering::Relaxed) >> PORT_SHIFT) as u16)
    }

    /// Overwrites the entry unless another thread is doing so. In that case the later fragments of this datagram find
    /// no record.
    fn write(&self, key: &Key, first: FirstFragment, now: Tick) {
        let before = self.0.control();
        let claimed = before.claimed();
        if before.is_writing() || self.0.exchange(before, claimed).is_err() {
            return;
        }
        self.0.publish(claimed.held(now), |words| {
            for (word, part) in words.key.iter().zip(key) {
                word.store(*part, Ordering::Relaxed);
            }
            words.value.store(first.to_word(), Ordering::Relaxed);
        });
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::packet::{Address, Fragment, Layout, Transport};

    const NOW: Timestamp = Timestamp::from_millis(5_000_000);
    const PORT: PortId = PortId(3);

    /// A fragment of 1480 bytes of datagram `id` at `offset`, from port 1000 to port 53.
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
    fn a_fragment_that_overlaps_the_first_is_dropped() {
        let fragments = Fragments::new();
        fragments.remember(&fragment(false, 7, 0), PORT, NOW);
        for (offset, passes) in [(8, false), (1472, false), (1480, true)] {
            assert_eq!(fragments.flow_of(&fragment(false, 7, offset), PORT, NOW).is_some(), passes, "at {offset}");
        }
    }

    #[test]
    fn overlap_counts_from_the_fragment_header() {
        let fragments = Fragments::new();
        // 64 bytes of extension headers out of 1480 behind the Fragment header.
        let mut first = fragment(true, 7, 0);
        first.layout.transport += 64;
        fragments.remember(&first, PORT, NOW);
        for (offset, passes) in [(8, false), (1416, false), (1472, false), (1480, true)] {
            assert_eq!(fragments.flow_of(&fragment(true, 7, offset), PORT, NOW).is_some(), passes, "at {offset}");
        }
    }

    /// Identifications are reused, so the second one is valid and its fragments follow it.
    #[test]
    fn later_fragments_follow_a_second_first_fragment() {
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
    fn only_first_fragments_are_recorded_and_they_expire() {
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
    fn a_flood_of_datagrams_replaces_the_oldest_ones() {
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

    /// The set of a datagram.
    fn set_of(fragments: &Fragments, packet: &Packet, port: PortId) -> usize {
        fragments.seed.hash(&key(packet, port).unwrap()) as usize % SETS
    }

    #[test]
    fn a_flood_of_first_fragments_leaves_each_port_its_share() {
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
    fn a_single_port_uses_a_whole_set_and_shares_it_with_a_new_one() {
        let fragments = Fragments::new();
        let passes = |id, port| fragments.flow_of(&fragment(false, id, 1480), port, NOW).is_some();
        // Begins `count` datagrams that fall into the first set.
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
    fn concurrent_reads_never_mix_two_datagrams() {
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
