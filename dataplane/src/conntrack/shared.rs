//! A table in BPF arrays: programs in the kernel read it and forward packets of established connections by themselves.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapMut, MmapOptions};

use super::answers::Repeats;
use super::config::TIMEOUTS;
use super::entry::TableEntry;
use super::groups::group_count;
use super::header::FileHeader;
use super::kernel_maps::KernelMaps;
use super::opener::Opener;
use super::path::KernelUse;
use super::tags::{LANES, Tags};
use crate::epoch::Epoch;
use crate::grace::wait_for_programs;

/// Sizes of the arrays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelMapSizes {
    /// Number of groups.
    pub groups: u32,
    /// Number of entries.
    pub entries: u32,
    /// Number of elements of the array of entries: the entries, then their openers, and what programs need to open connections.
    pub with_openers: u32,
}

impl KernelMapSizes {
    /// Version of the arrays' contents: what another version left must not be used.
    pub const VERSION: u64 = FileHeader::VERSION;
    /// Bytes of `struct table`.
    pub const TABLE: u32 = size_of::<TablePage>() as u32;
    /// Bytes of `struct tags`.
    pub const TAGS: u32 = size_of::<Tags>() as u32;
    /// Bytes of `struct entry`.
    pub const ENTRY: u32 = size_of::<TableEntry>() as u32;
    /// Bytes of `struct kernel_use`.
    pub const USE: u32 = size_of::<KernelUse>() as u32;

    /// Those of a table for this many connections.
    pub fn of(connections: usize) -> Self {
        let groups = group_count(connections);
        let entries = groups * LANES;
        Self { groups, entries, with_openers: entries + entries / OPENERS + Repeats::ELEMENTS }
    }
}

/// Openers in an element of the array of entries.
const OPENERS: u32 = 4;
const _: () = assert!(
    cfg!(all(test, feature = "loom"))
        || OPENERS as usize * size_of::<Opener>() == size_of::<TableEntry>() && LANES.is_multiple_of(OPENERS),
    "openers of a group fill whole elements"
);

/// `struct table`.
#[repr(C)]
struct TablePage {
    header: [u64; FileHeader::WORDS],
    epoch: AtomicU32,
    timeouts: [AtomicU32; TIMEOUTS],
    repeats: AtomicU32,
    unused: u32,
}

/// The mapped arrays.
pub(super) struct SharedMaps {
    table: MmapMut,
    tags: MmapMut,
    entries: MmapMut,
    uses: MmapMut,
    groups: usize,
}

impl SharedMaps {
    pub(super) fn open(maps: &KernelMaps, groups: u32) -> io::Result<Self> {
        let groups = groups as usize;
        let map = |fd: &OwnedFd, len: usize| {
            // SAFETY: programs in the kernel change only what is read as atomics here; the header is checked before use.
            unsafe { MmapOptions::new().len(len).map_mut(fd.as_raw_fd()) }
        };
        let entries = groups * LANES as usize;
        Ok(Self {
            table: map(&maps.0.table, size_of::<TablePage>())?,
            tags: map(&maps.0.tags, groups * size_of::<Tags>())?,
            entries: map(
                &maps.0.entries,
                entries * (size_of::<TableEntry>() + size_of::<Opener>()) + size_of::<Repeats>(),
            )?,
            uses: map(&maps.0.uses, entries * size_of::<KernelUse>())?,
            groups,
        })
    }

    /// The bytes of the header.
    pub(super) fn header(&self) -> &[u8] {
        &self.table[..size_of::<[u64; FileHeader::WORDS]>()]
    }

    /// Empties the table, and gives it this header. Only before others use it.
    pub(super) fn clear(&mut self, header: &[u8]) {
        for map in [&mut self.tags, &mut self.entries, &mut self.uses, &mut self.table] {
            map.fill(0);
        }
        self.table[..header.len()].copy_from_slice(header);
    }

    pub(super) fn entries(&mut self) -> NonNull<TableEntry> {
        NonNull::from(&mut self.entries[..]).cast()
    }

    pub(super) fn tags(&mut self) -> NonNull<Tags> {
        NonNull::from(&mut self.tags[..]).cast()
    }

    #[inline]
    pub(super) fn uses(&self) -> &[KernelUse] {
        // SAFETY: the mapping contains this many, page-aligned, and any bit pattern is a valid atomic.
        unsafe { std::slice::from_raw_parts(self.uses.as_ptr().cast(), self.groups * LANES as usize) }
    }

    /// The memory that programs need to open connections, behind the openers.
    #[inline]
    pub(super) fn repeats(&self) -> &Repeats {
        let at = self.groups * LANES as usize * (size_of::<TableEntry>() + size_of::<Opener>());
        // SAFETY: the mapping contains it there ([`SharedMaps::open`]), aligned to 64 bytes as whole elements are, and any bit pattern is a
        // valid atomic.
        unsafe { &*self.entries.as_ptr().add(at).cast() }
    }

    fn page(&self) -> &TablePage {
        // SAFETY: the mapping contains one, page-aligned; only atomics in it are read through this reference.
        unsafe { &*self.table.as_ptr().cast() }
    }

    /// The epoch under which the programs forward.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.page().epoch.load(Ordering::Acquire))
    }

    /// From now on the programs forward no packet of a connection that was evaluated under an older epoch. A program that
    /// runs meanwhile may still do so.
    pub(super) fn set_epoch(&self, epoch: Epoch) {
        self.page().epoch.store(epoch.0, Ordering::SeqCst);
    }

    /// Until when programs may open connections.
    pub(super) fn set_repeats(&self, until: u32) {
        let word = &self.page().repeats;
        // Programs on other cores read it, and what is beside it.
        if word.load(Ordering::Relaxed) != until {
            word.store(until, Ordering::SeqCst);
        }
    }

    /// The programs open no connection when this returns, and forget by which they could.
    pub(super) fn stop_repeats(&self) {
        self.set_repeats(0);
        wait_for_programs();
        self.repeats().clear();
    }

    /// Timeouts in ticks: TCP established; UDP unreplied, replied, assured; TCP before it is established.
    pub(super) fn set_timeouts(&self, ticks: [u32; TIMEOUTS]) {
        for (word, ticks) in self.page().timeouts.iter().zip(ticks) {
            word.store(ticks, Ordering::Relaxed);
        }
    }
}
