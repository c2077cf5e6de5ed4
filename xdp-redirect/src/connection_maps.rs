//! The BPF arrays of the workers' connection table, which the tcx programs read.
//!
//! They are pinned, so that the programs of a daemon that has ended and the next daemon use the same table. Only root can
//! open a pinned map: the files have mode 0600, in a directory with mode 0700.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use libbpf_rs::{MapCore, MapHandle, MapType, libbpf_sys};

use crate::pins::Pins;

/// Sizes of the arrays: numbers of elements, and bytes of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectionMapSizes {
    /// Version of their contents: arrays of another version are not taken over.
    pub version: u64,
    /// The size of the one `struct table` in `src/bpf/conntrack_maps.h`.
    pub table: u32,
    /// Number of groups, and bytes of their tags.
    pub tags: (u32, u32),
    /// Number of elements with entries or behind them, and bytes of an entry.
    pub entries: (u32, u32),
    /// Number of connections, and bytes that the programs write for each.
    pub usage: (u32, u32),
}

#[derive(Debug, thiserror::Error)]
#[error(
    "the connection table's BPF maps: {source}; {bytes} bytes of kernel memory are needed: set conntrack.entries lower, or offload = false"
)]
pub struct ConnectionMapsError {
    bytes: u64,
    source: libbpf_rs::Error,
}

/// The arrays, in the order in which the table's owner maps them.
#[derive(Debug)]
pub struct ConnectionMaps {
    table: MapHandle,
    tags: MapHandle,
    entries: MapHandle,
    uses: MapHandle,
}

/// Prefix of the pins: `conntrack_tags_2_1` are the tags in version 2 of the network namespace with cookie 1.
const PREFIX: &str = "conntrack_";

impl ConnectionMaps {
    /// Opens the arrays that an earlier process has pinned if they have these sizes and this version; otherwise makes new
    /// ones, and pins them. Without `pins` they end with the process and the programs.
    pub fn open(pins: Option<&Pins>, sizes: &ConnectionMapSizes) -> Result<Self, ConnectionMapsError> {
        if let Some(found) = pins.and_then(|pins| Self::find(pins, sizes)) {
            return Ok(found);
        }
        let bytes = sizes.all().iter().map(|(_, count, size)| u64::from(*count) * u64::from(*size)).sum();
        let failed = |source| ConnectionMapsError { bytes, source };
        let [table, tags, entries, uses] = sizes.all().map(|(name, count, size)| create(name, count, size));
        let mut maps = Self {
            table: table.map_err(failed)?,
            tags: tags.map_err(failed)?,
            entries: entries.map_err(failed)?,
            uses: uses.map_err(failed)?,
        };
        if let Some(pins) = pins {
            remove(pins);
            let [table, tags, entries, uses] = sizes.all().map(|(name, ..)| path(pins, name, sizes));
            for (map, path) in
                [(&mut maps.table, table), (&mut maps.tags, tags), (&mut maps.entries, entries), (&mut maps.uses, uses)]
            {
                map.pin(path).map_err(failed)?;
            }
        }
        Ok(maps)
    }

    /// Opens the arrays that a process has pinned if they have these sizes and this version.
    pub fn find(pins: &Pins, sizes: &ConnectionMapSizes) -> Option<Self> {
        let open = |(name, count, size)| {
            let map = MapHandle::from_pinned_path(path(pins, name, sizes)).ok()?;
            let is_same = map.max_entries() == count && map.value_size() == size && map.map_type() == MapType::Array;
            is_same.then_some(map)
        };
        let [table, tags, entries, uses] = sizes.all().map(open);
        Some(Self { table: table?, tags: tags?, entries: entries?, uses: uses? })
    }

    /// Descriptors of the table, the tags, the entries, and what the programs write.
    pub fn descriptors(&self) -> io::Result<[OwnedFd; 4]> {
        let [table, tags, entries, uses] = self.handles().map(|map| map.as_fd().try_clone_to_owned());
        Ok([table?, tags?, entries?, uses?])
    }

    pub(crate) fn handles(&self) -> [&MapHandle; 4] {
        [&self.table, &self.tags, &self.entries, &self.uses]
    }
}

impl ConnectionMapSizes {
    /// Name, number of elements and bytes of an element of each array.
    fn all(&self) -> [(&'static str, u32, u32); 4] {
        [
            ("ct_table", 1, self.table),
            ("ct_tags", self.tags.0, self.tags.1),
            ("ct_entries", self.entries.0, self.entries.1),
            ("ct_uses", self.usage.0, self.usage.1),
        ]
    }
}

impl Pins {
    /// Removes pinned connection tables. Programs that use them keep them until they end.
    pub fn remove_connection_maps(&self) {
        remove(self);
    }
}

fn create(name: &str, count: u32, size: u32) -> Result<MapHandle, libbpf_rs::Error> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        // Not BPF_F_RDONLY_PROG: a process may not map that writable (bpf_map_mmap in kernel/bpf/syscall.c).
        map_flags: libbpf_sys::BPF_F_MMAPABLE,
        ..Default::default()
    };
    MapHandle::create(MapType::Array, Some(name), 4, size, count, &options)
}

fn path(pins: &Pins, name: &str, sizes: &ConnectionMapSizes) -> PathBuf {
    pins.map_path(&format!("{PREFIX}{}_{}", name.trim_start_matches("ct_"), sizes.version))
}

fn remove(pins: &Pins) {
    pins.remove_maps(PREFIX);
}
