//! Paced floods of packets that belong to no connection, optionally from spoofed addresses.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use etherparse::{IpNumber, Ipv4Header, TcpHeader, UdpHeader};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use super::generator::Generator;
use crate::testbed::{Namespace, Netlink, Node, Outside, RouteVia};

const BATCH: usize = 64;
/// A flood that was held up for longer than this, in seconds, does not catch up on the rest.
const LATE: f64 = 0.02;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloodPackets {
    /// TCP segments with only the ACK flag, as from the middle of a connection.
    Ack,
    Syn,
    Rst,
    Udp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FloodSources {
    /// A different address of 11.0.0.0/8 and port for each packet.
    Spoofed,
    /// This address, with a different port for each packet.
    One(Ipv4Addr),
}

/// A flood to a pod, from a machine outside the node or from another pod.
pub struct Flood {
    pub packets: FloodPackets,
    pub sources: FloodSources,
    pub destination: (Ipv4Addr, u16),
    macs: ([u8; 6], [u8; 6]),
    random: SmallRng,
    sent: Arc<AtomicU64>,
}

impl Flood {
    /// A flood that the machine or pod of this namespace sends through its `eth0`, whose other end is `interface` of the node.
    pub fn new(
        node: &Node,
        (from, interface): (&Namespace, &str),
        packets: FloodPackets,
        sources: FloodSources,
        destination: (Ipv4Addr, u16),
    ) -> Result<Self> {
        let macs = (from.netlink()?.mac("eth0")?, node.netlink().mac(interface)?);
        Ok(Self { packets, sources, destination, macs, random: SmallRng::seed_from_u64(16), sent: Arc::default() })
    }

    /// How many packets the kernel has accepted so far; it counts on while the flood runs.
    pub fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    /// Sends `rate` packets a second until `ends` is set; returns how many the kernel accepted. `generator` must be a
    /// socket on the machine that sends.
    pub fn run(&mut self, generator: &Generator, rate: f64, ends: &AtomicBool) -> Result<u64> {
        let (mut taken, mut due, mut last) = (0, 0.0, Instant::now());
        while !ends.load(Ordering::Relaxed) {
            due += last.elapsed().as_secs_f64().min(LATE) * rate;
            last = Instant::now();
            if due < 1.0 {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            let count = (due as usize).min(BATCH);
            let frames: Vec<_> = (0..count).map(|_| self.frame()).collect::<Result<_>>()?;
            let accepted = generator.send_frames(&frames)? as u64;
            taken += accepted;
            self.sent.fetch_add(accepted, Ordering::Relaxed);
            due -= count as f64;
        }
        Ok(taken)
    }

    fn frame(&mut self) -> Result<Vec<u8>> {
        let random = self.random.next_u64();
        let [a, b, c, ..] = random.to_be_bytes();
        let port = 1024 + (random as u16) % (u16::MAX - 1024);
        let source = match self.sources {
            FloodSources::Spoofed => Ipv4Addr::new(11, a, b, c),
            FloodSources::One(address) => address,
        };
        let (protocol, transport) = match self.packets {
            FloodPackets::Udp => (IpNumber::UDP, 8),
            _ => (IpNumber::TCP, 20),
        };
        let ip = Ipv4Header::new(transport, 64, protocol, source.octets(), self.destination.0.octets())?;
        let mut frame = Vec::with_capacity(54);
        frame.extend([self.macs.1, self.macs.0].concat());
        frame.extend([0x08, 0x00]);
        ip.write(&mut frame)?;
        match self.packets {
            FloodPackets::Udp => {
                UdpHeader::with_ipv4_checksum(port, self.destination.1, &ip, &[])?.write(&mut frame)?
            }
            _ => self.segment(port, &ip)?.write(&mut frame)?,
        }
        Ok(frame)
    }

    fn segment(&mut self, port: u16, ip: &Ipv4Header) -> Result<TcpHeader> {
        let mut tcp = TcpHeader::new(port, self.destination.1, self.random.next_u32(), 64_240);
        match self.packets {
            FloodPackets::Syn => tcp.syn = true,
            FloodPackets::Rst => tcp.rst = true,
            _ => (tcp.ack, tcp.acknowledgment_number) = (true, self.random.next_u32()),
        }
        tcp.checksum = tcp.calc_checksum_ipv4(ip, &[])?;
        Ok(tcp)
    }
}

/// Gives the node a default route to this machine, so that replies to spoofed addresses leave the node.
pub fn route_default_to(node: &Node, outside: &Outside) -> Result<()> {
    let netlink: &Netlink = node.netlink();
    let machine = outside.addresses().iter().copied().find(|address| address.is_ipv4());
    let machine = machine.context("the machine outside has no IPv4 address")?;
    netlink.add_route("0.0.0.0/0".parse()?, netlink.index(outside.interface())?, RouteVia::Gateway(machine))
}
