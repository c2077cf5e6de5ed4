//! The memory that a table lives in.

use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use memmap2::{MmapMut, MmapOptions};

use super::config::ConfigError;
use super::entry::Entry;
use super::hash::Seed;
use super::tags::{LANES, Tags};

/// How a table came to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Opened {
    /// In memory, or in a file that was not there: it begins empty.
    New,
}

/// Why a table could not be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A setting cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is not enough memory.
    #[error("connection table: no {bytes} octets of memory ({source}): set conntrack entries lower")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// What the kernel says.
        source: std::io::Error,
    },
    /// The file cannot be opened, made or mapped.
    #[error("connection table {path}: {source}: make its directory, or set another mapping")]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        source: std::io::Error,
    },
}

/// Entries and tags, in a mapping that begins all zero: free.
pub(super) struct Storage {
    entries: NonNull<Entry>,
    tags: NonNull<Tags>,
    groups: usize,
    /// What the two point into.
    _map: MmapMut,
}

// SAFETY: the pointers are into the mapping that the value owns, and all that lies there is atomics.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    /// Memory for this many groups.
    pub(super) fn open(groups: u32, _mapping: Option<&Path>) -> Result<(Self, Seed, Opened), OpenError> {
        let groups = groups as usize;
        let (tags_len, entries_len) = (groups * size_of::<Tags>(), groups * LANES as usize * size_of::<Entry>());
        let bytes = tags_len + entries_len;
        let map = MmapOptions::new().len(bytes).map_anon().map_err(|source| OpenError::Memory { bytes, source })?;
        // Fewer translations to look up; if the kernel has none to give, small pages do.
        let _ = map.advise(memmap2::Advice::HugePage);
        let base = NonNull::from(&map[..]).cast::<u8>();
        // SAFETY: both parts lie within the mapping, one behind the other, and begin at multiples of 64.
        let (tags, entries) = unsafe { (base.cast(), base.add(tags_len).cast()) };
        Ok((Self { entries, tags, groups, _map: map }, Seed::random(), Opened::New))
    }

    #[inline]
    pub(super) fn entries(&self) -> &[Entry] {
        // SAFETY: the mapping holds so many, aligned, and any bits are valid atomics.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), self.groups * LANES as usize) }
    }

    #[inline]
    pub(super) fn tags(&self) -> &[Tags] {
        // SAFETY: as for the entries.
        unsafe { std::slice::from_raw_parts(self.tags.as_ptr(), self.groups) }
    }
}
