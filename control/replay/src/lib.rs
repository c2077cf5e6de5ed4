//! Replay: sends the packets of a capture through the workers' pipeline, on the capture's clock.
//!
//! [`capture`] reads a packet as an Ethernet frame, [`player`] finds its ingress port and evaluates it in a [`batch`],
//! `sinks` write the result. A [`cluster`] makes tables and ports from manifests, a [`timeline`] changes them during the
//! replay, [`compare`] evaluates the same packets under a second one.
//! [`connections`] lists the connections of captures. A [`bundle`] has packets of a daemon with its objects; `recorded` compares
//! with what the daemon decided.
//!
//! Pipeline and connection table come from `penstock-dataplane`, tables from `penstock-policy`, manifests from
//! `penstock-sources`. No socket and no daemon is needed. The `penstock` command, the capture tests and the benchmarks use
//! this crate.
//!
//! Results do not depend on the clock or on chance: the same input gives the same bytes. (The connection table's hash seed
//! is random, but affects only eviction from a full table.)

pub mod batch;
pub mod bundle;
pub mod capture;
pub mod cluster;
pub mod compare;
pub mod connections;
mod dedup;
mod in_order;
pub mod kernel;
mod line;
mod objects;
mod output;
pub mod player;
mod ports;
mod recorded;
mod rules;
mod run;
mod sinks;
pub mod summary;
pub mod timeline;
pub mod truncated;

pub use output::OutputError;
pub use ports::{Mapping, PortMap, PortMappingError, PortName};
pub use recorded::RecordedCounts;
pub use rules::{RuleId, RuleNames, Rules};
pub use run::{ReplayError, ReplayOptions, ReplayReport, run};
pub use sinks::OutputPaths;
