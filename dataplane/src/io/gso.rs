//! Sending TCP segments as one GSO packet: through a packet socket whose messages tell the kernel how to segment
//! (PACKET_VNET_HDR in packet(7), `struct virtio_net_hdr` in linux/virtio_net.h), which AF_XDP does not support.
//!
//! The kernel then takes one packet through the receiver's stack instead of up to 64. For a device that needs segments
//! it segments the packet.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, SockaddrLike, sendmsg, socket};

use crate::batch::BATCH;
use crate::packet::JoinedSegments;

/// A packet socket, which receives nothing. All pairs share one: closing it takes the kernel an RCU grace period (`packet_release`
/// in net/packet/af_packet.c).
#[derive(Debug)]
pub(crate) struct GsoSocket {
    socket: OwnedFd,
}

impl AsFd for GsoSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl GsoSocket {
    /// In the calling thread's network namespace. Needs CAP_NET_RAW, as AF_XDP does.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None)?;
        let this = Self { socket };
        this.set_option(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        this.set_option(libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
        this.set_option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, 4 << 20)?;
        Ok(this)
    }

    fn set_option(&self, level: i32, option: i32, value: i32) -> io::Result<()> {
        // SAFETY: the value lives across the call, and its size is given.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<i32>() as libc::socklen_t,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[derive(Debug)]
pub(crate) struct GsoPort {
    socket: Arc<GsoSocket>,
    to: LinkAddr,
}

impl GsoPort {
    /// For an interface of the calling thread's network namespace, which must be the socket's.
    pub(crate) fn new(socket: Arc<GsoSocket>, interface: &str) -> io::Result<Self> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: 0,
            sll_ifindex: if_nametoindex(interface)? as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: it is a complete address of the family that it names.
        let to = unsafe {
            LinkAddr::from_raw((&raw const address).cast(), Some(size_of::<libc::sockaddr_ll>() as libc::socklen_t))
        };
        Ok(Self { socket, to: to.ok_or(io::ErrorKind::InvalidInput)? })
    }

    /// Sends these joined frames as one GSO packet. On an error nothing was sent.
    pub(crate) fn send<'a>(
        &self,
        joined: &JoinedSegments,
        frames: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Errno> {
        let header = virtio_net_hdr(joined);
        let mut parts = [(); 2 + BATCH].map(|()| IoSlice::new(&[]));
        (parts[0], parts[1]) = (IoSlice::new(&header), IoSlice::new(joined.headers()));
        let mut count = 2;
        for frame in frames {
            parts[count] = IoSlice::new(&frame[joined.payload..]);
            count += 1;
        }
        self.send_parts(&parts[..count])
    }

    /// Sends a frame as it is, of any length that the interface takes.
    pub(crate) fn send_whole(&self, frame: &[u8]) -> Result<(), Errno> {
        self.send_parts(&[IoSlice::new(&[0; VIRTIO_NET_HDR]), IoSlice::new(frame)])
    }

    fn send_parts(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let socket = self.socket.as_fd().as_raw_fd();
        sendmsg(socket, parts, &[], MsgFlags::MSG_DONTWAIT, Some(&self.to)).map(drop)
    }
}

/// Bytes of `struct virtio_net_hdr`.
const VIRTIO_NET_HDR: usize = 10;

fn virtio_net_hdr(joined: &JoinedSegments) -> [u8; VIRTIO_NET_HDR] {
    const NEEDS_CSUM: u8 = 1;
    const TCPV4: u8 = 1;
    const TCPV6: u8 = 4;
    const CHECKSUM_AT: u16 = 16;
    let mut header = [0; VIRTIO_NET_HDR];
    (header[0], header[1]) = (NEEDS_CSUM, if joined.is_v4() { TCPV4 } else { TCPV6 });
    let words = [joined.payload as u16, joined.segment, joined.tcp, CHECKSUM_AT];
    for (at, word) in words.into_iter().enumerate() {
        header[2 + 2 * at..4 + 2 * at].copy_from_slice(&word.to_ne_bytes());
    }
    header
}
