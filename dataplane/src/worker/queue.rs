//! The socket of a worker's pair, with the packets to be sent on it in this poll iteration.

use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use xsk_rs::FrameDesc;

use super::statistics::PortCounters;
use crate::batch::BATCH;
use crate::forward::PortId;
use crate::io::{FrameCache, Kick, Umem, XskQueue};
use crate::packet::JoinedSegments;

/// Packets sent and batches received after which a watched socket is no longer watched until the worker sleeps. At that
/// number the cost of two system calls per packet is negligible.
const BUSY: u32 = 256;

pub(super) struct PairQueue {
    /// The pair's own port.
    pub(super) port: PortId,
    pub(super) xsk: XskQueue,
    pub(super) counters: Arc<PortCounters>,
    /// Packets to send in this iteration, with their ingress and egress ports. At most a batch.
    frames: Vec<FrameDesc>,
    ingress: Vec<PortId>,
    egress: Vec<PortId>,
    /// Egress ports and lengths of the frames sent since these were last counted.
    pub(super) sent: Vec<(PortId, usize)>,
    /// The kernel must be woken: the TX ring contains packets that it has not taken.
    unsent: bool,
    watched: bool,
    /// Packets sent and batches received since it is watched.
    moved: u32,
}

impl PairQueue {
    /// The event by which epoll names the socket.
    pub(super) const READY: u64 = 1;

    pub(super) fn new(port: PortId, xsk: XskQueue, counters: Arc<PortCounters>) -> Self {
        Self {
            port,
            xsk,
            counters,
            frames: Vec::with_capacity(BATCH),
            ingress: Vec::with_capacity(BATCH),
            egress: Vec::with_capacity(BATCH),
            sent: Vec::with_capacity(BATCH),
            unsent: false,
            watched: false,
            moved: 0,
        }
    }

    /// Adds a packet to send. `true`: there is a full batch, which must be put into the ring.
    #[inline]
    pub(super) fn push(&mut self, frame: FrameDesc, port: PortId, ingress: PortId) -> bool {
        self.frames.push(frame);
        self.ingress.push(ingress);
        self.egress.push(port);
        self.frames.len() >= BATCH
    }

    /// Sends TCP segments as GSO packets where possible, and puts everything else into the TX ring, in order. Frames of
    /// GSO packets are freed to `cache`; frames that do not fit, even after the kernel was woken, go to `rejected`.
    /// Returns the number of segments that were sent joined.
    pub(super) fn transmit(
        &mut self,
        umem: &Umem,
        cache: &mut FrameCache,
        rejected: &mut Vec<(FrameDesc, PortId)>,
    ) -> usize {
        if self.frames.is_empty() {
            return 0;
        }
        let (mut sent, mut at, mut left_joined) = (0, 0, 0);
        while at + 1 < self.frames.len() {
            let Some(joined) = self.xsk.join(umem, &self.frames[at..]) else {
                at += 1;
                continue;
            };
            let end = at + joined.count;
            // Earlier packets of their connection must be sent before them.
            sent = self.fill_ring(sent, at, umem);
            if sent == at && self.drain() && self.send_joined(at, &joined, umem) {
                self.frames[at..end].iter().for_each(|frame| cache.free(*frame, umem.pool()));
                left_joined += joined.count;
                sent = end;
            }
            at = end;
        }
        sent = self.fill_ring(sent, self.frames.len(), umem);
        self.moved = self.moved.saturating_add(sent as u32);
        let bytes: usize = self.frames[..sent].iter().map(|frame| frame.lengths().data()).sum();
        self.counters.tx_packets.add(sent as u64);
        self.counters.tx_bytes.add(bytes as u64);
        let ports = self.egress.drain(..).zip(&self.frames).take(sent);
        self.sent.extend(ports.map(|(port, frame)| (port, frame.lengths().data())));
        rejected.extend(self.frames.drain(..).zip(self.ingress.drain(..)).skip(sent));
        left_joined
    }

    /// Puts frames from one index up to another into the TX ring; returns the index of the first one that did not fit.
    #[inline]
    fn fill_ring(&mut self, from: usize, to: usize, umem: &Umem) -> usize {
        let mut sent = from;
        while sent < to && !self.xsk.is_dead() {
            let count = self.xsk.send(&mut self.frames[sent..to], umem);
            self.unsent |= count > 0;
            sent += count;
            if sent < to && self.xsk.kick() == Kick::Stalled {
                break;
            }
        }
        sent
    }

    /// Makes the kernel send everything in the TX ring; returns whether it did.
    fn drain(&mut self) -> bool {
        while self.kick() == Some(Kick::More) {}
        !self.unsent
    }

    /// Sends a packet that does not fit a frame, once the kernel has taken what was before it.
    pub(super) fn send_long(&mut self, frame: &[u8]) -> bool {
        self.drain() && self.xsk.send_long(frame)
    }

    fn send_joined(&mut self, at: usize, joined: &JoinedSegments, umem: &Umem) -> bool {
        self.xsk.send_joined(umem, &self.frames[at..at + joined.count], joined)
    }

    /// Wakes the kernel once if it has not taken everything. `None`: not necessary.
    #[inline]
    pub(super) fn kick(&mut self) -> Option<Kick> {
        if !self.unsent {
            return None;
        }
        let kick = self.xsk.kick();
        self.unsent = kick != Kick::Drained;
        Some(kick)
    }

    #[inline]
    pub(super) fn count_batch(&mut self) {
        self.moved = self.moved.saturating_add(1);
    }

    /// Makes a received packet, past or future, wake the thread that waits on `epoll`.
    pub(super) fn watch(&mut self, epoll: &Epoll) -> Result<(), Errno> {
        if !self.watched {
            epoll.add(self.xsk.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, Self::READY))?;
            (self.watched, self.moved) = (true, 0);
        }
        Ok(())
    }

    /// Stops watching it under high traffic, when the worker does not sleep. For a watched socket the kernel signals
    /// each sent packet (`sock_wfree`, net/core/sock.c) and each received batch with a lock and a walk over the
    /// waiters, whether or not they sleep.
    pub(super) fn unwatch_if_busy(&mut self, epoll: &Epoll) {
        if self.watched && self.moved >= BUSY {
            self.watched = epoll.delete(self.xsk.as_fd()).is_err();
        }
    }

    /// Returns the socket; no packet may be left to send.
    pub(super) fn into_xsk(self) -> XskQueue {
        debug_assert!(self.frames.is_empty(), "a socket is given up between poll iterations");
        self.xsk
    }
}
