//! Program tags: the kernel's hash of a program's instructions, which identifies a program wherever it is attached.
//!
//! The programs' constants are in a map, and not part of the hash.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

use crate::pins::{Pinned, Pins, filters, link_info};
use crate::{LoadError, TcxOptions, TcxPrograms, quietly};

/// A program's tag (`bpf_prog_info.tag`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramTag([u8; 8]);

impl fmt::Display for ProgramTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl ProgramTag {
    /// The tags of this binary's tcx programs: on what a pod sends, what the node's stack sends to it, what that sends to another machine, and
    /// what another machine sends.
    pub fn own() -> Result<[Self; 4], LoadError> {
        let programs = quietly(|| TcxPrograms::load(&TcxOptions::default(), None))?;
        let tag = |program| Self::of(program).map_err(|error| LoadError::new("the program's tag", error.into()));
        let [from_pod, to_pod, to_uplink, from_uplink] = programs.pinned().map(tag);
        Ok([from_pod?, to_pod?, to_uplink?, from_uplink?])
    }

    fn of(program: BorrowedFd<'_>) -> io::Result<Self> {
        let mut info = libbpf_sys::bpf_prog_info::default();
        let mut length = size_of::<libbpf_sys::bpf_prog_info>() as u32;
        let to = (&raw mut info).cast();
        // SAFETY: `to` points to `length` bytes that live across the call. The kernel writes at most `length`, and all
        // pointers in the structure are null, so it writes nowhere else.
        match unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), to, &mut length) } {
            0 => Ok(Self(info.tag)),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }
}

impl Pins {
    /// The tag of the current program of each pinned link and of each filter. Needs CAP_SYS_ADMIN, which the kernel requires for opening
    /// programs by id.
    pub fn tags(&self) -> Vec<(Pinned, io::Result<ProgramTag>)> {
        let tag = |pinned| {
            let link = self.take(pinned).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let info = link_info(&link).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            ProgramTag::of(open(info.prog_id)?.as_fd())
        };
        let filters = filters().into_iter().map(|(pinned, tag)| (pinned, Ok(ProgramTag(tag))));
        self.pinned_links().map(|pinned| (pinned, tag(pinned))).chain(filters).collect()
    }
}

fn open(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the id is passed by value.
    match unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) } {
        // SAFETY: the call has just returned this descriptor, and nothing else owns it.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
