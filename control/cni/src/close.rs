//! Closes an interface: a tc program on each direction that drops everything, as a pinned tcx link where the daemon pins its own, or before
//! Linux 6.6 as a filter with the name of the daemon's.
//!
//! The three bpf(2) commands are made here without libbpf, so that the plugin needs no library on the node: it runs there
//! outside of any image.

use std::ffi::CString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::statfs::{BPF_FS_MAGIC, statfs};
use penstock_tc_filters::{Filters, Hook, are_forced};

/// The node's end of the pod's veth.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Veth {
    pub(crate) name: String,
    pub(crate) index: u32,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum CloseError {
    #[error("{}: no BPF file system: mount one on the node (mount -t bpf bpf /sys/fs/bpf)", .0.display())]
    NoBpffs(PathBuf),
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot load the closing program: {0}; it needs CAP_BPF and CAP_NET_ADMIN")]
    Load(io::Error),
    #[error(
        "cannot close {interface}: {source}; the kernel needs tcx (Linux 6.6), or sch_ingress and cls_bpf (modprobe)"
    )]
    Attach { interface: String, source: io::Error },
}

/// A direction, seen from the node's end: its attach type in `enum bpf_attach_type` (include/uapi/linux/bpf.h), and the daemon's names for
/// the pin and the filter.
struct Direction {
    attach_type: u32,
    hook: Hook,
    pin: &'static str,
    filter: &'static str,
}

/// First the direction in which the pod sends: until both are closed, nothing that it sends passes.
const DIRECTIONS: [Direction; 2] = [
    Direction { attach_type: 46, hook: Hook::Ingress, pin: "from_pod", filter: "penstock_from_pod" },
    Direction { attach_type: 47, hook: Hook::Egress, pin: "to_pod", filter: "penstock_to_pod" },
];

/// Closes an interface in this network namespace, unless a daemon has got there first. Each link ends with its pin.
pub(crate) fn close(root: &Path, veth: &Veth) -> Result<(), CloseError> {
    check(root)?;
    if !has_tcx()? {
        return close_by_filters(veth);
    }
    close_by_tcx(root, veth)
}

/// Each link ends with its pin.
fn close_by_tcx(root: &Path, veth: &Veth) -> Result<(), CloseError> {
    let directory = directory(root)?;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    made.map_err(|source| CloseError::File { path: directory.clone(), source })?;
    for Direction { attach_type, pin, .. } in DIRECTIONS {
        let failed = |source| CloseError::Attach { interface: veth.name.clone(), source };
        let path = directory.join(format!("{pin}-{}", veth.index));
        let program = bpf::load_dropping_program(attach_type).map_err(CloseError::Load)?;
        let link = bpf::create_link(&program, veth.index, attach_type).map_err(failed)?;
        match bpf::pin(&link, &path) {
            // The daemon's, which has seen the interface meanwhile. The link here ends with its descriptor.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && bpf::is_of(&path, veth.index) => {}
            // An interface of this index that is gone has left it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path).and_then(|()| bpf::pin(&link, &path)).map_err(failed)?;
            }
            other => other.map_err(failed)?,
        }
    }
    Ok(())
}

/// The filters outlast this process.
fn close_by_filters(veth: &Veth) -> Result<(), CloseError> {
    let failed = |source| CloseError::Attach { interface: veth.name.clone(), source };
    let filters = Filters::open().map_err(failed)?;
    for direction in DIRECTIONS {
        // The daemon's, which has seen the interface already.
        if has_filter(&filters, veth, &direction).map_err(failed)? {
            continue;
        }
        let program = bpf::load_dropping_program(direction.attach_type).map_err(CloseError::Load)?;
        filters.put(veth.index, direction.hook, direction.filter, program.as_fd(), None).map_err(failed)?;
    }
    Ok(())
}

fn has_filter(filters: &Filters, veth: &Veth, direction: &Direction) -> io::Result<bool> {
    Ok(filters.list(veth.index, direction.hook)?.iter().any(|filter| filter.name == direction.filter))
}

/// Whether the kernel has tcx: no interface has the index, and a kernel with tcx says just that.
fn has_tcx() -> Result<bool, CloseError> {
    let [Direction { attach_type, .. }, _] = DIRECTIONS;
    let program = bpf::load_dropping_program(attach_type).map_err(CloseError::Load)?;
    let refused = bpf::create_link(&program, i32::MAX.cast_unsigned(), attach_type).err();
    Ok(!are_forced() && refused.is_none_or(|error| error.raw_os_error() != Some(libc::EINVAL)))
}

/// Whether both directions have a program: the closing one, or the daemon's.
pub(crate) fn is_closed_or_served(root: &Path, veth: &Veth) -> Result<bool, CloseError> {
    let [from_pod, to_pod] = DIRECTIONS;
    let failed = |source| CloseError::Attach { interface: veth.name.clone(), source };
    let filters = Filters::open().map_err(failed)?;
    let has = |direction: &Direction| -> Result<bool, CloseError> {
        Ok(is_pinned(root, veth, direction.pin)? || has_filter(&filters, veth, direction).map_err(failed)?)
    };
    Ok(has(&from_pod)? && has(&to_pod)?)
}

fn is_pinned(root: &Path, veth: &Veth, pin: &str) -> Result<bool, CloseError> {
    Ok(bpf::is_of(&directory(root)?.join(format!("{pin}-{}", veth.index)), veth.index))
}

pub(crate) fn check(root: &Path) -> Result<(), CloseError> {
    let existing = root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match statfs(existing).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC) {
        true => Ok(()),
        false => Err(CloseError::NoBpffs(root.to_owned())),
    }
}

/// Whether interfaces can be closed on this node by this kernel.
pub(crate) fn try_closing(root: &Path) -> Result<(), CloseError> {
    check(root)?;
    has_tcx().map(drop)
}

/// Removes the pins of interfaces that are gone: without a daemon nobody else does.
pub(crate) fn collect(root: &Path) -> Result<(), CloseError> {
    let directory = directory(root)?;
    let files = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(|source| CloseError::File { path: directory, source })?,
    };
    for path in files.flatten().map(|file| file.path()) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_ours = DIRECTIONS
            .iter()
            .any(|direction| name.strip_prefix(direction.pin).is_some_and(|rest| rest.starts_with('-')));
        // A link outlives its interface, and is of none then.
        if is_ours && bpf::interface_of(&path) == Some(0) {
            match fs::remove_file(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                done => done.map_err(|source| CloseError::File { path, source })?,
            }
        }
    }
    Ok(())
}

/// Where the pins of this network namespace are: the daemon names the directory after the namespace's inode.
fn directory(root: &Path) -> Result<PathBuf, CloseError> {
    let namespace = Path::new("/proc/self/ns/net");
    let inode = fs::metadata(namespace).map_err(|source| CloseError::File { path: namespace.into(), source })?.ino();
    Ok(root.join(inode.to_string()))
}

/// bpf(2): <https://docs.kernel.org/userspace-api/ebpf/syscall.html>. Each structure is the part of `union bpf_attr` that the
/// command reads; what is behind it is zero for the kernel.
mod bpf {
    use super::*;

    const PROG_LOAD: u32 = 5;
    const OBJ_PIN: u32 = 6;
    const OBJ_GET: u32 = 7;
    const OBJ_GET_INFO: u32 = 15;
    const LINK_CREATE: u32 = 28;
    /// `BPF_PROG_TYPE_SCHED_CLS`.
    const SCHED_CLS: u32 = 3;
    /// `BPF_LINK_TYPE_TCX`.
    const TCX_LINK: u32 = 11;
    /// `r0 = 2` (`TCX_DROP`), `exit`: `struct bpf_insn` as in Documentation/bpf/standardization/instruction-set.rst.
    const DROP: [u64; 2] = [2 << 32 | 0xb7, 0x95];

    #[repr(C)]
    struct ProgramLoad {
        program_type: u32,
        instruction_count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        expected_attach_type: u32,
    }

    #[repr(C)]
    struct LinkCreate {
        program: u32,
        interface: u32,
        attach_type: u32,
        flags: u32,
        relative: u32,
        padding: u32,
        expected_revision: u64,
    }

    #[repr(C)]
    struct Object {
        path: u64,
        descriptor: u32,
        flags: u32,
    }

    #[repr(C)]
    struct GetInfo {
        descriptor: u32,
        length: u32,
        info: u64,
    }

    /// The beginning of `struct bpf_link_info` for a link of tcx, without its attach type.
    #[repr(C)]
    #[derive(Default)]
    struct LinkInfo {
        link_type: u32,
        id: u32,
        program: u32,
        padding: u32,
        interface: u32,
    }

    pub(super) fn load_dropping_program(attach_type: u32) -> io::Result<OwnedFd> {
        let mut name = [0; 16];
        name[..14].copy_from_slice(b"penstock_close");
        // The program calls nothing of the kernel, so its licence is the project's own.
        let license = c"Apache-2.0";
        let attributes = ProgramLoad {
            program_type: SCHED_CLS,
            instruction_count: DROP.len() as u32,
            instructions: DROP.as_ptr() as u64,
            license: license.as_ptr() as u64,
            log_level: 0,
            log_size: 0,
            log: 0,
            kernel_version: 0,
            flags: 0,
            name,
            interface: 0,
            expected_attach_type: attach_type,
        };
        // SAFETY: the instructions and the licence outlive the call, and their counts are given.
        unsafe { descriptor(PROG_LOAD, &attributes) }
    }

    pub(super) fn create_link(program: &OwnedFd, interface: u32, attach_type: u32) -> io::Result<OwnedFd> {
        let program = program.as_raw_fd().cast_unsigned();
        let attributes =
            LinkCreate { program, interface, attach_type, flags: 0, relative: 0, padding: 0, expected_revision: 0 };
        // SAFETY: the structure has no pointer.
        unsafe { descriptor(LINK_CREATE, &attributes) }
    }

    pub(super) fn pin(link: &OwnedFd, path: &Path) -> io::Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let descriptor = link.as_raw_fd().cast_unsigned();
        let attributes = Object { path: path.as_ptr() as u64, descriptor, flags: 0 };
        // SAFETY: the path is a NUL-terminated string that outlives the call.
        unsafe { call(OBJ_PIN, &attributes) }.map(drop)
    }

    /// Whether this is a pinned link of this interface.
    pub(super) fn is_of(path: &Path, interface: u32) -> bool {
        interface_of(path) == Some(interface)
    }

    /// The interface of a pinned link, 0 if it is gone; `None` if this is no such link, or cannot be read.
    pub(super) fn interface_of(path: &Path) -> Option<u32> {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        let attributes = Object { path: path.as_ptr() as u64, descriptor: 0, flags: 0 };
        // SAFETY: as above.
        let link = unsafe { descriptor(OBJ_GET, &attributes) }.ok()?;
        let mut info = LinkInfo::default();
        let attributes = GetInfo {
            descriptor: link.as_raw_fd().cast_unsigned(),
            length: size_of::<LinkInfo>() as u32,
            info: (&raw mut info) as u64,
        };
        // SAFETY: the kernel writes at most the given length to the structure, which outlives the call.
        unsafe { call(OBJ_GET_INFO, &attributes) }.ok()?;
        (info.link_type == TCX_LINK).then_some(info.interface)
    }

    /// A command that returns a descriptor.
    ///
    /// # Safety
    /// As for [`call`].
    unsafe fn descriptor<T>(command: u32, attributes: &T) -> io::Result<OwnedFd> {
        // SAFETY: the caller's promise.
        let descriptor = unsafe { call(command, attributes) }?;
        // SAFETY: the kernel has just returned it, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// # Safety
    /// `attributes` is the structure of this command, and its pointers are valid for what the command does with them.
    unsafe fn call<T>(command: u32, attributes: &T) -> io::Result<i32> {
        // SAFETY: the structure lives across the call and its size is given; the rest is the caller's promise.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
    }
}
