//! The verdict log: JSON lines about single packets, with the names of pods and rules.
//!
//! The workers write records within a budget and never wait ([`penstock_dataplane::worker::VerdictLog`]). The daemon's
//! loop adds names ten times a second. A separate thread writes, so that a slow disk blocks nobody; lines that do not
//! fit its queue are dropped and counted.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use penstock_dataplane::packet::Address;
use penstock_dataplane::pipeline::EvaluationReason;
use penstock_dataplane::worker::{LoggedEvaluation, LoggedOutcome, VerdictLog, VerdictRecord};
use serde::Serialize;

use super::config;
use super::config::VerdictOutput;
use super::naming::{self, PacketNames, evaluated_sides, identifier};
use super::nonblocking_writer::NonBlockingWriter;
use super::private_file;

/// The most records that are named in one round, to keep the daemon's loop responsive.
const RECORDS_PER_ROUND: usize = 2_000;
/// Chunks of lines that may wait to be written.
const WAITING_CHUNKS: usize = 32;

#[derive(Debug, thiserror::Error)]
#[error("verdict_log.output = {}: cannot open it ({source}); set a regular file that is writable, \"stdout\" or \"off\"", .path.display())]
pub(super) struct VerdictLogError {
    path: PathBuf,
    source: io::Error,
}

/// Turns records into lines and hands them to the writing thread.
pub(super) struct VerdictWriter {
    log: Arc<VerdictLog>,
    /// `None` if it is off or has no thread.
    writer: Option<NonBlockingWriter>,
    is_on: bool,
    /// Packets without a record, by outcome, as of the last line that reported them.
    suppressed: Vec<(LoggedOutcome, u64)>,
    unwritten: u64,
}

#[derive(Serialize)]
struct VerdictLine<'a> {
    time: String,
    /// `opened`, or the drop reason.
    outcome: &'static str,
    worker: usize,
    epoch: u32,
    ingress: IngressPort<'a>,
    bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    connection: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    src: Option<PacketEnd>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dst: Option<PacketEnd>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<PolicyReason>,
}

#[derive(Serialize)]
struct IngressPort<'a> {
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<&'a str>,
}

#[derive(Serialize)]
struct PacketEnd {
    address: std::net::IpAddr,
    #[serde(skip_serializing_if = "is_zero")]
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// The policy's verdict, in the direction in which the connection was opened.
#[derive(Serialize)]
struct PolicyReason {
    /// Whether this was the first packet of a connection, or one that is re-evaluated.
    reason: &'static str,
    egress: String,
    ingress: String,
    /// The rules that passed a side on to the next tier, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    egress_passed_by: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ingress_passed_by: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recorded_for: Vec<String>,
}

#[derive(Serialize)]
struct SuppressedLine {
    time: String,
    /// Packets since the last such line that exceeded the budget, by outcome.
    suppressed: std::collections::BTreeMap<&'static str, u64>,
}

fn is_zero(port: &u16) -> bool {
    *port == 0
}

impl VerdictWriter {
    pub(super) fn start(log: Arc<VerdictLog>, settings: &config::VerdictLog) -> Result<Self, VerdictLogError> {
        let mut verdicts = Self { log, writer: None, is_on: false, suppressed: Vec::new(), unwritten: 0 };
        verdicts.change(settings)?;
        Ok(verdicts)
    }

    /// Applies other settings and reopens the output.
    pub(super) fn change(&mut self, settings: &config::VerdictLog) -> Result<(), VerdictLogError> {
        // The previous writer flushes its queue and ends.
        self.writer = match &settings.output {
            VerdictOutput::Off => None,
            VerdictOutput::Stdout => writer(io::stdout()),
            VerdictOutput::File(path) => {
                let file = private_file::append(path);
                writer(file.map_err(|source| VerdictLogError { path: path.to_owned(), source })?)
            }
        };
        self.is_on = settings.output != VerdictOutput::Off;
        self.log.set_budget(settings.budget());
        Ok(())
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten
    }

    pub(super) fn take(&self) -> Vec<VerdictRecord> {
        std::iter::from_fn(|| self.log.take()).take(RECORDS_PER_ROUND).collect()
    }

    pub(super) fn lines(&self, names: &PacketNames<'_>, records: &[VerdictRecord]) -> Vec<String> {
        records.iter().map(|record| line(names, record)).collect()
    }

    /// Queues lines, with one about missing lines if there are any.
    pub(super) fn write(&mut self, mut lines: Vec<String>) {
        lines.extend(self.missing());
        if lines.is_empty() {
            return;
        }
        let chunk: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        if !self.writer.as_ref().is_some_and(|writer| writer.try_write(chunk.into_bytes())) {
            self.unwritten += lines.len() as u64;
        }
    }

    fn missing(&mut self) -> Option<String> {
        let now: Vec<(LoggedOutcome, u64)> = LoggedOutcome::all()
            .map(|outcome| (outcome, self.log.suppressed(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let reported = |outcome: LoggedOutcome| {
            self.suppressed.iter().find(|(known, _)| *known == outcome).map_or(0, |(_, count)| *count)
        };
        let more = now.iter().map(|&(outcome, count)| (outcome.name(), count - reported(outcome)));
        let suppressed: std::collections::BTreeMap<_, _> = more.filter(|(_, count)| *count > 0).collect();
        self.suppressed = now;
        (!suppressed.is_empty()).then(|| json(&SuppressedLine { time: stamp(SystemTime::now()), suppressed }))
    }
}

/// Starts the thread that writes lines; without it every line counts as not written.
fn writer(output: impl Write + Send + 'static) -> Option<NonBlockingWriter> {
    let failed = |error| tracing::error!(%error, "cannot write the verdict log; its lines are lost until it can");
    let nonblocking_writer = NonBlockingWriter::new("verdict-log", WAITING_CHUNKS, output, failed);
    nonblocking_writer
        .inspect_err(|error| tracing::error!(%error, "cannot start the thread that writes the verdict log"))
        .ok()
}

fn line(names: &PacketNames<'_>, record: &VerdictRecord) -> String {
    let end = |address: Address, port: u16| {
        let end = naming::end(names.engine, address, port);
        PacketEnd { address: end.address, port: end.port, name: end.name }
    };
    let pod = names.ports.pod_of(record.ingress).map(ToString::to_string);
    let (src, dst) = match record.flow {
        Some(flow) => {
            let (src_port, dst_port) = flow.shown_ports();
            (Some(end(flow.src, src_port)), Some(end(flow.dst, dst_port)))
        }
        None => (None, None),
    };
    json(&VerdictLine {
        time: stamp(SystemTime::now() - record.at.elapsed()),
        outcome: record.outcome.name(),
        worker: record.worker,
        epoch: record.epoch.0,
        ingress: IngressPort { port: record.ingress.0, pod: pod.as_deref() },
        bytes: record.bytes,
        connection: record.connection.map(identifier),
        protocol: record.flow.map(|flow| flow.protocol.to_string()),
        src,
        dst,
        policy: record.evaluation.as_ref().map(policy),
    })
}

fn policy(evaluation: &LoggedEvaluation) -> PolicyReason {
    let (egress, ingress) = evaluated_sides(evaluation);
    PolicyReason {
        reason: match evaluation.evaluation_reason {
            EvaluationReason::Opened => "first packet",
            EvaluationReason::Reevaluated => "re-evaluated",
        },
        egress,
        ingress,
        egress_passed_by: evaluation.egress_passes.iter().map(ToString::to_string).collect(),
        ingress_passed_by: evaluation.ingress_passes.iter().map(ToString::to_string).collect(),
        recorded_for: evaluation.recorded_for.iter().map(ToString::to_string).collect(),
    }
}

fn json(line: &impl Serialize) -> String {
    serde_json::to_string(line).expect("strings and numbers are JSON")
}

/// RFC 3339, in UTC.
fn stamp(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time).map_or_else(|error| error.to_string(), |time| format!("{time:.6}"))
}
