//! Attaching through a BPF link: natively if the driver can, in generic mode if allowed; pinned if it must outlast the
//! process.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{MapCore, MapFlags, libbpf_sys};

use crate::attach::{Attachment, replace_program};
use crate::pins::{InterfaceLink, Pinned, PinnedProgram, Pins};
use crate::program::{MAX_QUEUES, Program};
use crate::{
    AttachError, AttachOptions, Interface, ModeChoice, OwnAddressesError, ProgramOutcomeCounts, SocketError,
    egress_check, own_addresses,
};

/// XDP mode of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum XdpMode {
    Native,
    /// Generic: in the kernel's generic path.
    ///
    /// On a veth the peer's segmentation offloads then stay on, and packets longer than a frame are lost. Turn them off
    /// on the pod's side.
    Generic {
        /// Why it is not native; `None` if generic mode was requested.
        because: Option<String>,
    },
}

impl fmt::Display for XdpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Native => "native",
            Self::Generic { .. } => "generic",
        })
    }
}

/// A program attached to an interface. Dropping it detaches the program; the sockets in its map are not closed.
///
/// If the process ends without dropping it, the kernel detaches it too, unless the link is pinned ([`Pins`]): then the
/// program stays, and without sockets every redirect is a miss.
#[derive(Debug)]
pub struct Attached {
    interface: Interface,
    options: AttachOptions,
    mode: XdpMode,
    program: Program,
    link: InterfaceLink,
}

impl Attached {
    pub(crate) fn attach(program: Program, interface: &Interface, options: AttachOptions) -> Result<Self, AttachError> {
        let (link, mode) = match options.mode {
            ModeChoice::Generic => (try_generic(&program, interface)?, XdpMode::Generic { because: None }),
            ModeChoice::Native => {
                let link = create_link(&program, interface, libbpf_sys::XDP_FLAGS_DRV_MODE);
                (link.map_err(|source| refused(interface, "native", source))?, XdpMode::Native)
            }
            ModeChoice::NativeElseGeneric => match create_link(&program, interface, libbpf_sys::XDP_FLAGS_DRV_MODE) {
                Ok(link) => (link, XdpMode::Native),
                Err(error) if is_final(&error) => return Err(refused(interface, "native", error)),
                Err(error) => {
                    (try_generic(&program, interface)?, XdpMode::Generic { because: Some(error.to_string()) })
                }
            },
        };
        let link = InterfaceLink::new(Attachment::Link(link), None);
        Ok(Self { interface: interface.clone(), options, mode, program, link })
    }

    /// Takes over the link pinned for this interface, if there is one: its program is replaced atomically by this one.
    /// Otherwise attaches and pins.
    pub(crate) fn attach_pinned(
        program: Program,
        interface: &Interface,
        options: AttachOptions,
        pins: &Pins,
    ) -> Result<Self, AttachError> {
        let pinned = Pinned { program: PinnedProgram::Xdp(options.role), interface: interface.index };
        if let Some(link) = pins.take(pinned) {
            match replace_program(&link, &program.fd) {
                Ok(()) => {
                    let mode = mode_of(interface);
                    let link = InterfaceLink::new(Attachment::Link(link), Some((pins.clone(), pinned)));
                    return Ok(Self { interface: interface.clone(), options, mode, program, link });
                }
                Err(error) => {
                    tracing::warn!(%interface, %error, "the pinned XDP link cannot be taken over; a new one is made");
                    pins.remove(pinned);
                }
            }
        }
        let mut attached = Self::attach(program, interface, options)?;
        pins.pin(pinned, &attached.link.attachment)
            .map_err(|source| AttachError::Pin { interface: interface.name.clone(), source })?;
        attached.link.pin = Some((pins.clone(), pinned));
        Ok(attached)
    }

    /// Leaves the program attached if it is pinned; otherwise detaches it.
    pub fn keep(mut self) {
        self.link.keep();
    }

    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    pub fn options(&self) -> AttachOptions {
        self.options
    }

    /// Its mode, and why it is not native.
    pub fn mode(&self) -> &XdpMode {
        &self.mode
    }

    /// Redirects packets of this RX queue to this AF_XDP socket. The socket must be bound to this interface and queue,
    /// with frames in its fill ring; otherwise packets are lost. The kernel removes it when it is closed.
    pub fn set_socket(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), SocketError> {
        if queue >= MAX_QUEUES {
            return Err(SocketError::QueueOutOfRange {
                interface: self.interface.name.clone(),
                queue,
                max: MAX_QUEUES,
            });
        }
        let value = socket.as_raw_fd().to_ne_bytes();
        self.program.sockets.update(&queue.to_ne_bytes(), &value, MapFlags::ANY).map_err(|source| SocketError::Kernel {
            interface: self.interface.name.clone(),
            queue,
            source,
        })
    }

    /// Sets MAC and addresses of the pod behind this port: ARP and neighbour discovery that claim others are dropped.
    /// Before the first call the program cannot verify them.
    pub fn set_own_addresses(&self, mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Result<(), OwnAddressesError> {
        own_addresses::set(&self.program.own, mac, addresses)
            .map_err(|source| OwnAddressesError { interface: self.interface.name.clone(), source })
    }

    /// On the node's end of the host port (this is the workers' end), drops packets with a local pod's source that did
    /// not enter the node's stack there: see `penstock_leave` in `src/bpf/redirect.bpf.c`. Atomically replaces the
    /// program of an earlier process. It stays as long as the interface, and is counted in [`Attached::outcomes`].
    pub fn check_sources_on(&self, node: &Interface) -> Result<(), AttachError> {
        let Some(program) = &self.program.egress_check else { return Ok(()) };
        egress_check::attach(program.as_fd(), node)
            .map_err(|source| AttachError::Filter { interface: node.name.clone(), source })
    }

    pub fn outcomes(&self) -> Result<ProgramOutcomeCounts, libbpf_rs::Error> {
        ProgramOutcomeCounts::read(&self.program.outcomes)
    }
}

fn try_generic(program: &Program, interface: &Interface) -> Result<OwnedFd, AttachError> {
    create_link(program, interface, libbpf_sys::XDP_FLAGS_SKB_MODE)
        .map_err(|source| refused(interface, "generic", source))
}

/// Errors that would also occur in another mode.
fn is_final(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST | libc::EPERM | libc::EACCES | libc::ENODEV))
}

fn refused(interface: &Interface, mode: &'static str, source: io::Error) -> AttachError {
    let interface_name = interface.name.clone();
    match source.raw_os_error() {
        Some(libc::EBUSY | libc::EEXIST) => {
            AttachError::Occupied { interface: interface_name, program: occupant(interface) }
        }
        Some(libc::EPERM | libc::EACCES) => AttachError::NotPermitted { interface: interface_name },
        Some(libc::EINVAL | libc::ENODEV) if interface.is_gone() => AttachError::NoInterface { name: interface_name },
        _ => AttachError::Kernel { interface: interface_name, mode, source },
    }
}

/// `libbpf_rs`'s `attach_xdp` leaves the mode to the kernel; a link with a chosen mode needs the lower-level call.
fn create_link(program: &Program, interface: &Interface, flags: u32) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: the options live across the call and contain their own size; the rest is passed by value.
    let result = unsafe {
        libbpf_sys::bpf_link_create(program.fd.as_raw_fd(), interface.index as i32, libbpf_sys::BPF_XDP, &options)
    };
    match result {
        // SAFETY: the call has just returned this descriptor, and nothing else owns it.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// XDP mode of an interface's program.
fn mode_of(interface: &Interface) -> XdpMode {
    match query(interface) {
        Some(found) if found.skb_prog_id != 0 => XdpMode::Generic { because: None },
        _ => XdpMode::Native,
    }
}

fn query(interface: &Interface) -> Option<libbpf_sys::bpf_xdp_query_opts> {
    let mut options = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    // SAFETY: the options live across the call and state their own size.
    let result = unsafe { libbpf_sys::bpf_xdp_query(interface.index as i32, 0, &mut options) };
    (result >= 0).then_some(options)
}

/// Describes the program that is already on an interface.
fn occupant(interface: &Interface) -> String {
    let Some(options) = query(interface) else { return "unknown".to_owned() };
    let (id, mode) =
        [(options.drv_prog_id, "native"), (options.skb_prog_id, "generic"), (options.hw_prog_id, "offloaded")]
            .into_iter()
            .find(|(id, _)| *id != 0)
            .unwrap_or((options.prog_id, "unknown mode"));
    if id == 0 {
        return "unknown".to_owned();
    }
    let name = ProgInfoIter::default().find(|info| info.id == id).map(|info| info.name.to_string_lossy().into_owned());
    format!("{} id {id}, {mode}", name.unwrap_or_else(|| "unnamed".to_owned()))
}
