//! Liveness of the process that serves the sockets, as seen by the programs.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};
use socket2::{Domain, Socket, Type};

use crate::LoadError;

/// A map with one socket that receives nothing. The kernel removes the socket when it is closed, however the process
/// ends. The programs check whether it is present.
///
/// A port's own socket would not do: closing each takes the kernel an RCU grace period or two, so with a hundred ports
/// the last ones are open seconds after the first.
#[derive(Debug)]
pub(crate) struct ProcessLiveness {
    map: MapHandle,
    pub(crate) socket: OwnedFd,
}

impl ProcessLiveness {
    pub(crate) fn create() -> Result<Self, LoadError> {
        let failed = |source| LoadError::new("the map of the process", source);
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let map = MapHandle::create(MapType::Xskmap, Some("alive"), 4, 4, 1, &options).map_err(failed)?;
        let socket = socket().map_err(|source| failed(source.into()))?;
        let value = socket.as_raw_fd().to_ne_bytes();
        map.update(&0_u32.to_ne_bytes(), &value, MapFlags::ANY).map_err(failed)?;
        Ok(Self { map, socket })
    }

    pub(crate) fn map(&self) -> &MapHandle {
        &self.map
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// An AF_XDP socket that is not bound, with the smallest RX ring: from Linux 7.1 on a map takes none without a ring
/// (`xsk_map_update_elem` in net/xdp/xskmap.c).
pub(crate) fn socket() -> io::Result<OwnedFd> {
    let entries: libc::c_int = 1;
    let socket = OwnedFd::from(Socket::new(Domain::from(libc::AF_XDP), Type::RAW, None)?);
    // SAFETY: the value lives across the call, and its length is given.
    let result = unsafe {
        let length = size_of_val(&entries) as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, libc::XDP_RX_RING, (&raw const entries).cast(), length)
    };
    if result == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}
