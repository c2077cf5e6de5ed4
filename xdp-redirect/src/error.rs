//! Errors, each in one line with thing, value and remedy.

use std::io;

use super::{Interface, MINIMUM_KERNEL};

/// The program or one of its maps could not be loaded into the kernel.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel does not permit this process to use BPF, or its verifier refuses the program, with the same error.
    #[error(
        "the kernel does not permit BPF ({source}): run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; with them, its verifier refuses the program"
    )]
    NotPermitted { source: libbpf_rs::Error },
    /// Any other error, most often a kernel without a required feature.
    #[error(
        "cannot load {what} into the kernel ({source}): Linux {}.{} or later with CONFIG_XDP_SOCKETS is needed",
        MINIMUM_KERNEL.0,
        MINIMUM_KERNEL.1
    )]
    Kernel { what: &'static str, source: libbpf_rs::Error },
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
    #[error("interface {name} does not exist in this network namespace: correct the name or create the interface")]
    NoInterface { name: String },
    /// The interface already has an XDP program.
    #[error(
        "interface {interface} already has an XDP program ({program}): detach it first (ip link set dev {interface} xdp off, or end the process that holds its link)"
    )]
    Occupied {
        interface: String,
        /// Name, identifier and mode of that program.
        program: String,
    },
    #[error("attaching to interface {interface} is not permitted: run as root or with CAP_BPF and CAP_NET_ADMIN")]
    NotPermitted { interface: String },
    #[error("interface {interface}: {source}")]
    Load { interface: String, source: LoadError },
    #[error(
        "interface {interface}: its link cannot be pinned ({source}): bpffs must be writable, or end without pins (fail.mode = \"open\")"
    )]
    Pin { interface: String, source: io::Error },
    /// The program that checks sources could not be attached.
    #[error(
        "interface {interface}: the program that checks local pods' sources cannot be attached ({source}): a kernel with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF is needed (modprobe sch_ingress; modprobe cls_bpf)"
    )]
    Filter { interface: String, source: libbpf_rs::Error },
    #[error(
        "cannot attach to interface {interface} ({source}): before Linux 6.6 the programs are filters, which need CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF (modprobe sch_ingress; modprobe cls_bpf)"
    )]
    Tc { interface: String, source: io::Error },
    #[error(
        "cannot attach to interface {interface} in {mode} mode ({source}): try the other XDP mode, or a smaller MTU if it is above 3506"
    )]
    Kernel {
        interface: String,
        /// The mode tried last.
        mode: &'static str,
        source: io::Error,
    },
}

impl AttachError {
    /// An error of attaching a tc program.
    pub(crate) fn tc(interface: &Interface, source: io::Error) -> Self {
        let name = interface.name.clone();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted { interface: name },
            Some(libc::ENODEV) => Self::NoInterface { name },
            Some(libc::EINVAL) if interface.is_gone() => Self::NoInterface { name },
            _ => Self::Tc { interface: name, source },
        }
    }
}

/// A socket could not be put into a port's map.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error(
        "interface {interface}: RX queue {queue} is beyond the {max} that are supported: reduce its channels (ethtool -L {interface} combined {max})"
    )]
    QueueOutOfRange { interface: String, queue: u32, max: u32 },
    #[error(
        "interface {interface}: the kernel rejects the AF_XDP socket of RX queue {queue} ({source}): it must be an AF_XDP socket of this process"
    )]
    Kernel { interface: String, queue: u32, source: libbpf_rs::Error },
}
