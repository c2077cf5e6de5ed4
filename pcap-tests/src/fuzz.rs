//! The fuzz targets as functions that tests call too.

use std::io::Cursor;
use std::path::Path;
use std::sync::Arc;

use penstock_dataplane::conntrack::Config;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::packet::{Packet, TcpFlags, Transport, parse};
use penstock_dataplane::policy::RuleScope;
use penstock_policy::model::{Object, ObjectChange};
use penstock_replay::batch::PacketBatch;
use penstock_replay::capture::{CaptureFile, InterfaceId, Record, Time};
use penstock_replay::cluster::{HOST, ReplayCluster, UPLINK};
use penstock_replay::player::{ConnectionState, Decision, EntryPoint, Player};
use penstock_replay::truncated::fill_up;
use penstock_sources::manifest::{self, read_manifests};

use crate::case::root;

/// A node that takes frames on every port and checks invariants of what it does with them.
pub struct FuzzNode {
    player: Player,
    batch: PacketBatch,
    before: PacketBatch,
    time: Time,
    changes: [Arc<[ObjectChange]>; 2],
    changed: usize,
    frames: u64,
}

/// Ports that frames arrive on: host, uplink and the first pods.
const PORTS: u16 = 8;

impl Default for FuzzNode {
    /// A node of the corpus' cluster.
    fn default() -> Self {
        let objects = |directory: &str| -> Vec<Object> {
            let paths = [root().join("clusters").join(directory)];
            let manifests =
                read_manifests(&paths, &manifest::Options::default()).expect("the corpus' manifests are good");
            manifests.documents.into_iter().map(|document| document.object).collect()
        };
        let shop = objects("shop");
        let closed = objects("changes/db-closed.yaml").into_iter().map(ObjectChange::Set).collect();
        let back =
            shop.iter().filter(|object| matches!(object, Object::NetworkPolicy(_))).cloned().map(ObjectChange::Set);
        let changes = [closed, back.collect()];
        let cluster =
            ReplayCluster::new(shop, Some("n1"), RuleScope::BothSides).expect("the corpus' cluster can be replayed");
        // Small, so that it fills up.
        let config = Config { entries: 4096, ..Config::default() };
        let player = Player::new(cluster, &config).expect("a small table can be made");
        let (batch, before) = (PacketBatch::default(), PacketBatch::default());
        Self { player, batch, before, time: Time(1_000_000_000_000), changes, changed: 0, frames: 0 }
    }
}

impl FuzzNode {
    /// Frames passed and frames evaluated so far.
    pub fn passed(&self) -> (u64, u64) {
        (self.player.counters().allowed, self.frames)
    }

    /// Adds a frame to the next batch, and evaluates the batch when it is full.
    pub fn push(&mut self, frame: &[u8]) {
        let start = self.batch.bytes().len();
        self.batch.space().extend_from_slice(frame);
        let length = frame.len() as u32;
        let record = Record { time: self.time, interface: InterfaceId(0), captured: length, original: length };
        self.batch.push(self.frames, record, start);
        if self.batch.is_full() {
            self.evaluate(0);
        }
    }

    /// Evaluates the batch on the port selected by `choice` and advances the clock.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn evaluate(&mut self, choice: u8) {
        let port = match u16::from(choice) % PORTS {
            0 => HOST,
            1 => UPLINK,
            pod => PortId(pod),
        };
        self.before.copy_from(&self.batch);
        let tally = |player: &Player| player.counters().allowed + player.counters().denied.iter().sum::<u64>();
        let evaluated = tally(&self.player);
        self.player.play(EntryPoint::Port(port), self.time, &mut self.batch);
        let count = self.batch.packets().len() as u64;
        assert_eq!(tally(&self.player) - evaluated, count, "every frame has one verdict");
        for (index, (after, before)) in self.batch.packets().iter().zip(self.before.packets()).enumerate() {
            let (after, before) = (self.batch.frame(after), self.before.frame(before));
            match self.player.decision(EntryPoint::Port(port), index) {
                Decision::Allow => check_forwarded(before, after),
                Decision::Deny(_) => assert_eq!(before, after, "what is dropped is left as it was"),
                Decision::Kernel(outcome) => panic!("a worker's frame was left to the kernel: {outcome}"),
            }
            if let Ok(packet) = parse(after) {
                let (state, _) = self.player.connection_state(EntryPoint::Port(port), index, &packet, after);
                if state == Some(ConnectionState::New) && !is_syn_ack(&packet) {
                    let verdict = self.player.cluster().snapshot().policy.evaluate(&packet.flow);
                    assert!(verdict.is_allowed(), "opened against policy for its sender: {packet:?}");
                }
            }
            self.player.entry_point(None, before);
        }
        self.frames += count;
        self.batch.clear();
        self.time.0 += u64::from(choice) * 7_000_000;
    }

    /// Changes the policies of one pod; the next call reverts it.
    pub fn change(&mut self) {
        let changes = Arc::clone(&self.changes[self.changed]);
        self.changed = 1 - self.changed;
        self.player.apply(changes.iter().cloned()).expect("no pod was added");
    }
}

/// Whether it may restart a connection in the direction of the SYN that it answers.
fn is_syn_ack(packet: &Packet) -> bool {
    matches!(packet.transport, Transport::Tcp(segment) if segment.flags.contains(TcpFlags::SYN.with(TcpFlags::ACK)))
}

/// Checks that a forwarded frame differs from the received one only in MACs, TTL and checksums.
fn check_forwarded(before: &[u8], after: &[u8]) {
    assert_eq!(before.len(), after.len());
    let (Ok(sent), Ok(forwarded)) = (parse(before), parse(after)) else {
        // Between ends without policy, where nobody looks behind the addresses.
        let header = if before[14] >> 4 == 4 { 14 + 20 } else { 14 + 40 };
        assert_eq!(before[header..], after[header..]);
        return;
    };
    assert_eq!((sent.flow, sent.layout), (forwarded.flow, forwarded.layout));
    assert!(forwarded.ttl == sent.ttl || forwarded.ttl + 1 == sent.ttl);
    assert_eq!(before[12..14], after[12..14]);
    assert_eq!(before[usize::from(sent.layout.end)..], after[usize::from(sent.layout.end)..]);
}

/// The frames target: input bytes as a list of frames, each preceded by its port and its length in two bytes.
pub fn frames(node: &mut FuzzNode, mut bytes: &[u8]) {
    while let [port, high, low, rest @ ..] = bytes {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(rest.len());
        let (frame, behind) = rest.split_at(length);
        node.push(frame);
        if port & 0x40 == 0 {
            node.evaluate(port & 0x3f);
        }
        if port & 0x80 != 0 {
            node.change();
        }
        bytes = behind;
    }
    node.evaluate(1);
}

/// Encodes these frames as input of the frames target, each on a different port.
pub fn frames_input(frames: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (port, frame) in frames.iter().enumerate() {
        let length = frame.len().min(usize::from(u16::MAX));
        bytes.push(port as u8 % PORTS as u8);
        bytes.extend((length as u16).to_be_bytes());
        bytes.extend(&frame[..length]);
    }
    bytes
}

/// The capture target: input bytes as a capture file, read to its end or to the first error. Returns the number of
/// packets.
pub fn capture(bytes: &[u8]) -> usize {
    let (mut interfaces, mut frames, mut packets) = (Vec::new(), Vec::new(), 0);
    let input = Cursor::new(bytes.to_vec());
    let Ok(mut file) = CaptureFile::read(Path::new("fuzz"), input, 0, &mut interfaces) else { return 0 };
    while let Ok(Some(record)) = file.next(&mut frames, &mut interfaces) {
        assert_eq!(frames.len(), record.captured as usize);
        assert!(record.interface.index() < interfaces.len() && record.captured <= record.original);
        fill_up(0, record.captured, record.original, &mut frames);
        frames.clear();
        packets += 1;
    }
    packets
}
