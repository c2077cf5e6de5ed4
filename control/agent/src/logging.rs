//! The log: structured events on standard error; the last lines are also kept for a support bundle.
//!
//! Logging never blocks: policy must not stop because nobody reads standard error or standard output. Lines that do not
//! fit the queue are counted, and the count is logged when there is room again.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use penstock_admin::printable::Escaping;
use tracing::field::Field;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use super::config::{Log, LogFormat, LogLevel};
use super::nonblocking_writer::NonBlockingWriter;

/// Events of this target are logged at any level: a supervisor waits for them.
pub(super) const MILESTONES: &str = "penstock";

/// The crates of this project in the daemon. Full names, because [`MILESTONES`] is a prefix of all.
const OWN_CRATES: [&str; 6] = [
    "penstock_admin",
    "penstock_agent",
    "penstock_dataplane",
    "penstock_policy",
    "penstock_sources",
    "penstock_xdp_redirect",
];

const WAITING_LINES: usize = 1_024;

const RECENT_LINES: usize = 1_000;

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();
static OUTPUTS: Mutex<Option<Outputs>> = Mutex::new(None);
static RECENT: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

struct Outputs {
    log: NonBlockingWriter,
    lost: u64,
    statistics: NonBlockingWriter,
}

/// Starts logging for the whole process. A second call changes nothing.
pub fn start(log: &Log) {
    let (filter, handle) = reload::Layer::new(filter(log.level));
    let output = tracing_subscriber::fmt::layer().with_writer(|| LogWriter).with_target(false);
    // An event stays one line, and steers no terminal, whatever it tells of.
    let fields = || debug_fn(write_field).delimited(" ");
    let output = match log.format {
        LogFormat::Json => output.json().flatten_event(true).boxed(),
        LogFormat::Text => {
            let coloured = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            output.with_ansi(coloured).fmt_fields(fields()).boxed()
        }
    };
    let kept = tracing_subscriber::fmt::layer().with_writer(|| RecentLogWriter).with_target(false).with_ansi(false);
    let kept = kept.fmt_fields(fields());
    // Fails only if a subscriber exists already, which then stays in charge.
    if tracing_subscriber::registry().with(filter).with(output).with(kept).try_init().is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// Writes a field of an event: the message alone, others with their names.
fn write_field(to: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug) -> fmt::Result {
    match field.name() {
        "message" => write!(Escaping(to), "{value:?}"),
        name => write!(Escaping(to), "{name}={value:?}"),
    }
}

/// From now on threads write and nobody waits for them, until [`finish`]. They have at most the calling thread's
/// privileges.
pub(super) fn use_nonblocking_writers() {
    // The reader may be gone, which is no reason to stop.
    let log = NonBlockingWriter::new("log", WAITING_LINES, io::stderr(), |_| ());
    let statistics = NonBlockingWriter::new("statistics", 1, io::stdout(), |_| ());
    *outputs() = log.ok().zip(statistics.ok()).map(|(log, statistics)| Outputs { log, lost: 0, statistics });
}

/// Flushes what fits the time limit; from now on each caller writes its own lines.
pub(super) fn finish() {
    let outputs = outputs().take();
    drop(outputs);
}

/// Prints statistics on standard output; `false` if the previous ones are still unread.
pub(super) fn print(text: String) -> bool {
    outputs().as_ref().is_some_and(|outputs| outputs.statistics.try_write(text.into_bytes()))
}

fn outputs() -> MutexGuard<'static, Option<Outputs>> {
    OUTPUTS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn set_level(level: LogLevel) {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(level))
    {
        tracing::error!(%error, "cannot change the log level");
    }
}

pub(super) fn recent() -> String {
    recent_lines().iter().map(String::as_str).collect()
}

fn filter(level: LogLevel) -> Targets {
    let level = LevelFilter::from_level(level.into());
    Targets::new()
        .with_targets(OWN_CRATES.map(|own| (own, level)))
        .with_target(MILESTONES, level.max(LevelFilter::INFO))
        // The source logs an outage of the API server itself, once.
        .with_target("kube_client", LevelFilter::OFF)
        // Libraries log about themselves: warnings and errors only.
        .with_default(level.min(LevelFilter::WARN))
}

fn recent_lines() -> MutexGuard<'static, VecDeque<String>> {
    RECENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Queues what is written to it; each write is one event's line.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut outputs = outputs();
        let Some(Outputs { log, lost, .. }) = outputs.as_mut() else {
            drop(outputs);
            return io::stderr().write_all(line).map(|()| line.len());
        };
        if *lost > 0 && log.try_write(format!("{lost} log lines were dropped: they were not read in time\n").into()) {
            *lost = 0;
        }
        *lost += u64::from(!log.try_write(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps what is written to it; each write is one event's line.
struct RecentLogWriter;

impl Write for RecentLogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lines = recent_lines();
        if lines.len() == RECENT_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(line)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_event_is_one_line_whatever_it_tells_of() {
        let written = Written::default();
        let layer = tracing_subscriber::fmt::layer().with_target(false).without_time().with_ansi(false);
        let output = written.clone();
        let layer = layer.with_writer(move || output.clone()).fmt_fields(debug_fn(write_field).delimited(" "));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::warn!(file = %"a\x1b[3x.yaml\n INFO ready", epoch = 1, "not applied: {}", "x\x07");
        });
        let written = written.0.lock().unwrap();
        let expected = " WARN not applied: x\\u{7} file=a\\u{1b}[3x.yaml\\n INFO ready epoch=1\n";
        assert_eq!(String::from_utf8_lossy(&written), expected);
    }
}
