//! Errors, each in one line with thing, value and remedy.

use std::io;

use super::MINIMUM_KERNEL;

/// The program or one of its maps could not be loaded into the kernel.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel does not permit this process to use BPF, or its verifier refuses the program, with the same error.
    #[error(
        "the kernel does not permit BPF ({source}): run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; with them, its verifier refuses the program"
    )]
    NotPermitted {
        /// Error of the kernel.
        source: libbpf_rs::Error,
    },
    /// Any other error, most often a kernel without a required feature.
    #[error(
        "cannot load {what} into the kernel ({source}): Linux {}.{} or later with CONFIG_XDP_SOCKETS is needed",
        MINIMUM_KERNEL.0,
        MINIMUM_KERNEL.1
    )]
    Kernel {
        /// The object that failed.
        what: &'static str,
        /// Error of the kernel.
        source: libbpf_rs::Error,
    },
}

impl LoadError {
    pub(crate) fn new(what: &'static str, source: libbpf_rs::Error) -> Self {
        match source.kind() {
            libbpf_rs::ErrorKind::PermissionDenied => Self::NotPermitted { source },
            _ => Self::Kernel { what, source },
        }
    }
}

/// The program could not be attached to an interface.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no such interface.
    #[error("interface {name} does not exist in this network namespace: correct the name or create the interface")]
    NoInterface {
        /// The requested name.
        name: String,
    },
    /// The interface already has an XDP program.
    #[error(
        "interface {interface} already has an XDP program ({program}): detach it first (ip link set dev {interface} xdp off, or end the process that holds its link)"
    )]
    Occupied {
        /// The interface.
        interface: String,
        /// Name, identifier and mode of that program.
        program: String,
    },
    /// The process is not permitted to attach programs.
    #[error("attaching to interface {interface} is not permitted: run as root or with CAP_BPF and CAP_NET_ADMIN")]
    NotPermitted {
        /// The interface.
        interface: String,
    },
    /// The program could not be loaded.
    #[error("interface {interface}: {source}")]
    Load {
        /// The interface.
        interface: String,
        /// The cause.
        source: LoadError,
    },
    /// The link could not be pinned.
    #[error(
        "interface {interface}: its link cannot be pinned ({source}): bpffs must be writable, or end without pins (fail.mode = \"open\")"
    )]
    Pin {
        /// The interface.
        interface: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The program that checks sources could not be attached.
    #[error(
        "interface {interface}: the program that checks local pods' sources cannot be attached ({source}): a kernel with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF is needed (modprobe sch_ingress; modprobe cls_bpf)"
    )]
    Filter {
        /// The interface.
        interface: String,
        /// The kernel's message.
        source: libbpf_rs::Error,
    },
    /// The kernel rejected a tcx program.
    #[error(
        "cannot attach to interface {interface} by tcx ({source}): Linux 6.6 or newer is needed, or attach = \"xdp\""
    )]
    Tcx {
        /// The interface.
        interface: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel rejected every allowed mode.
    #[error(
        "cannot attach to interface {interface} in {mode} mode ({source}): try the other XDP mode, or a smaller MTU if it is above 3506"
    )]
    Kernel {
        /// The interface.
        interface: String,
        /// The mode tried last.
        mode: &'static str,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// A socket could not be put into a port's map.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The queue has no place in the map.
    #[error(
        "interface {interface}: RX queue {queue} is beyond the {max} that are supported: reduce its channels (ethtool -L {interface} combined {max})"
    )]
    QueueOutOfRange {
        /// The interface.
        interface: String,
        /// The requested queue.
        queue: u32,
        /// Maximum number of queues.
        max: u32,
    },
    /// The kernel rejected it.
    #[error(
        "interface {interface}: the kernel rejects the AF_XDP socket of RX queue {queue} ({source}): it must be an AF_XDP socket of this process"
    )]
    Kernel {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// Error of the kernel.
        source: libbpf_rs::Error,
    },
}
