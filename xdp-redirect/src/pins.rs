//! Pinned links: attachments that outlast their process.
//!
//! A link that is pinned in bpffs stays when its owner ends, and with it the program, until the next process takes the link over, by
//! replacing the old program with its own (`BPF_LINK_UPDATE`): the interface always has a program.
//!
//! Interface indices are only unique within a network namespace, so each namespace has a directory, named after its
//! inode.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use libbpf_rs::libbpf_sys;
use nix::mount::{MsFlags, mount};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use penstock_tc_filters::{Filters, Hook};

use crate::attach::Attachment;

/// Conventional mount point of bpffs; mounted if missing.
const BPFFS: &str = "/sys/fs/bpf";

#[derive(Debug, thiserror::Error)]
pub enum PinError {
    #[error("{}: not in a BPF file system; give a directory below {BPFFS}", .directory.display())]
    NotBpffs { directory: PathBuf },
    #[error("{BPFFS}: no BPF file system there, and it cannot be mounted ({source}): mount -t bpf bpf {BPFFS}")]
    Mount { source: io::Error },
    /// A file or directory in it is not accessible.
    #[error("{}: {source}; it must be writable for this process", .path.display())]
    File { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug)]
pub struct Pins {
    directory: PathBuf,
    /// The directory, locked as long as a process uses its pins.
    _lock: Option<Arc<File>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinnedProgram {
    /// The tcx program on what a pod sends.
    FromPod,
    /// The tcx program on what the node's stack sends to a pod.
    ToPod,
    /// The tcx program on what the node's stack sends to another machine.
    ToUplink,
    /// The tcx program on what another machine sends to the node.
    FromUplink,
}

impl PinnedProgram {
    const ALL: [Self; 4] = [Self::FromPod, Self::ToPod, Self::ToUplink, Self::FromUplink];

    const fn name(self) -> &'static str {
        match self {
            Self::FromPod => "from_pod",
            Self::ToPod => "to_pod",
            Self::ToUplink => "to_uplink",
            Self::FromUplink => "from_uplink",
        }
    }

    /// Its name as a filter, where the kernel has no tcx.
    pub(crate) const fn filter(self) -> &'static str {
        match self {
            Self::FromPod => "penstock_from_pod",
            Self::ToPod => "penstock_to_pod",
            Self::ToUplink => "penstock_to_uplink",
            Self::FromUplink => "penstock_from_uplink",
        }
    }

    /// Its hook, if it is a filter.
    const fn hook(self) -> Hook {
        match self {
            Self::ToPod | Self::ToUplink => Hook::Egress,
            Self::FromPod | Self::FromUplink => Hook::Ingress,
        }
    }

    /// Whether its interface is the node's end of a pod's veth.
    pub const fn is_at_pod(self) -> bool {
        matches!(self, Self::FromPod | Self::ToPod)
    }

    /// Whether its interface leads to other machines.
    pub const fn is_at_uplink(self) -> bool {
        matches!(self, Self::ToUplink | Self::FromUplink)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pinned {
    pub program: PinnedProgram,
    /// Index of its interface, while that exists.
    pub interface: u32,
}

/// An attached program. Dropping it detaches the program, and unpins its link if it is pinned.
#[derive(Debug)]
pub(crate) struct InterfaceLink {
    pub(crate) attachment: Attachment,
    pub(crate) pin: Option<(Pins, Pinned)>,
    kept: bool,
}

impl InterfaceLink {
    pub(crate) fn new(attachment: Attachment, pin: Option<(Pins, Pinned)>) -> Self {
        Self { attachment, pin, kept: false }
    }

    /// Leaves the program attached when this is dropped, if it may outlast the process.
    pub(crate) fn keep(&mut self) {
        self.kept = self.pin.is_some();
    }
}

impl Drop for InterfaceLink {
    fn drop(&mut self) {
        if self.kept {
            return self.attachment.leave();
        }
        // Closing a link would suffice if no recently forked child could hold a copy.
        self.attachment.detach();
        if let Some((pins, pinned)) = &self.pin {
            pins.unlink(*pinned);
        }
    }
}

impl Pins {
    /// The pins of the calling thread's network namespace, below `root` (such as `/sys/fs/bpf/penstock`). Mounts bpffs
    /// at `/sys/fs/bpf` if necessary, creates the directory, and removes links whose interfaces are gone.
    pub fn open(root: &Path) -> Result<Self, PinError> {
        mount_bpffs(root)?;
        let pins = Self::at(root)?;
        pins.make_directory().map_err(|source| PinError::File { path: pins.directory.clone(), source })?;
        // It may disappear: a process that starts in another namespace removes empty ones.
        if !pins.directory.ancestors().find(|directory| directory.exists()).is_some_and(is_bpffs) {
            return Err(PinError::NotBpffs { directory: pins.directory });
        }
        // Namespaces that are gone cannot clean up after themselves.
        for entry in fs::read_dir(root).into_iter().flatten().flatten().filter(|entry| entry.path() != pins.directory) {
            let others = Self { directory: entry.path(), _lock: None };
            // Locked: a process of that namespace uses it, and may be about to pin something.
            let Some(_lock) = others.lock() else { continue };
            // A connection table stays: its namespace may be between two daemons, of which the first restored the node.
            others.sweep();
            others.close();
        }
        pins.sweep();
        let lock = pins.lock_own();
        Ok(Self { _lock: lock, ..pins })
    }

    /// Makes the directory and locks it, against processes in other namespaces that remove empty ones. `None`: another
    /// process of this namespace has the lock.
    fn lock_own(&self) -> Option<Arc<File>> {
        const ATTEMPTS: u32 = 100;
        (0..ATTEMPTS).find_map(|attempt| {
            if attempt > 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            self.make_directory().ok()?;
            let lock = self.lock()?;
            let inode = |found: io::Result<fs::Metadata>| found.map(|metadata| metadata.ino()).ok();
            (inode(lock.metadata()) == inode(fs::metadata(&self.directory))).then_some(lock)
        })
    }

    /// Locks the directory, if no other process has.
    fn lock(&self) -> Option<Arc<File>> {
        let directory = File::open(&self.directory).ok()?;
        directory.try_lock().ok().map(|()| Arc::new(directory))
    }

    /// The same without creating or changing anything. There may be no pins.
    pub fn at(root: &Path) -> Result<Self, PinError> {
        let namespace = Path::new("/proc/thread-self/ns/net");
        let inode = fs::metadata(namespace).map_err(|source| PinError::File { path: namespace.into(), source })?.ino();
        Ok(Self { directory: root.join(inode.to_string()), _lock: None })
    }

    /// Where a map is pinned. The directory is named after the namespace's inode, which may be another's later, so the name
    /// ends with the namespace's cookie. bpffs has no file names with a dot (`bpf_lookup` in kernel/bpf/inode.c).
    pub(crate) fn map_path(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}_{:x}", namespace_cookie().unwrap_or_default()))
    }

    /// Removes the pinned maps whose names begin like this. Programs that use them keep them until they end.
    pub(crate) fn remove_maps(&self, prefix: &str) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix))
                && let Err(error) = fs::remove_file(entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "a pinned map could not be taken away");
            }
        }
    }

    fn make_directory(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
    }

    /// All pinned links whose interfaces exist, and all filters, which need no pin to outlast their process.
    pub fn links(&self) -> Vec<Pinned> {
        self.pinned_links().chain(filters().into_iter().map(|(filter, _)| filter)).collect()
    }

    pub(crate) fn pinned_links(&self) -> impl Iterator<Item = Pinned> {
        let names = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let named = names.filter_map(|name| parse(name.to_str()?));
        named.filter(|pinned| self.take(*pinned).is_some())
    }

    /// Whether there is such a link or filter, and its interface exists.
    pub fn has(&self, pinned: Pinned) -> bool {
        let Pinned { program, interface } = pinned;
        let list = || Filters::open().and_then(|filters| filters.list(interface, program.hook()));
        self.take(pinned).is_some()
            || list().is_ok_and(|filters| filters.iter().any(|filter| filter.name == program.filter()))
    }

    /// Removes a pinned link or a filter: the interface then has no program.
    pub fn remove(&self, pinned: Pinned) {
        if let Some(link) = self.take(pinned) {
            Attachment::Link(link).detach();
        }
        self.unlink(pinned);
        let Pinned { program, interface } = pinned;
        let removed = Filters::open().and_then(|from| from.remove(interface, program.hook(), program.filter()));
        if let Err(error) = removed {
            tracing::warn!(interface, filter = program.filter(), %error, "a filter could not be removed");
        }
    }

    /// Removes the directories if nothing is pinned in them.
    pub fn close(&self) {
        for directory in self.directory.ancestors().take(2) {
            if let Err(error) = fs::remove_dir(directory) {
                tracing::debug!(directory = %directory.display(), %error, "directory of pins left");
                return;
            }
        }
    }

    /// Pins a link. A filter outlasts the process without.
    pub(crate) fn pin(&self, pinned: Pinned, attachment: &Attachment) -> io::Result<()> {
        let Attachment::Link(link) = attachment else { return Ok(()) };
        let path = self.path(pinned);
        let text = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        // If it was empty, a process that started in another namespace may have removed it.
        self.make_directory()?;
        // A file of this name belongs to a removed interface; otherwise [`Pins::take`] would have found it.
        self.unlink(pinned);
        // SAFETY: the path is a NUL-terminated string that lives across the call, and the descriptor is open.
        match unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), text.as_ptr()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// The pinned link, if it exists and its interface is the one that it was created for.
    pub(crate) fn take(&self, pinned: Pinned) -> Option<OwnedFd> {
        let text = std::ffi::CString::new(self.path(pinned).as_os_str().as_bytes()).ok()?;
        // SAFETY: the path is a NUL-terminated string that lives across the call.
        let fd = unsafe { libbpf_sys::bpf_obj_get(text.as_ptr()) };
        // SAFETY: the call has just returned this descriptor, and nothing else owns it.
        let link = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })?;
        (interface_of(&link) == Some(pinned.interface)).then_some(link)
    }

    pub(crate) fn unlink(&self, pinned: Pinned) {
        let path = self.path(pinned);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a pinned link could not be taken away");
        }
    }

    /// Removes the files of links whose interfaces are gone.
    fn sweep(&self) {
        let names = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
        for pinned in names.filter_map(|name| parse(name.to_str()?)) {
            if self.take(pinned).is_none() {
                self.unlink(pinned);
            }
        }
    }

    fn path(&self, pinned: Pinned) -> PathBuf {
        self.directory.join(format!("{}-{}", pinned.program.name(), pinned.interface))
    }
}

fn parse(name: &str) -> Option<Pinned> {
    let (program, interface) = name.rsplit_once('-')?;
    let program = PinnedProgram::ALL.into_iter().find(|known| known.name() == program)?;
    Some(Pinned { program, interface: interface.parse().ok()? })
}

/// A number of the calling thread's network namespace that no other one has until the next boot (Linux 5.14).
fn namespace_cookie() -> io::Result<u64> {
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::DGRAM, None)?;
    let (mut cookie, mut length) = (0_u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the option is a number of 64 bits, to which the pointer and the length refer.
    let result = unsafe {
        let to = (&raw mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, to, &raw mut length)
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC)
}

/// Mounts bpffs at its conventional place if `root` is there and nothing is mounted yet.
fn mount_bpffs(root: &Path) -> Result<(), PinError> {
    let at = Path::new(BPFFS);
    if !root.starts_with(at) || is_bpffs(at) {
        return Ok(());
    }
    mount(Some("bpf"), at, Some("bpf"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC, Some("mode=0700"))
        .map_err(|error| PinError::Mount { source: error.into() })
}

/// The filters of the calling thread's network namespace, with the tags of their programs.
pub(crate) fn filters() -> Vec<(Pinned, [u8; 8])> {
    let all = Filters::open().and_then(|filters| filters.all()).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot list the filters of interfaces");
        Vec::new()
    });
    let known = all.into_iter().filter_map(|(interface, hook, filter)| {
        let is_it = |program: &PinnedProgram| program.filter() == filter.name && program.hook() == hook;
        let program = PinnedProgram::ALL.into_iter().find(is_it)?;
        Some((Pinned { program, interface }, filter.tag))
    });
    known.collect()
}

/// The kernel's information about a tcx link; `None` for another kind of link.
pub(crate) fn link_info(link: &OwnedFd) -> Option<libbpf_sys::bpf_link_info> {
    let mut info = libbpf_sys::bpf_link_info::default();
    let mut length = size_of::<libbpf_sys::bpf_link_info>() as u32;
    let to = (&raw mut info).cast();
    // SAFETY: `to` points to `length` bytes that live across the call; the kernel writes at most `length`.
    let result = unsafe { libbpf_sys::bpf_obj_get_info_by_fd(link.as_raw_fd(), to, &mut length) };
    (result == 0 && info.type_ == libbpf_sys::BPF_LINK_TYPE_TCX).then_some(info)
}

/// Index of the interface that a link is attached to; `None` if that is gone or it is another kind of link.
fn interface_of(link: &OwnedFd) -> Option<u32> {
    let info = link_info(link)?;
    // SAFETY: the kernel has filled in this part of the union according to the type; it is a plain number.
    let index = unsafe { info.__bindgen_anon_1.tcx.ifindex };
    (index != 0).then_some(index)
}

#[cfg(test)]
mod tests {
    use super::{Pinned, PinnedProgram, parse};

    #[test]
    fn pin_names_encode_program_and_interface() {
        for program in PinnedProgram::ALL {
            let pinned = Pinned { program, interface: 4_294_967_295 };
            assert_eq!(parse(&format!("{}-{}", program.name(), pinned.interface)), Some(pinned));
        }
        for other in ["", "pod", "pod-", "pod-x", "pod--1", "pod-4294967296", "map-3"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }
}
