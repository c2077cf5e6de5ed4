//! How many packets of each port wait for a worker, counted by the tcx programs and the workers together.
//!
//! All ports share a worker's pair. The programs drop what would be more than a port's share of it, so that a pod that floods
//! fills its own share. A program counts a packet when it sends it to a worker, a worker when it has received it; the
//! difference waits. Packets that are lost between them are made up for with the next [`WaitingSweep`].

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};

use crate::forward::PortId;

/// A BPF array (`BPF_MAP_TYPE_ARRAY` with `BPF_F_MMAPABLE`) with an element for each port number from 0 up, each of
/// [`WaitingPackets::ELEMENT`] bytes.
#[derive(Clone, Debug)]
pub struct WaitingPackets {
    map: Arc<MmapRaw>,
}

/// `struct waiting` in `xdp-redirect/src/bpf/tcx_maps.h`. Each counter has its own cache lines: programs on other cores write
/// the first.
#[repr(C, align(128))]
struct Waiting {
    sent: AtomicU64,
    unused: [u64; 7],
    received: AtomicU64,
}

impl Waiting {
    /// Packets received and sent.
    fn load(&self) -> (u64, u64) {
        (self.received.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed))
    }
}

impl WaitingPackets {
    pub const ELEMENT: u32 = size_of::<Waiting>() as u32;

    /// Maps the array, which has so many elements.
    pub fn map(array: &OwnedFd, elements: u32) -> io::Result<Self> {
        let map = MmapOptions::new().len((elements * Self::ELEMENT) as usize).map_raw(array.as_raw_fd())?;
        Ok(Self { map: Arc::new(map) })
    }

    fn of(&self, port: PortId) -> Option<&Waiting> {
        let (at, end) = (port.index() * size_of::<Waiting>(), (port.index() + 1) * size_of::<Waiting>());
        // SAFETY: the element is within the mapping, which is page-aligned and lives as long as `self`; any bit pattern is a
        // valid atomic.
        (end <= self.map.len()).then(|| unsafe { &*self.map.as_ptr().add(at).cast() })
    }

    fn iter(&self) -> impl Iterator<Item = &Waiting> {
        (0..).map_while(|port| self.of(PortId(port)))
    }

    /// A worker has received so many packets of this port.
    #[inline]
    pub(super) fn received(&self, port: PortId, packets: u64) {
        if let Some(waiting) = self.of(port) {
            waiting.received.fetch_add(packets, Ordering::Relaxed);
        }
    }
}

/// Time in which each packet that was sent to a worker has been received or lost.
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// A worker's regular look at all counters: what was sent before the last one waits no longer.
pub(super) struct WaitingSweep {
    waiting: Option<WaitingPackets>,
    /// By port: packets sent at the last sweep.
    sent: Vec<u64>,
    last: Option<Instant>,
}

impl WaitingSweep {
    pub(super) fn new(waiting: Option<WaitingPackets>) -> Self {
        Self { waiting, sent: Vec::new(), last: None }
    }

    #[inline]
    pub(super) fn packets(&self) -> Option<&WaitingPackets> {
        self.waiting.as_ref()
    }

    /// Room for this port, so that sweeps allocate nothing.
    pub(super) fn add(&mut self, port: PortId) {
        if self.sent.len() <= port.index() {
            self.sent.resize(port.index() + 1, 0);
        }
    }

    pub(super) fn sweep(&mut self, now: Instant) {
        let Some(waiting) = &self.waiting else { return };
        if self.last.is_some_and(|last| now.duration_since(last) < LONGEST_WAIT) {
            return;
        }
        self.last = Some(now);
        for (counters, before) in waiting.iter().zip(&mut self.sent) {
            let (received, sent) = counters.load();
            // A program counts a packet that the kernel will cut up as its segments, but may be wrong about them.
            let corrected = received.clamp((*before).min(sent), sent);
            if corrected != received {
                // If it fails, another worker has just received something, and the next sweep corrects.
                let _ = counters.received.compare_exchange(received, corrected, Ordering::Relaxed, Ordering::Relaxed);
            }
            *before = sent;
        }
    }

    /// Whether packets may wait: then the worker must look again soon, even if nothing arrives.
    pub(super) fn may_wait(&self) -> bool {
        let Some(waiting) = &self.waiting else { return false };
        waiting.iter().take(self.sent.len()).map(Waiting::load).any(|(received, sent)| received != sent)
    }
}

/// Longest sleep of a worker while packets may wait that will never arrive.
pub(super) const SLEEP: u16 = LONGEST_WAIT.as_millis() as u16;

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    fn packets() -> WaitingPackets {
        // SAFETY: the name ends in NUL; the descriptor is new, and nothing else owns it.
        let memory = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"waiting".as_ptr(), libc::MFD_CLOEXEC)) };
        nix::unistd::ftruncate(&memory, i64::from(2 * WaitingPackets::ELEMENT)).unwrap();
        WaitingPackets::map(&memory, 2).unwrap()
    }

    fn waits(packets: &WaitingPackets, port: u16) -> i64 {
        let counters = packets.of(PortId(port)).unwrap();
        let (sent, received) = (&counters.sent, &counters.received);
        sent.load(Ordering::Relaxed).wrapping_sub(received.load(Ordering::Relaxed)) as i64
    }

    #[test]
    fn a_packet_waits_until_it_is_received() {
        let packets = packets();
        packets.of(PortId(1)).unwrap().sent.store(7, Ordering::Relaxed);
        packets.received(PortId(1), 3);
        assert_eq!([waits(&packets, 0), waits(&packets, 1)], [0, 4]);
        // Beyond the array: the programs have no such port.
        packets.received(PortId(2), 1);
    }

    #[test]
    fn lost_packets_wait_for_the_second_sweep() {
        let (packets, start) = (packets(), Instant::now());
        let mut sweep = WaitingSweep::new(Some(packets.clone()));
        sweep.add(PortId(1));
        let sent = |count| packets.of(PortId(0)).unwrap().sent.store(count, Ordering::Relaxed);
        sent(100);
        packets.received(PortId(0), 60);
        sweep.sweep(start);
        assert_eq!((waits(&packets, 0), sweep.may_wait()), (40, true));
        sent(150);
        // Too early, and then all that was sent before the first sweep has arrived or is lost.
        sweep.sweep(start + LONGEST_WAIT / 2);
        assert_eq!(waits(&packets, 0), 90);
        sweep.sweep(start + LONGEST_WAIT);
        assert_eq!(waits(&packets, 0), 50);
        // More were received than counted as sent.
        packets.received(PortId(0), 70);
        assert!(sweep.may_wait());
        sweep.sweep(start + 2 * LONGEST_WAIT);
        assert_eq!((waits(&packets, 0), sweep.may_wait()), (0, false));
    }

    #[test]
    fn without_counters_nothing_waits() {
        let mut sweep = WaitingSweep::new(None);
        sweep.add(PortId(3));
        sweep.sweep(Instant::now());
        assert!(!sweep.may_wait());
    }
}
