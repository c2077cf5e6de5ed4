//! The log: structured events on standard error, the last of them also kept for a support bundle.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use super::config::{Log, LogFormat, LogLevel};

/// Events of this target are logged whatever the level: what a supervisor waits for.
pub(super) const MILESTONES: &str = "penstock";

/// Lines that are kept.
const KEPT: usize = 1_000;

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();
static RECENT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

/// Starts logging for the whole process. A second call changes nothing.
pub fn start(log: &Log) {
    let (filter, handle) = reload::Layer::new(filter(log.level));
    let output = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false);
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
        .with_target("penstock_control", level)
        .with_target("penstock_dataplane", level)
        .with_target("penstock_xdp_redirect", level)
        .with_target(MILESTONES, level.max(LevelFilter::INFO))
        // An outage of the API server is told once, by us.
        .with_target("kube_client", LevelFilter::OFF)
        // Libraries' own events are about themselves.
        .with_default(level.min(LevelFilter::WARN))
}

fn recent_lines() -> MutexGuard<'static, VecDeque<String>> {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner)
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
