//! The memory of all frames.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::thread;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sched::{CloneFlags, unshare};
use xsk_rs::config::{BindFlags, FrameSize, LibxdpFlags, QueueSize, SocketConfig, UmemConfig as XskUmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue};

use super::{FramePool, UmemError};

/// The kind of pages that the UMEM uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    Huge,
    Ordinary,
}

/// Dimensions of the UMEM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UmemConfig {
    pub frames: u32,
    /// Bytes of a frame: 2048 or 4096.
    pub frame_size: u32,
    /// Entries of each ring of a queue: a power of two from 64 to 32768.
    pub ring_size: u32,
    /// Whether its sockets take packets of several frames.
    pub long_packets: bool,
}

const HUGE_PAGE: u64 = 2 << 20;

impl UmemConfig {
    fn validated(self) -> Result<Self, UmemError> {
        let Self { frames, frame_size, ring_size, .. } = self;
        if frame_size != 2048 && frame_size != 4096 {
            return Err(UmemError::FrameSize(frame_size));
        }
        if !ring_size.is_power_of_two() || !(64..=32_768).contains(&ring_size) {
            return Err(UmemError::RingSize(ring_size));
        }
        if !(2 * ring_size..=1 << 24).contains(&frames) {
            return Err(UmemError::Frames { frames, least: 2 * ring_size, ring_size });
        }
        Ok(self)
    }

    fn bytes(&self) -> u64 {
        u64::from(self.frames) * u64::from(self.frame_size)
    }
}

#[derive(Debug)]
pub struct Umem {
    xsk: xsk_rs::Umem,
    config: UmemConfig,
    pages: Pages,
    pool: FramePool,
    // The lock is never taken: it makes the rings, which are not `Sync`, shareable.
    _anchor: Mutex<Anchor>,
}

/// The socket that the UMEM is registered with.
///
/// Every other socket is bound with a reference to it (XDP_SHARED_UMEM), which the kernel allows while it is bound
/// itself; and libxdp does not close it before the UMEM. If it belonged to a port, that port could never be closed, and
/// no port could be opened once its interface was gone. So it is bound to the loopback interface of a private network
/// namespace, which nothing else uses and which exists as long as the socket.
type Anchor = (TxQueue, RxQueue, FillQueue, CompQueue);

impl Umem {
    /// Maps the memory and registers it with the kernel.
    pub fn new(config: UmemConfig) -> Result<Self, UmemError> {
        let config = config.validated()?;
        // On a separate thread, since a thread cannot always return to the network namespace that it left.
        let made = thread::spawn(move || {
            // Without CAP_SYS_ADMIN it must be the loopback interface of the current namespace, which suffices for one
            // dataplane in it.
            let _ = unshare(CloneFlags::CLONE_NEWNET);
            Self::register(config)
        });
        let (xsk, frames, anchor, pages) = made.join().map_err(|_| UmemError::Kernel {
            step: "registering it",
            source: io::Error::other("the thread that did so died"),
        })??;
        Ok(Self { xsk, config, pages, pool: FramePool::new(frames, config.frame_size), _anchor: Mutex::new(anchor) })
    }

    fn register(config: UmemConfig) -> Result<(xsk_rs::Umem, Vec<FrameDesc>, Anchor, Pages), UmemError> {
        let (xsk, frames, pages) = Self::map(config)?;
        let interface = "lo".parse().expect("the name has no NUL");
        // SAFETY: this is the first socket of the UMEM, and it loads no XDP program.
        let queues = unsafe { Socket::new(socket_config(config.ring_size, config.long_packets), &xsk, &interface, 0) };
        let (tx, rx, fill_and_completion) = queues.map_err(|error| umem_error("binding its socket", error, &config))?;
        // SAFETY: the socket is open as long as its queues live.
        let socket = unsafe { BorrowedFd::borrow_raw(rx.fd().as_raw_fd()) };
        let _ = fcntl(socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        let (fill, completion) = fill_and_completion.expect("the first socket of a device has both rings");
        Ok((xsk, frames, (tx, rx, fill, completion), pages))
    }

    fn map(config: UmemConfig) -> Result<(xsk_rs::Umem, Vec<FrameDesc>, Pages), UmemError> {
        let ring = QueueSize::new(config.ring_size).expect("the ring size was checked");
        let built = XskUmemConfig::builder()
            .frame_size(FrameSize::new(config.frame_size).expect("the frame size was checked"))
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()
            .expect("the sizes were checked");
        let count = NonZeroU32::new(config.frames).expect("the number of frames was checked");
        // munmap(2) requires whole huge pages, so a size that is not a multiple cannot use them.
        if config.bytes().is_multiple_of(HUGE_PAGE)
            && let Ok((xsk, frames)) = xsk_rs::Umem::new(built, count, true)
        {
            return Ok((xsk, frames, Pages::Huge));
        }
        let made = xsk_rs::Umem::new(built, count, false);
        let (xsk, frames) = made.map_err(|error| umem_error("registering its memory", error, &config))?;
        Ok((xsk, frames, Pages::Ordinary))
    }

    pub fn config(&self) -> &UmemConfig {
        &self.config
    }

    pub fn pages(&self) -> Pages {
        self.pages
    }

    pub(crate) fn pool(&self) -> &FramePool {
        &self.pool
    }

    /// Writes `bytes` into the frame; they must fit.
    ///
    /// # Safety
    ///
    /// It must be a frame of this UMEM that nobody else has.
    pub(crate) unsafe fn write(&self, frame: &mut FrameDesc, bytes: &[u8]) {
        // SAFETY: the caller's contract.
        let mut data = unsafe { self.xsk.data_mut(frame) };
        let mut cursor = data.cursor();
        cursor.set_pos(0);
        cursor.write_all(bytes).expect("what is written fits the smallest frame");
    }

    /// The bytes of a frame.
    ///
    /// # Safety
    ///
    /// It must be a frame of this UMEM that nobody else has while the result lives.
    #[inline]
    pub(super) unsafe fn bytes(&self, frame: &FrameDesc) -> &[u8] {
        // SAFETY: the caller's contract.
        let data = unsafe { self.xsk.data(frame) };
        let bytes = data.contents();
        // SAFETY: the bytes are in the UMEM, and `data` is only a view of them.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }
    }

    /// The bytes of a frame, mutable.
    ///
    /// # Safety
    ///
    /// As for [`Umem::bytes`].
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "a frame is the caller's, whatever else has the UMEM")]
    pub(super) unsafe fn bytes_mut(&self, frame: &mut FrameDesc) -> &mut [u8] {
        // SAFETY: the caller's contract.
        let mut data = unsafe { self.xsk.data_mut(frame) };
        let bytes = data.contents_mut();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr(), bytes.len()) }
    }

    pub(super) fn xsk(&self) -> &xsk_rs::Umem {
        &self.xsk
    }
}

/// Configuration of every socket. The flags of the first one apply to all that share its UMEM: that they take packets of several
/// frames, for example.
pub(super) fn socket_config(ring_size: u32, takes_long: bool) -> SocketConfig {
    let long = if takes_long { BindFlags::XDP_USE_SG } else { BindFlags::empty() };
    let ring = QueueSize::new(ring_size).expect("the ring size was checked");
    SocketConfig::builder()
        .rx_queue_size(ring)
        .tx_queue_size(ring)
        .libxdp_flags(LibxdpFlags::XSK_LIBXDP_FLAGS_INHIBIT_PROG_LOAD)
        .bind_flags(BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP | long)
        .build()
}

/// The system error that caused an error of xsk-rs.
pub(super) fn system_error(error: &dyn std::error::Error) -> io::Error {
    match error.source().and_then(|source| source.downcast_ref::<io::Error>()) {
        Some(source) => {
            source.raw_os_error().map_or_else(|| io::Error::other(source.to_string()), io::Error::from_raw_os_error)
        }
        None => io::Error::other(error.to_string()),
    }
}

fn umem_error(step: &'static str, error: impl std::error::Error, config: &UmemConfig) -> UmemError {
    let source = system_error(&error);
    match source.raw_os_error() {
        Some(libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT) => UmemError::NoAfXdp(source),
        Some(libc::EPERM | libc::EACCES) => UmemError::NotPermitted(source),
        Some(libc::ENOMEM | libc::ENOBUFS) => UmemError::NoMemory { bytes: config.bytes(), source },
        _ => UmemError::Kernel { step, source },
    }
}
