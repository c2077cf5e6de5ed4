//! The kernel's fingerprint of a program's instructions, by which one is known wherever it is attached.
//!
//! The constants that differ from port to port stand in a map and are no part of it: all instances of a build for pods have the same, and all others.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

use crate::pins::{Pinned, Pins, link_info};
use crate::program::{Program, Shared};
use crate::{AttachOptions, LoadError, Role};

/// A program's tag (`bpf_prog_info.tag`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramTag([u8; 8]);

impl fmt::Display for ProgramTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|octet| write!(f, "{octet:02x}"))
    }
}

impl ProgramTag {
    /// The tag of the program that this binary has for ports of this role: it is loaded for that, attached nowhere, and gone
    /// again. Uplinks and the host port have the same.
    pub fn own(role: Role) -> Result<Self, LoadError> {
        let program = Program::load(AttachOptions::new(role), &Shared::create()?)?;
        Self::of(program.fd.as_fd()).map_err(|error| LoadError::new("the program's tag", error.into()))
    }

    fn of(program: BorrowedFd<'_>) -> io::Result<Self> {
        let mut info = libbpf_sys::bpf_prog_info::default();
        let mut length = size_of::<libbpf_sys::bpf_prog_info>() as u32;
        let to = (&raw mut info).cast();
        // SAFETY: `to` points to `length` octets that live across the call; the kernel writes no more than `length`, and all
        // pointers in there are null, so that it writes nowhere else.
        match unsafe { libbpf_sys::bpf_obj_get_info_by_fd(program.as_raw_fd(), to, &mut length) } {
            0 => Ok(Self(info.tag)),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }
}

impl Pins {
    /// The tag of each pinned link's present program. Needs CAP_SYS_ADMIN: the kernel opens programs by their number for
    /// nobody else.
    pub fn tags(&self) -> Vec<(Pinned, io::Result<ProgramTag>)> {
        let tag = |pinned| {
            let link = self.take(pinned).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            let info = link_info(&link).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
            ProgramTag::of(open(info.prog_id)?.as_fd())
        };
        self.links().into_iter().map(|pinned| (pinned, tag(pinned))).collect()
    }
}

/// Opens the program of this number.
fn open(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the number is passed by value.
    match unsafe { libbpf_sys::bpf_prog_get_fd_by_id(id) } {
        // SAFETY: the call has just returned this descriptor to us, and nobody else knows of it.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}
