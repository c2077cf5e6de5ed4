//! Counters with one writer, a worker, and any number of readers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::counter::Counter;
use super::histogram::{Durations, Histogram};
use crate::DropReason;
use crate::batch::BATCH;
use crate::epoch::Epoch;
use crate::forward::PortId;
use crate::io::{FrameAccount, XskStatistics};

/// Counters of one worker for one port. Aligned so that no two workers write to the same cache line (or to a pair of
/// lines that the CPU prefetches together).
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct PortCounters {
    pub(crate) rx_packets: Counter,
    pub(crate) rx_bytes: Counter,
    pub(crate) tx_packets: Counter,
    pub(crate) tx_bytes: Counter,
    dropped_bytes: Counter,
    drops: [Counter; DropReason::COUNT],
}

impl Default for PortCounters {
    fn default() -> Self {
        let counter = Counter::default;
        Self {
            rx_packets: counter(),
            rx_bytes: counter(),
            tx_packets: counter(),
            tx_bytes: counter(),
            dropped_bytes: counter(),
            drops: std::array::from_fn(|_| counter()),
        }
    }
}

impl PortCounters {
    #[inline]
    pub(crate) fn drop_one(&self, reason: DropReason, bytes: usize) {
        self.dropped_bytes.add(bytes as u64);
        self.drops[reason as usize].add(1);
    }
}

#[derive(Default, Debug)]
#[repr(align(128))]
pub(crate) struct WorkerCounters {
    pub(crate) rounds: Counter,
    pub(crate) empty_rounds: Counter,
    pub(crate) batches: Counter,
    pub(crate) joined: Counter,
    pub(crate) replies: Counter,
    pub(crate) replies_suppressed: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) asleep_nanoseconds: Counter,
    pub(crate) busy_iterations: Durations,
    batch_sizes: [Counter; BATCH_SIZES],
    epoch: AtomicU32,
}

/// Powers of two up to a batch.
pub(crate) const BATCH_SIZES: usize = BATCH.ilog2() as usize + 1;

impl WorkerCounters {
    /// Counts a non-empty batch of this many packets.
    #[inline]
    pub(crate) fn count_batch(&self, packets: usize) {
        self.batches.add(1);
        self.batch_sizes[(packets.next_power_of_two().ilog2() as usize).min(BATCH_SIZES - 1)].add(1);
    }

    /// Announces that this worker evaluates packets under this epoch or a later one from now on.
    #[inline]
    pub(crate) fn set_epoch(&self, epoch: Epoch) {
        self.epoch.store(epoch.0, Ordering::Release);
    }

    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }
}

/// Packets, bytes and drops of a port, of a worker, or in total.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traffic {
    pub rx_packets: u64,
    /// Bytes received, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets passed to the kernel for sending.
    pub tx_packets: u64,
    pub tx_bytes: u64,
    /// Bytes of received packets that were dropped.
    pub dropped_bytes: u64,
    drops: [u64; DropReason::COUNT],
}

impl Default for Traffic {
    fn default() -> Self {
        Self { rx_packets: 0, rx_bytes: 0, tx_packets: 0, tx_bytes: 0, dropped_bytes: 0, drops: [0; DropReason::COUNT] }
    }
}

impl Traffic {
    /// Packets received on this port and dropped for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }

    pub fn drops(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|&reason| (reason, self.dropped(reason))).filter(|(_, count)| *count > 0)
    }

    pub fn dropped_packets(&self) -> u64 {
        self.drops.iter().sum()
    }

    pub(crate) fn add(&mut self, counters: &PortCounters) {
        self.rx_packets += counters.rx_packets.get();
        self.rx_bytes += counters.rx_bytes.get();
        self.tx_packets += counters.tx_packets.get();
        self.tx_bytes += counters.tx_bytes.get();
        self.dropped_bytes += counters.dropped_bytes.get();
        for (total, counter) in self.drops.iter_mut().zip(&counters.drops) {
            *total += counter.get();
        }
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.dropped_bytes += other.dropped_bytes;
        for (total, count) in self.drops.iter_mut().zip(&other.drops) {
            *total += count;
        }
    }
}

/// Packets that the kernel dropped at the socket of a pair (`struct xdp_statistics` in linux/if_xdp.h). Each packet is in
/// one counter only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelDrops {
    /// Packets longer than a frame. The kernel's counter of this name has those of an empty fill ring, too.
    pub rx_dropped: u64,
    /// Packets that found the RX ring full: the worker is too slow.
    pub rx_ring_full: u64,
    /// Packets that found the fill ring empty: frames are short, or the worker is too slow.
    pub fill_ring_empty: u64,
    /// Descriptors that the kernel rejected: a bug of this program.
    pub invalid_descriptors: u64,
}

impl KernelDrops {
    pub fn packets(&self) -> u64 {
        self.rx_dropped + self.rx_ring_full + self.fill_ring_empty
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        [
            ("rx_dropped", self.rx_dropped),
            ("rx_ring_full", self.rx_ring_full),
            ("fill_ring_empty", self.fill_ring_empty),
            ("invalid_descriptors", self.invalid_descriptors),
        ]
        .into_iter()
    }

    pub fn add_all(&mut self, other: &Self) {
        self.rx_dropped += other.rx_dropped;
        self.rx_ring_full += other.rx_ring_full;
        self.fill_ring_empty += other.fill_ring_empty;
        self.invalid_descriptors += other.invalid_descriptors;
    }

    pub(crate) fn add(&mut self, statistics: &XskStatistics) {
        // The kernel counts a packet that found the fill ring empty in both.
        let fill_ring_empty = statistics.fill_ring_empty.min(statistics.rx_dropped);
        self.rx_dropped += statistics.rx_dropped - fill_ring_empty;
        self.rx_ring_full += statistics.rx_ring_full;
        self.fill_ring_empty += fill_ring_empty;
        self.invalid_descriptors += statistics.invalid_descriptors;
    }
}

/// Frames in the rings of a pair's socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingDepth {
    /// In the fill ring, or received and not yet read.
    pub receiving: u32,
    /// Passed to the kernel for sending and not yet completed.
    pub sending: u32,
    /// Entries of each ring.
    pub size: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RingDepths {
    pub frames: FrameAccount,
    /// By worker; of one without a pair, zeros.
    pub workers: Vec<RingDepth>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortStatistics {
    pub port: PortId,
    pub interface: String,
    /// Counters of all workers.
    pub traffic: Traffic,
    pub by_worker: Vec<Traffic>,
    pub kernel: KernelDrops,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WorkerStatistics {
    pub rounds: u64,
    /// Poll iterations without work.
    pub empty_rounds: u64,
    pub batches: u64,
    /// TCP segments that were sent joined in GSO packets.
    pub joined: u64,
    pub replies: u64,
    pub replies_suppressed: u64,
    pub sleeps: u64,
    pub asleep: Duration,
    pub running: Duration,
    /// Durations of poll iterations that moved packets: evaluated, sent. Their sum is the busy time.
    pub busy_iterations: Histogram,
    /// Batches by size: for each power of two from 1 up to [`BATCH`], those with at most as many packets, and more than
    /// the previous power.
    pub batch_sizes: Vec<u64>,
}

impl WorkerStatistics {
    /// Share of time awake, from 0 to 1.
    pub fn awake_share(&self) -> f64 {
        match self.running.as_secs_f64() {
            running if running > 0.0 => (1.0 - self.asleep.as_secs_f64() / running).clamp(0.0, 1.0),
            _ => 0.0,
        }
    }

    pub(crate) fn read(counters: &WorkerCounters, running: Duration) -> Self {
        Self {
            rounds: counters.rounds.get(),
            empty_rounds: counters.empty_rounds.get(),
            batches: counters.batches.get(),
            joined: counters.joined.get(),
            replies: counters.replies.get(),
            replies_suppressed: counters.replies_suppressed.get(),
            sleeps: counters.sleeps.get(),
            asleep: Duration::from_nanos(counters.asleep_nanoseconds.get()),
            running,
            busy_iterations: counters.busy_iterations.read(),
            batch_sizes: counters.batch_sizes.iter().map(Counter::get).collect(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DataplaneStatistics {
    /// The open ports in the order of their numbers.
    pub ports: Vec<PortStatistics>,
    /// Counters of closed ports, and of packets whose port was closed while they were in transit.
    pub closed: Traffic,
    /// Drops by the kernel at the sockets of closed ports.
    pub closed_kernel: KernelDrops,
    /// The workers in the order of `Config::cores`.
    pub workers: Vec<WorkerStatistics>,
}

impl DataplaneStatistics {
    pub fn port(&self, port: PortId) -> Option<&PortStatistics> {
        self.ports.iter().find(|statistics| statistics.port == port)
    }

    /// All ports together, closed ones included.
    pub fn total(&self) -> Traffic {
        let mut total = self.closed;
        for port in &self.ports {
            total.add_all(&port.traffic);
        }
        total
    }

    /// Drops by the kernel at the sockets of all ports, closed ones included.
    pub fn total_kernel(&self) -> KernelDrops {
        let mut total = self.closed_kernel;
        for port in &self.ports {
            total.add_all(&port.kernel);
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_that_found_the_fill_ring_empty_is_counted_once() {
        let mut drops = KernelDrops::default();
        let socket = |rx_dropped, fill_ring_empty| XskStatistics {
            rx_dropped,
            rx_ring_full: 5,
            fill_ring_empty,
            invalid_descriptors: 1,
        };
        drops.add(&socket(10, 7));
        // The kernel adds to the two counters one after the other.
        drops.add(&socket(2, 3));
        let expected = KernelDrops { rx_dropped: 3, rx_ring_full: 10, fill_ring_empty: 9, invalid_descriptors: 2 };
        assert_eq!(drops, expected);
        assert_eq!(drops.packets(), 22);
        let statistics = DataplaneStatistics { closed_kernel: drops, ..DataplaneStatistics::default() };
        assert_eq!(statistics.total_kernel(), expected, "closed ports count, too");
    }
}
