//! The summary of a replay: counts, reasons, rules.

use std::fmt::{self, Write as _};

use indicatif::HumanCount;
use penstock_dataplane::ProgramOutcome;
use penstock_dataplane::pipeline::DropReason;
use serde::Serialize;

use super::player::Player;

/// The counts of a replay. Serializes as the command's JSON.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Summary {
    pub packets: u64,
    /// Duplicates among these, which count once; see `--dedup`.
    pub duplicates: u64,
    /// Packets among these that the snap length truncated, and that were padded for evaluation.
    pub filled_up: u64,
    pub verdicts: VerdictCounts,
    pub connections: ConnectionCounts,
    /// Reasons of packets dropped or passed to the kernel; most first.
    pub reasons: Vec<ReasonCount>,
    /// Rules by the connections they decided or passed on, most first. A Deny counts each packet that it denies.
    pub rules: Vec<RuleHits>,
    pub never_hit: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct VerdictCounts {
    pub allow: u64,
    pub deny: u64,
    pub kernel: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ConnectionCounts {
    pub opened: u64,
    pub revoked: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ReasonCount {
    /// The verdict: `deny` or `kernel`.
    pub verdict: &'static str,
    pub reason: &'static str,
    pub packets: u64,
}

/// The connections that a rule decided or passed on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RuleHits {
    pub rule: String,
    pub connections: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InputCounts {
    pub packets: u64,
    pub duplicates: u64,
    /// Packets padded.
    pub filled_up: u64,
}

impl Summary {
    pub fn new(input: InputCounts, player: &Player) -> Self {
        let counters = player.counters();
        let denied = DropReason::ALL.iter().map(|reason| (*reason, counters.denied[*reason as usize]));
        let kernel = ProgramOutcome::ALL.iter().map(|outcome| (*outcome, counters.kernel[*outcome as usize]));
        let denied = denied.map(|(reason, packets)| ReasonCount { verdict: "deny", reason: reason.name(), packets });
        let kernel =
            kernel.map(|(outcome, packets)| ReasonCount { verdict: "kernel", reason: outcome.name(), packets });
        let mut reasons: Vec<ReasonCount> = denied.chain(kernel).filter(|reason| reason.packets > 0).collect();
        reasons.sort_by_key(|reason| std::cmp::Reverse(reason.packets));
        let (hit, never): (Vec<_>, Vec<_>) = player.cluster().rules().hits().into_iter().partition(|rule| rule.1 > 0);
        Self {
            packets: input.packets,
            duplicates: input.duplicates,
            filled_up: input.filled_up,
            verdicts: VerdictCounts {
                allow: counters.allowed,
                deny: counters.denied.iter().sum(),
                kernel: counters.kernel.iter().sum(),
            },
            connections: ConnectionCounts { opened: counters.connections, revoked: counters.revoked },
            reasons,
            rules: hit.into_iter().map(|(rule, connections)| RuleHits { rule: rule.to_owned(), connections }).collect(),
            never_hit: never.into_iter().map(|(rule, _)| rule.to_owned()).collect(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut notes = String::new();
        for (count, what) in [(self.duplicates, "seen twice"), (self.filled_up, "cut by the snap length")] {
            if count > 0 {
                write!(notes, "{}{} {what}", if notes.is_empty() { "  (" } else { ", " }, grouped(count))?;
            }
        }
        if !notes.is_empty() {
            notes.push(')');
        }
        writeln!(f, "packets      {:>13}{notes}", grouped(self.packets))?;
        writeln!(f, "  allow      {:>13}", grouped(self.verdicts.allow))?;
        writeln!(f, "  deny       {:>13}", grouped(self.verdicts.deny))?;
        writeln!(f, "  kernel     {:>13}", grouped(self.verdicts.kernel))?;
        let revoked = match self.connections.revoked {
            0 => String::new(),
            revoked => format!("  ({} revoked)", grouped(revoked)),
        };
        writeln!(f, "connections  {:>13}{revoked}", grouped(self.connections.opened))?;
        if !self.reasons.is_empty() {
            let rows = self.reasons.iter().map(|r| (format!("{} {}", r.verdict, r.reason), r.packets));
            columns(f, "reason", "packets", rows)?;
        }
        if !self.rules.is_empty() {
            columns(f, "rule", "connections", self.rules.iter().map(|rule| (rule.rule.clone(), rule.connections)))?;
        }
        if !self.never_hit.is_empty() {
            writeln!(f, "\nrules never hit")?;
            self.never_hit.iter().try_for_each(|rule| writeln!(f, "  {rule}"))?;
        }
        Ok(())
    }
}

fn columns(
    f: &mut fmt::Formatter<'_>,
    left: &str,
    right: &str,
    rows: impl Iterator<Item = (String, u64)>,
) -> fmt::Result {
    let rows: Vec<_> = rows.map(|(name, count)| (name, grouped(count))).collect();
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(left.len());
    writeln!(f, "\n{left:<width$}  {right:>13}")?;
    rows.iter().try_for_each(|(name, count)| writeln!(f, "{name:<width$}  {count:>13}"))
}

/// A count with thousands separators.
pub(super) fn grouped(count: u64) -> String {
    HumanCount(count).to_string()
}
