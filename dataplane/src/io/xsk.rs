//! The AF_XDP socket of a worker's pair, with its four rings.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue};

use super::umem::{socket_config, system_error};
use super::{FrameCache, FrameOwner, FramePool, GsoPort, PortError, QueueSlot, RxBatch, Umem};
use crate::batch::BATCH;
use crate::packet::{JoinedSegments, LEAST_TO_JOIN, finish_open};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kick {
    /// The kernel has taken everything from the TX ring.
    Drained,
    /// It took a part and must be woken again.
    More,
    /// It took nothing: the interface is down, or its queue is full.
    Stalled,
}

/// Packets that the kernel dropped at a socket (`struct xdp_statistics` in linux/if_xdp.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct XskStatistics {
    pub(crate) rx_dropped: u64,
    pub(crate) rx_ring_full: u64,
    pub(crate) fill_ring_empty: u64,
    pub(crate) invalid_descriptors: u64,
}

/// A socket bound to the one queue of an interface. It belongs to one worker at a time: xsk-rs and libxdp serialise
/// closing, and everything else is owned by this value.
#[derive(Debug)]
pub(crate) struct XskQueue {
    slot: QueueSlot,
    rx: RxQueue,
    tx: TxQueue,
    fill: FillQueue,
    completion: CompQueue,
    ring_size: u32,
    /// Frames in the fill ring, or received and not yet read.
    filled: u32,
    /// Target for that number.
    fill_target: u32,
    /// Frames put into the TX ring and not yet seen in the completion ring.
    outstanding: u32,
    /// The kernel rejects the socket permanently: its interface is gone.
    dead: bool,
    /// For packets that do not fit a frame.
    sender: Option<GsoPort>,
    /// Whether TCP segments leave as GSO packets.
    joins: bool,
}

impl XskQueue {
    /// Creates a socket, binds it to an interface in the calling thread's network namespace, and puts its first frames into
    /// the fill ring: as many as are free, up to `fill_target`.
    pub(crate) fn open(umem: &Umem, interface: &str, slot: QueueSlot, fill_target: u32) -> Result<Self, PortError> {
        let ring_size = umem.config().ring_size;
        let pool = umem.pool();
        let (tx, rx, fill, completion) = bind(umem, interface)?;
        let mut this = Self {
            slot,
            rx,
            tx,
            fill,
            completion,
            ring_size,
            filled: 0,
            fill_target,
            outstanding: 0,
            dead: false,
            sender: None,
            joins: false,
        };
        // A child process must not keep the socket, and with it its frames, after it was closed here.
        let _ = fcntl(this.as_fd(), FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        this.raise_budget();
        let frames: Vec<FrameDesc> = std::iter::from_fn(|| pool.take_for(slot)).take(fill_target as usize).collect();
        // SAFETY: the frames belong to this UMEM and were free until now.
        let taken = unsafe { this.fill.produce(&frames) };
        for frame in &frames[taken..] {
            pool.release(frame);
        }
        this.filled = taken as u32;
        Ok(this)
    }

    /// Lets it send packets that do not fit a frame, and TCP segments as GSO packets if it `joins` them.
    pub(crate) fn send_by(&mut self, sender: GsoPort, joins: bool) {
        (self.sender, self.joins) = (Some(sender), joins);
    }

    /// Sends a packet that does not fit a frame. The TX ring must have been drained before.
    pub(crate) fn send_long(&self, frame: &[u8]) -> bool {
        self.sender.as_ref().is_some_and(|sender| sender.send_whole(frame).is_ok())
    }

    /// Lets one wake-up send more than 32 packets if the kernel has the option (Linux 6.17), and enlarges the send
    /// buffer accordingly. Without it everything is sent too, with more wake-ups.
    fn raise_budget(&self) {
        const XDP_MAX_TX_SKB_BUDGET: i32 = 9;
        let sndbuf = self.ring_size.saturating_mul(4096).min(i32::MAX as u32);
        let _ = self.set_option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, sndbuf);
        let _ = self.set_option(libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, self.ring_size.min(1024));
    }

    fn set_option(&self, level: i32, option: i32, value: u32) -> io::Result<()> {
        // SAFETY: the value lives across the call, and its size is given.
        let result = unsafe {
            libc::setsockopt(self.fd(), level, option, (&raw const value).cast(), size_of::<u32>() as libc::socklen_t)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn fd(&self) -> RawFd {
        self.rx.fd().as_raw_fd()
    }

    /// The socket, for the XDP program's map and for polling.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.fd()) }
    }

    /// Frames in the fill ring, or received and not yet read.
    pub(crate) fn in_fill(&self) -> u32 {
        self.filled
    }

    pub(crate) fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Whether the kernel rejects the socket permanently.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead
    }

    /// Reads up to a batch of received frames. The caller owns them from now on, though they are marked as the queue's
    /// until they are passed on.
    #[inline]
    pub(crate) fn receive<'a>(&mut self, umem: &'a Umem, frames: &'a mut [FrameDesc; BATCH]) -> RxBatch<'a> {
        // SAFETY: the ring's frames belong to the UMEM that the socket was created with.
        let count = unsafe { self.rx.consume(frames) };
        self.filled -= count as u32;
        // SAFETY: these were just taken from the RX ring, which never contains a frame twice.
        unsafe { RxBatch::new(umem, &mut frames[..count]) }
    }

    /// Reads the next frame of a packet whose earlier ones were read; the kernel makes all of them visible at once.
    pub(crate) fn receive_part<'a>(&mut self, umem: &'a Umem, frame: &'a mut [FrameDesc; 1]) -> RxBatch<'a> {
        // SAFETY: the ring's frames belong to the UMEM that the socket was created with.
        let count = unsafe { self.rx.consume(frame) };
        self.filled -= count as u32;
        // SAFETY: it was just taken from the RX ring, which never contains a frame twice.
        unsafe { RxBatch::new(umem, &mut frame[..count]) }
    }

    /// Puts frames into the TX ring in order, as many as fit, and returns how many.
    #[inline]
    pub(crate) fn send(&mut self, frames: &mut [FrameDesc], umem: &Umem) -> usize {
        let wanted = frames.len() as u32;
        let room = (self.tx.nb_free(wanted).min(wanted)) as usize;
        for frame in &mut frames[..room] {
            if frame.lengths().data() >= LEAST_TO_JOIN {
                // SAFETY: the frame is the caller's until it is in the ring.
                finish_open(unsafe { umem.bytes_mut(frame) });
            }
            umem.pool().mark(frame, FrameOwner::Transmit(self.slot));
        }
        // SAFETY: the frames belong to this UMEM, and the caller passes them on with this call.
        let sent = unsafe { self.tx.produce(&frames[..room]) };
        debug_assert_eq!(sent, room, "the ring has the room that it said it has");
        self.outstanding += sent as u32;
        sent
    }

    /// The segments at the start of these frames that can be sent as one GSO packet, if any.
    #[inline]
    pub(crate) fn join(&self, umem: &Umem, frames: &[FrameDesc]) -> Option<JoinedSegments> {
        if !self.joins || frames.first()?.lengths().data() < LEAST_TO_JOIN {
            return None;
        }
        // SAFETY: the frames are the caller's, which is about to send them.
        JoinedSegments::at_start(frames.iter().map(|frame| unsafe { umem.bytes(frame) }))
    }

    /// Sends these joined frames as one GSO packet. The TX ring must have been drained before. `false`: the kernel did
    /// not take it, and the frames must be sent one by one.
    pub(crate) fn send_joined(&self, umem: &Umem, frames: &[FrameDesc], joined: &JoinedSegments) -> bool {
        let Some(gso) = &self.sender else { return false };
        // SAFETY: as above.
        gso.send(joined, frames.iter().map(|frame| unsafe { umem.bytes(frame) })).is_ok()
    }

    /// Entries of each of its rings.
    pub(crate) fn ring_size(&self) -> u32 {
        self.ring_size
    }

    /// Frames in the TX ring that the kernel has not taken yet.
    fn unsent(&mut self) -> u32 {
        self.ring_size - self.tx.nb_free_exact()
    }

    /// Wakes the kernel to send what is in the TX ring.
    ///
    /// In copy mode one wake-up sends at most 32 packets (TX_BATCH_SIZE in net/xdp/xsk.c) unless the budget could be
    /// raised. The rest waits for the next wake-up, so repeat it until the ring is drained.
    pub(crate) fn kick(&mut self) -> Kick {
        let before = self.unsent();
        if before == 0 || self.dead {
            return Kick::Drained;
        }
        if self.tx.wakeup().is_err() {
            self.dead = true;
            return Kick::Stalled;
        }
        match self.unsent() {
            0 => Kick::Drained,
            after if after < before => Kick::More,
            _ => Kick::Stalled,
        }
    }

    /// Frees the frames of sent packets and returns how many.
    #[inline]
    pub(crate) fn complete(
        &mut self,
        scratch: &mut [FrameDesc; BATCH],
        cache: &mut FrameCache,
        pool: &FramePool,
    ) -> u32 {
        let mut total = 0;
        loop {
            // SAFETY: the ring's frames belong to the UMEM that the socket was created with.
            let count = unsafe { self.completion.consume(scratch) };
            for frame in &scratch[..count] {
                cache.free(*frame, pool);
            }
            total += count as u32;
            if count < BATCH {
                self.outstanding -= total;
                return total;
            }
        }
    }

    /// Puts free frames into the fill ring if it lacks `least` or more of its target.
    #[inline]
    pub(crate) fn refill(
        &mut self,
        least: u32,
        scratch: &mut [FrameDesc; BATCH],
        cache: &mut FrameCache,
        pool: &FramePool,
    ) {
        loop {
            let missing = self.fill_target - self.filled;
            if missing < least.max(1) {
                return;
            }
            let wanted = (missing as usize).min(BATCH);
            let mut count = 0;
            while count < wanted {
                let Some(frame) = cache.take(pool) else { break };
                pool.mark(&frame, FrameOwner::Fill(self.slot));
                scratch[count] = frame;
                count += 1;
            }
            if count == 0 {
                return;
            }
            // SAFETY: the frames belong to this UMEM and were free until now.
            let taken = unsafe { self.fill.produce(&scratch[..count]) };
            self.filled += taken as u32;
            for frame in &scratch[taken..count] {
                cache.free(*frame, pool);
            }
            if taken < count {
                return;
            }
        }
    }

    /// Sends what is still in the TX ring before the queue is closed, while there is progress and until `deadline`. The
    /// rest is dropped with the socket.
    pub(crate) fn settle(&mut self, deadline: Instant, pool: &FramePool) {
        let mut scratch = [FrameDesc::default(); BATCH];
        let mut cache = FrameCache::new();
        loop {
            let kick = self.kick();
            self.complete(&mut scratch, &mut cache, pool);
            if self.outstanding == 0 || self.dead || Instant::now() >= deadline {
                break;
            }
            if kick != Kick::More {
                thread::sleep(Duration::from_micros(200));
            }
        }
        cache.empty_into(pool);
    }

    /// Packets that the kernel dropped at the socket with this descriptor.
    pub(crate) fn statistics(socket: BorrowedFd<'_>) -> io::Result<XskStatistics> {
        let mut raw: libc::xdp_statistics = libc::xdp_statistics {
            rx_dropped: 0,
            rx_invalid_descs: 0,
            tx_invalid_descs: 0,
            rx_ring_full: 0,
            rx_fill_ring_empty_descs: 0,
            tx_ring_empty_descs: 0,
        };
        let mut length = size_of_val(&raw) as libc::socklen_t;
        // SAFETY: both live across the call, and the length is that of the buffer.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_XDP,
                libc::XDP_STATISTICS,
                (&raw mut raw).cast(),
                &mut length,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(XskStatistics {
            rx_dropped: raw.rx_dropped,
            rx_ring_full: raw.rx_ring_full,
            fill_ring_empty: raw.rx_fill_ring_empty_descs,
            invalid_descriptors: raw.rx_invalid_descs + raw.tx_invalid_descs,
        })
    }
}

/// How long to wait for an interface that another socket is bound to.
const PATIENCE: Duration = Duration::from_secs(3);

/// Creates and binds a socket. A recently closed queue is only free when the kernel's deferred work is done, which
/// waits for a lock that all interface changes take (`xp_release_deferred` in net/xdp/xsk_buff_pool.c): so a busy queue
/// is retried.
fn bind(umem: &Umem, interface: &str) -> Result<(TxQueue, RxQueue, FillQueue, CompQueue), PortError> {
    let name = interface.parse().map_err(|_| PortError::NoInterface { interface: interface.to_owned() })?;
    let deadline = Instant::now() + PATIENCE;
    let (tx, rx, rings) = loop {
        // SAFETY: libxdp loads no program, which is what sharing a UMEM and queue would need.
        let result = unsafe { Socket::new(socket_config(umem.config().ring_size, false), umem.xsk(), &name, 0) };
        match result {
            Ok(queues) => break queues,
            Err(error) => {
                let source = system_error(&error);
                match source.raw_os_error() {
                    Some(libc::EBUSY) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
                    Some(libc::EBUSY) => return Err(PortError::Busy { interface: interface.to_owned() }),
                    Some(libc::ENODEV) => return Err(PortError::NoInterface { interface: interface.to_owned() }),
                    _ => {
                        return Err(PortError::Kernel {
                            interface: interface.to_owned(),
                            step: "binding a socket",
                            source,
                        });
                    }
                }
            }
        }
    };
    match rings {
        Some((fill, completion)) => Ok((tx, rx, fill, completion)),
        None => Err(PortError::Busy { interface: interface.to_owned() }),
    }
}
