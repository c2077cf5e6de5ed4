//! The XDP program that redirects a port's packets to AF_XDP sockets, and its loader.
//!
//! One instance of `src/bpf/redirect.bpf.c` is loaded per port, since its settings are constants for the verifier and
//! its map of sockets is indexed by the port's RX queues. [`Attached`] owns the attachment: dropping it detaches. All
//! instances share one map of local pods' addresses ([`LocalPods`]).
//!
//! Every packet has one of the outcomes [`ProgramOutcome::ALL`], which are counted.

mod attach;
mod connection_maps;
mod egress_check;
mod error;
mod foreign;
mod kernel_types;
mod liveness;
mod local_pods;
mod outcome;
mod own_addresses;
mod pins;
mod program;
mod service_addresses;
mod tag;
mod tcx;
mod translated_sources;
mod translation;
mod xdp_attach;

pub use attach::{FilterWatch, filters_of_others};
pub use connection_maps::{ConnectionMapSizes, ConnectionMaps, ConnectionMapsError};
pub use error::{AttachError, LoadError, SocketError};
pub use foreign::ForeignProgram;
pub use kernel_types::panics_on_sends;
pub use local_pods::{LocalPods, LocalPodsError, MAX_LOCAL_ADDRESSES};
pub use outcome::ProgramOutcomeCounts;
pub use own_addresses::OwnAddressesError;
pub use penstock_dataplane::ProgramOutcome;
pub use pins::{PinError, Pinned, PinnedProgram, Pins};
pub use program::MAX_QUEUES;
pub use service_addresses::{MAX_SERVICE_ADDRESSES, ServiceAddressError, ServiceAddresses};
pub use tag::ProgramTag;
pub use tcx::{
    AttachedUplink, Entrances, Filtered, KeptBy, MAX_TCX_PORTS, MAX_TCX_WORKERS, NO_UPLINK_NUMBER, PodVeth,
    RemoteNetwork, ServedPort, TcxMapError, TcxOptions, TcxPrograms, TrafficCount, TriedFrame, TriedSender,
    UplinkNumber, WaitingArray, WorkerPair,
};
pub use translated_sources::TranslatedSources;
pub use xdp_attach::{Attached, XdpMode};

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use program::SharedMaps;
use translation::ConnectionFunctions;

/// The programs in the file that this variable of the environment names, otherwise those that are built in. For tests of what tests notice.
#[cfg(feature = "replaceable-programs")]
fn replaceable_object(built_in: &'static [u8], variable: &str) -> &'static [u8] {
    match std::env::var_os(variable) {
        Some(path) => std::fs::read(path).unwrap_or_default().leak(),
        None => built_in,
    }
}

/// The largest MTU of a veth's peer at which the driver accepts a program that takes packets in one buffer alone, as before Linux
/// 5.18: a page of 4,096 bytes, less the XDP headroom, the kernel's tailroom and the Ethernet header (`veth_xdp_set` in
/// drivers/net/veth.c). Above it the program runs in generic mode.
pub const LARGEST_NATIVE_MTU: u32 = 4096 - 256 - 320 - 14;

/// The first kernel version that can run a node: from it on, the verifier accepts the tc programs. Before 5.12 it has no atomic operations
/// that return a value, and before 5.13 no pointers as arguments of functions that are verified once.
pub const MINIMUM_KERNEL: (u32, u32) = (5, 15);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The host side of a pod's veth: all IP packets. Its ARP and neighbour discovery must be about itself
    /// ([`Attached::set_own_addresses`]).
    Pod,
    /// The veth pair into the node's own stack: all IP packets.
    Host,
    /// A NIC or tunnel device: only packets to an address in [`LocalPods`]; all others pass to the kernel.
    Uplink,
}

/// The fate of a packet whose queue has no socket (a miss).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnMiss {
    /// It is dropped: without a worker nothing passes.
    #[default]
    Drop,
    /// It passes to the kernel: without a worker policy is not enforced. So does every packet once the process has
    /// ended ([`Redirect::alive`]).
    Pass,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ModeChoice {
    /// Native if the driver can, otherwise generic.
    #[default]
    NativeElseGeneric,
    /// Native only.
    Native,
    /// In the kernel's generic path.
    Generic,
}

/// Options for loading and attaching a port's program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttachOptions {
    pub role: Role,
    pub on_miss: OnMiss,
    pub mode: ModeChoice,
    /// The bridge that the interface belongs to, if any: neighbour discovery between its ports is not redirected to workers.
    pub bridge: Option<Bridge>,
}

impl AttachOptions {
    /// For this role, with misses dropped, native if possible.
    pub const fn new(role: Role) -> Self {
        Self { role, on_miss: OnMiss::Drop, mode: ModeChoice::NativeElseGeneric, bridge: None }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bridge {
    pub index: u32,
    pub mac: [u8; 6],
}

/// A network interface in the calling thread's network namespace.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Interface {
    /// Its name, for messages.
    pub name: String,
    /// Its index, which identifies it to the kernel.
    pub index: u32,
}

impl Interface {
    pub fn by_name(name: &str) -> Result<Self, AttachError> {
        match nix::net::if_::if_nametoindex(name) {
            Ok(index) => Ok(Self { name: name.to_owned(), index }),
            Err(_) => Err(AttachError::NoInterface { name: name.to_owned() }),
        }
    }

    /// The kernel only returns "invalid argument" for an index without an interface.
    fn is_gone(&self) -> bool {
        nix::net::if_::if_nametoindex(self.name.as_str()) != Ok(self.index)
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Whether the kernel accepts the program of [`Attached::check_sources_on`]: tried on the loopback of a temporary
/// network namespace. `None` if that is not possible, without CAP_SYS_ADMIN.
pub fn try_source_check() -> Option<Result<(), AttachError>> {
    in_temporary_namespace(|interface| {
        let program = try_loading(Role::Host, interface)?;
        let Some(check) = &program.egress_check else { return Ok(()) };
        egress_check::attach(check.as_fd(), interface)
            .map_err(|source| AttachError::Filter { interface: interface.name.clone(), source })
    })
}

/// Whether programs can read the connection that the kernel has found for a packet, and so who sent what the node has
/// masqueraded: the kernel describes its types (CONFIG_DEBUG_INFO_BTF), those of connection tracking among them.
pub fn reads_connections() -> bool {
    ConnectionFunctions::of_kernel().reads
}

/// Whether the program of an uplink can ask the kernel which connections it translates: Linux 5.18 or later, with connection
/// tracking built in or loaded, and its types. Otherwise an uplink would redirect packets that the kernel must translate first.
pub fn can_find_translated() -> bool {
    let loopback = Interface { name: "lo".to_owned(), index: 1 };
    ConnectionFunctions::of_kernel().lookups && try_loading(Role::Uplink, &loopback).is_ok()
}

fn try_loading(role: Role, interface: &Interface) -> Result<program::Program, AttachError> {
    SharedMaps::create()
        .and_then(|shared| program::Program::load(AttachOptions::new(role), &shared))
        .map_err(|source| AttachError::Load { interface: interface.name.clone(), source })
}

/// Tries something without libbpf's own messages: of a program that the kernel refuses they are thousands of lines.
pub fn quietly<T>(attempt: impl FnOnce() -> T) -> T {
    let print = libbpf_rs::set_print(None);
    let result = attempt();
    libbpf_rs::set_print(print);
    result
}

/// Tries something with the loopback interface of a network namespace that ends with it. `None` without CAP_SYS_ADMIN.
fn in_temporary_namespace<T: Send>(attempt: impl FnOnce(&Interface) -> T + Send) -> Option<T> {
    let run = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
        Some(attempt(&Interface { name: "lo".to_owned(), index: 1 }))
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Loads and attaches instances of the program, which share one map of local pods.
#[derive(Debug)]
pub struct Redirect {
    shared: SharedMaps,
    pins: Option<Pins>,
}

impl Redirect {
    /// Creates the shared maps. Needs CAP_BPF and CAP_NET_ADMIN (or root).
    pub fn new() -> Result<Self, LoadError> {
        Ok(Self { shared: SharedMaps::create()?, pins: None })
    }

    /// Like [`Redirect::new`], with all links pinned: links that an earlier process left in these pins are taken over.
    pub fn pinned(pins: Pins) -> Result<Self, LoadError> {
        Ok(Self { pins: Some(pins), ..Self::new()? })
    }

    /// The program of [`Attached::check_sources_on`] notes here whose packets the node has translated.
    pub fn with_sources(self, sources: TranslatedSources) -> Self {
        Self { shared: SharedMaps { sources: Some(sources), ..self.shared }, ..self }
    }

    /// The pins, if links are pinned.
    pub fn pins(&self) -> Option<&Pins> {
        self.pins.as_ref()
    }

    pub fn local_pods(&self) -> &LocalPods {
        &self.shared.local_pods
    }

    /// As long as this socket is open in any process, programs with [`OnMiss::Pass`] redirect packets; afterwards they
    /// pass all of them.
    pub fn alive(&self) -> BorrowedFd<'_> {
        self.shared.liveness.socket()
    }

    /// Loads an instance of the program and attaches it to an interface in the calling thread's network namespace.
    ///
    /// With [`ModeChoice::NativeElseGeneric`], [`Attached::mode`] says why it is not native. A pinned link of this
    /// interface and role is taken over in its mode: meanwhile no packet passes that the old program would have
    /// dropped.
    pub fn attach(&self, interface: &Interface, options: AttachOptions) -> Result<Attached, AttachError> {
        let program = program::Program::load(options, &self.shared)
            .map_err(|source| AttachError::Load { interface: interface.name.clone(), source })?;
        match &self.pins {
            Some(pins) => Attached::attach_pinned(program, interface, options, pins),
            None => Attached::attach(program, interface, options),
        }
    }
}
