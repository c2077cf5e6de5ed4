//! Errors of the UMEM and of ports, each in one line with thing, value and remedy.

use std::io;

use crate::forward::PortId;

/// The UMEM could not be created.
#[derive(Debug, thiserror::Error)]
pub enum UmemError {
    /// AF_XDP only supports other sizes.
    #[error("frame_size = {0}: must be 2048 or 4096")]
    FrameSize(u32),
    /// A ring's size must be a power of two.
    #[error("ring_size = {0}: must be a power of two from 64 to 32768")]
    RingSize(u32),
    /// Too few frames to move a packet, or more than supported.
    #[error("frames = {frames}: must be from {least} (two rings of {ring_size}) to 16777216")]
    Frames { frames: u32, least: u32, ring_size: u32 },
    /// The kernel lacks AF_XDP.
    #[error("this kernel has no AF_XDP sockets ({0}): CONFIG_XDP_SOCKETS=y is needed")]
    NoAfXdp(io::Error),
    /// The process is not permitted to use AF_XDP.
    #[error("AF_XDP is not permitted ({0}): run as root or with CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF and CAP_IPC_LOCK")]
    NotPermitted(io::Error),
    /// There is not enough memory, or it may not be locked.
    #[error(
        "no memory for a UMEM of {bytes} bytes ({source}): reduce frames or raise the limit of locked memory (ulimit -l)"
    )]
    NoMemory { bytes: u64, source: io::Error },
    #[error("cannot make the UMEM: {step}: {source}")]
    Kernel { step: &'static str, source: io::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum PortError {
    #[error("interface {interface} does not exist in this network namespace: correct the name or create the interface")]
    NoInterface { interface: String },
    #[error("interface {interface} is down: set it up (ip link set dev {interface} up)")]
    Down { interface: String },
    #[error("interface {interface} is bound by another AF_XDP socket: end the process that holds it")]
    Busy { interface: String },
    #[error("worker {0} has a pair: close its port first")]
    HasPair(usize),
    #[error("interface {interface}: no more than {max} ports can be open at once: close some first")]
    TooManyPorts { interface: String, max: usize },
    #[error("port {0} is not open: it was closed, or never opened")]
    NotOpen(PortId),
    #[error("worker {0} is dead: restart the dataplane")]
    WorkerDied(usize),
    /// A dead worker has not closed the port's sockets in time.
    #[error(
        "port {port} of interface {interface} is not closed: worker {worker} died and still holds its socket; restart the dataplane"
    )]
    NotClosed { port: PortId, interface: String, worker: usize },
    #[error("interface {interface}: {step}: {source}")]
    Kernel { interface: String, step: &'static str, source: io::Error },
}
