//! The verdict log: JSON lines of what became of single packets, with the names of pods and rules.
//!
//! The workers make records within a budget and never wait ([`penstock_dataplane::worker::VerdictLog`]); names are found in
//! the daemon's loop, ten times a second; a thread of its own writes, so that a slow disk stops nobody. Where it cannot
//! keep up, lines are left out and counted.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use penstock_dataplane::packet::Address;
use penstock_dataplane::pipeline::EvaluationReason;
use penstock_dataplane::policy::{DirectionVerdict, RuleName};
use penstock_dataplane::worker::{LoggedEvaluation, LoggedOutcome, VerdictLog, VerdictRecord};
use serde::Serialize;

use super::admin::{View, identifier};
use super::config;
use super::config::VerdictOutput;
use super::outlet::Outlet;

/// Most records that are named at once, so that the daemon's loop is not kept.
const AT_ONCE: usize = 2_000;
/// Portions of lines that may wait to be written.
const WAITING: usize = 32;

/// The file cannot be written to.
#[derive(Debug, thiserror::Error)]
#[error("verdict_log.output = {}: cannot be opened ({source}); give a file that can be written, \"stdout\" or \"off\"", .path.display())]
pub(super) struct OpenError {
    path: PathBuf,
    source: io::Error,
}

/// The log's end in the daemon's loop.
pub(super) struct Verdicts {
    log: Arc<VerdictLog>,
    /// `None` while it is off, or has no thread.
    writer: Option<Outlet>,
    is_on: bool,
    /// Packets without a record, by outcome, as of the last line that told of them.
    suppressed: Vec<(LoggedOutcome, u64)>,
    /// Lines that were not written.
    unwritten: u64,
}

/// One line.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    /// `opened`, or why it was dropped.
    outcome: &'static str,
    worker: usize,
    epoch: u32,
    /// Of the port that it came in by.
    ingress: In<'a>,
    octets: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<End>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<End>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Policy>,
}

#[derive(Serialize)]
struct In<'a> {
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<&'a str>,
}

#[derive(Serialize)]
struct End {
    address: std::net::IpAddr,
    #[serde(skip_serializing_if = "is_zero")]
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// What the policy said, in the direction in which the connection was opened.
#[derive(Serialize)]
struct Policy {
    /// Whether this was the first packet of a connection, or one of a connection that is judged again.
    occasion: &'static str,
    egress: String,
    ingress: String,
}

/// A line that tells what other lines are missing.
#[derive(Serialize)]
struct Missing {
    time: String,
    /// Packets since the last such line that the budget had no room for, by outcome.
    suppressed: std::collections::BTreeMap<&'static str, u64>,
}

fn is_zero(port: &u16) -> bool {
    *port == 0
}

impl Verdicts {
    /// Starts as configured.
    pub(super) fn start(log: Arc<VerdictLog>, settings: &config::VerdictLog) -> Result<Self, OpenError> {
        let mut verdicts = Self { log, writer: None, is_on: false, suppressed: Vec::new(), unwritten: 0 };
        verdicts.change(settings)?;
        Ok(verdicts)
    }

    /// Goes on with other settings, and opens the output anew.
    pub(super) fn change(&mut self, settings: &config::VerdictLog) -> Result<(), OpenError> {
        // The one before writes what it was given, and ends.
        self.writer = match &settings.output {
            VerdictOutput::Off => None,
            VerdictOutput::Stdout => writer(io::stdout()),
            VerdictOutput::File(path) => writer(append(path)?),
        };
        self.is_on = settings.output != VerdictOutput::Off;
        self.log.set_budget(settings.budget());
        Ok(())
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Lines that were made and could not be written.
    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten
    }

    /// What the workers have told since the last time.
    pub(super) fn take(&self) -> Vec<VerdictRecord> {
        std::iter::from_fn(|| self.log.take()).take(AT_ONCE).collect()
    }

    /// The lines of these records.
    pub(super) fn lines(&self, view: &View<'_>, records: &[VerdictRecord]) -> Vec<String> {
        records.iter().map(|record| line(view, record)).collect()
    }

    /// Has lines written, and one of what is missing.
    pub(super) fn write(&mut self, mut lines: Vec<String>) {
        lines.extend(self.missing());
        if lines.is_empty() {
            return;
        }
        let portion: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        if !self.writer.as_ref().is_some_and(|writer| writer.offer(portion.into_bytes())) {
            self.unwritten += lines.len() as u64;
        }
    }

    fn missing(&mut self) -> Option<String> {
        let now: Vec<(LoggedOutcome, u64)> = LoggedOutcome::all()
            .map(|outcome| (outcome, self.log.suppressed(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let told = |outcome: LoggedOutcome| {
            self.suppressed.iter().find(|(known, _)| *known == outcome).map_or(0, |(_, count)| *count)
        };
        let more = now.iter().map(|&(outcome, count)| (outcome.name(), count - told(outcome)));
        let suppressed: std::collections::BTreeMap<_, _> = more.filter(|(_, count)| *count > 0).collect();
        self.suppressed = now;
        (!suppressed.is_empty()).then(|| json(&Missing { time: stamp(SystemTime::now()), suppressed }))
    }
}

fn append(path: &Path) -> Result<File, OpenError> {
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|source| OpenError { path: path.to_owned(), source })
}

/// A thread that writes lines until there are no more to come; without it every line is counted as not written.
fn writer(output: impl Write + Send + 'static) -> Option<Outlet> {
    let failed = |error| tracing::error!(%error, "the verdict log cannot be written; its lines are lost until it can");
    let outlet = Outlet::new("verdict-log", WAITING, output, failed);
    outlet.inspect_err(|error| tracing::error!(%error, "the verdict log has no thread to write it")).ok()
}

fn line(view: &View<'_>, record: &VerdictRecord) -> String {
    let end = |address: Address, port: u16| {
        let end = view.end(address, port);
        End { address: end.address, port: end.port, name: end.name }
    };
    let pod = view.ports.pod_of(record.ingress).map(ToString::to_string);
    let (src, dst) = match record.flow {
        Some(flow) => {
            let (src_port, dst_port) = flow.shown_ports();
            (Some(end(flow.src, src_port)), Some(end(flow.dst, dst_port)))
        }
        None => (None, None),
    };
    json(&Line {
        time: stamp(SystemTime::now() - record.at.elapsed()),
        outcome: record.outcome.name(),
        worker: record.worker,
        epoch: record.epoch.0,
        ingress: In { port: record.ingress.0, pod: pod.as_deref() },
        octets: record.bytes,
        connection: record.connection.map(identifier),
        protocol: record.flow.map(|flow| flow.protocol.to_string()),
        src,
        dst,
        policy: record.evaluation.as_ref().map(policy),
    })
}

fn policy(judged: &LoggedEvaluation) -> Policy {
    let side = |side: DirectionVerdict, rule: &Option<RuleName>| match (side, rule) {
        (DirectionVerdict::Denied, _) => "denied".to_owned(),
        (DirectionVerdict::NotLocal, _) => "not here".to_owned(),
        (DirectionVerdict::Open, _) => "open".to_owned(),
        (DirectionVerdict::Exempt, _) => "exempt".to_owned(),
        (DirectionVerdict::Allowed(_) | DirectionVerdict::AllowedByPeer(_), Some(rule)) => rule.to_string(),
        (DirectionVerdict::Allowed(_) | DirectionVerdict::AllowedByPeer(_), None) => "allowed".to_owned(),
    };
    Policy {
        occasion: match judged.evaluation_reason {
            EvaluationReason::Opened => "first packet",
            EvaluationReason::Reevaluated => "judged again",
        },
        egress: side(judged.policy_verdict.egress, &judged.egress_rule),
        ingress: side(judged.policy_verdict.ingress, &judged.ingress_rule),
    }
}

fn json(line: &impl Serialize) -> String {
    serde_json::to_string(line).expect("strings and numbers are JSON")
}

/// RFC 3339, in UTC.
fn stamp(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|error| error.to_string(), |time| format!("{time:.6}"))
}
