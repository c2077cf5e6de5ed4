//! Test traffic: frames of one or several lengths on one or many UDP connections. Each carries a sequence number, its
//! scheduled time of sending and a check of both.

use std::net::SocketAddr;
use std::ops::Range;

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use super::generator::UdpFlow;
use super::ports::PORTS;

/// Bytes of headers before a frame's payload.
const HEADERS: usize = 14 + 20 + 8;
/// Offset of the UDP header.
const UDP: usize = 14 + 20;
/// Offset of the TCP header.
const TCP: usize = UDP;
/// Bytes of number, time and check at the start of a payload.
const STAMP: usize = 20;
const FIRST_SOURCE: u16 = 1024;
const SOURCES: u32 = (u16::MAX - FIRST_SOURCE) as u32;
/// First number of a new connection. Rotating connections are numbered below it in every trial, so that the two never
/// collide.
const NEW: u32 = 1_200_000;
/// Frames prepared in advance: a multiple of the length of a mix.
pub(super) const SLOTS: usize = 120;

/// Frame lengths in bytes, from the Ethernet header to the end of the payload, without the frame check sequence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum FrameLengths {
    Of(usize),
    /// The simple Internet mix: seven frames of 64 bytes to four of 576 and one of 1,500.
    Imix,
}

impl FrameLengths {
    fn of(self, slot: usize) -> usize {
        const MIX: [usize; 12] = [64, 576, 64, 64, 576, 64, 1500, 64, 576, 64, 64, 576];
        match self {
            Self::Of(length) => length,
            Self::Imix => MIX[slot % MIX.len()],
        }
    }

    pub fn name(self) -> String {
        match self {
            Self::Of(length) => format!("{length}"),
            Self::Imix => "IMIX".to_owned(),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    pub lengths: FrameLengths,
    /// Number of connections that rotate, packet by packet.
    pub connections: u32,
    /// Share of packets that open a new connection, from 0 to 1.
    pub new: f64,
}

impl Traffic {
    /// One connection, frames of 64 bytes.
    pub const SMALLEST: Self = Self { lengths: FrameLengths::Of(64), connections: 1, new: 0.0 };
}

/// Prepared frames; number and time are filled in when one is sent.
pub(super) struct FrameTemplates {
    pub(super) bytes: Vec<Vec<u8>>,
    /// One's complement sum of each frame's checksum without the variable fields.
    sums: Vec<u32>,
    traffic: Traffic,
    ports: Range<u16>,
    opened: u64,
    due: f64,
    /// Packets sent on rotating connections.
    turns: u64,
}

impl FrameTemplates {
    /// Frames from one address to another, with destination ports out of `ports`.
    pub(super) fn new(hop: &UdpFlow, traffic: Traffic, ports: Range<u16>) -> Result<Self> {
        ensure!(traffic.connections > 0, "traffic needs a connection");
        ensure!(traffic.connections <= NEW, "there are {NEW} connections at most that take turns");
        let all = SOURCES * u32::from(ports.end - ports.start);
        ensure!(traffic.new == 0.0 || all > NEW, "new connections need more ports");
        let bytes: Vec<Vec<u8>> =
            (0..SLOTS).map(|slot| template(hop, traffic.lengths.of(slot))).collect::<Result<_>>()?;
        let sums = bytes.iter().map(|frame| pseudo_header_and_udp(frame)).collect();
        Ok(Self { bytes, sums, traffic, ports, opened: 0, due: 0.0, turns: 0 })
    }

    /// Skips this many connections, so that the next new ones were never used.
    pub(super) fn skip_opened(&mut self, opened: u64) {
        self.opened = opened;
    }

    pub(super) fn opened(&self) -> u64 {
        self.opened
    }

    /// Fills the frame of `slot`: packet `number`, scheduled at `time` nanoseconds.
    #[inline]
    pub(super) fn stamp(&mut self, slot: usize, number: u64, time: u64) {
        let connection = self.connection();
        let (source, destination) = connection_ports(connection, &self.ports);
        self.stamp_as(slot, number, time, source, destination);
    }

    /// The same for given ports.
    #[inline]
    pub(super) fn stamp_as(&mut self, slot: usize, number: u64, time: u64, source: u16, destination: u16) {
        let frame = &mut self.bytes[slot];
        frame[UDP..UDP + 2].copy_from_slice(&source.to_be_bytes());
        frame[UDP + 2..UDP + 4].copy_from_slice(&destination.to_be_bytes());
        let stamp = stamp(number, time);
        frame[HEADERS..HEADERS + STAMP].copy_from_slice(&stamp);
        let mut sum = self.sums[slot] + u32::from(source) + u32::from(destination);
        for pair in stamp.chunks_exact(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
        }
        frame[UDP + 6..UDP + 8].copy_from_slice(&finish(sum).to_be_bytes());
    }

    #[inline]
    fn connection(&mut self) -> u32 {
        let Traffic { connections, new, .. } = self.traffic;
        self.due += new;
        if self.due >= 1.0 {
            self.due -= 1.0;
            self.opened += 1;
            let room = SOURCES * u32::from(self.ports.end - self.ports.start) - NEW;
            return NEW + ((self.opened - 1) % u64::from(room)) as u32;
        }
        self.turns += 1;
        (self.turns % u64::from(connections)) as u32
    }
}

/// Frames of 64 bytes that open connections, numbered as those that take turns in a trial.
pub struct UdpFrames {
    frames: FrameTemplates,
}

impl UdpFrames {
    /// Frames from the flow's one address to the other.
    pub fn new(hop: &UdpFlow) -> Result<Self> {
        Ok(Self { frames: FrameTemplates::new(hop, Traffic::SMALLEST, PORTS)? })
    }

    /// One of each of these connections; at most 120.
    pub fn of(&mut self, connections: Range<u32>) -> &[Vec<u8>] {
        for (slot, connection) in connections.clone().enumerate() {
            let (source, destination) = connection_ports(connection, &PORTS);
            self.frames.stamp_as(slot, 0, 0, source, destination);
        }
        &self.frames.bytes[..connections.len()]
    }
}

/// Ports of a connection. Consecutive connections differ in the source port.
pub(super) fn connection_ports(connection: u32, ports: &Range<u16>) -> (u16, u16) {
    let source = FIRST_SOURCE + (connection % SOURCES) as u16;
    (source, ports.start + (connection / SOURCES) as u16)
}

fn template(hop: &UdpFlow, length: usize) -> Result<Vec<u8>> {
    ensure!(length >= HEADERS + STAMP, "a frame of {length} bytes has no room for number and time");
    let mut frame = hop.frame(length)?;
    frame[HEADERS..HEADERS + STAMP].fill(0);
    frame[UDP..UDP + 4].fill(0);
    frame[UDP + 6..UDP + 8].fill(0);
    Ok(frame)
}

/// Sequence number, time, and a check that detects a change of either.
fn stamp(number: u64, time: u64) -> [u8; STAMP] {
    let mut stamp = [0; STAMP];
    stamp[..8].copy_from_slice(&number.to_be_bytes());
    stamp[8..16].copy_from_slice(&time.to_be_bytes());
    stamp[16..].copy_from_slice(&check(number, time).to_be_bytes());
    stamp
}

fn check(number: u64, time: u64) -> u32 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ time.rotate_left(31).wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    (mixed ^ (mixed >> 32)) as u32
}

/// Sequence number and time of a payload; `None` if the payload was changed.
pub(super) fn read_stamp(payload: &[u8]) -> Option<(u64, u64)> {
    let number = u64::from_be_bytes(*payload.first_chunk()?);
    let time = u64::from_be_bytes(*payload.get(8..)?.first_chunk()?);
    let stamped_check = u32::from_be_bytes(*payload.get(16..)?.first_chunk()?);
    let filled = payload[STAMP..].iter().all(|&byte| byte == FILL);
    (stamped_check == check(number, time) && filled).then_some((number, time))
}

/// Fill byte of a payload behind its stamp.
pub(super) const FILL: u8 = 0x5a;

/// Sum over the pseudo-header, the UDP header and the payload of a template.
fn pseudo_header_and_udp(frame: &[u8]) -> u32 {
    let words = |bytes: &[u8]| -> u32 {
        bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))).sum()
    };
    let length = (frame.len() - UDP) as u32;
    words(&frame[26..34]) + 17 + length + words(&frame[UDP..])
}

fn finish(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !(sum as u16) {
        0 => 0xffff,
        checksum => checksum,
    }
}

/// Raw TCP SYNs with random source ports and sequence numbers.
pub(super) struct RandomSyns {
    frame: Vec<u8>,
    random: SmallRng,
}

impl RandomSyns {
    pub(super) fn new(hop: &UdpFlow) -> Result<Self> {
        let (SocketAddr::V4(source), SocketAddr::V4(destination)) = (hop.source, hop.destination) else {
            anyhow::bail!("SYNs are generated for IPv4 alone");
        };
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2(hop.source_mac, hop.gateway_mac)
            .ipv4(source.ip().octets(), destination.ip().octets(), 64)
            .tcp(1, destination.port(), 0, 65535)
            .syn()
            .write(&mut frame, &[])
            .context("cannot build a SYN")?;
        frame.resize(60.max(frame.len()), 0);
        Ok(Self { frame, random: SmallRng::seed_from_u64(7) })
    }

    pub(super) fn next(&mut self) -> &[u8] {
        let number = self.random.next_u32();
        let source = FIRST_SOURCE + (self.random.next_u32() % SOURCES) as u16;
        self.frame[TCP..TCP + 2].copy_from_slice(&source.to_be_bytes());
        self.frame[TCP + 4..TCP + 8].copy_from_slice(&number.to_be_bytes());
        self.frame[TCP + 16..TCP + 18].fill(0);
        let addresses: [u8; 8] = *self.frame[26..].first_chunk().unwrap_or(&[0; 8]);
        let bytes = |part: &[u8]| -> u32 {
            part.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum()
        };
        let sum = bytes(&addresses) + 6 + 20 + bytes(&self.frame[TCP..TCP + 20]);
        self.frame[TCP + 16..TCP + 18].copy_from_slice(&finish(sum).to_be_bytes());
        &self.frame
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use etherparse::{SlicedPacket, TransportSlice};

    use super::*;

    fn frames(traffic: Traffic) -> FrameTemplates {
        let (source, destination) = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:9000".parse().unwrap());
        let hop = UdpFlow { source_mac: [2; 6], gateway_mac: [4; 6], source, destination };
        FrameTemplates::new(&hop, traffic, 9000..9060).unwrap()
    }

    /// Ports and payload of a frame whose checksum is verified.
    fn read(frame: &[u8]) -> (u16, u16, Vec<u8>) {
        let packet = SlicedPacket::from_ethernet(frame).unwrap();
        let Some(TransportSlice::Udp(udp)) = packet.transport else { panic!("no UDP: {packet:?}") };
        let (source, destination) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let right = udp.to_header().calc_checksum_ipv4_raw(source, destination, udp.payload()).unwrap();
        assert_eq!(udp.checksum(), right);
        (udp.source_port(), udp.destination_port(), udp.payload().to_vec())
    }

    #[test]
    fn every_frame_has_a_valid_checksum_and_stamp() {
        for lengths in [FrameLengths::Of(64), FrameLengths::Of(1500), FrameLengths::Of(513), FrameLengths::Imix] {
            let mut frames = frames(Traffic { lengths, connections: 3, new: 0.5 });
            for number in 0..3 * SLOTS as u64 {
                let slot = number as usize % SLOTS;
                frames.stamp(slot, number, number * 1_000_003 + (1 << 60));
                let (_, _, mut payload) = read(&frames.bytes[slot]);
                assert_eq!(read_stamp(&payload), Some((number, number * 1_000_003 + (1 << 60))));
                let at = number as usize % payload.len();
                payload[at] ^= 0x10;
                assert_eq!(read_stamp(&payload), None, "byte {at} was changed");
            }
        }
    }

    #[test]
    fn connections_rotate_and_new_ones_are_unused() {
        let mut frames = frames(Traffic { connections: 100_000, new: 0.25, ..Traffic::SMALLEST });
        let (mut seen, mut opened) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..200_000 {
            let connection = frames.connection();
            if connection < 100_000 {
                seen.insert(connection_ports(connection, &(9000..9060)));
            } else {
                assert!(opened.insert(connection_ports(connection, &(9000..9060))), "{connection} was there before");
            }
        }
        assert_eq!(opened.len(), 50_000);
        assert!(seen.len() == 100_000 && seen.is_disjoint(&opened), "{} connections were there", seen.len());
    }
}
