//! The XDP program at the far end of a worker's pair.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, libbpf_sys};

use crate::{AttachError, Interface, LoadError, quietly};

#[allow(missing_docs, unreachable_pub, clippy::all, clippy::undocumented_unsafe_blocks)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/redirect.skel.rs"));
}

/// The program of `src/bpf/redirect.bpf.c`, attached. Dropping it detaches the program.
#[derive(Debug)]
pub struct SocketRedirect {
    interface: Interface,
    _link: Link,
}

impl SocketRedirect {
    /// Hands the packets that arrive at this interface to this AF_XDP socket, which must be bound to its one queue, with frames in its fill
    /// ring.
    ///
    /// # Errors
    /// The kernel lacks AF_XDP, the interface is gone or has an XDP program, or the process lacks CAP_BPF or CAP_NET_ADMIN.
    pub fn attach(interface: &Interface, socket: BorrowedFd<'_>) -> Result<Self, AttachError> {
        // Kernels before 5.18 know no packets of several buffers.
        let flags = libbpf_sys::BPF_F_XDP_HAS_FRAGS;
        quietly(|| Self::attach_with(interface, socket, flags)).or_else(|_| Self::attach_with(interface, socket, 0))
    }

    fn attach_with(interface: &Interface, socket: BorrowedFd<'_>, flags: u32) -> Result<Self, AttachError> {
        let load = |source| AttachError::Load {
            interface: interface.name.clone(),
            source: LoadError::new("the XDP program", source),
        };
        let failed = |source| AttachError::Xdp { interface: interface.name.clone(), source };
        let mut storage = MaybeUninit::uninit();
        let mut open = skeleton::RedirectSkelBuilder::default().open(&mut storage).map_err(load)?;
        open.progs.penstock.set_flags(flags);
        let loaded = open.load().map_err(load)?;
        let socket = socket.as_raw_fd().to_ne_bytes();
        loaded.maps.sockets.update(&0_u32.to_ne_bytes(), &socket, MapFlags::ANY).map_err(failed)?;
        let link = loaded.progs.penstock.attach_xdp(interface.index as i32).map_err(failed)?;
        Ok(Self { interface: interface.clone(), _link: link })
    }

    pub fn interface(&self) -> &Interface {
        &self.interface
    }
}
