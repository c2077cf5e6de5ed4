//! Sends paced or flat out and measures what became of it, all on one thread, so that sender and receiver share a core
//! without waiting for each other.

use std::io::IoSliceMut;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, setsockopt, sockopt};

use super::cores::CoreTimes;
use super::generator::{Generator, UdpFlow};
use super::meter::{Count, Meter};
use super::traffic::{Frames, Lengths, SLOTS, Syns, Traffic, read_stamp};
use crate::testbed::Pod;

/// Destination ports of what is counted.
pub const PORTS: Range<u16> = 9000..9060;
/// The destination port of probes.
pub const PROBE_PORT: u16 = 9060;
/// The source port of probes that are not the first packet of their connection, and the first of those that are.
const PROBE_SOURCE: u16 = 1024;
/// Most frames that are handed to the kernel at once when they are paced.
const BURST: usize = 32;
/// How long packets may be on their way after the last was sent.
const LAST: Duration = Duration::from_millis(300);

/// What probes do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Probing {
    /// Nothing.
    Off,
    /// So many a second are sent on one connection and answered.
    RoundTrip(f64),
    /// So many a second, each the first packet of its connection.
    FirstPacket(f64),
}

/// How to measure.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// What is sent.
    pub traffic: Traffic,
    /// Packets a second; none: as many as the core can.
    pub rate: Option<f64>,
    /// How long what is counted is sent.
    pub length: Duration,
    /// How long it is sent before.
    pub warm_up: Duration,
    /// Probes beside it.
    pub probing: Probing,
    /// TCP SYNs a second from nowhere beside it.
    pub syns: f64,
}

impl Trial {
    /// Flat out, with a fifth of the time before what is counted.
    pub fn flat_out(traffic: Traffic, length: Duration) -> Self {
        Self { traffic, rate: None, length, warm_up: length / 5, probing: Probing::Off, syns: 0.0 }
    }

    /// Paced.
    pub fn paced(traffic: Traffic, rate: f64, length: Duration) -> Self {
        Self { rate: Some(rate), ..Self::flat_out(traffic, length) }
    }
}

/// What probes came to. Times are nanoseconds.
#[derive(Clone, Debug)]
pub struct Probes {
    /// How many were sent.
    pub sent: u64,
    /// How many arrived, as they were sent.
    pub arrived: u64,
    /// How many of those came after one that was sent later.
    pub reordered: u64,
    /// How many arrived otherwise than they were sent.
    pub corrupted: u64,
    /// From when it was to be sent until it reached the receiver's stack.
    pub one_way: Histogram<u64>,
    /// The same, and from when the answer was sent until it reached the sender's stack.
    pub round_trip: Histogram<u64>,
    /// The longest time in which none arrived.
    pub longest_gap: Duration,
}

/// What a trial came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How long it took to send what is counted.
    pub time: Duration,
    /// Packets that were to be sent: those that the kernel took, and those that the interface refused.
    pub offered: u64,
    /// How many of them the interface refused.
    pub refused: u64,
    /// Packets that arrived with a right checksum.
    pub received: u64,
    /// Packets that arrived with a wrong one.
    pub corrupted: u64,
    /// How long each core was busy.
    pub busy: Vec<Duration>,
    /// The probes.
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

    /// Nanoseconds that a core was busy for each packet received.
    pub fn busy_nanoseconds(&self, core: usize) -> Option<f64> {
        Some(self.busy.get(core)?.as_nanos() as f64 / self.received.max(1) as f64)
    }
}

/// A sender in one pod and what counts in another.
pub struct Station {
    generator: Generator,
    hop: UdpFlow,
    meter: Meter,
    /// In the sender's pod: where answers to probes arrive.
    asks: UdpSocket,
    /// In the receiver's pod: where probes arrive.
    answers: UdpSocket,
    opened: u64,
    probed: u64,
}

impl Station {
    /// Opens one between two pods; `gateway_mac` is what the sender addresses frames to.
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
        })
    }

    /// Runs one trial on the calling thread, which should be pinned.
    pub fn run(&mut self, trial: &Trial) -> Result<Outcome> {
        let mut frames = Frames::new(&self.hop, trial.traffic, PORTS)?;
        frames.skip_opened(self.opened);
        let mut run = Run {
            probe_frame: Frames::new(&self.hop, Traffic::SMALLEST, PROBE_PORT..PROBE_PORT + 1)?,
            syns: Syns::new(&self.hop)?,
            generator: &self.generator,
            frames,
            slot: 0,
            probing: Probing::Off,
            asks: &self.asks,
            answers: &self.answers,
            probes: Probes::new()?,
            first_probe: self.probed,
            next_probe: self.probed,
            newest: None,
            last_arrival: None,
        };
        if !trial.warm_up.is_zero() {
            run.send_for(trial, trial.warm_up)?;
            // Flat out, what is under way at the start stands for what will be at the end.
            if trial.rate.is_some() {
                self.wait_until_quiet(&mut run)?;
            }
        }
        run.probing = trial.probing;
        let (count, cores) = (self.meter.count()?, CoreTimes::read()?);
        let sent = run.send_for(trial, trial.length)?;
        let busy = CoreTimes::read()?.since(&cores);
        let after = if trial.rate.is_none() { self.meter.count()? } else { self.wait_until_quiet(&mut run)? };
        (self.opened, self.probed) = (run.frames.opened(), run.next_probe);
        // The meter counts all datagrams of its pod: probes that were read there, too.
        let probes = run.probes.arrived + run.probes.corrupted;
        Ok(Outcome {
            time: sent.time,
            offered: sent.taken + sent.refused,
            refused: sent.refused,
            received: (after.arrived - count.arrived).saturating_sub(probes),
            corrupted: after.corrupted - count.corrupted,
            busy,
            probes: run.probes,
        })
    }

    /// Waits until nothing arrives any more.
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

impl Probes {
    fn new() -> Result<Self> {
        let histogram = || Histogram::new_with_bounds(1, 10_000_000_000, 3).context("a histogram");
        let (one_way, round_trip) = (histogram()?, histogram()?);
        let longest_gap = Duration::ZERO;
        Ok(Self { sent: 0, arrived: 0, reordered: 0, corrupted: 0, one_way, round_trip, longest_gap })
    }

    /// How many did not arrive.
    pub fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.arrived + self.corrupted)
    }
}

/// What one call of [`Run::send_for`] sent.
struct Sent {
    taken: u64,
    refused: u64,
    time: Duration,
}

/// A trial under way.
struct Run<'a> {
    generator: &'a Generator,
    frames: Frames,
    slot: usize,
    probe_frame: Frames,
    syns: Syns,
    probing: Probing,
    asks: &'a UdpSocket,
    answers: &'a UdpSocket,
    probes: Probes,
    first_probe: u64,
    next_probe: u64,
    newest: Option<u64>,
    last_arrival: Option<u64>,
}

impl Run<'_> {
    /// Sends for so long, each packet at its time: what could not be sent in time is sent late, and its time of sending
    /// is when it was due.
    fn send_for(&mut self, trial: &Trial, length: Duration) -> Result<Sent> {
        let (start, epoch) = (Instant::now(), now()?);
        let (mut taken, mut refused, mut number) = (0, 0, 0_u64);
        let (mut probed, mut flooded) = (0_u64, 0_u64);
        loop {
            let elapsed = start.elapsed();
            if elapsed >= length {
                break;
            }
            let seconds = elapsed.as_secs_f64();
            let due = match trial.rate {
                Some(rate) => ((seconds * rate) as u64).saturating_sub(number).min(BURST as u64) as usize,
                None => SLOTS - self.slot,
            };
            for offset in 0..due.min(SLOTS - self.slot) {
                let at = number + offset as u64;
                let after = trial.rate.map_or(seconds, |rate| at as f64 / rate);
                self.frames.stamp(self.slot + offset, at, epoch + (after * 1e9) as u64);
            }
            let due = due.min(SLOTS - self.slot);
            if due > 0 {
                let sent = self.generator.send_frames(&self.frames.octets[self.slot..self.slot + due])?;
                taken += sent as u64;
                refused += (due - sent) as u64;
                number += due as u64;
                self.slot = (self.slot + due) % SLOTS;
            }
            if let Probing::RoundTrip(rate) | Probing::FirstPacket(rate) = self.probing {
                if seconds * rate > probed as f64 {
                    self.probe(epoch + (probed as f64 / rate * 1e9) as u64)?;
                    probed += 1;
                }
                self.poll()?;
            }
            while seconds * trial.syns > flooded as f64 {
                self.generator.send_frames(&[self.syns.next()])?;
                flooded += 1;
            }
        }
        Ok(Sent { taken, refused, time: start.elapsed() })
    }

    fn probe(&mut self, time: u64) -> Result<()> {
        let source = match self.probing {
            Probing::FirstPacket(_) => PROBE_SOURCE + 1 + (self.next_probe % 60_000) as u16,
            Probing::RoundTrip(_) | Probing::Off => PROBE_SOURCE,
        };
        self.probe_frame.stamp_as(0, self.next_probe, time, source, PROBE_PORT);
        self.next_probe += 1;
        self.probes.sent += 1;
        self.generator.send_frames(&self.probe_frame.octets[..1])?;
        Ok(())
    }

    /// Reads what has arrived of probes and answers.
    fn poll(&mut self) -> Result<()> {
        if self.probing == Probing::Off {
            return Ok(());
        }
        let mut octets = [0; 2048];
        while let Some((length, from, arrived)) = receive(self.answers, &mut octets)? {
            let Some((number, sent)) = read_stamp(&octets[..length]) else {
                self.probes.corrupted += 1;
                continue;
            };
            if number < self.first_probe {
                continue;
            }
            self.note_arrival(number, sent, arrived);
            if let (Probing::RoundTrip(_), Some(from)) = (self.probing, from) {
                // An answer is the probe with two times: how long it took so far, and when it was answered.
                let answer = [arrived.saturating_sub(sent).to_be_bytes(), now()?.to_be_bytes()].concat();
                // What finds no room is a lost answer.
                let _ = self.answers.send_to(&answer, from);
            }
        }
        while let Some((length, _, arrived)) = receive(self.asks, &mut octets)? {
            let Some((taken, answered)) = octets[..length].split_first_chunk::<8>() else { continue };
            let Some(answered) = answered.first_chunk::<8>() else { continue };
            let back = arrived.saturating_sub(u64::from_be_bytes(*answered));
            self.probes.round_trip.saturating_record(u64::from_be_bytes(*taken) + back);
        }
        Ok(())
    }

    fn note_arrival(&mut self, number: u64, sent: u64, arrived: u64) {
        let probes = &mut self.probes;
        probes.arrived += 1;
        probes.reordered += u64::from(self.newest.is_some_and(|newest| number < newest));
        self.newest = self.newest.max(Some(number));
        probes.one_way.saturating_record(arrived.saturating_sub(sent).max(1));
        if let Some(last) = self.last_arrival {
            probes.longest_gap = probes.longest_gap.max(Duration::from_nanos(arrived.saturating_sub(last)));
        }
        self.last_arrival = Some(arrived);
    }
}

/// One datagram, if there is one: its length, who sent it, and when the kernel received it.
fn receive(socket: &UdpSocket, octets: &mut [u8]) -> Result<Option<(usize, Option<SocketAddr>, u64)>> {
    let mut parts = [IoSliceMut::new(octets)];
    let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
    let message =
        match recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_DONTWAIT) {
            Ok(message) => message,
            // A refusal that came back for an earlier one is no datagram.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNREFUSED | Errno::EHOSTUNREACH) => return Ok(None),
            Err(error) => return Err(error).context("cannot receive probes"),
        };
    let from = message.address.map(|address| SocketAddr::new(address.ip().into(), address.port()));
    let stamp = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::ScmTimestampns(time) => Some(time),
        _ => None,
    });
    let Some(stamp) = stamp else { bail!("the kernel does not say when a datagram was received") };
    let nanoseconds = stamp.tv_sec() as u64 * 1_000_000_000 + stamp.tv_nsec() as u64;
    Ok(Some((message.bytes, from, nanoseconds)))
}

/// The time of the clock that the kernel stamps datagrams with.
fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64)
}

/// Traffic of frames of one length.
pub fn of_length(length: usize) -> Traffic {
    Traffic { lengths: Lengths::Of(length), ..Traffic::SMALLEST }
}
