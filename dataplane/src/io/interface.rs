//! Properties of a network interface that are needed to open a port on it.

use std::ffi::c_char;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use super::PortError;

/// Headroom of the kernel before a received packet (`XDP_PACKET_HEADROOM` in linux/bpf.h), in bytes.
const HEADROOM: u32 = 256;
/// For packets of several frames (linux/if_xdp.h).
const XDP_USE_SG: u16 = 16;
const ETHERNET: u32 = 14;

/// The largest MTU whose packets fit into frames of this size, in bytes.
pub const fn largest_mtu(frame_size: u32) -> u32 {
    frame_size.saturating_sub(HEADROOM + ETHERNET)
}

/// Bytes of the longest packet that a frame holds, Ethernet header included.
pub(crate) const fn longest_frame(frame_size: u32) -> usize {
    (largest_mtu(frame_size) + ETHERNET) as usize
}

/// Whether the kernel hands over packets that are longer than a frame, in several of them: Linux 6.6. An older one refuses the flag before
/// it looks for the interface (`xsk_bind` in net/xdp/xsk.c), which there is none of.
pub fn takes_long_packets() -> bool {
    static TAKES: OnceLock<bool> = OnceLock::new();
    *TAKES.get_or_init(|| {
        // SAFETY: it has no memory of ours.
        let socket = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return false;
        }
        // SAFETY: the descriptor was just opened, and nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let nowhere = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_COPY | XDP_USE_SG,
            sxdp_ifindex: i32::MAX as u32,
            sxdp_queue_id: 0,
            sxdp_shared_umem_fd: 0,
        };
        let length = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
        // SAFETY: the address lives across the call, and its size is given.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const nowhere).cast(), length) };
        bound != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV)
    })
}

/// Whether an interface in the calling thread's network namespace has an IPv4 address. Asks for this one alone: all addresses of a node come
/// with all its interfaces, which takes the longer the more pods there are.
pub fn has_ipv4_address(name: &str) -> bool {
    let control = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
    control.is_ok_and(|control| Request::new(&control, name).ask(libc::SIOCGIFADDR).is_ok())
}

/// Current properties of an interface in the calling thread's network namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InterfaceFacts {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
    pub up: bool,
}

impl InterfaceFacts {
    /// Queries the kernel.
    pub fn read(name: &str) -> Result<Self, PortError> {
        let missing = || PortError::NoInterface { interface: name.to_owned() };
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
            return Err(missing());
        }
        let failed = |step, source: io::Error| match source.raw_os_error() {
            Some(libc::ENODEV) => missing(),
            _ => PortError::Kernel { interface: name.to_owned(), step, source },
        };
        let control = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
            .map_err(|error| failed("opening a control socket", error.into()))?;
        let mut request = Request::new(&control, name);
        let mtu = request.mtu().map_err(|error| failed("reading its MTU", error))?;
        let up = request.is_up().map_err(|error| failed("reading its flags", error))?;
        let index = nix::net::if_::if_nametoindex(name).map_err(|_| missing())?;
        Ok(Self { name: name.to_owned(), index, mtu, up })
    }

    /// Rejects an interface that is down. Of one whose packets may be longer than a frame, those are lost that are.
    pub fn check(&self) -> Result<(), PortError> {
        match self.up {
            true => Ok(()),
            false => Err(PortError::Down { interface: self.name.clone() }),
        }
    }
}

/// Offloads of an interface's driver and stack; `None` if unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Offloads {
    /// TCP segmentation by the device (TSO): it receives packets longer than the MTU.
    pub tso: Option<bool>,
    /// Segmentation just before the device (GSO).
    pub gso: Option<bool>,
    /// Coalescing of received packets by the stack (GRO).
    pub gro: Option<bool>,
    /// Coalescing of received packets by the device (LRO).
    pub lro: Option<bool>,
    /// Checksum verification of received packets by the device.
    pub rx_checksum: Option<bool>,
    /// Checksum completion of sent packets by the device.
    pub tx_checksum: Option<bool>,
}

impl Offloads {
    /// Queries the kernel about an interface in the calling thread's network namespace.
    pub fn read(name: &str) -> Result<Self, PortError> {
        let missing = || PortError::NoInterface { interface: name.to_owned() };
        if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
            return Err(missing());
        }
        let control = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None);
        let control = control.map_err(|error| PortError::Kernel {
            interface: name.to_owned(),
            step: "opening a control socket",
            source: error.into(),
        })?;
        let mut request = Request::new(&control, name);
        request.is_up().map_err(|_| missing())?;
        let flags = request.value(ETHTOOL_GFLAGS);
        Ok(Self {
            tso: request.value(ETHTOOL_GTSO).map(|value| value != 0),
            gso: request.value(ETHTOOL_GGSO).map(|value| value != 0),
            gro: request.value(ETHTOOL_GGRO).map(|value| value != 0),
            lro: flags.map(|flags| flags & ETH_FLAG_LRO != 0),
            rx_checksum: request.value(ETHTOOL_GRXCSUM).map(|value| value != 0),
            tx_checksum: request.value(ETHTOOL_GTXCSUM).map(|value| value != 0),
        })
    }
}

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

const ETHTOOL_GRXCSUM: u32 = 0x14;
const ETHTOOL_GTXCSUM: u32 = 0x16;
const ETHTOOL_GTSO: u32 = 0x1e;
const ETHTOOL_GGSO: u32 = 0x23;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GGRO: u32 = 0x2b;
const ETH_FLAG_LRO: u32 = 1 << 15;

struct Request<'a> {
    control: &'a OwnedFd,
    // SAFETY-relevant: always holds a NUL-terminated name, which `new` put there.
    ifreq: libc::ifreq,
}

impl<'a> Request<'a> {
    fn new(control: &'a OwnedFd, name: &str) -> Self {
        // SAFETY: `ifreq` is plain data for which all zeros is valid.
        let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in ifreq.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
            *to = from as c_char;
        }
        Self { control, ifreq }
    }

    fn ask(&mut self, question: libc::Ioctl) -> io::Result<()> {
        // SAFETY: all requests take a `struct ifreq`, which lives across the call. The only one that refers to further
        // memory, SIOCETHTOOL, is made in `value`, which first stores a pointer to a live structure of the command's own type in it.
        match unsafe { libc::ioctl(self.control.as_raw_fd(), question, &mut self.ifreq) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn mtu(&mut self) -> io::Result<u32> {
        self.ask(libc::SIOCGIFMTU)?;
        // SAFETY: SIOCGIFMTU fills this field.
        Ok(unsafe { self.ifreq.ifr_ifru.ifru_mtu } as u32)
    }

    fn is_up(&mut self) -> io::Result<bool> {
        self.ask(libc::SIOCGIFFLAGS)?;
        // SAFETY: SIOCGIFFLAGS fills this field.
        Ok(i32::from(unsafe { self.ifreq.ifr_ifru.ifru_flags }) & libc::IFF_UP != 0)
    }

    /// A single-number answer of ethtool; `None` if there is none.
    fn value(&mut self, command: u32) -> Option<u32> {
        let mut value = EthtoolValue { command, data: 0 };
        self.ifreq.ifr_ifru.ifru_data = (&raw mut value).cast();
        // The kernel writes the answer into `value`, which the request points to and which outlives the call.
        self.ask(libc::SIOCETHTOOL).ok().map(|()| value.data)
    }
}
