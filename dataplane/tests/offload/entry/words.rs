//! The words of an entry, as the programs read them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions};
use penstock_dataplane::conntrack::OwnerId;

use crate::repeat::{ANSWERS, place_of_credit};
use crate::*;

// The control word, as `dataplane/src/conntrack/entry.rs` has it.
pub(crate) const STATES: u64 = 15;
pub(crate) const TENTATIVE: u64 = 1 << 4;
pub(crate) const ORIGINAL: u64 = 1 << 5;
pub(crate) const REVOKED: u64 = 1 << 6;
pub(crate) const VIA_HOST: u64 = 1 << 7;
pub(crate) const TICK_AT: u32 = 8;
pub(crate) const TICKS: u64 = 0x3f_ffff;
pub(crate) const TICK_MILLISECONDS: u64 = 512;
pub(crate) const EPOCH_AT: u32 = 30;
pub(crate) const EPOCHS: u64 = 0x7f_ffff;
pub(crate) const GENERATION_AT: u32 = 53;
pub(crate) const GENERATIONS: u64 = 0x3ff;
pub(crate) const HAS_OPENER: u64 = 1 << 63;
pub(crate) const CLAIMED: u64 = 1;

// The path, as `dataplane/src/conntrack/path.rs` has it.
pub(crate) const ANSWERED: u64 = 1 << 42;
pub(crate) const CONFIRMED: u64 = 1 << 43;
pub(crate) const FINISHED: u64 = 0b11 << 44;
pub(crate) const TAKEN_AT: usize = 46;
pub(crate) const PATH_EPOCH_AT: u32 = 48;
pub(crate) const END_BITS: usize = 21;
pub(crate) const BY_NODE: u64 = 0x1f_ffff;

/// The parts of a connection that programs read, and the words for all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fields {
    /// Control word, four words of addresses, ports with protocol, and tracking of each direction.
    pub(crate) entry: [u64; 8],
    pub(crate) path: u64,
    /// By direction: bytes, and the tick of the last packet.
    pub(crate) used: [u64; 2],
    pub(crate) epoch: u32,
    pub(crate) timeouts: [u32; 5],
}

impl Fields {
    pub(crate) fn set_state(&mut self, state: u64) {
        self.entry[0] = self.entry[0] & !STATES | state;
    }

    /// The tick of the last packet at a worker.
    pub(crate) fn tick(&self) -> u64 {
        self.entry[0] >> TICK_AT & TICKS
    }

    pub(crate) fn set_tick(&mut self, now: Timestamp) {
        let tick = (now.as_millis() / TICK_MILLISECONDS) & TICKS;
        self.entry[0] = self.entry[0] & !(TICKS << TICK_AT) | tick << TICK_AT;
    }

    /// How often the entry was claimed.
    pub(crate) fn generation(&self) -> u64 {
        self.entry[0] >> GENERATION_AT & GENERATIONS
    }

    /// The present tick, as programs note it.
    pub(crate) fn now() -> u64 {
        (Timestamp::now().as_millis() / TICK_MILLISECONDS) & TICKS
    }

    pub(crate) fn set_age(&mut self, ticks: i64) {
        let tick = self.tick().wrapping_sub(ticks as u64) & TICKS;
        self.entry[0] = self.entry[0] & !(TICKS << TICK_AT) | tick << TICK_AT;
    }

    /// The parts that are alike in two entries of the same connection: neither its generation nor when it was used.
    pub(crate) fn lasting(mut self) -> Self {
        let began = self.tick();
        self.entry[0] &= !(TICKS << TICK_AT | GENERATIONS << GENERATION_AT);
        self.used = self.used.map(|used| used & !TICKS);
        if self.entry[5] >> 32 & 0xff == 17 && self.entry[6] == began {
            self.entry[6] = u64::MAX;
        }
        self
    }

    /// Whether it is of the connection of this flow.
    pub(crate) fn is_of(&self, flow: &Flow) -> bool {
        let ends = [flow.src.min(flow.dst), flow.src.max(flow.dst)].map(|end| end.bits());
        let halves = ends.iter().flat_map(|bits| [(bits >> 64) as u64, *bits as u64]);
        let ports = [flow.src_port, flow.dst_port].map(u64::from);
        let [low, high] = if flow.src < flow.dst { ports } else { [ports[1], ports[0]] };
        self.entry[1..5].iter().copied().eq(halves)
            && self.entry[5] & 0xff_ffff_ffff == low | high << 16 | u64::from(flow.protocol.0) << 32
    }

    /// The window of a SYN's sender whose options were not read.
    pub(crate) fn widen(&mut self, direction: usize) {
        self.entry[6 + direction] &= !(31 << 52 | 15 << 57);
        self.entry[6 + direction] |= 16 << 52 | 14 << 57;
    }

    /// Evaluated under this epoch, and the path taken under it.
    pub(crate) fn set_evaluated(&mut self, epoch: u64) {
        self.entry[0] = self.entry[0] & !(EPOCHS << EPOCH_AT) | (epoch & EPOCHS) << EPOCH_AT;
        self.set_path_epoch(epoch);
    }

    pub(crate) fn set_path_epoch(&mut self, epoch: u64) {
        self.path = self.path & ((1 << PATH_EPOCH_AT) - 1) | (epoch & 0xffff) << PATH_EPOCH_AT;
    }
}

/// The table's words, mapped as workers map them.
pub(crate) struct Words {
    pub(crate) table: MmapMut,
    pub(crate) tags: MmapMut,
    pub(crate) entries: MmapMut,
    pub(crate) uses: MmapMut,
}

/// Entries of a group.
pub(crate) const LANES: usize = 32;

/// Number of entries: more than there may be connections.
pub(crate) fn capacity() -> usize {
    KernelMapSizes::of(ENTRIES).entries as usize
}

/// Words of `struct table` before its epoch.
pub(crate) const HEADER: usize = 14;

impl Words {
    pub(crate) fn of(node: &Node) -> Self {
        let [table, tags, entries, uses] = node.maps.descriptors().unwrap();
        let sizes = KernelMapSizes::of(ENTRIES);
        let map = |fd, elements: u32, size: u32| {
            // SAFETY: what others change in these maps is read and written by atomics only.
            unsafe { MmapOptions::new().len((elements * size) as usize).map_mut(&fd) }.unwrap()
        };
        Self {
            table: map(table, 1, KernelMapSizes::TABLE),
            tags: map(tags, sizes.groups, KernelMapSizes::TAGS),
            entries: map(entries, sizes.with_openers, KernelMapSizes::ENTRY),
            uses: map(uses, sizes.entries, KernelMapSizes::USE),
        }
    }

    pub(crate) fn words(map: &MmapMut) -> &[AtomicU64] {
        // SAFETY: the mapping lives as long as the borrow, is page-aligned, and any bits are a valid atomic.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), map.len() / 8) }
    }

    pub(crate) fn entry(&self, slot: usize) -> &[AtomicU64] {
        &Self::words(&self.entries)[slot * 8..][..8]
    }

    /// Path, packets, and of each direction the bytes and the tick.
    pub(crate) fn usage(&self, slot: usize) -> &[AtomicU64] {
        &Self::words(&self.uses)[slot * 4..][..4]
    }

    pub(crate) fn tag(&self, slot: usize) -> u64 {
        Self::words(&self.tags)[slot / 4].load(Ordering::Acquire) >> (slot % 4 * 16) & 0xffff
    }

    pub(crate) fn set_tag(&self, slot: usize, tag: u64) {
        let (word, at) = (&Self::words(&self.tags)[slot / 4], slot % 4 * 16);
        let others = word.load(Ordering::Acquire) & !(0xffff << at);
        word.store(others | tag << at, Ordering::Release);
    }

    /// Element of what programs need to open connections: answers, then credit by owner.
    pub(crate) fn behind(&self, element: usize) -> &[AtomicU64] {
        // Four openers are an element.
        let first = capacity() + capacity() / 4;
        &Self::words(&self.entries)[(first + element) * 8..][..8]
    }

    /// How many connections programs may still open for an owner.
    pub(crate) fn credit(&self, owner: OwnerId) -> u64 {
        self.behind(ANSWERS + place_of_credit(owner))[0].load(Ordering::Acquire)
    }

    /// Until when programs may open connections.
    pub(crate) fn repeats(&self) -> &AtomicU32 {
        let at = &self.table[HEADER * 8 + 6 * 4..][..4];
        // SAFETY: as in [`Words::words`].
        unsafe { &*at.as_ptr().cast() }
    }

    /// The epoch that programs compare with.
    pub(crate) fn epoch(&self) -> &AtomicU32 {
        &self.shared()[0]
    }

    /// Gives each entry of the table a tag, so that none is free, or takes these away again.
    pub(crate) fn fill(&self, is_full: bool) {
        for slot in (0..capacity()).filter(|&slot| self.entry(slot)[0].load(Ordering::Acquire) & STATES == 0) {
            self.set_tag(slot, u64::from(is_full));
        }
    }

    /// The epoch, and the timeouts.
    pub(crate) fn shared(&self) -> &[AtomicU32] {
        let at = &self.table[HEADER * 8..][..6 * 4];
        // SAFETY: as in [`Words::words`].
        unsafe { std::slice::from_raw_parts(at.as_ptr().cast(), 6) }
    }

    /// The entries in use.
    pub(crate) fn slots(&self) -> Vec<usize> {
        (0..capacity()).filter(|&slot| self.entry(slot)[0].load(Ordering::Acquire) & STATES > CLAIMED).collect()
    }

    pub(crate) fn read(&self, slot: usize) -> Fields {
        let load = |word: &AtomicU64| word.load(Ordering::Acquire);
        let shared = self.shared();
        Fields {
            entry: std::array::from_fn(|word| load(&self.entry(slot)[word])),
            path: load(&self.usage(slot)[0]),
            used: std::array::from_fn(|direction| load(&self.usage(slot)[2 + direction])),
            epoch: shared[0].load(Ordering::Acquire),
            timeouts: std::array::from_fn(|kind| shared[1 + kind].load(Ordering::Acquire)),
        }
    }

    pub(crate) fn write(&self, slot: usize, fields: &Fields) {
        let store = |word: &AtomicU64, value| word.store(value, Ordering::Release);
        self.entry(slot).iter().zip(fields.entry).for_each(|(word, value)| store(word, value));
        store(&self.usage(slot)[0], fields.path);
        self.usage(slot)[2..].iter().zip(fields.used).for_each(|(word, value)| store(word, value));
        self.shared()[0].store(fields.epoch, Ordering::Release);
        self.shared()[1..].iter().zip(fields.timeouts).for_each(|(word, value)| word.store(value, Ordering::Release));
    }
}
