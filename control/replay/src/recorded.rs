//! Compares what a daemon decided on the packets of a bundle, and whether replay decides the same.
//!
//! Some packets cannot be compared, and are counted apart: those of a connection that began before the capture, or whose
//! beginning the capture does not have; and those that were decided by the node's state, as a full table, or by what its kernel had
//! translated.

use std::collections::BTreeMap;
use std::fmt;

use penstock_dataplane::packet::{TcpFlags, Transport, parse};
use penstock_dataplane::{DropReason, Epoch};
use rustc_hash::FxHashSet;
use serde::Serialize;

use super::bundle::{Bundle, BundleError};
use super::capture::{CaptureError, Captures, Record};
use super::compare::{Comparison, VerdictChange, write_changes};
use super::player::{Decision, leaves_connection};
use super::summary::grouped;

/// Packets that are read ahead. A worker that processes a batch under the snapshot before may be so many packets behind.
const READ_AHEAD: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RecordedVerdict {
    /// Why it was dropped; `None` if it passed.
    pub(super) dropped: Option<DropReason>,
    connection: Option<u64>,
    /// Whether it belonged to no connection yet.
    opens: bool,
    pub(super) epoch: Epoch,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Treatment {
    Compare,
    /// Play it: it opened a connection, or moved its state. The node's state decided on it.
    Play,
    /// Leave it out: it is of a connection that replay does not know.
    EarlierConnection,
    /// Leave it out: the node's state decided on it before it had a connection.
    NodeState,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RecordedPacket {
    pub(super) verdict: RecordedVerdict,
    is_compared: bool,
}

/// Packets by whether replay decides what the daemon decided. Serializes as the command's JSON.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct RecordedCounts {
    /// Both pass it, or both drop it.
    pub same: u64,
    /// One passes it, the other drops it.
    pub different: u64,
    /// Packets of connections whose beginning is not in the capture. They are not evaluated.
    pub earlier_connections: u64,
    /// Dropped for the node's state, which a bundle does not have.
    pub node_state: u64,
    /// The differences; `before` is what the daemon decided.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub differences: Vec<VerdictChange>,
}

/// The packets of a bundle in the order of epochs, and what came of them.
pub(super) struct RecordedPackets {
    bundle: Bundle,
    /// Read, and not played yet: by epoch, counted from the bundle's first, and place. Of two workers one may still process under the
    /// snapshot before.
    ahead: BTreeMap<(u32, u64), ReadPacket>,
    is_read: bool,
    read: u64,
    /// Connections whose beginning was played, by their identifiers.
    known: FxHashSet<u64>,
    /// Connections that the daemon judged by what the node's kernel had made of them, by their identifiers.
    by_kernel: FxHashSet<u64>,
    /// The current batch's.
    batch: Vec<RecordedPacket>,
    counts: RecordedCounts,
    differences: Comparison,
}

struct ReadPacket {
    record: Record,
    frame: Vec<u8>,
    verdict: RecordedVerdict,
    /// Whether it is TCP's answer to a SYN.
    answers: bool,
}

impl RecordedPackets {
    pub(super) fn new(bundle: Bundle) -> Self {
        Self {
            bundle,
            ahead: BTreeMap::new(),
            is_read: false,
            read: 0,
            known: FxHashSet::default(),
            by_kernel: FxHashSet::default(),
            batch: Vec::new(),
            counts: RecordedCounts::default(),
            differences: Comparison::default(),
        }
    }

    pub(super) fn lost(&self) -> u64 {
        self.bundle.lost()
    }

    /// Appends the next packet that is to be played to `frames`.
    pub(super) fn next(
        &mut self,
        captures: &mut Captures,
        frames: &mut Vec<u8>,
    ) -> Result<Option<(Record, RecordedPacket)>, RecordedError> {
        loop {
            while !self.is_read && self.ahead.len() < READ_AHEAD {
                self.read_packet(captures)?;
            }
            let Some((_, packet)) = self.ahead.pop_first() else { return Ok(None) };
            let is_compared = match self.treatment(&packet.verdict, packet.answers) {
                Treatment::Compare => true,
                Treatment::Play => {
                    self.counts.node_state += 1;
                    false
                }
                Treatment::EarlierConnection => {
                    self.counts.earlier_connections += 1;
                    continue;
                }
                Treatment::NodeState => {
                    self.counts.node_state += 1;
                    continue;
                }
            };
            frames.extend_from_slice(&packet.frame);
            return Ok(Some((packet.record, RecordedPacket { verdict: packet.verdict, is_compared })));
        }
    }

    fn read_packet(&mut self, captures: &mut Captures) -> Result<(), RecordedError> {
        let mut frame = Vec::new();
        let Some(record) = captures.next(&mut frame)? else {
            self.is_read = true;
            return Ok(self.bundle.check_count(self.read)?);
        };
        self.read += 1;
        let comment = captures.comment();
        let verdict = RecordedVerdict::parse(comment).ok_or_else(|| self.bundle.bad_comment(self.read, comment))?;
        self.bundle.check_packet(self.read, record.time, verdict.epoch)?;
        let epoch = verdict.epoch.0.wrapping_sub(self.bundle.first_epoch().0);
        let answers = is_answer_to_syn(&frame);
        self.ahead.insert((epoch, self.read), ReadPacket { record, frame, verdict, answers });
        Ok(())
    }

    fn treatment(&mut self, verdict: &RecordedVerdict, answers: bool) -> Treatment {
        use DropReason as R;
        // The SYN was for a connection that was open already: its answer opens another one in the place of that, which replay
        // does not know.
        let is_of_unknown = |connection| !self.known.contains(&connection);
        let is_reopened = answers && verdict.opens && verdict.dropped != Some(R::NoConnection);
        if is_reopened && verdict.connection.is_some_and(is_of_unknown) {
            return Treatment::EarlierConnection;
        }
        let is_known = match verdict.connection {
            Some(connection) if verdict.opens && verdict.dropped.is_none_or(leaves_connection) => {
                self.known.insert(connection);
                true
            }
            Some(connection) => verdict.opens || self.known.contains(&connection),
            // An error about a connection, or a later fragment: whether replay knows it is seen when it is played.
            None => true,
        };
        match verdict.dropped {
            Some(R::NotReady | R::TableFull | R::QuotaExceeded | R::ConnectionRate | R::TooManyConnections) => {
                Treatment::NodeState
            }
            Some(reason) if is_without_connection(reason) => Treatment::Compare,
            _ if !is_known => Treatment::EarlierConnection,
            Some(R::TooBig | R::NoPort | R::TxRingFull | R::PortGone) => Treatment::Play,
            _ => Treatment::Compare,
        }
    }

    pub(super) fn push(&mut self, packet: RecordedPacket) {
        self.batch.push(packet);
    }

    /// The packets of the batch, in order, which are then forgotten.
    pub(super) fn take_batch(&mut self) -> Vec<RecordedPacket> {
        std::mem::take(&mut self.batch)
    }

    /// Counts what replay decided on a packet. Returns whether that is another verdict. `is_by_kernel`: whether the node's kernel may
    /// have translated the packet, of which a daemon knows the original.
    pub(super) fn count(
        &mut self,
        packet: &RecordedPacket,
        decision: Decision,
        is_by_kernel: impl FnOnce() -> bool,
    ) -> bool {
        if !packet.is_compared {
            return false;
        }
        let connection = packet.verdict.connection;
        if connection.is_some_and(|connection| self.by_kernel.contains(&connection)) {
            self.counts.node_state += 1;
            return false;
        }
        let passes = matches!(decision, Decision::Allow | Decision::Kernel(_));
        if passes == packet.verdict.dropped.is_none() {
            self.counts.same += 1;
            return false;
        }
        let is_unknown = matches!(decision, Decision::Deny(DropReason::NoConnection | DropReason::Fragment));
        if is_unknown && connection.is_none() {
            self.counts.earlier_connections += 1;
            return false;
        }
        if is_by_kernel() {
            self.by_kernel.extend(connection);
            self.counts.node_state += 1;
            return false;
        }
        self.counts.different += 1;
        true
    }

    pub(super) fn differences(&mut self) -> &mut Comparison {
        &mut self.differences
    }

    pub(super) fn into_counts(self) -> RecordedCounts {
        RecordedCounts { differences: self.differences.changes(), ..self.counts }
    }
}

/// Why the packets of a bundle cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordedError {
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
}

impl RecordedVerdict {
    /// The verdict in a comment; `None` if it is none of a capture.
    fn parse(comment: &str) -> Option<Self> {
        let (mut verdict, mut dropped, mut connection, mut epoch) = (None, None, None, None);
        let mut opens = false;
        for (key, value) in Parts(comment) {
            match key {
                "verdict" => verdict = Some(value),
                "reason" => dropped = Some(DropReason::ALL.iter().copied().find(|reason| reason.name() == value)?),
                "connection" => connection = Some(u64::from_str_radix(value, 16).ok()?),
                "epoch" => epoch = Some(Epoch(value.parse().ok()?)),
                "opens" => opens = true,
                _ => {}
            }
        }
        if (verdict? == "allow") != dropped.is_none() {
            return None;
        }
        Some(Self { dropped, connection, opens, epoch: epoch? })
    }
}

/// The parts of a comment, `key=value` or `key`. A value with a space is in quotes, with a backslash before a quote in it.
struct Parts<'a>(&'a str);

impl<'a> Iterator for Parts<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.0.trim_start_matches(' ');
        if text.is_empty() {
            return None;
        }
        let key = text.find(['=', ' ']).unwrap_or(text.len());
        let (key, rest) = text.split_at(key);
        let Some(rest) = rest.strip_prefix('=') else {
            self.0 = rest;
            return Some((key, ""));
        };
        let end = match rest.strip_prefix('"') {
            None => rest.find(' ').unwrap_or(rest.len()),
            Some(quoted) => {
                let mut is_escaped = false;
                let end = quoted.find(|character| {
                    let is_end = character == '"' && !is_escaped;
                    is_escaped = character == '\\' && !is_escaped;
                    is_end
                });
                end.map_or(rest.len(), |end| end + 2)
            }
        };
        let (value, rest) = rest.split_at(end);
        self.0 = rest;
        Some((key, value.trim_matches('"')))
    }
}

fn is_answer_to_syn(frame: &[u8]) -> bool {
    let packet = parse(frame).ok();
    packet.is_some_and(|packet| match packet.transport {
        Transport::Tcp(tcp) => tcp.flags.contains(TcpFlags::SYN) && tcp.flags.contains(TcpFlags::ACK),
        _ => false,
    })
}

/// Whether a packet is dropped so whatever connections there are, or because there is none.
fn is_without_connection(reason: DropReason) -> bool {
    use DropReason as R;
    match reason {
        R::Truncated
        | R::Malformed
        | R::NotIp
        | R::VlanTag
        | R::ExtensionHeaders
        | R::SourceRoute
        | R::Redirect
        | R::InvalidDiscovery
        | R::HeaderChecksum
        | R::SpoofedSource
        | R::Encapsulation
        | R::Multicast
        | R::NotRoutable
        | R::EgressDenied
        | R::ServiceDenied
        | R::IngressDenied
        | R::NoConnection
        | R::Fragment
        | R::NoSocket
        | R::ForgedNeighbour
        | R::ShareUsed
        | R::NoMemory => true,
        R::TtlExpired
        | R::TooBig
        | R::ConnectionRevoked
        | R::InvalidState
        | R::TableFull
        | R::QuotaExceeded
        | R::ConnectionRate
        | R::TooManyConnections
        | R::NoPort
        | R::TxRingFull
        | R::PortGone
        | R::NotReady => false,
    }
}

impl fmt::Display for RecordedCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "as the daemon decided  {:>13}", grouped(self.same))?;
        writeln!(f, "otherwise              {:>13}", grouped(self.different))?;
        writeln!(f, "not comparable         {:>13}", grouped(self.earlier_connections + self.node_state))?;
        for (count, what) in
            [(self.earlier_connections, "connections that began before"), (self.node_state, "the node's state")]
        {
            if count > 0 {
                writeln!(f, "  {what}: {}", grouped(count))?;
            }
        }
        if self.differences.is_empty() {
            return Ok(());
        }
        writeln!(f, "\ndecided otherwise: before by the daemon, after by this replay")?;
        write_changes(f, &self.differences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_of_a_capture_is_read_and_another_is_refused() {
        let text = "verdict=allow egress=open ingress=\"a \\\"b\\\" reason=no_port\" connection=00c0ffee epoch=7 worker=1 opens";
        let read = RecordedVerdict::parse(text).unwrap();
        let expected = RecordedVerdict { dropped: None, connection: Some(0x00c0_ffee), opens: true, epoch: Epoch(7) };
        assert_eq!(read, expected, "a rule's name is none of the rest");
        let denied = RecordedVerdict::parse("verdict=deny reason=no_port epoch=8 worker=0 lost=3").unwrap();
        assert_eq!((denied.dropped, denied.connection), (Some(DropReason::NoPort), None));
        assert!(!denied.opens);
        for wrong in [
            "",
            "shop-ingress-api-0",
            "verdict=allow worker=1",
            "verdict=deny epoch=7",
            "verdict=allow reason=no_port epoch=7",
            "verdict=deny reason=bad_luck epoch=7",
            "verdict=allow epoch=-7",
            "verdict=allow epoch=7 connection=xyz",
            "verdict=\"allow epoch=7",
        ] {
            assert_eq!(RecordedVerdict::parse(wrong), None, "{wrong}");
        }
    }
}
