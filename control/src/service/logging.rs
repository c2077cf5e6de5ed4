//! The log: structured events on standard error.

use std::io::{self, IsTerminal};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::config::{Log, LogFormat};

/// Events of this target are logged whatever the level: what a supervisor waits for.
pub(super) const MILESTONES: &str = "penstock";

/// Starts logging for the whole process. A second call changes nothing.
pub fn start(log: &Log) {
    let level = LevelFilter::from_level(log.level.into());
    let filter = Targets::new()
        .with_target("penstock_control", level)
        .with_target("penstock_dataplane", level)
        .with_target("penstock_xdp_redirect", level)
        .with_target(MILESTONES, level.max(LevelFilter::INFO))
        // An outage of the API server is told once, by us.
        .with_target("kube_client", LevelFilter::OFF)
        // Libraries' own events are about themselves.
        .with_default(level.min(LevelFilter::WARN));
    let output = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_target(false);
    let output = match log.format {
        LogFormat::Json => output.json().flatten_event(true).boxed(),
        LogFormat::Text => {
            let coloured = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            output.with_ansi(coloured).boxed()
        }
    };
    // It fails only where a subscriber is there already, which then has the say.
    let _ = tracing_subscriber::registry().with(output.with_filter(filter)).try_init();
}
