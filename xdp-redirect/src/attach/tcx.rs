//! tcx links.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys::{self, BPF_TCX_INGRESS, bpf_attach_type};

use crate::{AttachError, Interface};

/// Whether the kernel knows these hooks: it answers what is attached to the loopback interface.
pub(super) fn is_supported() -> bool {
    const LOOPBACK: i32 = 1;
    let mut options = libbpf_sys::bpf_prog_query_opts {
        sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: the options live across the call and contain their own size; they ask for no list.
    let result = unsafe { libbpf_sys::bpf_prog_query_opts(LOOPBACK, BPF_TCX_INGRESS, &mut options) };
    result != -libc::EINVAL
}

pub(super) fn attach(
    program: BorrowedFd<'_>,
    interface: &Interface,
    hook: bpf_attach_type,
) -> Result<OwnedFd, AttachError> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: libbpf_sys::BPF_F_BEFORE,
        ..Default::default()
    };
    // SAFETY: the options live across the call and contain their own size; the rest is passed by value.
    let result = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), interface.index as i32, hook, &options) };
    if result >= 0 {
        // SAFETY: the call has just returned this descriptor, and nothing else owns it.
        return Ok(unsafe { OwnedFd::from_raw_fd(result) });
    }
    Err(AttachError::tc(interface, io::Error::from_raw_os_error(-result)))
}

/// Detaches a link's program immediately, even if others hold the link.
pub(super) fn detach(link: &OwnedFd) {
    // SAFETY: the descriptor is open, and is passed by value.
    let result = unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) };
    if result != 0 {
        let error = io::Error::from_raw_os_error(-result);
        tracing::debug!(%error, "the program was detached already");
    }
}

pub(crate) fn replace_program(link: &OwnedFd, program: &OwnedFd) -> io::Result<()> {
    // SAFETY: both descriptors are open and passed by value; no options are given.
    let result = unsafe { libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null()) };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-result)) }
}
