//! Fragments: the later ones of a datagram have no ports, so they follow the first one's.
//!
//! The first fragment carries the ports and is judged like any packet; when it passes, it is remembered here, and the
//! later ones get its flow. A later fragment that comes before its first one, or whose first one did not pass, finds
//! nothing and is dropped. One that overlaps the first one's octets finds nothing either: it could replace the header
//! that was judged (RFC 1858, RFC 3128, RFC 5722).
//!
//! Later fragments may come in any order among themselves. One that comes before its first is not held: whoever sends
//! fragments without a first one would have frames of the UMEM kept for nothing, and so take them from all other pods. Linux sends
//! a datagram's fragments in order and a veth keeps it; where a network changes it, the datagram is lost as if one of
//! its fragments were, and the drop is counted as [`Fragment`](crate::Cause::Fragment).
//!
//! The cache is shared by all workers and bounded: sets of four entries of a cache line, read and written without
//! locks like the connection table's. When a set is full the oldest datagram goes.

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

const WAYS: usize = 4;
/// Sets: 4096 datagrams, 256 KiB.
const SETS: usize = if cfg!(all(test, feature = "loom")) { 1 } else { 1024 };
/// Ticks that a datagram is remembered: 30 s, as long as the kernel waits for the rest of one (`ipfrag_time`).
const LIFETIME: u32 = 59;

/// All zero is a free entry. The control word: bits 0–21 tick, bit 22 set while one thread writes, bit 23 set when it
/// holds a datagram, from bit 24 on a count of writes.
#[derive(Default)]
#[repr(C, align(64))]
struct Entry {
    control: AtomicU64,
    key: [AtomicU64; 5],
    /// Source port, destination port, first octet behind the first fragment, protocol; 16 bits each.
    value: AtomicU64,
}

const WRITING: u64 = 1 << 22;
const HELD: u64 = 1 << 23;
const WRITE: u64 = 1 << 24;

type Key = [u64; 5];

impl Fragments {
    pub(super) fn new() -> Self {
        Self { sets: (0..SETS).map(|_| Default::default()).collect(), seed: Seed::random() }
    }

    /// Remembers the first fragment of a datagram, which was let through. `port` is the one that it came in by. Any other
    /// packet is left alone.
    pub fn remember(&self, packet: &Packet, port: PortId, now: Timestamp) {
        if packet.fragment.is_none_or(|fragment| fragment.offset > 0) {
            return;
        }
        let Some(key) = key(packet, port) else { return };
        let flow = &packet.flow;
        let end = u64::from(packet.layout.end - packet.layout.transport);
        let value =
            u64::from(flow.src_port) | u64::from(flow.dst_port) << 16 | end << 32 | u64::from(flow.protocol.0) << 48;
        let now = now.tick();
        let set = self.set(&key);
        let held = set.iter().find(|entry| entry.read(&key, now).is_some());
        let oldest = || set.iter().max_by_key(|entry| entry.age(now)).expect("a set has entries");
        held.unwrap_or_else(oldest).write(&key, value, now);
    }

    /// The flow of a later fragment, with the ports of the first one; `None` if that is not known, or if this one
    /// overlaps it.
    pub fn flow_of(&self, packet: &Packet, port: PortId, now: Timestamp) -> Option<Flow> {
        let fragment = packet.fragment.filter(|fragment| fragment.offset > 0)?;
        let key = key(packet, port)?;
        let value = self.set(&key).iter().find_map(|entry| entry.read(&key, now.tick()))?;
        (fragment.offset >= (value >> 32) as u16).then_some(Flow {
            protocol: Protocol((value >> 48) as u8),
            src_port: value as u16,
            dst_port: (value >> 16) as u16,
            ..packet.flow
        })
    }

    fn set(&self, key: &Key) -> &[Entry; WAYS] {
        &self.sets[self.seed.hash(key) as usize % SETS]
    }
}

/// What all fragments of a datagram have in common: RFC 791 section 3.2, RFC 8200 section 4.5. The protocol counts in
/// IPv4 only: in IPv6 other headers may stand between the fragment's and the transport's.
fn key(packet: &Packet, port: PortId) -> Option<Key> {
    let Flow { src, dst, protocol, .. } = packet.flow;
    let protocol = if src.is_v4() { protocol.0 } else { 0 };
    let last = u64::from(packet.fragment?.id) | u64::from(port.0) << 32 | u64::from(protocol) << 48;
    let halves = |bits: u128| [(bits >> 64) as u64, bits as u64];
    let ([a, b], [c, d]) = (halves(src.bits()), halves(dst.bits()));
    Some([a, b, c, d, last])
}

impl Entry {
    /// The value under this key, if it is held and young enough.
    fn read(&self, key: &Key, now: Tick) -> Option<u64> {
        let before = self.control.load(Ordering::Acquire);
        if before & (HELD | WRITING) != HELD || tick(before).age(now) > LIFETIME {
            return None;
        }
        let is_equal = self.key.iter().zip(key).all(|(word, wanted)| word.load(Ordering::Relaxed) == *wanted);
        let value = self.value.load(Ordering::Relaxed);
        // As in the connection table: what was read is whole if nobody has begun to write since.
        fence(Ordering::Acquire);
        (is_equal && self.control.load(Ordering::Relaxed) == before).then_some(value)
    }

    /// How good an entry is to write over: its age, the greatest if it holds nothing or what it holds has expired.
    fn age(&self, now: Tick) -> u32 {
        let control = self.control.load(Ordering::Relaxed);
        let age = tick(control).age(now);
        match control & (HELD | WRITING) {
            HELD if age <= LIFETIME => age,
            // Another worker is at it: the worst choice, since the write would not be made.
            state if state & WRITING != 0 => 0,
            _ => u32::MAX,
        }
    }

    /// Writes over the entry, unless another thread is doing so: then that datagram has it, and this one's later
    /// fragments find nothing.
    fn write(&self, key: &Key, value: u64, now: Tick) {
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
        self.value.store(value, Ordering::Relaxed);
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
            fragment: Some(Fragment { id, offset, more: true }),
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
