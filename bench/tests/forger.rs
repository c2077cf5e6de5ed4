//! Sends packets that a regular stack would not send, and reads the daemon's drop counters.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep, TcpHeader};
use penstock_admin::types::PortStatus;
use penstock_bench::load::PacketSocket;
use penstock_bench::testbed::{Namespace, Outside};

use crate::fixture::Fixture;

/// The broadcast MAC address.
pub(crate) const BROADCAST: [u8; 6] = [0xff; 6];

/// A raw socket on a pod's interface.
pub(crate) struct Forger {
    wire: PacketSocket,
    pub(crate) mac: [u8; 6],
    pub(crate) gateway: [u8; 6],
    pub(crate) sent: u64,
}

impl Forger {
    pub(crate) fn of(fixture: &Fixture, pod: &str) -> Self {
        let namespace = &fixture.site(pod).namespace;
        let host_side = fixture.cluster.node.pod(pod).unwrap().interface();
        Self {
            wire: PacketSocket::open(namespace).unwrap(),
            mac: namespace.netlink().unwrap().mac("eth0").unwrap(),
            gateway: fixture.cluster.node.netlink().mac(host_side).unwrap(),
            sent: 0,
        }
    }

    /// A raw socket on an outside machine's interface.
    pub(crate) fn outside(fixture: &Fixture, outside: &Outside) -> Self {
        Self {
            wire: PacketSocket::open(outside.namespace()).unwrap(),
            mac: outside.namespace().netlink().unwrap().mac("eth0").unwrap(),
            gateway: fixture.cluster.node.netlink().mac(outside.interface()).unwrap(),
            sent: 0,
        }
    }

    /// Ethernet and IP header of a packet to the gateway.
    pub(crate) fn ip(&self, from: IpAddr, to: IpAddr) -> PacketBuilderStep<IpHeaders> {
        let ethernet = PacketBuilder::ethernet2(self.mac, self.gateway);
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => ethernet.ipv4(from.octets(), to.octets(), 64),
            (IpAddr::V6(from), IpAddr::V6(to)) => ethernet.ipv6(from.octets(), to.octets(), 64),
            _ => panic!("{from} and {to} are of two families"),
        }
    }

    pub(crate) fn udp(&self, from: (IpAddr, u16), to: (IpAddr, u16), payload: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        self.ip(from.0, to.0).udp(from.1, to.1).write(&mut frame, payload).unwrap();
        frame
    }

    /// A TCP segment; `flags` sets flags and numbers.
    pub(crate) fn tcp(&self, from: (IpAddr, u16), to: (IpAddr, u16), flags: impl FnOnce(&mut TcpHeader)) -> Vec<u8> {
        let mut header = TcpHeader::new(from.1, to.1, 1_000, 65_000);
        flags(&mut header);
        let mut frame = Vec::new();
        self.ip(from.0, to.0).tcp_header(header).write(&mut frame, b"").unwrap();
        frame
    }

    /// Sends a frame. When this returns, the worker or the kernel has it, or it was dropped.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN));
        while let Err(error) = self.wire.send(frame) {
            assert!(refused(&error), "{error}");
            std::thread::yield_now();
        }
        self.sent += 1;
    }
}

/// Work that the kernel is to do on a frame: `struct virtio_net_hdr` (include/uapi/linux/virtio_net.h).
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct VirtioHeader {
    pub(crate) flags: u8,
    /// How to cut it up (`VIRTIO_NET_HDR_GSO_*`), after how many bytes of headers, into segments of which size.
    pub(crate) kind: u8,
    pub(crate) headers: u16,
    pub(crate) segment: u16,
    /// The checksum: from where on, and how many bytes behind that it is written.
    pub(crate) start: u16,
    pub(crate) offset: u16,
}

impl VirtioHeader {
    /// The checksum is open (`VIRTIO_NET_HDR_F_NEEDS_CSUM`).
    pub(crate) fn open() -> Self {
        Self { flags: 1, ..Self::default() }
    }
}

/// A packet socket at `eth0` whose frames begin with such a header. It receives nothing.
pub(crate) struct VirtioSocket(OwnedFd);

impl VirtioSocket {
    pub(crate) fn open(namespace: &Namespace) -> Self {
        const PACKET_VNET_HDR: libc::c_int = 15;
        namespace.run(|| {
            // SAFETY: a plain system call; nothing else owns the descriptor that it returns.
            let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
            assert!(fd >= 0, "{}", io::Error::last_os_error());
            // SAFETY: as above.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            let on: libc::c_int = 1;
            // SAFETY: all zeros is valid for this plain structure.
            let mut at: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
            at.sll_family = libc::AF_PACKET as u16;
            at.sll_ifindex = nix::net::if_::if_nametoindex("eth0").unwrap() as i32;
            // SAFETY: values live across the calls, and their sizes are given.
            let results = unsafe {
                let size = size_of::<libc::c_int>() as u32;
                let set = libc::setsockopt(fd, libc::SOL_PACKET, PACKET_VNET_HDR, (&raw const on).cast(), size);
                [set, libc::bind(fd, (&raw const at).cast(), size_of::<libc::sockaddr_ll>() as u32)]
            };
            assert_eq!(results, [0, 0], "{}", io::Error::last_os_error());
            Self(socket)
        })
    }

    /// Sends a frame, unless the kernel refuses it.
    pub(crate) fn send(&self, header: &VirtioHeader, frame: &[u8]) -> io::Result<()> {
        let VirtioHeader { flags, kind, headers, segment, start, offset } = *header;
        let words = [headers, segment, start, offset].map(u16::to_ne_bytes).concat();
        let bytes = [&[flags, kind][..], &words, frame].concat();
        // SAFETY: the frame lives across the call, and its length is given.
        let sent = unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The daemon's current count of a drop reason on a port or pod.
pub(crate) fn count(fixture: &Fixture, pod: &str, cause: &str) -> u64 {
    let statistics = fixture.statistics();
    let line = statistics.iter().find(|line| line.contains(pod)).unwrap_or_else(|| panic!("{statistics:#?}"));
    let mut words = line.split([' ', ',']).skip_while(|word| *word != cause).skip(1);
    words.next().map_or(0, |count| count.parse().unwrap())
}

/// The same, after waiting until it reaches `expected` or a timeout passes.
pub(crate) fn count_to(fixture: &Fixture, pod: &str, cause: &str, expected: u64) -> u64 {
    sum_to(fixture, pod, &[cause], expected)
}

/// The sum of several reasons.
pub(crate) fn sum_to(fixture: &Fixture, pod: &str, causes: &[&str], expected: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let counted = causes.iter().map(|cause| count(fixture, pod, cause)).sum();
        if counted >= expected || Instant::now() > deadline {
            return counted;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Packets that the kernel dropped at a port's socket.
pub(crate) fn kernel_lost(port: &PortStatus) -> u64 {
    ["rx_dropped", "rx_ring_full", "fill_ring_empty"].iter().filter_map(|cause| port.kernel_drops.get(*cause)).sum()
}
