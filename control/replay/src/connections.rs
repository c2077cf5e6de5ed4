//! The connections of a capture, whatever policy says about them: who opened each, whether it was answered, and when.

use std::collections::BTreeMap;
use std::path::PathBuf;

use penstock_dataplane::conntrack;
use penstock_dataplane::packet::{Flow, Packet, TcpFlags, Transport, parse};
use penstock_dataplane::policy::RuleScope;
use penstock_policy::model::{Namespace, Object};
use rustc_hash::FxHashMap;

use super::batch::PacketBatch;
use super::capture::{Captures, Record, Time};
use super::cluster::ReplayCluster;
use super::player::{ConnectionState, Decision, EntryPoint, Player};
use super::run::{ReplayError, unread_parts};
use super::truncated::fill_up;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CapturedConnection {
    /// In the direction of its first packet.
    pub flow: Flow,
    /// The opener, by its first packet.
    pub first_packet: FirstPacket,
    /// Whether a packet came back; of TCP one that does not refuse it.
    pub is_answered: bool,
    pub first: Time,
    pub last: Time,
}

/// The opener of a connection, by its first packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirstPacket {
    /// It opens one: a SYN, an INIT, a query.
    Opens,
    /// It may open one or answer one: its protocol does not show that.
    MayOpen,
    /// It belongs to one that is older than the capture.
    MidStream,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CapturedConnections {
    /// The connections, by their first packet. The same flow opened again is another connection.
    pub connections: Vec<CapturedConnection>,
    /// Packets that belong to none, by the reason for which a worker would drop them.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Notes about the input for the user, one per line.
    pub notes: Vec<String>,
}

/// Reads the connections of captures, which are merged by time. Policies among the objects do not count; the objects say
/// which addresses are whose.
///
/// # Errors
/// A capture cannot be read, or there are too many pods.
pub fn connections(
    captures: &[PathBuf],
    objects: impl IntoIterator<Item = Object>,
) -> Result<CapturedConnections, ReplayError> {
    let cluster = ReplayCluster::new(objects.into_iter().filter_map(without_policy), None, RuleScope::default())?;
    let player = Player::new(cluster, &conntrack::Config::default())?;
    let captures = Captures::open(captures)?;
    let reader = Reader {
        captures,
        player,
        batch: PacketBatch::default(),
        key: None,
        latest: FxHashMap::default(),
        found: CapturedConnections::default(),
    };
    reader.read()
}

/// An object, if it says nothing about policy.
fn without_policy(object: Object) -> Option<Object> {
    match object {
        Object::NetworkPolicy(_) | Object::ClusterNetworkPolicy(_) => None,
        Object::Namespace(namespace) => Some(Object::Namespace(Namespace { default_deny_ingress: false, ..namespace })),
        other => Some(other),
    }
}

struct Reader {
    captures: Captures,
    player: Player,
    batch: PacketBatch,
    /// The packets of the batch share this: where they enter, and when, in the connection table's unit.
    key: Option<(EntryPoint, u64)>,
    latest: FxHashMap<Flow, usize>,
    found: CapturedConnections,
}

impl Reader {
    fn read(mut self) -> Result<CapturedConnections, ReplayError> {
        let (mut start, mut packets) = (0, 0);
        while let Some(record) = self.captures.next(self.batch.space())? {
            packets += 1;
            if record.captured < record.original {
                fill_up(start, record.captured, record.original, self.batch.space());
            }
            let key = self.key_of(&record, start);
            if self.batch.is_full() || self.key.is_some_and(|current| current != key) {
                start = self.flush(start);
            }
            self.key = Some(key);
            self.batch.push(packets, record, start);
            start = self.batch.bytes().len();
        }
        self.flush(start);
        self.found.notes = unread_parts(&self.captures);
        Ok(self.found)
    }

    fn key_of(&self, record: &Record, start: usize) -> (EntryPoint, u64) {
        let entry = self.player.entry_point(None, &self.batch.bytes()[start..]);
        (entry, record.time.0 / 1_000_000)
    }

    /// Plays the batch. Keeps what was appended behind it, from `start`; returns where that starts now.
    fn flush(&mut self, start: usize) -> usize {
        let Some((entry, _)) = self.key.take().filter(|_| !self.batch.is_empty()) else { return start };
        let time = self.batch.packets()[0].record.time;
        self.player.play(entry, time, &mut self.batch);
        for index in 0..self.batch.packets().len() {
            self.note(entry, index);
        }
        self.batch.clear();
        0
    }

    fn note(&mut self, entry: EntryPoint, index: usize) {
        let member = &self.batch.packets()[index];
        let (time, frame) = (member.record.time, self.batch.frame(member));
        if let Decision::Deny(reason) = self.player.decision(entry, index) {
            *self.found.dropped.entry(reason.name()).or_default() += 1;
        }
        let Ok(packet) = parse(frame) else { return };
        match self.player.connection_state(entry, index, &packet, frame).0 {
            Some(ConnectionState::New) => {
                self.latest.insert(packet.flow, self.found.connections.len());
                self.found.connections.push(opened(&packet, time));
            }
            Some(ConnectionState::Established) => {
                let flow = self.player.original_flow(&packet, frame).unwrap_or(packet.flow);
                let known = self.latest.get(&flow).and_then(|number| self.found.connections.get_mut(*number));
                if let Some(connection) = known {
                    connection.last = connection.last.max(time);
                    connection.is_answered |= flow != packet.flow && !refuses(&packet);
                }
            }
            Some(ConnectionState::Related | ConnectionState::Revoked) | None => {}
        }
    }
}

fn opened(packet: &Packet, time: Time) -> CapturedConnection {
    let first_packet = match packet.transport {
        Transport::Tcp(_) | Transport::Sctp { .. } if packet.transport.may_open() => FirstPacket::Opens,
        Transport::Tcp(_) | Transport::Sctp { .. } => FirstPacket::MidStream,
        Transport::EchoRequest => FirstPacket::Opens,
        _ => FirstPacket::MayOpen,
    };
    CapturedConnection { flow: packet.flow, first_packet, is_answered: false, first: time, last: time }
}

fn refuses(packet: &Packet) -> bool {
    matches!(packet.transport, Transport::Tcp(segment) if segment.flags.contains(TcpFlags::RST))
}
