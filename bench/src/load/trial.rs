//! Parameters and results of a trial.

use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use super::traffic::{FrameLengths, Traffic};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ProbeMode {
    Off,
    /// This many probes a second on one connection, each answered.
    RoundTrip(f64),
    /// This many a second, each the first packet of a new connection.
    FirstPacket(f64),
}

/// Probe results. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct ProbeStats {
    pub sent: u64,
    pub arrived: u64,
    /// Probes among those that arrived after a later one.
    pub reordered: u64,
    pub corrupted: u64,
    /// From the scheduled time of sending until the probe reached the receiver's stack.
    pub one_way: Histogram<u64>,
    /// One-way time plus the time from sending the reply until it reached the sender's stack.
    pub round_trip: Histogram<u64>,
    pub longest_gap: Duration,
}

impl ProbeStats {
    pub(super) fn new() -> Result<Self> {
        let histogram = || Histogram::new_with_bounds(1, 10_000_000_000, 3).context("a histogram");
        let (one_way, round_trip) = (histogram()?, histogram()?);
        let longest_gap = Duration::ZERO;
        Ok(Self { sent: 0, arrived: 0, reordered: 0, corrupted: 0, one_way, round_trip, longest_gap })
    }

    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.arrived + self.corrupted)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Trial {
    pub traffic: Traffic,
    /// Packets a second; `None`: as fast as the core can.
    pub rate: Option<f64>,
    pub length: Duration,
    pub warm_up: Duration,
    pub probing: ProbeMode,
    /// Spoofed TCP SYNs a second sent beside the traffic.
    pub syns: f64,
    /// Whether the measuring thread runs at nice -20.
    pub high_priority: bool,
}

impl Trial {
    /// Flat out; the warm-up is a fifth of `length`.
    pub fn flat_out(traffic: Traffic, length: Duration) -> Self {
        Self {
            traffic,
            rate: None,
            length,
            warm_up: length / 5,
            probing: ProbeMode::Off,
            syns: 0.0,
            high_priority: false,
        }
    }

    /// At a fixed rate.
    pub fn paced(traffic: Traffic, rate: f64, length: Duration) -> Self {
        Self { rate: Some(rate), ..Self::flat_out(traffic, length) }
    }
}

#[derive(Clone, Debug)]
pub struct TrialResult {
    /// Time it took to send the counted packets.
    pub time: Duration,
    /// Packets offered: accepted by the kernel or rejected by the interface.
    pub offered: u64,
    /// Packets rejected by the interface.
    pub refused: u64,
    pub received: u64,
    pub corrupted: u64,
    pub busy: Vec<Duration>,
    /// Time stolen by the host from all cores together.
    pub stolen: Duration,
    pub probes: ProbeStats,
}

impl TrialResult {
    pub fn rate(&self) -> f64 {
        self.received as f64 / self.time.as_secs_f64()
    }

    pub fn offered_rate(&self) -> f64 {
        self.offered as f64 / self.time.as_secs_f64()
    }

    pub fn lost(&self) -> u64 {
        self.offered.saturating_sub(self.received)
    }

    /// The share of the packets that did not arrive.
    pub fn lost_share(&self) -> f64 {
        self.lost() as f64 / self.offered.max(1) as f64
    }

    /// Busy nanoseconds of a core for each packet received.
    pub fn busy_nanoseconds(&self, core: usize) -> Option<f64> {
        Some(self.busy.get(core)?.as_nanos() as f64 / self.received.max(1) as f64)
    }
}

/// Frames of one length on one connection.
pub fn of_length(length: usize) -> Traffic {
    Traffic { lengths: FrameLengths::Of(length), ..Traffic::SMALLEST }
}
