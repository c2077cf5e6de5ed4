//! Samples taken once a second.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::unistd::Pid;
use penstock_admin::types::Status;

use crate::fixture::Fixture;
use crate::streams::Streams;

const INTERVAL: Duration = Duration::from_secs(1);
/// Timeout for the traffic to drain at the end.
const REST: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) at: Duration,
    /// Index and age of the daemon.
    pub(crate) life: usize,
    pub(crate) age: Duration,
    pub(crate) memory_mebibytes: f64,
    pub(crate) descriptors: f64,
    /// Frames that are neither free nor in a fill ring.
    pub(crate) frames_under_way: f64,
    pub(crate) latency_milliseconds: Option<(f64, f64)>,
    pub(crate) received: u64,
}

pub(crate) struct Sampler {
    pub(crate) samples: Vec<Sample>,
    /// Losses counted by each daemon since it was in effect, by reason; policy denials are not losses.
    pub(crate) losses: Vec<BTreeMap<String, u64>>,
    at_first: BTreeMap<String, u64>,
    pub(crate) frames_missing: i64,
    began: Instant,
    last: Instant,
}

/// Drop reasons that policy and the pods' own behaviour explain.
const MEANT: [&str; 5] = ["ingress_denied", "egress_denied", "no_connection", "multicast", "not_routable"];

impl Sampler {
    pub(crate) fn new(fixture: &Fixture) -> Result<Self> {
        let now = Instant::now();
        let mut sampler = Self {
            samples: Vec::new(),
            losses: Vec::new(),
            at_first: BTreeMap::new(),
            frames_missing: 0,
            began: now,
            last: now,
        };
        sampler.begin_life(fixture)?;
        Ok(sampler)
    }

    pub(crate) fn is_due(&self) -> bool {
        self.last.elapsed() >= INTERVAL
    }

    /// A new daemon is in effect.
    pub(crate) fn begin_life(&mut self, fixture: &Fixture) -> Result<()> {
        self.losses.push(BTreeMap::new());
        self.at_first = losses(&fixture.status()?);
        self.began = Instant::now();
        Ok(())
    }

    pub(crate) fn take(&mut self, fixture: &Fixture, streams: &Streams) -> Result<()> {
        let status = fixture.status()?;
        let frames = status.frames;
        self.note_losses(&status);
        self.samples.push(Sample {
            at: fixture.epoch.elapsed(),
            life: self.losses.len() - 1,
            age: self.began.elapsed(),
            memory_mebibytes: memory(fixture.daemon.id())?,
            descriptors: std::fs::read_dir(format!("/proc/{}/fd", fixture.daemon.id()))?.count() as f64,
            frames_under_way: f64::from(frames.total) - f64::from(frames.free) - f64::from(frames.fill),
            latency_milliseconds: streams.take_latency(),
            received: streams.received(),
        });
        self.last = Instant::now();
        Ok(())
    }

    fn note_losses(&mut self, status: &Status) {
        let mut now = losses(status);
        for (cause, count) in &mut now {
            *count -= self.at_first.get(cause).copied().unwrap_or(0).min(*count);
        }
        now.retain(|_, count| *count > 0);
        if let Some(last) = self.losses.last_mut() {
            *last = now;
        }
    }

    /// The frame account when no packet is in flight.
    pub(crate) fn take_at_rest(&mut self, fixture: &Fixture) -> Result<()> {
        let deadline = Instant::now() + REST;
        loop {
            let status = fixture.status()?;
            let frames = status.frames;
            self.note_losses(&status);
            self.frames_missing = i64::from(frames.total) - i64::from(frames.free) - i64::from(frames.fill);
            if self.frames_missing == 0 || Instant::now() > deadline {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The last sample as a short text.
    pub(crate) fn describe(&self) -> String {
        let Some(last) = self.samples.last() else { return String::new() };
        let (p50, p99) = last.latency_milliseconds.unwrap_or_default();
        format!(
            "memory {:.1} MiB, {} descriptors, {} frames under way, latency {p50:.2} ms, 99 % {p99:.2} ms, {} received",
            last.memory_mebibytes, last.descriptors, last.frames_under_way, last.received
        )
    }
}

/// Packets lost by a daemon since it started, by reason.
fn losses(status: &Status) -> BTreeMap<String, u64> {
    let mut losses = BTreeMap::new();
    for (cause, count) in status.ports.iter().flat_map(|port| port.drops.iter().chain(&port.kernel_drops)) {
        if !MEANT.contains(&cause.as_str()) {
            *losses.entry(cause.clone()).or_default() += count;
        }
    }
    losses
}

/// Resident memory of a process in MiB.
fn memory(process: Pid) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let Some(line) = text.lines().find_map(|line| line.strip_prefix("VmRSS:")) else {
        bail!("process {process} has no memory: it has ended");
    };
    let kibibytes = line.split_whitespace().next().context("VmRSS has a value")?;
    Ok(kibibytes.parse::<f64>()? / 1024.0)
}
