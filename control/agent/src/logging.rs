//! The log: structured events on standard error, the last of them also kept for a support bundle.
//!
//! Nobody waits for whoever reads standard error or standard output: policy must not stop because a log does. Lines that
//! find no room are counted, and told of when there is room again.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use super::config::{Log, LogFormat, LogLevel};
use super::outlet::Outlet;

/// Events of this target are logged whatever the level: what a supervisor waits for.
pub(super) const MILESTONES: &str = "penstock";

/// The crates of this project that a daemon consists of. Each is named in full, since [`MILESTONES`] is the beginning of all.
const OWN: [&str; 7] = [
    "penstock_admin",
    "penstock_agent",
    "penstock_dataplane",
    "penstock_policy",
    "penstock_privileges",
    "penstock_sources",
    "penstock_xdp_redirect",
];

/// Lines that may wait to be written.
const WAITING: usize = 1_024;

/// Lines that are kept.
const KEPT: usize = 1_000;

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();
static OUTPUTS: Mutex<Option<Outputs>> = Mutex::new(None);
static RECENT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// Where all that the daemon says goes.
struct Outputs {
    log: Outlet,
    /// Lines of the log that found no room.
    lost: u64,
    statistics: Outlet,
}

/// Starts logging for the whole process. A second call changes nothing.
pub fn start(log: &Log) {
    let (filter, handle) = reload::Layer::new(filter(log.level));
    let output = tracing_subscriber::fmt::layer().with_writer(|| Line).with_target(false);
    let output = match log.format {
        LogFormat::Json => output.json().flatten_event(true).boxed(),
        LogFormat::Text => {
            let coloured = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            output.with_ansi(coloured).boxed()
        }
    };
    let kept = tracing_subscriber::fmt::layer().with_writer(|| Keeper).with_target(false).with_ansi(false);
    // It fails only where a subscriber is there already, which then has the say.
    if tracing_subscriber::registry().with(filter).with(output).with(kept).try_init().is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// From now on threads write, and nobody waits for them, until [`finish`]. They have the privileges of the calling thread
/// at most.
pub(super) fn never_wait() {
    // Whoever read it may be gone: no reason to stop.
    let log = Outlet::new("log", WAITING, io::stderr(), |_| ());
    let statistics = Outlet::new("statistics", 1, io::stdout(), |_| ());
    *outputs() = log.ok().zip(statistics.ok()).map(|(log, statistics)| Outputs { log, lost: 0, statistics });
}

/// Has written what can be; from now on lines are written by whoever logs them.
pub(super) fn finish() {
    let outputs = outputs().take();
    drop(outputs);
}

/// Prints statistics on standard output; `false` where the last ones are still to be read.
pub(super) fn print(text: String) -> bool {
    outputs().as_ref().is_some_and(|outputs| outputs.statistics.offer(text.into_bytes()))
}

fn outputs() -> MutexGuard<'static, Option<Outputs>> {
    OUTPUTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Logs from this level on.
pub(super) fn set_level(level: LogLevel) {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(level))
    {
        tracing::error!(%error, "the log's level stays as it was");
    }
}

/// The last lines of the log.
pub(super) fn recent() -> String {
    recent_lines().iter().map(String::as_str).collect()
}

fn filter(level: LogLevel) -> Targets {
    let level = LevelFilter::from_level(level.into());
    Targets::new()
        .with_targets(OWN.map(|own| (own, level)))
        .with_target(MILESTONES, level.max(LevelFilter::INFO))
        // An outage of the API server is told once, by us.
        .with_target("kube_client", LevelFilter::OFF)
        // Libraries' own events are about themselves.
        .with_default(level.min(LevelFilter::WARN))
}

fn recent_lines() -> MutexGuard<'static, VecDeque<String>> {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Offers what is written to it, each write being an event's line.
struct Line;

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut outputs = outputs();
        let Some(Outputs { log, lost, .. }) = outputs.as_mut() else {
            drop(outputs);
            return io::stderr().write_all(line).map(|()| line.len());
        };
        if *lost > 0 && log.offer(format!("{lost} lines of the log were lost: they were not read in time\n").into()) {
            *lost = 0;
        }
        *lost += u64::from(!log.offer(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps what is written to it, each write being an event's line.
struct Keeper;

impl Write for Keeper {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lines = recent_lines();
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
