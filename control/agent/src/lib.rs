//! The node service: what `penstock run` runs.
//!
//! Two threads keep everything in step, and publish (`publisher`): one follows the objects and has policy compiled
//! (`follow`), the other follows the network ([`discovery`]), opens and closes ports (`ports`) and answers who asks
//! (`daemon`). What the second does may wait for the kernel; policy does not. The packets are the workers' business alone.
//!
//! Here are the daemon, what it finds out about the node, its configuration ([`config`]), its checks ([`preflight`]), the
//! server of the admin API, and metrics. What policies mean is in `penstock-policy`, where objects come from in
//! `penstock-sources`, what the answers look like in `penstock-admin`. This crate runs with privileges: it reads no command
//! line and draws on no terminal. Only the `penstock` command, the tests and the benchmarks depend on it.

mod admin;
pub mod config;
mod connections;
mod daemon;
pub mod discovery;
mod exporter;
mod first_closed;
mod follow;
mod layout;
pub mod logging;
mod metrics;
mod objects;
mod operation;
mod outlet;
mod ports;
pub mod preflight;
mod progress;
mod publisher;
mod query;
mod report;
mod samples;
mod signals;
mod surroundings;
mod verdicts;
mod view;
mod waiting;
mod walks;

use std::fmt::Display;
use std::io;
use std::time::Duration;

use penstock_policy::model::Change;
use penstock_privileges as privileges;
use penstock_sources::{Location, Source};

use anyhow::Context;
use config::{Config, Layers, Loaded};
use discovery::{Netlink, clear_left};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use objects::Objects;
use preflight::{Finding, Level};
use tokio::runtime::{Builder, Runtime};

/// How long a check waits for an API server.
const SOURCE_TIME: Duration = Duration::from_secs(15);

/// Why the service ended otherwise than by a signal.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Configuration, manifests or machine are not good; each line names the thing, the value and the mend.
    #[error("{}", .0.join("\n"))]
    BadInput(Vec<String>),
    /// It could not be done, or could not go on.
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

/// Runs the service until SIGINT or SIGTERM. SIGHUP has the configuration's layers read again.
///
/// Returns once all that it changed on the node is put back, also when it could not start.
pub fn run(layers: &Layers, loaded: &Loaded) -> Result<(), RunError> {
    raise_descriptors();
    daemon::refuse(preflight::machine(&loaded.config))?;
    privileges::begin().context("privileges cannot be given up")?;
    let runtime = runtime().map_err(RunError::failed)?;
    logging::never_wait();
    let ended = runtime.block_on(daemon::run(layers, loaded));
    logging::finish();
    ended
}

/// Looks whether this machine can run this configuration. Changes nothing.
pub fn check(config: &Config) -> io::Result<Vec<Finding>> {
    let mut findings = preflight::machine(config);
    let mut objects = Objects::new(config.node.as_str(), &config.node_addresses);
    let runtime = runtime()?;
    runtime.block_on(read_source(config, &mut objects, &mut findings));
    runtime.block_on(async {
        match Netlink::open(config.host_port.table) {
            Err(error) => findings.push(Finding::error(error.to_string())),
            Ok((netlink, _)) => {
                findings.extend(preflight::network(config, &netlink).await);
                findings.extend(preflight::programs(config));
                findings.extend(preflight::source_check());
                match netlink.facts().await {
                    Ok(facts) => findings.extend(preflight::pods(config, &facts, objects.tenants())),
                    Err(error) => findings.push(Finding::error(error.to_string())),
                }
            }
        }
    });
    findings.sort_by_key(|finding| finding.level != Level::Ok);
    Ok(findings)
}

/// What [`cleanup`] took away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CleanedUp {
    /// How many interfaces had a pinned program.
    pub programs: usize,
    /// Whether the host port's pair or its rules were there.
    pub host_port: bool,
}

/// Takes away what a daemon left in this network namespace that was killed, or ended with `fail.on_exit = "keep"`.
/// Refused while one runs.
pub fn cleanup(config: &Config) -> Result<CleanedUp, RunError> {
    runtime().map_err(RunError::failed)?.block_on(async {
        let (netlink, _) = Netlink::open(config.host_port.table).map_err(RunError::bad_input)?;
        let host_port = clear_left(&netlink, &config.host_port).await.map_err(RunError::bad_input)?;
        let programs = daemon::clear_pins(&config.fail.pins)
            .map_err(|error| RunError::bad_input(format!("fail.pins: {error}")))?;
        Ok(CleanedUp { programs, host_port })
    })
}

/// Reads all objects of the source. What is wrong with it is a finding.
async fn read_source(config: &Config, objects: &mut Objects, findings: &mut Vec<Finding>) {
    let location = config.source.location();
    // Where there is no directory, that has been told.
    if matches!(&location, Location::Manifests(path) if !path.is_dir()) {
        return;
    }
    let opened = tokio::time::timeout(SOURCE_TIME, Source::open(&location)).await;
    match opened {
        Ok(Ok((_, read))) => {
            findings.push(Finding::ok(format!("source: {} objects", read.len())));
            objects.apply(read.into_iter().map(Change::Set), &[]);
        }
        Ok(Err(error)) => findings.extend(error.to_string().lines().map(Finding::error)),
        Err(_) => findings.push(Finding::error(format!(
            "source: the API server did not list all objects within {} s; the log says why",
            SOURCE_TIME.as_secs()
        ))),
    }
}

/// As many open files as the system lets this process have: each pod takes several, each client one, and the usual 1,024 are
/// soon used up.
fn raise_descriptors() {
    let raised =
        getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// The most threads that the runtime starts for work that blocks, such as walks through the connection table. Those take
/// turns; a second thread lets one begin while the last thread still goes idle.
const BLOCKING_THREADS: usize = 2;

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .on_thread_start(privileges::forgo)
        .build()
}
