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
    #[error("attaching to interface {interface} is not permitted: run as root or with CAP_BPF and CAP_NET_ADMIN")]
    NotPermitted { interface: String },
    #[error("interface {interface}: {source}")]
    Load { interface: String, source: LoadError },
    #[error(
        "interface {interface}: its link cannot be pinned ({source}): bpffs must be writable, or end without pins (fail.mode = \"open\")"
    )]
    Pin { interface: String, source: io::Error },
    #[error(
        "cannot attach to interface {interface} ({source}): before Linux 6.6 the programs are filters, which need CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF (modprobe sch_ingress; modprobe cls_bpf)"
    )]
    Tc { interface: String, source: io::Error },
    #[error("cannot attach the XDP program to interface {interface} ({source}): Linux {}.{} or later with CONFIG_XDP_SOCKETS is needed", MINIMUM_KERNEL.0, MINIMUM_KERNEL.1)]
    Xdp { interface: String, source: libbpf_rs::Error },
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
