//! Counters that a worker alone writes and anybody may read.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::histogram::{Durations, Histogram};
use super::stages::{StageCounters, StageStatistics};
use crate::forward::PortId;
use crate::io::{FrameAccount, XskStatistics};
use crate::pipeline::{BATCH, Cause};
use crate::snapshot::Epoch;

/// A counter with one writer: no locked instruction, since nobody else stores to it.
#[derive(Default, Debug)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one worker counted for one port. Aligned so that no two workers write to one cache line (or to a pair of
/// lines that the processor fetches together).
#[derive(Default, Debug)]
#[repr(align(128))]
pub(crate) struct PortCounters {
    pub(crate) rx_packets: Counter,
    pub(crate) rx_bytes: Counter,
    pub(crate) tx_packets: Counter,
    pub(crate) tx_bytes: Counter,
    dropped_bytes: Counter,
    drops: [Counter; Cause::COUNT],
}

impl PortCounters {
    #[inline]
    pub(crate) fn drop_one(&self, cause: Cause, octets: usize) {
        self.dropped_bytes.add(octets as u64);
        self.drops[cause as usize].add(1);
    }
}

/// What one worker counted for itself.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(crate) struct WorkerCounters {
    pub(crate) rounds: Counter,
    pub(crate) empty_rounds: Counter,
    pub(crate) batches: Counter,
    pub(crate) handed_over: Counter,
    pub(crate) joined: Counter,
    pub(crate) answers: Counter,
    pub(crate) answers_withheld: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) asleep_nanoseconds: Counter,
    /// How long turns took in which packets were moved.
    pub(crate) busy_turns: Durations,
    /// What the stages of some of them took.
    pub(crate) stages: StageCounters,
    batch_sizes: [Counter; BATCH_SIZES],
    epoch: AtomicU32,
}

/// Powers of two up to a batch.
pub(crate) const BATCH_SIZES: usize = BATCH.ilog2() as usize + 1;

impl WorkerCounters {
    /// Counts a batch of so many packets, of which there is at least one.
    #[inline]
    pub(crate) fn note_batch(&self, packets: usize) {
        self.batches.add(1);
        self.batch_sizes[(packets.next_power_of_two().ilog2() as usize).min(BATCH_SIZES - 1)].add(1);
    }

    /// Says that what this worker judges from now on it judges under this epoch or a later one.
    #[inline]
    pub(crate) fn note_epoch(&self, epoch: Epoch) {
        self.epoch.store(epoch.0, Ordering::Release);
    }

    /// The epoch that was noted last.
    pub(crate) fn epoch(&self) -> Epoch {
        Epoch(self.epoch.load(Ordering::Acquire))
    }
}

/// Packets, octets and drops; of a port, of a worker, or of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traffic {
    /// Packets received.
    pub rx_packets: u64,
    /// Octets received, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets given to the kernel to be sent.
    pub tx_packets: u64,
    /// Octets of those.
    pub tx_bytes: u64,
    /// Octets of packets that came in and were dropped.
    pub dropped_bytes: u64,
    drops: [u64; Cause::COUNT],
}

impl Default for Traffic {
    fn default() -> Self {
        Self { rx_packets: 0, rx_bytes: 0, tx_packets: 0, tx_bytes: 0, dropped_bytes: 0, drops: [0; Cause::COUNT] }
    }
}

impl Traffic {
    /// Packets that came in by this port and were dropped for this cause.
    pub fn dropped(&self, cause: Cause) -> u64 {
        self.drops[cause as usize]
    }

    /// Every cause for which packets were dropped, with their number.
    pub fn drops(&self) -> impl Iterator<Item = (Cause, u64)> + '_ {
        Cause::ALL.iter().map(|&cause| (cause, self.dropped(cause))).filter(|(_, count)| *count > 0)
    }

    /// All packets that were dropped.
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

/// Packets that the kernel lost at a port's sockets (`struct xdp_statistics` in linux/if_xdp.h), all queues together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KernelDrops {
    /// Packets longer than a frame, or for which the fill ring was empty.
    pub rx_dropped: u64,
    /// Packets for which the RX ring was full: the worker is too slow.
    pub rx_ring_full: u64,
    /// How often the fill ring was found empty: frames are short. These packets are in `rx_dropped` too.
    pub fill_ring_empty: u64,
    /// A descriptor that the kernel did not take: a fault of this program.
    pub invalid_descriptors: u64,
}

impl KernelDrops {
    /// How many packets were lost in all.
    pub fn packets(&self) -> u64 {
        self.rx_dropped + self.rx_ring_full
    }

    /// Each count with its name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        [
            ("rx_dropped", self.rx_dropped),
            ("rx_ring_full", self.rx_ring_full),
            ("fill_ring_empty", self.fill_ring_empty),
            ("invalid_descriptors", self.invalid_descriptors),
        ]
        .into_iter()
    }

    /// Adds those of other sockets.
    pub fn add_all(&mut self, other: &Self) {
        self.rx_dropped += other.rx_dropped;
        self.rx_ring_full += other.rx_ring_full;
        self.fill_ring_empty += other.fill_ring_empty;
        self.invalid_descriptors += other.invalid_descriptors;
    }

    pub(crate) fn add(&mut self, statistics: &XskStatistics) {
        self.rx_dropped += statistics.rx_dropped;
        self.rx_ring_full += statistics.rx_ring_full;
        self.fill_ring_empty += statistics.fill_ring_empty;
        self.invalid_descriptors += statistics.invalid_descriptors;
    }
}

/// How many frames a queue of a port holds at a moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueDepth {
    /// The port.
    pub port: PortId,
    /// With the kernel for receiving, or received and not yet read. Full is the ring's size.
    pub receiving: u32,
    /// Given to the kernel for sending, and not yet seen to be sent.
    pub sending: u32,
}

/// What waits where at a moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Depths {
    /// Where all frames are.
    pub frames: FrameAccount,
    /// Of every queue of every open port.
    pub queues: Vec<QueueDepth>,
    /// By worker: packets that other workers have handed over to it and that it has not taken yet.
    pub handed_over: Vec<usize>,
}

/// One port's figures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PortStatistics {
    /// The port.
    pub port: PortId,
    /// Its interface.
    pub interface: String,
    /// What all workers counted for it.
    pub traffic: Traffic,
    /// What each worker counted for it, by worker.
    pub by_worker: Vec<Traffic>,
    /// What the kernel lost at its sockets.
    pub kernel: KernelDrops,
}

/// One worker's figures.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WorkerStatistics {
    /// Turns of its loop.
    pub rounds: u64,
    /// Turns in which there was nothing to do.
    pub empty_rounds: u64,
    /// Batches of packets received.
    pub batches: u64,
    /// Packets given to another worker, which owns their port.
    pub handed_over: u64,
    /// TCP segments that left joined with others, as one packet of the kernel's.
    pub joined: u64,
    /// Packets of its own making, in answer to others.
    pub answers: u64,
    /// Answers that were due and not given, because there had been too many.
    pub answers_withheld: u64,
    /// How often it went to sleep.
    pub sleeps: u64,
    /// How long it slept.
    pub asleep: Duration,
    /// How long it has been running.
    pub running: Duration,
    /// How long turns took in which packets were moved: judged, sent, handed over. Their sum is the time that it was busy.
    pub busy_turns: Histogram,
    /// What the stages of some of these turns took.
    pub stages: StageStatistics,
    /// Batches by how many packets they had: of each power of two, from 1 up to [`BATCH`], those with as many or fewer, and
    /// more than the power before.
    pub batch_sizes: Vec<u64>,
}

impl WorkerStatistics {
    /// The share of its time in which it was awake, from 0 to 1.
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
            handed_over: counters.handed_over.get(),
            joined: counters.joined.get(),
            answers: counters.answers.get(),
            answers_withheld: counters.answers_withheld.get(),
            sleeps: counters.sleeps.get(),
            asleep: Duration::from_nanos(counters.asleep_nanoseconds.get()),
            running,
            busy_turns: counters.busy_turns.read(),
            stages: counters.stages.read(),
            batch_sizes: counters.batch_sizes.iter().map(Counter::get).collect(),
        }
    }
}

/// All figures at about one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// The open ports in the order of their numbers.
    pub ports: Vec<PortStatistics>,
    /// What was counted for ports that are closed by now, and for packets whose port went away under way.
    pub closed: Traffic,
    /// The workers in the order of `Config::cores`.
    pub workers: Vec<WorkerStatistics>,
}

impl Statistics {
    /// The figures of one open port.
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
}
