//! The node service: what `penstock run` runs.
//!
//! Two threads do the control work and publish snapshots (`publisher`). One watches the objects and compiles policy
//! (`policy_thread`). The other watches the network ([`discovery`]), opens and closes ports (`ports`) and answers
//! queries (`daemon`); it may wait for the kernel, the policy thread never does. Only the workers touch packets.
//!
//! This crate holds the daemon, node discovery, the configuration ([`config`]), the checks before a start
//! ([`preflight`]), the server of the admin API, and metrics. Policy semantics are in `penstock-policy`, object sources
//! in `penstock-sources`, the types of the admin API in `penstock-admin`. The crate runs with privileges, so it parses
//! no command line and links no terminal library. Only the `penstock` command, the tests and the benchmarks depend on
//! it.

mod admin;
mod capture;
mod close_first;
pub mod config;
mod connection_limits;
mod connections;
mod coverage;
mod daemon;
mod deleted_policies;
pub mod discovery;
mod exporter;
mod flow_records;
mod handover;
mod haste;
pub mod last_good;
mod learnt_names;
pub mod logging;
mod metrics;
mod naming;
mod new_pods;
mod node_context;
mod nonblocking_writer;
mod objects;
mod operation;
mod pod_bindings;
mod policy_thread;
mod port_layout;
mod ports;
mod postponed;
pub mod preflight;
mod private_file;
pub mod privileges;
mod progress;
mod publisher;
mod query;
mod recorded_objects;
mod report;
mod reserved_descriptors;
mod rule_usage;
mod samples;
mod scans;
mod service_manager;
mod settings;
mod signals;
mod state_file;
mod subscribers;
mod table_builder;
mod testing;
mod trial;
mod unix_socket;
mod verdicts;
mod view;

use std::fmt::Display;
use std::io;
use std::time::Duration;

use penstock_policy::model::ObjectChange;
use penstock_sources::directory::unread_manifest;
use penstock_sources::{Location, Source};

use anyhow::Context;
use config::{Config, ConfigLayers, LoadedConfig};
use daemon::Ended;
use discovery::{Netlink, clear_leftovers};
use exporter::MetricsListener;
use last_good::{LastGood, LastGoodError, RejectedConfig};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use objects::NodeObjects;
use penstock_dataplane::worker::Hurry;
use pod_bindings::PodBindings;
use preflight::{Level, PreflightFinding};
use recorded_objects::ObjectFile;
use settings::Settings;
use tokio::runtime::{Builder, Runtime};
use unix_socket::AdminSocketError;

/// How long `penstock check` waits for the API server to list all objects.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(15);

/// Why the service ended, other than by a signal.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Configuration, manifests or machine are unfit. Each line names the thing, its value and the remedy.
    #[error("{}", .0.join("\n"))]
    BadInput(Vec<String>),
    /// Another daemon has the node.
    #[error("{0}")]
    Occupied(String),
    /// The service could not start or could not continue.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
}

impl RunError {
    fn bad_input(problem: impl Display) -> Self {
        Self::BadInput(vec![problem.to_string()])
    }

    fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Failed(error.into())
    }
}

impl From<AdminSocketError> for RunError {
    fn from(error: AdminSocketError) -> Self {
        match error {
            AdminSocketError::Live { .. } => Self::Occupied(error.to_string()),
            other => Self::bad_input(other),
        }
    }
}

/// How a start treats a daemon that runs already.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartMode {
    /// It is refused.
    Alone,
    /// It takes over, once it has read all objects.
    TakeOver,
}

/// Runs the service until SIGINT or SIGTERM. SIGHUP reloads the configuration layers.
///
/// If the configuration is refused, or the daemon cannot start with it, the last good one takes its place
/// ([`last_good`]). Restores everything that it changed on the node before it returns, also after a failed start.
pub fn run(layers: &ConfigLayers, mode: StartMode) -> Result<(), RunError> {
    raise_open_file_limit();
    let ended = match layers.load() {
        Ok(loaded) => {
            logging::start(&loaded.config.log);
            run_or_last_good(layers, &loaded, mode)
        }
        Err(errors) => run_last_good(layers, None, errors.lines(), mode),
    };
    logging::finish();
    ended
}

fn run_or_last_good(layers: &ConfigLayers, loaded: &LoadedConfig, mode: StartMode) -> Result<(), RunError> {
    match run_with(layers, loaded, None, mode) {
        // The daemon was not ready yet. One that found another daemon has nothing to correct.
        Err(RunError::BadInput(reasons)) => run_last_good(layers, Some(loaded), reasons, mode),
        ended => ended,
    }
}

/// Runs with the last good configuration, if there is one, and it is not the `refused` one.
fn run_last_good(
    layers: &ConfigLayers,
    refused: Option<&LoadedConfig>,
    reasons: Vec<String>,
    mode: StartMode,
) -> Result<(), RunError> {
    let found = last_good::find(layers);
    let admin = refused.or(found.as_ref().ok().and_then(|found| Some(&found.as_ref()?.loaded)));
    if mode == StartMode::Alone && admin.is_some_and(|it| handover::is_daemon_running(&it.config.admin.socket)) {
        let running = "another daemon runs on this node, and continues".to_owned();
        return Err(RunError::BadInput(reasons.into_iter().chain([running]).collect()));
    }
    let last_good = match found {
        Ok(Some(found)) if refused.is_none_or(|refused| refused.values != found.loaded.values) => found,
        Ok(_) => return Err(RunError::BadInput(reasons)),
        // The mistake is in the environment or the command line, which the last good configuration has from now.
        Err(LastGoodError::Config(errors)) if reasons == errors.lines() => {
            return Err(RunError::BadInput(reasons));
        }
        Err(error) => return Err(RunError::BadInput(reasons.into_iter().chain([error.to_string()]).collect())),
    };
    let LastGood { loaded, since } = last_good;
    logging::start(&loaded.config.log);
    for reason in &reasons {
        tracing::error!(target: logging::MILESTONES, "configuration refused: {reason}");
    }
    tracing::error!(
        target: logging::MILESTONES,
        "starting with the last good configuration instead, which was in effect at {since}: correct {} and restart penstock",
        layers.file().display()
    );
    match run_with(layers, &loaded, Some(RejectedConfig { reasons: reasons.clone() }), mode) {
        Err(RunError::BadInput(again)) => {
            let again = again.into_iter().map(|line| format!("the last good configuration fails, too: {line}"));
            Err(RunError::BadInput(reasons.into_iter().chain(again).collect()))
        }
        ended => ended,
    }
}

fn run_with(
    layers: &ConfigLayers,
    loaded: &LoadedConfig,
    rejected: Option<RejectedConfig>,
    mode: StartMode,
) -> Result<(), RunError> {
    let hurry = Hurry::begin();
    let settings = Settings::decide(&loaded.config);
    daemon::fail_on_errors(preflight::machine(&settings))?;
    privileges::drop_to_startup().context("privileges cannot be given up")?;
    // Threads that begin from here on stay.
    drop(hurry);
    let runtime = runtime().map_err(RunError::failed)?;
    logging::use_nonblocking_writers();
    let ended = runtime.block_on(daemon::run(layers, loaded, &settings, rejected, mode));
    // Closes all listeners, which another daemon may wait for.
    drop(runtime);
    match ended? {
        Ended::BySignal => Ok(()),
        Ended::HandedOver(handover) => handover.finish(&loaded.config.admin.socket),
    }
}

/// Which objects [`check`] reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckedSource {
    Any,
    /// Those of manifests only: an API server may be away, and a daemon would wait for it.
    Manifests,
}

/// Checks whether this machine can run this configuration. Changes nothing.
pub fn check(config: &Config, source: CheckedSource) -> io::Result<Vec<PreflightFinding>> {
    let settings = Settings::decide(config);
    let mut findings = preflight::machine(&settings);
    let mut objects = NodeObjects::new(config.node.as_str(), &config.node_addresses);
    let runtime = runtime()?;
    if source == CheckedSource::Any || matches!(config.source.location(), Location::Manifests(_)) {
        runtime.block_on(read_source(config, &mut objects, &mut findings));
    }
    findings.extend(objects.wrong_node().map(PreflightFinding::not_ready));
    runtime.block_on(async {
        findings.extend(check_metrics_port(config).await);
        match Netlink::open() {
            Err(error) => findings.push(PreflightFinding::error(error.to_string())),
            Ok((netlink, _)) => {
                findings.extend(preflight::network());
                findings.extend(preflight::programs(&settings));
                findings.push(preflight::attachable(&settings));
                match netlink.network_state().await {
                    Ok(netstate) => {
                        let (mut bindings, resolved) = (PodBindings::open(config), objects.resolved_pods());
                        let bindings = bindings.follow(&netstate, &resolved.0);
                        findings.extend(preflight::pods(&settings, &netstate, bindings, resolved));
                    }
                    Err(error) => findings.push(PreflightFinding::error(error.to_string())),
                }
            }
        }
    });
    findings.sort_by_key(|finding| finding.level != Level::Ok);
    Ok(findings)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CleanedUp {
    /// How many interfaces had a pinned program.
    pub programs: usize,
    /// Whether there were workers' veth pairs.
    pub worker_pairs: bool,
    /// How many files of the state directory: the connection table, what stands beside it, and the admin socket.
    pub files: usize,
}

/// Removes what a killed daemon, or one with `fail.on_exit = "keep"`, left in this network namespace, and the files of
/// `conntrack.mapping` and `admin.socket`. Fails while a daemon runs.
pub fn cleanup(config: &Config) -> Result<CleanedUp, RunError> {
    runtime().map_err(RunError::failed)?.block_on(async {
        let (netlink, _) = Netlink::open().map_err(RunError::bad_input)?;
        let in_use = connections::lock_for_removal(config)?;
        let worker_pairs = clear_leftovers(&netlink).await.map_err(RunError::bad_input)?;
        let programs = daemon::clear_pins(&config.fail.pins)
            .map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))?;
        let files = connections::remove_state(config, in_use)?;
        haste::restore_after_kill();
        Ok(CleanedUp { programs, worker_pairs, files })
    })
}

/// Checks that the metrics port is free, or in use while a daemon runs here.
async fn check_metrics_port(config: &Config) -> Option<PreflightFinding> {
    let address = config.metrics.listen.address()?;
    Some(match MetricsListener::listen(address).await {
        Ok(_) => PreflightFinding::ok(format!("metrics.listen: {address}")),
        Err(error) if error.is_in_use() && handover::is_daemon_running(&config.admin.socket) => {
            PreflightFinding::ok(format!("metrics.listen: {address}, in use while a daemon runs here"))
        }
        Err(error) => PreflightFinding::error(error.to_string()),
    })
}

/// Reads all objects of the source, or what a start would take in their place. Problems with the source become findings: errors
/// where a start would fail, or wait.
async fn read_source(config: &Config, objects: &mut NodeObjects, findings: &mut Vec<PreflightFinding>) {
    let location = config.source.location();
    // `preflight::machine` has reported a missing directory.
    if matches!(&location, Location::Manifests(path) if !path.is_dir()) {
        return;
    }
    let recorded = ObjectFile::of(config);
    let last = || recorded.as_ref().and_then(ObjectFile::read);
    let of_last_run = || last().map(|(_, objects)| objects);
    let mut source = match Source::start(&location, None, config.conversion(), &of_last_run).await {
        Ok(source) => source,
        Err(error) => return findings.extend(error.to_string().lines().map(PreflightFinding::error)),
    };
    findings.extend(source.unread_files().iter().map(|file| {
        PreflightFinding::warning(format!(
            "source: {}: not read: manifests are *.yaml, *.yml and *.json; rename it if it is one",
            file.display()
        ))
    }));
    findings.extend(source.health().unreadable().map(|reason| {
        PreflightFinding::not_ready(format!(
            "source.manifests: {reason}; until then all objects stay as in the last run"
        ))
    }));
    match tokio::time::timeout(SOURCE_TIMEOUT, source.first()).await {
        Ok(read) => {
            let is_closed = read.iter().any(|object| unread_manifest(&object.reference()).is_some());
            findings.extend(source.problems().iter().map(|problem| match is_closed {
                true => PreflightFinding::not_ready(format!(
                    "source: {problem}; until then the pods that its file may be about are closed"
                )),
                false => PreflightFinding::warning(format!(
                    "source: {problem}; until then what its file had stays as in the last run"
                )),
            }));
            findings.push(PreflightFinding::ok(format!("source: {} objects", read.len())));
            objects.apply(read.into_iter().map(ObjectChange::Set), &[]);
        }
        Err(_) => {
            let last = last();
            let level = if last.is_some() { Level::Warning } else { Level::Error };
            findings.extend(source.health().awaited().into_iter().map(|(kind, reason)| {
                let reason = reason.unwrap_or_else(|| "no answer; is the API server up?".to_owned());
                let (kind, seconds) = (kind.resource(), SOURCE_TIMEOUT.as_secs());
                PreflightFinding { level, line: format!("source: {kind}: not listed within {seconds} s: {reason}") }
            }));
            if let Some((recorded, read)) = last {
                let count = read.len();
                findings.push(PreflightFinding::warning(format!(
                    "source: a start would take the {count} objects of the last run, recorded at {recorded}, until the API server is there"
                )));
                objects.apply(read.into_iter().map(ObjectChange::Set), &[]);
            }
        }
    }
}

/// Raises the limit of open files to the hard limit: each pod takes several descriptors and each client one, more than
/// the usual 1,024.
fn raise_open_file_limit() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// The most threads that the runtime starts for blocking work, such as scans of the connection table. Scans run one at
/// a time; the second thread lets one start while the previous thread is still going idle.
const BLOCKING_THREADS: usize = 2;

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .on_thread_start(privileges::drop_all)
        .build()
}
