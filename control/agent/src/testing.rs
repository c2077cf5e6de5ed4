//! What tests and benchmarks ask of a daemon by its environment: only in a binary with the feature `testing`.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use penstock_dataplane::pipeline::PipelineMode;
use penstock_dataplane::worker::Dataplane;

fn asked(name: &str) -> Option<String> {
    if cfg!(feature = "testing") { std::env::var(name).ok() } else { None }
}

/// How much of the packet path runs: all of it, or forwarding alone, to measure that.
pub(super) fn mode() -> PipelineMode {
    if asked("FORWARD_ONLY").is_some() { PipelineMode::ForwardOnly } else { PipelineMode::Full }
}

/// Whether the programs also open connections, each like one that a worker has opened.
pub(super) fn repeats() -> bool {
    asked("WITHOUT_REPEATS").is_none()
}

/// Milliseconds for which an answer of DNS counts at least, if not the usual time.
pub(super) fn min_ttl() -> Option<Duration> {
    asked("MIN_TTL")?.parse().ok().map(Duration::from_millis)
}

/// Packets that wait for the reader of a capture, if not the usual number.
pub(super) fn capture_queue() -> Option<usize> {
    asked("CAPTURE_QUEUE")?.parse().ok()
}

/// Makes the first worker panic, so many milliseconds after the daemon is ready.
pub(super) fn inject_faults(dataplane: &Arc<Dataplane>) {
    let Some(after) = asked("WORKER_PANICS_AFTER").and_then(|text| text.parse().ok()) else { return };
    let dataplane = Arc::downgrade(dataplane);
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(after));
        if let Some(dataplane) = dataplane.upgrade() {
            dataplane.kill_worker(0);
        }
    });
}
