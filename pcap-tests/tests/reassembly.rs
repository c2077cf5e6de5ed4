//! Whatever fragments are sent, a receiver that reassembles those that passed finds the header that policy evaluated;
//! even a receiver that accepts overlapping fragments against RFC 5722.

use std::net::IpAddr;

use penstock_dataplane::conntrack::Config;
use penstock_dataplane::policy::RuleScope;
use penstock_pcap_tests::frame::IpSpec;
use penstock_pcap_tests::root;
use penstock_policy::model::Object;
use penstock_replay::batch::PacketBatch;
use penstock_replay::capture::{InterfaceId, Record, Time};
use penstock_replay::cluster::ReplayCluster;
use penstock_replay::player::{Decision, Player};
use penstock_sources::manifest::{Options, read_manifests};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Policy allows this port from `db` to `web`, and no other.
const ALLOWED: u16 = 53;
const DENIED: [u16; 2] = [80, 22];
/// Maximum payload of a datagram in bytes.
const LONGEST: usize = 256;

/// A fragment to send.
#[derive(Clone, Debug)]
struct SentFragment {
    /// Protocol number of the first header behind the fragment header, or the IPv4 protocol.
    next: u8,
    offset: usize,
    more: bool,
    bytes: Vec<u8>,
}

/// Which of two overlapping fragments takes precedence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overlap {
    First,
    Last,
}

/// A receiver that accepts all fragments.
struct Receiver {
    overlap: Overlap,
    bytes: [Option<u8>; LONGEST],
    next: Option<u8>,
    total: Option<usize>,
}

impl Receiver {
    fn new(overlap: Overlap) -> Self {
        Self { overlap, bytes: [None; LONGEST], next: None, total: None }
    }

    fn set<T>(&self, old: Option<T>, new: T) -> Option<T> {
        match self.overlap {
            Overlap::First => old.or(Some(new)),
            Overlap::Last => Some(new),
        }
    }

    /// Adds a fragment; returns the datagram if it is complete.
    fn take(&mut self, sent: &SentFragment) -> Option<(u8, Vec<u8>)> {
        for (place, byte) in (sent.offset..).zip(&sent.bytes) {
            self.bytes[place] = self.set(self.bytes[place], *byte);
        }
        if sent.offset == 0 {
            self.next = self.set(self.next, sent.next);
        }
        if !sent.more {
            self.total = self.set(self.total, sent.offset + sent.bytes.len());
        }
        let whole: Option<Vec<u8>> = self.bytes[..self.total?].iter().copied().collect();
        let whole = (self.next?, whole?);
        *self = Self::new(self.overlap);
        Some(whole)
    }
}

/// The destination port that a receiver finds in a datagram; `None` without a UDP header.
fn destination(&(mut next, ref datagram): &(u8, Vec<u8>)) -> Option<u16> {
    let mut at = 0;
    while next == 60 {
        let header = datagram.get(at..at + 2)?;
        (next, at) = (header[0], at + (usize::from(header[1]) + 1) * 8);
    }
    let ports = datagram.get(at..at + 8).filter(|_| next == 17)?;
    Some(u16::from_be_bytes([ports[2], ports[3]]))
}

fn udp(port: u16) -> Vec<u8> {
    [&40_000u16.to_be_bytes()[..], &port.to_be_bytes(), &200u16.to_be_bytes(), &[0, 0]].concat()
}

/// A first fragment: destination options in IPv6, a UDP header, and payload; sometimes truncated.
fn first(random: &mut SmallRng, is_v6: bool) -> SentFragment {
    let port = if random.random_ratio(3, 4) { ALLOWED } else { DENIED[0] };
    let mut bytes = Vec::new();
    let headers = if is_v6 { random.random_range(0..3) } else { 0 };
    for n in 0..headers {
        let length = random.random_range(0..6u8);
        let padding = length * 8 + 4;
        bytes.extend([if n + 1 < headers { 60 } else { 17 }, length, 1, padding]);
        bytes.resize(bytes.len() + usize::from(padding), 0);
    }
    bytes.extend(udp(port));
    bytes.resize(bytes.len() + 8 * random.random_range(0..6), b'd');
    if random.random_ratio(1, 8) {
        bytes.truncate(8 * random.random_range(1..=bytes.len() / 8));
    }
    SentFragment { next: if headers > 0 { 60 } else { 17 }, offset: 0, more: true, bytes }
}

/// A later fragment that reads as a UDP header to a denied port.
fn later(random: &mut SmallRng, is_v6: bool, units: usize, more: bool) -> SentFragment {
    let length = random.random_range(1..6);
    let next = if is_v6 && random.random() { 60 } else { 17 };
    SentFragment { next, offset: units * 8, more, bytes: udp(DENIED[1]).repeat(length) }
}

/// Fragments with one identification: consecutive ones, some overlapping ones, and some unrelated ones.
fn fragments(random: &mut SmallRng, is_v6: bool) -> Vec<SentFragment> {
    let mut sent = vec![first(random, is_v6)];
    let mut end = sent[0].bytes.len() / 8;
    let count = random.random_range(1..5);
    for n in 0..count {
        let units = if random.random_ratio(1, 4) { end.saturating_sub(random.random_range(0..8)).max(1) } else { end };
        let piece = later(random, is_v6, units, n + 1 < count);
        end = end.max(units + piece.bytes.len() / 8);
        sent.push(piece);
    }
    for _ in 0..random.random_range(0..3) {
        let other = if random.random_ratio(1, 3) {
            first(random, is_v6)
        } else {
            let (units, more) = (random.random_range(1..24), random.random_ratio(3, 4));
            later(random, is_v6, units, more)
        };
        sent.insert(random.random_range(0..=sent.len()), other);
    }
    sent.retain(|piece| piece.offset + piece.bytes.len() <= LONGEST);
    sent
}

fn player() -> Player {
    let manifests = read_manifests(&[root().join("clusters/shop")], &Options::default()).unwrap();
    let objects: Vec<Object> = manifests.documents.into_iter().map(|document| document.object).collect();
    let cluster = ReplayCluster::new(objects, Some("n1"), RuleScope::BothSides).unwrap();
    Player::new(cluster, &Config { entries: 4096, ..Config::default() }).unwrap()
}

/// Whether a frame passes.
fn passes(player: &mut Player, time: Time, frame: &[u8]) -> bool {
    let mut batch = PacketBatch::default();
    batch.space().extend_from_slice(frame);
    let length = frame.len() as u32;
    batch.push(0, Record { time, interface: InterfaceId(0), captured: length, original: length }, 0);
    let place = player.entry_point(None, frame);
    player.play(place, time, &mut batch);
    player.decision(place, 0) == Decision::Allow
}

#[test]
fn fragments_that_pass_reassemble_to_the_evaluated_header() {
    let ends: [[IpAddr; 2]; 2] =
        [[[10, 0, 1, 1].into(), [10, 0, 1, 2].into()], ["fd00:1::1".parse().unwrap(), "fd00:1::2".parse().unwrap()]];
    let (mut player, mut random) = (player(), SmallRng::seed_from_u64(0xf4a6));
    let mut put_together = [0; 2];
    for id in 0..20_000u32 {
        let is_v6 = random.random();
        let [src, dst] = ends[usize::from(is_v6)];
        let mut receivers = [Overlap::First, Overlap::Last].map(Receiver::new);
        let sent = fragments(&mut random, is_v6);
        for piece in &sent {
            let mut ip = IpSpec::new(src, dst, piece.next);
            (ip.id, ip.fragment) = (id, Some((piece.offset as u16, piece.more)));
            let (ethertype, packet) = ip.packet(&piece.bytes);
            let frame = [&[2; 12][..], &ethertype, &packet].concat();
            if !passes(&mut player, Time(1_000_000_000_000 + u64::from(id) * 4_000_000), &frame) {
                continue;
            }
            for receiver in &mut receivers {
                let Some(datagram) = receiver.take(piece) else { continue };
                assert_eq!(destination(&datagram), Some(ALLOWED), "{:?} wins of {sent:#?}", receiver.overlap);
                put_together[usize::from(is_v6)] += 1;
            }
        }
    }
    assert!(put_together.iter().all(|count| *count > 4_000), "{put_together:?}");
}
