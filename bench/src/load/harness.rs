//! The harness of a trial: sends paced or flat out and measures the result, all on one thread, so that sender and
//! receiver share a core without waiting for each other.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};

use super::cores::CoreTimes;
use super::generator::{Generator, UdpFlow};
use super::meter::{DatagramCounts, UdpMeter};
use super::ports::{PORTS, PROBE_PORT};
use super::run::{PROBE_SOURCE, RunningTrial, TrialSockets};
use super::traffic::{SLOTS, UdpFrames, connection_ports};
use super::trial::{Trial, TrialResult};
use crate::testbed::{Namespace, Pod};

/// How long packets may still be in flight after the last was sent.
const LAST: Duration = Duration::from_millis(300);

/// How long an answered connection counts as established: shorter than any peer's timeout.
const ANSWERED: Duration = Duration::from_secs(20);

/// The load harness: a sender in one pod and counters in another.
pub struct Harness {
    generator: Generator,
    hop: UdpFlow,
    meter: UdpMeter,
    /// In the sender's pod: receives the replies to probes.
    sender: UdpSocket,
    /// In the receiver's pod: receives probes.
    receiver: UdpSocket,
    opened: u64,
    probed: u64,
    /// Number of connections that were answered, and when.
    answered: (u32, Instant),
}

/// A socket that tells when each datagram arrived.
fn stamped(address: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind {address}"))?;
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
    socket2::SockRef::from(&socket).set_recv_buffer_size(1 << 20)?;
    Ok(socket)
}

impl Harness {
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
        Ok(Self {
            generator: from.namespace().run(|| Generator::open("eth0"))?,
            meter: UdpMeter::open(to.namespace(), destination, PORTS)?,
            sender: from.namespace().run(|| stamped(hop.source))?,
            receiver: to.namespace().run(|| stamped(SocketAddr::new(destination, PROBE_PORT)))?,
            hop,
            opened: 0,
            probed: 0,
            answered: (0, Instant::now()),
        })
    }

    /// Lets another namespace receive from now on, at this address of its own.
    pub fn receive_at(&mut self, to: &Namespace, address: IpAddr) -> Result<()> {
        self.meter = UdpMeter::open(to, address, PORTS)?;
        self.receiver = to.run(|| stamped(SocketAddr::new(address, PROBE_PORT)))?;
        self.send_to(address);
        Ok(())
    }

    /// Sends to this address: that of the receiver, or of a Service whose only backend it is.
    pub fn send_to(&mut self, address: IpAddr) {
        self.hop.destination.set_ip(address);
    }

    /// Runs one trial on the calling thread, which should be pinned to a core.
    pub fn run(&mut self, trial: &Trial) -> Result<TrialResult> {
        self.establish(trial.traffic.connections)?;
        let sockets =
            TrialSockets { generator: &self.generator, hop: &self.hop, sender: &self.sender, receiver: &self.receiver };
        let mut run = RunningTrial::new(sockets, trial.traffic, self.opened, self.probed)?;
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
        Ok(TrialResult {
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
        let mut frames = UdpFrames::new(&self.hop)?;
        let mut under_way = 0..0;
        for first in (0..connections).step_by(SLOTS) {
            let some = first..connections.min(first + SLOTS as u32);
            self.generator.send_frames(frames.of(some.clone()))?;
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

    fn wait_until_quiet(&self, run: &mut RunningTrial<'_>) -> Result<DatagramCounts> {
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
