//! The harness of a trial: sends paced or flat out and measures the result, all on one thread, so that sender and
//! receiver share a core without waiting for each other.

use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};

use super::cores::CoreTimes;
use super::generator::{Generator, UdpFlow};
use super::meter::{Count, Meter};
use super::run::{PROBE_SOURCE, Probes, Run, Ways};
use super::traffic::{Frames, Lengths, SLOTS, Traffic, connection_ports};
use crate::testbed::Pod;

/// Destination ports of counted packets.
pub const PORTS: Range<u16> = 9000..9060;
/// The destination port of probes.
pub const PROBE_PORT: u16 = 9060;
/// How long packets may still be in flight after the last was sent.
const LAST: Duration = Duration::from_millis(300);

/// How long an answered connection counts as established: shorter than any peer's timeout.
const ANSWERED: Duration = Duration::from_secs(20);

/// What probes do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Probing {
    /// Nothing.
    Off,
    /// This many probes a second on one connection, each answered.
    RoundTrip(f64),
    /// This many a second, each the first packet of a new connection.
    FirstPacket(f64),
}

/// Parameters of a trial.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// Traffic to send.
    pub traffic: Traffic,
    /// Packets a second; `None`: as fast as the core can.
    pub rate: Option<f64>,
    /// Duration of the counted part.
    pub length: Duration,
    /// Warm-up before it.
    pub warm_up: Duration,
    /// Probes sent beside the traffic.
    pub probing: Probing,
    /// Spoofed TCP SYNs a second sent beside the traffic.
    pub syns: f64,
    /// Whether the measuring thread runs at nice -20.
    pub goes_first: bool,
}

impl Trial {
    /// Flat out; the warm-up is a fifth of `length`.
    pub fn flat_out(traffic: Traffic, length: Duration) -> Self {
        Self { traffic, rate: None, length, warm_up: length / 5, probing: Probing::Off, syns: 0.0, goes_first: false }
    }

    /// At a fixed rate.
    pub fn paced(traffic: Traffic, rate: f64, length: Duration) -> Self {
        Self { rate: Some(rate), ..Self::flat_out(traffic, length) }
    }
}

/// Result of a trial.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Time it took to send the counted packets.
    pub time: Duration,
    /// Packets offered: accepted by the kernel or rejected by the interface.
    pub offered: u64,
    /// Packets rejected by the interface.
    pub refused: u64,
    /// Packets received with a valid checksum.
    pub received: u64,
    /// Packets received with an invalid checksum.
    pub corrupted: u64,
    /// Busy time of each core.
    pub busy: Vec<Duration>,
    /// Time stolen by the host from all cores together.
    pub stolen: Duration,
    /// Probe results.
    pub probes: Probes,
}

impl Outcome {
    /// Packets received a second.
    pub fn rate(&self) -> f64 {
        self.received as f64 / self.time.as_secs_f64()
    }

    /// Packets offered a second.
    pub fn offered_rate(&self) -> f64 {
        self.offered as f64 / self.time.as_secs_f64()
    }

    /// Packets that did not arrive.
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

/// The load harness: a sender in one pod and counters in another.
pub struct Station {
    generator: Generator,
    hop: UdpFlow,
    meter: Meter,
    /// In the sender's pod: receives the replies to probes.
    asks: UdpSocket,
    /// In the receiver's pod: receives probes.
    answers: UdpSocket,
    opened: u64,
    probed: u64,
    /// Number of connections that were answered, and when.
    answered: (u32, Instant),
}

impl Station {
    /// Opens a harness between two pods; `gateway_mac` is the destination MAC of its frames.
    pub fn open(from: &Pod, to: &Pod, gateway_mac: [u8; 6]) -> Result<Self> {
        let address = |pod: &Pod| pod.address(false).with_context(|| format!("pod {} has no IPv4 address", pod.name()));
        let (source, destination) = (address(from)?, address(to)?);
        let hop = UdpFlow {
            source_mac: from.namespace().netlink()?.mac("eth0")?,
            gateway_mac,
            source: SocketAddr::new(source, PROBE_SOURCE),
            destination: SocketAddr::new(destination, PORTS.start),
        };
        let stamped = |address: SocketAddr| -> Result<UdpSocket> {
            let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
            setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
            socket2::SockRef::from(&socket).set_recv_buffer_size(1 << 20)?;
            Ok(socket)
        };
        Ok(Self {
            generator: from.namespace().run(|| Generator::open("eth0"))?,
            meter: Meter::open(to.namespace(), destination, PORTS)?,
            asks: from.namespace().run(|| stamped(hop.source))?,
            answers: to.namespace().run(|| stamped(SocketAddr::new(destination, PROBE_PORT)))?,
            hop,
            opened: 0,
            probed: 0,
            answered: (0, Instant::now()),
        })
    }

    /// Runs one trial on the calling thread, which should be pinned to a core.
    pub fn run(&mut self, trial: &Trial) -> Result<Outcome> {
        self.establish(trial.traffic.connections)?;
        let ways = Ways { generator: &self.generator, hop: &self.hop, asks: &self.asks, answers: &self.answers };
        let mut run = Run::new(ways, trial.traffic, self.opened, self.probed)?;
        if !trial.warm_up.is_zero() {
            run.send_for(trial, trial.warm_up)?;
            // Flat out, packets in flight at the start stand for those in flight at the end.
            if trial.rate.is_some() {
                self.wait_until_quiet(&mut run)?;
            }
        }
        run.probe_as(trial.probing);
        let (count, cores) = (self.meter.count()?, CoreTimes::read()?);
        let sent = run.send_for(trial, trial.length)?;
        let cores_after = CoreTimes::read()?;
        let after = if trial.rate.is_none() { self.meter.count()? } else { self.wait_until_quiet(&mut run)? };
        (self.opened, self.probed) = run.so_far();
        // The meter counts all datagrams of its pod, so subtract the probes that were read there.
        let probes = run.into_probes();
        let read = probes.arrived + probes.corrupted;
        Ok(Outcome {
            time: sent.time,
            offered: sent.taken + sent.refused,
            refused: sent.refused,
            received: (after.arrived - count.arrived).saturating_sub(read),
            corrupted: after.corrupted - count.corrupted,
            busy: cores_after.since(&cores),
            stolen: cores_after.stolen_since(&cores),
            probes,
        })
    }

    /// Sends one packet on each rotating connection and has it answered. Until then the kernel's conntrack keeps a
    /// connection in state NEW and its packets traverse all rules.
    fn establish(&mut self, connections: u32) -> Result<()> {
        if connections <= self.answered.0 && self.answered.1.elapsed() < ANSWERED {
            return Ok(());
        }
        let mut frames = Frames::new(&self.hop, Traffic::SMALLEST, PORTS)?;
        let mut under_way = 0..0;
        for first in (0..connections).step_by(SLOTS) {
            let some = first..connections.min(first + SLOTS as u32);
            for (slot, connection) in some.clone().enumerate() {
                let (source, destination) = connection_ports(connection, &PORTS);
                frames.stamp_as(slot, 0, 0, source, destination);
            }
            self.generator.send_frames(&frames.octets[..some.len()])?;
            self.answer(under_way);
            under_way = some;
        }
        std::thread::sleep(LAST / 10);
        self.answer(under_way);
        std::thread::sleep(LAST / 10);
        self.answered = (connections, Instant::now());
        Ok(())
    }

    fn answer(&self, connections: Range<u32>) {
        for connection in connections {
            let (source, destination) = connection_ports(connection, &PORTS);
            self.meter.answer(destination, SocketAddr::new(self.hop.source.ip(), source));
        }
    }

    /// Waits until no more datagrams arrive.
    fn wait_until_quiet(&self, run: &mut Run<'_>) -> Result<Count> {
        let deadline = Instant::now() + LAST;
        let mut count = self.meter.count()?;
        loop {
            let pause = Instant::now() + Duration::from_millis(15);
            while Instant::now() < pause {
                run.poll()?;
            }
            let now = self.meter.count()?;
            if now == count || Instant::now() > deadline {
                return Ok(now);
            }
            count = now;
        }
    }
}

/// Frames of one length on one connection.
pub fn of_length(length: usize) -> Traffic {
    Traffic { lengths: Lengths::Of(length), ..Traffic::SMALLEST }
}
