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
mod close_first;
mod closed_interfaces;
pub mod config;
mod connections;
mod daemon;
pub mod discovery;
mod exporter;
pub mod logging;
mod metrics;
mod node_context;
mod node_path;
mod nonblocking_writer;
mod objects;
mod operation;
mod policy_thread;
mod port_layout;
mod ports;
pub mod preflight;
mod progress;
mod publisher;
mod query;
mod report;
mod samples;
mod scans;
mod signals;
mod verdicts;
mod view;

use std::fmt::Display;
use std::io;
use std::time::Duration;

use penstock_policy::model::ObjectChange;
use penstock_privileges as privileges;
use penstock_sources::{Location, Source};

use anyhow::Context;
use config::{Config, ConfigLayers, LoadedConfig};
use discovery::{Netlink, clear_leftovers};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use objects::NodeObjects;
use preflight::{Level, PreflightFinding};
use tokio::runtime::{Builder, Runtime};

/// How long `penstock check` waits for the API server to list all objects.
const SOURCE_TIMEOUT: Duration = Duration::from_secs(15);

/// Why the service ended, other than by a signal.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Configuration, manifests or machine are unfit. Each line names the thing, its value and the remedy.
    #[error("{}", .0.join("\n"))]
    BadInput(Vec<String>),
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

/// Runs the service until SIGINT or SIGTERM. SIGHUP reloads the configuration layers.
///
/// Restores everything that it changed on the node before it returns, also after a failed start.
pub fn run(layers: &ConfigLayers, loaded: &LoadedConfig) -> Result<(), RunError> {
    raise_open_file_limit();
    daemon::fail_on_errors(preflight::machine(&loaded.config))?;
    privileges::drop_to_startup().context("privileges cannot be given up")?;
    let runtime = runtime().map_err(RunError::failed)?;
    logging::use_nonblocking_writers();
    let ended = runtime.block_on(daemon::run(layers, loaded));
    logging::finish();
    ended
}

/// Checks whether this machine can run this configuration. Changes nothing.
pub fn check(config: &Config) -> io::Result<Vec<PreflightFinding>> {
    let mut findings = preflight::machine(config);
    let mut objects = NodeObjects::new(config.node.as_str(), &config.node_addresses);
    let runtime = runtime()?;
    runtime.block_on(read_source(config, &mut objects, &mut findings));
    runtime.block_on(async {
        match Netlink::open(config.host_veth.table) {
            Err(error) => findings.push(PreflightFinding::error(error.to_string())),
            Ok((netlink, _)) => {
                findings.extend(preflight::network(config, &netlink).await);
                findings.extend(preflight::programs(config));
                findings.extend(preflight::attachable(config));
                match netlink.network_state().await {
                    Ok(netstate) => findings.extend(preflight::pods(config, &netstate, objects.resolved_pods())),
                    Err(error) => findings.push(PreflightFinding::error(error.to_string())),
                }
            }
        }
    });
    findings.sort_by_key(|finding| finding.level != Level::Ok);
    Ok(findings)
}

/// What [`cleanup`] removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CleanedUp {
    /// How many interfaces had a pinned program.
    pub programs: usize,
    /// Whether the host veth pair or its rules existed.
    pub host_veth: bool,
}

/// Removes what a killed daemon, or one with `fail.on_exit = "keep"`, left in this network namespace. Fails while a
/// daemon runs.
pub fn cleanup(config: &Config) -> Result<CleanedUp, RunError> {
    runtime().map_err(RunError::failed)?.block_on(async {
        let (netlink, _) = Netlink::open(config.host_veth.table).map_err(RunError::bad_input)?;
        let host_veth = clear_leftovers(&netlink, &config.host_veth).await.map_err(RunError::bad_input)?;
        let programs = daemon::clear_pins(&config.fail.pins)
            .map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))?;
        Ok(CleanedUp { programs, host_veth })
    })
}

/// Reads all objects of the source. Problems with the source become findings.
async fn read_source(config: &Config, objects: &mut NodeObjects, findings: &mut Vec<PreflightFinding>) {
    let location = config.source.location();
    // `preflight::machine` has reported a missing directory.
    if matches!(&location, Location::Manifests(path) if !path.is_dir()) {
        return;
    }
    let opened = tokio::time::timeout(SOURCE_TIMEOUT, Source::open(&location)).await;
    match opened {
        Ok(Ok((_, read))) => {
            findings.push(PreflightFinding::ok(format!("source: {} objects", read.len())));
            objects.apply(read.into_iter().map(ObjectChange::Set), &[]);
        }
        Ok(Err(error)) => findings.extend(error.to_string().lines().map(PreflightFinding::error)),
        Err(_) => findings.push(PreflightFinding::error(format!(
            "source: the API server did not list all objects within {} s; the log says why",
            SOURCE_TIMEOUT.as_secs()
        ))),
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
