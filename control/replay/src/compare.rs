//! Compares two sets of objects on one capture: the connections whose verdict changes.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};

use penstock_dataplane::DropReason;
use penstock_dataplane::packet::{Flow, Packet, parse};
use rustc_hash::{FxHashSet, FxHasher};
use serde::Serialize;

use super::batch::PacketBatch;
use super::cluster::ReplayCluster;
use super::player::{Decision, EntryPoint, Player};
use super::rules::Rules;
use super::summary::grouped;

/// Connections with the same change: same endpoints, port, rules and verdicts.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct Group {
    /// The client: a pod, a node or an address.
    pub src: String,
    pub dst: String,
    pub protocol: String,
    /// Its destination port, where the protocol has ports.
    pub dport: Option<u16>,
    /// The verdict under the first set.
    pub before: PacketVerdict,
    /// The verdict under the second set.
    pub after: PacketVerdict,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct PacketVerdict {
    /// `allow`, `deny` or `kernel`.
    pub verdict: &'static str,
    /// The reason, unless `allow`.
    pub reason: Option<&'static str>,
    /// The names of the rules that allow it, separated by a space, or of the rule that denies it.
    pub rule: Option<String>,
}

#[derive(Clone, Debug, Default)]
struct ChangeCount {
    connections: FxHashSet<u64>,
    packets: u64,
    bytes: u64,
}

/// The differences found so far. Memory grows by eight bytes for each changed connection, not with the capture.
#[derive(Debug, Default)]
pub struct Comparison {
    groups: BTreeMap<Group, ChangeCount>,
}

pub(super) struct PacketOutcome<'a> {
    pub(super) cluster: &'a ReplayCluster,
    pub(super) decision: Decision,
    pub(super) rules: Rules,
}

impl PacketOutcome<'_> {
    fn packet_verdict(&self) -> PacketVerdict {
        let (verdict, reason) = match self.decision {
            Decision::Allow => ("allow", None),
            Decision::Deny(reason) => ("deny", Some(reason.name())),
            Decision::Kernel(outcome) => ("kernel", Some(outcome.name())),
        };
        let mut names = Vec::new();
        self.cluster.rules().write_names(self.rules, &mut names);
        let rule = String::from_utf8_lossy(&names).into_owned();
        // Another denied packet belongs to a connection that rules allow.
        let is_by_rule = matches!(
            self.decision,
            Decision::Allow | Decision::Deny(DropReason::EgressDenied | DropReason::IngressDenied)
        );
        PacketVerdict { verdict, reason, rule: (!rule.is_empty() && is_by_rule).then_some(rule) }
    }
}

/// The decision on a packet under one set of objects.
pub(super) struct Said {
    decision: Decision,
    rules: Rules,
    /// The flow of its connection, in opening direction.
    flow: Option<Flow>,
}

impl Said {
    /// The decision on packet `index` of the player's last batch.
    pub(super) fn of(player: &mut Player, entry: EntryPoint, index: usize, frame: &[u8]) -> Self {
        let decision = player.decision(entry, index);
        let Ok(packet) = parse(frame) else { return Self { decision, rules: Rules::default(), flow: None } };
        let rules = player.connection_state(entry, index, &packet, frame).1;
        Self { decision, rules, flow: player.original_flow(&packet, frame) }
    }

    fn outcome<'a>(&self, cluster: &'a ReplayCluster) -> PacketOutcome<'a> {
        PacketOutcome { cluster, decision: self.decision, rules: self.rules }
    }
}

/// Compared for a change is the verdict, not its reason.
fn kind(decision: Decision) -> u8 {
    match decision {
        Decision::Allow => 0,
        Decision::Deny(_) => 1,
        Decision::Kernel(_) => 2,
    }
}

/// Records the packets of a batch whose verdict differs, but for those that are held.
pub(super) fn compare(
    before: (&mut Player, EntryPoint),
    after: (&mut Player, EntryPoint),
    batch: &PacketBatch,
    comparison: &mut Comparison,
) {
    for (index, member) in batch.packets().iter().enumerate() {
        let decisions = (before.0.decision(before.1, index), after.0.decision(after.1, index));
        let is_early = before.0.is_early(index) || after.0.is_early(index);
        if is_early || kind(decisions.0) == kind(decisions.1) {
            continue;
        }
        let frame = batch.frame(member);
        let said = Said::of(before.0, before.1, index, frame);
        let other = Said::of(after.0, after.1, index, frame);
        comparison.note_said((&*before.0, &said), (&*after.0, &other), frame, member.record.original);
    }
}

impl Comparison {
    /// Records a packet of so many bytes, if its verdict differs.
    pub(super) fn note_said(&mut self, before: (&Player, &Said), after: (&Player, &Said), frame: &[u8], bytes: u32) {
        if kind(before.1.decision) == kind(after.1.decision) {
            return;
        }
        let flow = before.1.flow.or(after.1.flow);
        let outcomes = (before.1.outcome(before.0.cluster()), after.1.outcome(after.0.cluster()));
        self.note(flow, parse(frame).ok().as_ref(), bytes, &outcomes.0, &outcomes.1);
    }

    /// Records a packet whose verdict differs under the second set. `flow` is its connection's, in opening direction.
    pub(super) fn note(
        &mut self,
        flow: Option<Flow>,
        packet: Option<&Packet>,
        bytes: u32,
        before: &PacketOutcome<'_>,
        after: &PacketOutcome<'_>,
    ) {
        let flow = flow.or(packet.map(|packet| packet.flow)).unwrap_or_default();
        let name = |address| before.cluster.name(address).or(after.cluster.name(address)).map(str::to_owned);
        let name = |address| name(address).unwrap_or_else(|| std::net::IpAddr::from(address).to_string());
        let group = Group {
            src: name(flow.src),
            dst: name(flow.dst),
            protocol: flow.protocol.to_string(),
            dport: flow.protocol.has_ports().then_some(flow.dst_port),
            before: before.packet_verdict(),
            after: after.packet_verdict(),
        };
        let count = self.groups.entry(group).or_default();
        let mut hasher = FxHasher::default();
        flow.hash(&mut hasher);
        count.connections.insert(hasher.finish());
        count.packets += 1;
        count.bytes += u64::from(bytes);
    }

    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    pub fn changes(&self) -> Vec<VerdictChange> {
        let changes = self.groups.iter().map(|(group, count)| VerdictChange {
            group: group.clone(),
            connections: count.connections.len() as u64,
            packets: count.packets,
            bytes: count.bytes,
        });
        changes.collect()
    }
}

/// A group of connections and its counts. Serializes as the command's JSON.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct VerdictChange {
    #[serde(flatten)]
    pub group: Group,
    pub connections: u64,
    pub packets: u64,
    /// Bytes of these packets' frames on the wire.
    pub bytes: u64,
}

impl fmt::Display for PacketVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.verdict)?;
        [self.reason, self.rule.as_deref()].into_iter().flatten().try_for_each(|why| write!(f, " {why}"))
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return writeln!(f, "no connection's verdict changes");
        }
        write_changes(f, &self.changes())
    }
}

pub(super) fn write_changes(f: &mut fmt::Formatter<'_>, changes: &[VerdictChange]) -> fmt::Result {
    let head = ["source", "destination", "port", "before", "after", "connections", "packets", "bytes"];
    let rows = changes.iter().map(|VerdictChange { group, connections, packets, bytes }| {
        let port = group.dport.map_or(group.protocol.clone(), |port| format!("{}/{port}", group.protocol));
        let [connections, packets, bytes] = [connections, packets, bytes].map(|count| grouped(*count));
        let (before, after) = (group.before.to_string(), group.after.to_string());
        [group.src.clone(), group.dst.clone(), port, before, after, connections, packets, bytes]
    });
    let rows: Vec<[String; 8]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let widths: Vec<usize> =
        (0..head.len()).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let is_count = column >= 5;
            line += &if is_count { format!("{gap}{cell:>width$}") } else { format!("{gap}{cell:<width$}") };
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}
