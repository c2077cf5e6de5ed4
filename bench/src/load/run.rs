//! A running trial: schedules packets and collects the results of its probes.

use std::io::IoSliceMut;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg};

use super::generator::{Generator, UdpFlow};
use super::ports::{PORTS, PROBE_PORT};
use super::traffic::{FrameTemplates, RandomSyns, SLOTS, Traffic, read_stamp};
use super::trial::{ProbeMode, ProbeStats, Trial};

/// Source port of probes on an established connection, and the first source port of first-packet probes.
pub(super) const PROBE_SOURCE: u16 = 1024;
/// Maximum number of frames per system call in a paced trial.
const BURST: usize = 32;

/// Packets that one call of [`RunningTrial::send_for`] sent.
pub(super) struct SendCounts {
    pub(super) taken: u64,
    pub(super) refused: u64,
    pub(super) time: Duration,
}

pub(super) struct TrialSockets<'a> {
    pub(super) generator: &'a Generator,
    pub(super) hop: &'a UdpFlow,
    /// In the sender's pod: receives the replies to probes.
    pub(super) sender: &'a UdpSocket,
    /// In the receiver's pod: receives probes.
    pub(super) receiver: &'a UdpSocket,
}

pub(super) struct RunningTrial<'a> {
    sockets: TrialSockets<'a>,
    frames: FrameTemplates,
    slot: usize,
    probe_frame: FrameTemplates,
    syns: RandomSyns,
    probing: ProbeMode,
    probes: ProbeStats,
    first_probe: u64,
    next_probe: u64,
    newest: Option<u64>,
    last_arrival: Option<u64>,
}

impl<'a> RunningTrial<'a> {
    /// Starts after the `opened` connections and `probed` probes of earlier trials, so that late packets are not
    /// counted here.
    pub(super) fn new(sockets: TrialSockets<'a>, traffic: Traffic, opened: u64, probed: u64) -> Result<Self> {
        let mut frames = FrameTemplates::new(sockets.hop, traffic, PORTS)?;
        frames.skip_opened(opened);
        Ok(Self {
            probe_frame: FrameTemplates::new(sockets.hop, Traffic::SMALLEST, PROBE_PORT..PROBE_PORT + 1)?,
            syns: RandomSyns::new(sockets.hop)?,
            sockets,
            frames,
            slot: 0,
            probing: ProbeMode::Off,
            probes: ProbeStats::new()?,
            first_probe: probed,
            next_probe: probed,
            newest: None,
            last_arrival: None,
        })
    }

    /// Changes the probe mode from now on.
    pub(super) fn probe_as(&mut self, probing: ProbeMode) {
        self.probing = probing;
    }

    /// Connections opened and probes sent so far, those of earlier trials included.
    pub(super) fn so_far(&self) -> (u64, u64) {
        (self.frames.opened(), self.next_probe)
    }

    /// Ends the trial and returns its probe results.
    pub(super) fn into_probes(self) -> ProbeStats {
        self.probes
    }

    /// Sends for this long, each packet at its scheduled time. A packet that is late is still sent, stamped with its
    /// scheduled time.
    pub(super) fn send_for(&mut self, trial: &Trial, length: Duration) -> Result<SendCounts> {
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
                let sent = self.sockets.generator.send_frames(&self.frames.bytes[self.slot..self.slot + due])?;
                taken += sent as u64;
                refused += (due - sent) as u64;
                number += due as u64;
                self.slot = (self.slot + due) % SLOTS;
            }
            if let ProbeMode::RoundTrip(rate) | ProbeMode::FirstPacket(rate) = self.probing {
                if seconds * rate > probed as f64 {
                    self.probe(epoch + (probed as f64 / rate * 1e9) as u64)?;
                    probed += 1;
                }
                self.poll()?;
            }
            while seconds * trial.syns > flooded as f64 {
                self.sockets.generator.send_frames(&[self.syns.next()])?;
                flooded += 1;
            }
        }
        Ok(SendCounts { taken, refused, time: start.elapsed() })
    }

    fn probe(&mut self, time: u64) -> Result<()> {
        let source = match self.probing {
            ProbeMode::FirstPacket(_) => PROBE_SOURCE + 1 + (self.next_probe % 60_000) as u16,
            ProbeMode::RoundTrip(_) | ProbeMode::Off => PROBE_SOURCE,
        };
        self.probe_frame.stamp_as(0, self.next_probe, time, source, PROBE_PORT);
        self.next_probe += 1;
        self.probes.sent += 1;
        self.sockets.generator.send_frames(&self.probe_frame.bytes[..1])?;
        Ok(())
    }

    /// Reads probes and replies that have arrived.
    pub(super) fn poll(&mut self) -> Result<()> {
        if self.probing == ProbeMode::Off {
            return Ok(());
        }
        let mut bytes = [0; 2048];
        while let Some((length, from, arrived)) = receive(self.sockets.receiver, &mut bytes)? {
            let Some((number, sent)) = read_stamp(&bytes[..length]) else {
                self.probes.corrupted += 1;
                continue;
            };
            if number < self.first_probe {
                continue;
            }
            self.note_arrival(number, sent, arrived);
            if let (ProbeMode::RoundTrip(_), Some(from)) = (self.probing, from) {
                // A reply is the probe's one-way time and the time at which the reply was sent.
                let answer = [arrived.saturating_sub(sent).to_be_bytes(), now()?.to_be_bytes()].concat();
                // A reply that does not fit into the buffer counts as lost.
                let _ = self.sockets.receiver.send_to(&answer, from);
            }
        }
        while let Some((length, _, arrived)) = receive(self.sockets.sender, &mut bytes)? {
            let Some((taken, answered)) = bytes[..length].split_first_chunk::<8>() else { continue };
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

/// Receives one datagram, if there is one: its length, its sender and the kernel's receive timestamp.
fn receive(socket: &UdpSocket, bytes: &mut [u8]) -> Result<Option<(usize, Option<SocketAddr>, u64)>> {
    let mut parts = [IoSliceMut::new(bytes)];
    let mut control = nix::cmsg_space!(nix::sys::time::TimeSpec);
    let message =
        match recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::MSG_DONTWAIT) {
            Ok(message) => message,
            // An ICMP error for an earlier datagram is reported here; it is not a datagram.
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

/// Now, on the clock of the kernel's receive timestamps.
fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64)
}
