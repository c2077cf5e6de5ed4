//! The memory of a table: anonymous, a file that outlasts the process, or BPF arrays that programs in the kernel read.
//!
//! A file is a page with the [`FileHeader`], the tags, the entries, then their openers. It is created under another name and renamed
//! when complete. Every change to the table is one atomic word and an entry describes itself, so the file is usable
//! after a process died at any point; [`super::recover`] clears operations in progress.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use memmap2::{MmapMut, MmapOptions};

use super::config::TableMemory;
use super::entry::TableEntry;
use super::hash::Seed;
use super::header::FileHeader;
use super::kernel_maps::KernelMaps;
use super::opener::Opener;
use super::origin::{OpenError, TableOrigin, UnusableFile};
use super::path::KernelUse;
use super::shared::SharedMaps;
use super::tags::{LANES, Tags};

/// Entries and tags in mappings that are initially zero: free.
pub(super) struct Storage {
    entries: NonNull<TableEntry>,
    tags: NonNull<Tags>,
    groups: usize,
    memory: Memory,
}

/// The memory that the pointers refer to.
enum Memory {
    /// One mapping; its file is locked as long as the table exists.
    One(
        #[expect(dead_code, reason = "held for the pointers into it")] MmapMut,
        #[expect(dead_code, reason = "held for its lock")] Option<File>,
    ),
    /// BPF arrays.
    Shared(SharedMaps),
}

// SAFETY: the pointers refer to the mappings that the value owns, and everything in it is atomic.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Storage {
    /// Memory for this many groups: the content of the file if it is usable, otherwise free entries.
    pub(super) fn open(groups: u32, memory: &TableMemory) -> Result<(Self, Seed, TableOrigin), OpenError> {
        let path = match memory {
            TableMemory::Anonymous => {
                let bytes = table_len(groups);
                let map =
                    MmapOptions::new().len(bytes).map_anon().map_err(|source| OpenError::Memory { bytes, source })?;
                advise(&map, used_len(groups));
                return Ok((Self::new(map, None, 0, groups), Seed::random(), TableOrigin::New));
            }
            TableMemory::File(path) => path,
            TableMemory::Kernel(maps) => {
                return Self::open_shared(groups, maps).map_err(|source| OpenError::Kernel { source });
            }
        };
        Self::open_file(groups, path).map_err(|error| match error {
            FileError::InUse => OpenError::InUse { path: path.to_owned() },
            FileError::Io(source) => OpenError::File { path: path.to_owned(), source },
        })
    }

    fn open_shared(groups: u32, maps: &KernelMaps) -> io::Result<(Self, Seed, TableOrigin)> {
        let mut maps = SharedMaps::open(maps, groups)?;
        let (seed, origin) = match FileHeader::seed_in(maps.header(), groups) {
            Ok(seed) => (seed, TableOrigin::Found),
            Err(reason) => {
                let is_new = maps.header().iter().all(|byte| *byte == 0);
                let seed = Seed::random();
                maps.clear(&FileHeader::new(groups, &seed)?.to_bytes());
                (seed, if is_new { TableOrigin::New } else { TableOrigin::Remade(reason) })
            }
        };
        let (entries, tags) = (maps.entries(), maps.tags());
        Ok((Self { entries, tags, groups: groups as usize, memory: Memory::Shared(maps) }, seed, origin))
    }

    fn open_file(groups: u32, path: &Path) -> Result<(Self, Seed, TableOrigin), FileError> {
        let origin = match OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => TableOrigin::New,
            Err(error) => return Err(error.into()),
            Ok(file) => {
                lock(&file)?;
                let map = map(&file, groups)?;
                match check(&map, groups) {
                    Ok(seed) => return Ok((Self::new(map, Some(file), HEADER_LEN, groups), seed, TableOrigin::Found)),
                    Err(reason) => TableOrigin::Remade(reason),
                }
            }
        };
        let (file, map, seed) = make(groups, path)?;
        Ok((Self::new(map, Some(file), HEADER_LEN, groups), seed, origin))
    }

    fn new(mut map: MmapMut, file: Option<File>, tags_at: usize, groups: u32) -> Self {
        let groups = groups as usize;
        assert!(map.len() >= tags_at + table_len(groups as u32), "the mapping holds the table");
        // Derived from a unique reference, so that writes through it are valid.
        let base = NonNull::from(&mut map[..]).cast::<u8>();
        // SAFETY: both parts are within the mapping (asserted), one after the other. A mapping is page-aligned, and
        // header and tags are multiples of 64 bytes, so both parts are aligned to 64.
        let (tags, entries) =
            unsafe { (base.add(tags_at).cast(), base.add(tags_at + groups * size_of::<Tags>()).cast()) };
        Self { entries, tags, groups, memory: Memory::One(map, file) }
    }

    #[inline]
    pub(super) fn entries(&self) -> &[TableEntry] {
        // SAFETY: the mapping contains this many, aligned, and any bit pattern is a valid atomic.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr(), self.groups * LANES as usize) }
    }

    #[inline]
    pub(super) fn tags(&self) -> &[Tags] {
        // SAFETY: as for the entries.
        unsafe { std::slice::from_raw_parts(self.tags.as_ptr(), self.groups) }
    }

    /// The opener of each entry, behind the entries.
    #[inline]
    pub(super) fn openers(&self) -> &[Opener] {
        let entries = self.groups * LANES as usize;
        // SAFETY: the mapping contains this many openers behind the entries (`table_len`, `KernelMapSizes::of`), aligned to
        // 64 bytes, and any bit pattern is a valid atomic.
        unsafe { std::slice::from_raw_parts(self.entries.as_ptr().add(entries).cast(), entries) }
    }

    /// Packets that the kernel forwarded for each entry, if its programs read the table.
    #[inline]
    pub(super) fn uses(&self) -> Option<&[KernelUse]> {
        match &self.memory {
            Memory::One(..) => None,
            Memory::Shared(maps) => Some(maps.uses()),
        }
    }

    /// The maps, if the kernel's programs read the table.
    pub(super) fn shared(&self) -> Option<&SharedMaps> {
        match &self.memory {
            Memory::One(..) => None,
            Memory::Shared(maps) => Some(maps),
        }
    }
}

/// Bytes of tags and entries.
fn used_len(groups: u32) -> usize {
    groups as usize * (size_of::<Tags>() + LANES as usize * size_of::<TableEntry>())
}

/// Bytes of tags, entries and openers.
fn table_len(groups: u32) -> usize {
    used_len(groups) + groups as usize * LANES as usize * size_of::<Opener>()
}

enum FileError {
    InUse,
    Io(io::Error),
}

impl From<io::Error> for FileError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// How long to wait for the lock of a process that is about to end, or of a child forked while its parent had the file
/// open that has not called exec yet.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

fn lock(file: &File) -> Result<(), FileError> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(FileError::Io(error)),
            Err(TryLockError::WouldBlock) if Instant::now() > deadline => return Err(FileError::InUse),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn map(file: &File, groups: u32) -> io::Result<MmapMut> {
    // SAFETY: other processes that respect the lock do not change the file. While the mapping is shared, only atomics
    // are read from it, for which any bit pattern is valid, and the header, which is verified before use.
    let map = unsafe { MmapOptions::new().map_mut(file)? };
    advise(&map, HEADER_LEN + used_len(groups));
    Ok(map)
}

/// Asks for huge pages, so that there are fewer translations to look up, and for the first `used` bytes now, so that no worker
/// waits for a page to be cleared; openers take memory only where there are connections whose source is translated. If the kernel
/// has none of the first kind or does not know the second wish (before 5.14), the table works all the same.
fn advise(map: &MmapMut, used: usize) {
    let used = used.min(map.len());
    let _ = map.advise_range(memmap2::Advice::HugePage, 0, used);
    let _ = map.advise_range(memmap2::Advice::PopulateWrite, 0, used);
}

/// Creates an empty table and renames it to `path`.
fn make(groups: u32, path: &Path) -> Result<(File, MmapMut, Seed), FileError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = Path::new(&name);
    let made = fill(groups, new).and_then(|made| Ok(std::fs::rename(new, path).map(|()| made)?));
    if made.is_err() {
        let _ = std::fs::remove_file(new);
    }
    made
}

/// Creates the file of an empty table.
fn fill(groups: u32, new: &Path) -> Result<(File, MmapMut, Seed), FileError> {
    let _ = std::fs::remove_file(new);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(new)?;
    lock(&file)?;
    let len = HEADER_LEN + table_len(groups);
    // Allocate now rather than on the first write to a hole: a full file system is an error here instead of a SIGBUS
    // later.
    nix::fcntl::posix_fallocate(&file, 0, len as i64).map_err(io::Error::from)?;
    let mut map = map(&file, groups)?;
    let seed = Seed::random();
    map[..size_of::<FileHeader>()].copy_from_slice(&FileHeader::new(groups, &seed)?.to_bytes());
    Ok((file, map, seed))
}

/// Bytes before the tags: a page.
const HEADER_LEN: usize = 4096;

/// The seed of the table in `file`, if it is valid and has this many groups.
fn check(file: &[u8], groups: u32) -> Result<Seed, UnusableFile> {
    let seed = FileHeader::seed_in(file, groups)?;
    if file.len() == HEADER_LEN + table_len(groups) { Ok(seed) } else { Err(UnusableFile::Torn) }
}

#[cfg(test)]
mod tests;
