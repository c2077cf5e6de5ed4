//! Attaching by a BPF link: in the driver where it can, in the generic path where it may; pinned where it is to outlast
//! the process.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{MapCore, MapFlags, libbpf_sys};

use crate::pins::{Pinned, Pins, detach};
use crate::program::{MAX_QUEUES, Program};
use crate::{AttachError, AttachOptions, Interface, ModeChoice, Outcomes, OwnError, SocketError, leave, own};

/// Where the program runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mode {
    /// In the driver.
    Native,
    /// In the kernel's generic path.
    ///
    /// On a veth its peer's segmentation offloads stay on then, and packets longer than a frame are lost: they must be
    /// switched off on the pod's side.
    Generic {
        /// Why not in the driver; `None` where generic was asked for.
        because: Option<String>,
    },
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Native => "native",
            Self::Generic { .. } => "generic",
        })
    }
}

/// A program attached to an interface. Dropping it detaches; the sockets in its map are not closed.
///
/// Should the process end without dropping it, the kernel detaches as well, unless the link is pinned ([`Pins`]): then
/// the program stays, and without sockets all it would hand over is a miss.
#[derive(Debug)]
pub struct Attached {
    interface: Interface,
    options: AttachOptions,
    mode: Mode,
    program: Program,
    link: OwnedFd,
    pin: Option<(Pins, Pinned)>,
    kept: bool,
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // Closing would do, were it certain that no child process just forked still holds a copy.
        detach(&self.link);
        if let Some((pins, pinned)) = &self.pin {
            pins.unlink(*pinned);
        }
    }
}

impl Attached {
    pub(crate) fn attach(program: Program, interface: &Interface, options: AttachOptions) -> Result<Self, AttachError> {
        let (link, mode) = match options.mode {
            ModeChoice::Generic => (try_generic(&program, interface)?, Mode::Generic { because: None }),
            ModeChoice::Native => {
                let link = create_link(&program, interface, libbpf_sys::XDP_FLAGS_DRV_MODE);
                (link.map_err(|source| refused(interface, "native", source))?, Mode::Native)
            }
            ModeChoice::NativeElseGeneric => match create_link(&program, interface, libbpf_sys::XDP_FLAGS_DRV_MODE) {
                Ok(link) => (link, Mode::Native),
                Err(error) if is_final(&error) => return Err(refused(interface, "native", error)),
                Err(error) => (try_generic(&program, interface)?, Mode::Generic { because: Some(error.to_string()) }),
            },
        };
        Ok(Self { interface: interface.clone(), options, mode, program, link, pin: None, kept: false })
    }

    /// Takes over the link that is pinned for this interface, if there is one: its program is replaced by this one, in
    /// one step. Else attaches and pins.
    pub(crate) fn attach_pinned(
        program: Program,
        interface: &Interface,
        options: AttachOptions,
        pins: &Pins,
    ) -> Result<Self, AttachError> {
        let pinned = Pinned { role: options.role, interface: interface.index };
        if let Some(link) = pins.take(pinned) {
            match replace_program(&link, &program) {
                Ok(()) => {
                    let mode = mode_of(interface);
                    let pin = Some((pins.clone(), pinned));
                    let interface = interface.clone();
                    return Ok(Self { interface, options, mode, program, link, pin, kept: false });
                }
                Err(error) => {
                    tracing::warn!(%interface, %error, "the pinned XDP link cannot be taken over; a new one is made");
                    pins.remove(pinned);
                }
            }
        }
        let mut attached = Self::attach(program, interface, options)?;
        pins.pin(pinned, attached.link.as_fd())
            .map_err(|source| AttachError::Pin { interface: interface.name.clone(), source })?;
        attached.pin = Some((pins.clone(), pinned));
        Ok(attached)
    }

    /// Leaves the program where it is, if it is pinned; else detaches.
    pub fn keep(mut self) {
        self.kept = self.pin.is_some();
    }

    /// The interface that it is attached to.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// What it was attached with.
    pub fn options(&self) -> AttachOptions {
        self.options
    }

    /// Where it runs, and why not in the driver.
    pub fn mode(&self) -> &Mode {
        &self.mode
    }

    /// Packets of this RX queue go to this AF_XDP socket from now on. The socket must be bound to this interface and
    /// queue, with frames in its fill ring, or packets are lost. The kernel takes it out when it is closed.
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

    /// The pod behind this port has this MAC and these addresses alone, from now on: ARP and neighbour discovery that say
    /// otherwise are dropped. Before it is told for the first time, the program cannot know.
    pub fn set_own(&self, mac: [u8; 6], addresses: &BTreeSet<IpAddr>) -> Result<(), OwnError> {
        own::set(&self.program.own, mac, addresses)
            .map_err(|source| OwnError { interface: self.interface.name.clone(), source })
    }

    /// On the node's end of the host port, which this is the workers' end of, drops from now on what carries a local pod's
    /// source and did not come in there: see `penstock_leave` in `src/bpf/redirect.bpf.c`. Takes the place of what an earlier
    /// process put there, in one step. It stays as long as the interface, and is counted among [`Attached::outcomes`].
    pub fn check_sources_on(&self, node: &Interface) -> Result<(), AttachError> {
        let Some(program) = &self.program.leave else { return Ok(()) };
        leave::attach(program.as_fd(), node)
            .map_err(|source| AttachError::Filter { interface: node.name.clone(), source })
    }

    /// What the program did so far, by outcome.
    pub fn outcomes(&self) -> Result<Outcomes, libbpf_rs::Error> {
        Outcomes::read(&self.program.outcomes)
    }
}

fn try_generic(program: &Program, interface: &Interface) -> Result<OwnedFd, AttachError> {
    create_link(program, interface, libbpf_sys::XDP_FLAGS_SKB_MODE)
        .map_err(|source| refused(interface, "generic", source))
}

/// Errors that another mode would meet too.
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
        Some(libc::EINVAL | libc::ENODEV) if is_gone(interface) => AttachError::NoInterface { name: interface_name },
        _ => AttachError::Kernel { interface: interface_name, mode, source },
    }
}

/// The kernel says no more than "invalid argument" of an index that no interface has (any more).
fn is_gone(interface: &Interface) -> bool {
    nix::net::if_::if_nametoindex(interface.name.as_str()) != Ok(interface.index)
}

/// `libbpf_rs`'s `attach_xdp` leaves the mode to the kernel; a link of a chosen mode takes the call below it.
fn create_link(program: &Program, interface: &Interface, flags: u32) -> io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    // SAFETY: the options live across the call and state their own size; the rest is passed by value.
    let result = unsafe {
        libbpf_sys::bpf_link_create(program.fd.as_raw_fd(), interface.index as i32, libbpf_sys::BPF_XDP, &options)
    };
    match result {
        // SAFETY: the call has just returned this descriptor to us, and nobody else knows of it.
        fd if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// Puts a program in the place of a link's present one.
fn replace_program(link: &OwnedFd, program: &Program) -> io::Result<()> {
    // SAFETY: both descriptors are open and passed by value; no options are given.
    let result = unsafe { libbpf_sys::bpf_link_update(link.as_raw_fd(), program.fd.as_raw_fd(), std::ptr::null()) };
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(-result)) }
}

/// Where the program of an interface runs.
fn mode_of(interface: &Interface) -> Mode {
    match query(interface) {
        Some(found) if found.skb_prog_id != 0 => Mode::Generic { because: None },
        _ => Mode::Native,
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

/// Names the program that is on an interface already.
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
