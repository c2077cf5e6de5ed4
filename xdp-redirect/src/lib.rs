//! The XDP program that hands a port's packets to AF_XDP sockets, and its loader.
//!
//! One instance of `src/bpf/redirect.bpf.c` is loaded a port, since its settings are constants to the verifier and
//! its map of sockets is indexed by the port's own RX queues. [`Attached`] owns the attachment: dropping it detaches.
//! The addresses of local pods ([`LocalPods`]) are one map for all instances.
//!
//! What the program does with a packet is one of [`Outcome::ALL`], counted each.

mod alive;
mod attach;
mod error;
mod foreign;
mod leave;
mod local_pods;
mod outcome;
mod own;
mod pins;
mod program;
mod tag;
mod translation;

pub use attach::{Attached, Mode};
pub use error::{AttachError, LoadError, SocketError};
pub use foreign::ForeignProgram;
pub use local_pods::{LocalPods, LocalPodsError, MAX_LOCAL_ADDRESSES};
pub use outcome::{Outcome, Outcomes};
pub use own::OwnError;
pub use pins::{PinError, Pinned, Pins};
pub use program::MAX_QUEUES;
pub use tag::ProgramTag;
pub use translation::can_find_translated;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use program::Shared;

/// The largest MTU of a veth's other end at which the veth's driver takes the program: a page of 4,096 octets, less the headroom
/// that XDP has before a packet, what the kernel keeps behind it, and the Ethernet header (`veth_xdp_set` in
/// drivers/net/veth.c). Above it the program runs in the generic path.
pub const LARGEST_NATIVE_MTU: u32 = 4096 - 256 - 320 - 14;

/// Which packets of a port are handed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The host side of a pod's veth: all that is IP. What it says of neighbours must be of itself ([`Attached::set_own`]).
    Pod,
    /// The veth pair into the node's own stack: all that is IP.
    Host,
    /// A NIC or tunnel device: only what is for an address in [`LocalPods`]; all else passes to the kernel.
    Uplink,
}

/// What becomes of a packet that is to be handed over when its queue has no socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnMiss {
    /// It is dropped: without a worker nothing passes.
    #[default]
    Drop,
    /// It passes to the kernel: without a worker no policy holds. So does every packet once the process is gone
    /// ([`Redirect::alive`]).
    Pass,
}

/// How the program may be attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ModeChoice {
    /// In the driver; where the driver cannot, in the kernel's generic path.
    #[default]
    NativeElseGeneric,
    /// In the driver or not at all.
    Native,
    /// In the kernel's generic path.
    Generic,
}

/// How a port's program is loaded and attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachOptions {
    /// Which packets are handed over.
    pub role: Role,
    /// What becomes of one that no socket takes.
    pub on_miss: OnMiss,
    /// How it may be attached.
    pub mode: ModeChoice,
    /// The Ethernet address of the bridge that has the interface, if one does: neighbour discovery between its ports is
    /// not the workers'.
    pub bridge: Option<[u8; 6]>,
}

impl AttachOptions {
    /// For this role, with misses dropped, native where the driver can.
    pub const fn new(role: Role) -> Self {
        Self { role, on_miss: OnMiss::Drop, mode: ModeChoice::NativeElseGeneric, bridge: None }
    }
}

/// A network interface of the calling thread's network namespace.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Interface {
    /// Its name, for messages.
    pub name: String,
    /// Its index, which is what the kernel goes by.
    pub index: u32,
}

impl Interface {
    /// Looks an interface up by its name.
    pub fn by_name(name: &str) -> Result<Self, AttachError> {
        match nix::net::if_::if_nametoindex(name) {
            Ok(index) => Ok(Self { name: name.to_owned(), index }),
            Err(_) => Err(AttachError::NoInterface { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Whether the kernel takes the program that [`Attached::check_sources_on`] attaches: tried on the loopback of a network
/// namespace that goes again. `None` where that cannot be told, without CAP_SYS_ADMIN.
pub fn try_source_check() -> Option<Result<(), AttachError>> {
    let attempt = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
        let interface = Interface { name: "lo".to_owned(), index: 1 };
        let loaded =
            Shared::create().and_then(|shared| program::Program::load(AttachOptions::new(Role::Host), &shared));
        let program = match loaded {
            Ok(program) => program,
            Err(source) => return Some(Err(AttachError::Load { interface: interface.name, source })),
        };
        let attached = leave::attach(program.leave.as_ref()?.as_fd(), &interface);
        Some(attached.map_err(|source| AttachError::Filter { interface: interface.name, source }))
    };
    std::thread::scope(|scope| scope.spawn(attempt).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// The loader: loads and attaches instances of the program that share one map of local pods.
#[derive(Debug)]
pub struct Redirect {
    shared: Shared,
    pins: Option<Pins>,
}

impl Redirect {
    /// Makes the shared maps. Needs CAP_BPF and CAP_NET_ADMIN (or root).
    pub fn new() -> Result<Self, LoadError> {
        Ok(Self { shared: Shared::create()?, pins: None })
    }

    /// As [`Redirect::new`], with all links pinned: those of these pins that an earlier process left are taken over.
    pub fn pinned(pins: Pins) -> Result<Self, LoadError> {
        Ok(Self { pins: Some(pins), ..Self::new()? })
    }

    /// Where links are pinned, if they are.
    pub fn pins(&self) -> Option<&Pins> {
        self.pins.as_ref()
    }

    /// The addresses of this node's pods.
    pub fn local_pods(&self) -> &LocalPods {
        &self.shared.local_pods
    }

    /// As long as this socket is open in any process, programs with [`OnMiss::Pass`] hand packets over; from then on they
    /// pass all of them.
    pub fn alive(&self) -> BorrowedFd<'_> {
        self.shared.alive.socket()
    }

    /// Loads an instance of the program and attaches it to an interface of the calling thread's network namespace.
    ///
    /// With [`ModeChoice::NativeElseGeneric`], [`Attached::mode`] tells why it is not native where it is not. A pinned
    /// link of this interface and role is taken over, in the mode that it has: no packet passes meanwhile that the old
    /// program would have dropped.
    pub fn attach(&self, interface: &Interface, options: AttachOptions) -> Result<Attached, AttachError> {
        let program = program::Program::load(options, &self.shared)
            .map_err(|source| AttachError::Load { interface: interface.name.clone(), source })?;
        match &self.pins {
            Some(pins) => Attached::attach_pinned(program, interface, options, pins),
            None => Attached::attach(program, interface, options),
        }
    }
}
