//! The tc programs at pods' veths, the XDP program at the far end of each worker's pair, and their loader.
//!
//! Every packet has one of the outcomes [`ProgramOutcome::ALL`], which the tc programs count.

mod attach;
mod connection_maps;
mod error;
mod kernel_types;
mod liveness;
mod outcome;
mod own_addresses;
mod pins;
mod redirect;
mod service_addresses;
mod tag;
mod tcx;
mod translated_sources;
mod translation;

pub use attach::{FilterWatch, filters_of_others};
pub use connection_maps::{ConnectionMapSizes, ConnectionMaps, ConnectionMapsError};
pub use error::{AttachError, LoadError};
pub use kernel_types::panics_on_sends;
pub use outcome::ProgramOutcomeCounts;
pub use own_addresses::OwnAddressesError;
pub use penstock_dataplane::ProgramOutcome;
pub use pins::{PinError, Pinned, PinnedProgram, Pins};
pub use redirect::SocketRedirect;
pub use service_addresses::{MAX_SERVICE_ADDRESSES, ServiceAddressError, ServiceAddresses};
pub use tag::ProgramTag;
pub use tcx::{
    AttachedUplink, Destination, Entrances, Filtered, KeptBy, MAX_TCX_PORTS, MAX_TCX_WORKERS, NO_UPLINK_NUMBER,
    PodVeth, RemoteNetwork, ServedPort, TcxMapError, TcxOptions, TcxPrograms, TrafficCount, TriedFrame, TriedSender,
    UplinkNumber, WaitingArray, WorkerPair,
};
pub use translated_sources::TranslatedSources;

use std::fmt;
use std::net::IpAddr;

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
/// drivers/net/veth.c).
pub const LARGEST_NATIVE_MTU: u32 = 4096 - 256 - 320 - 14;

/// The first kernel version that can run a node: from it on, the verifier accepts the tc programs. Before 5.12 it has no atomic operations
/// that return a value, and before 5.13 no pointers as arguments of functions that are verified once.
pub const MINIMUM_KERNEL: (u32, u32) = (5, 15);

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

/// Whether programs can read the connection that the kernel has found for a packet, and so who sent what the node has
/// masqueraded: the kernel describes its types (CONFIG_DEBUG_INFO_BTF), those of connection tracking among them.
pub fn reads_connections() -> bool {
    ConnectionFunctions::of_kernel().reads
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

/// Sixteen bytes in network order, IPv4 as `::ffff:a.b.c.d`, as programs' maps have an address.
fn address_key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}
