//! Replay: packets of a capture through the workers' own pipeline, with the time that the capture tells.
//!
//! A packet's way: [`capture`] reads it as an Ethernet frame, [`player`] finds the port that it enters by and judges it
//! in a [`batch`] with its neighbours, `sinks` tell of it. A [`cluster`] makes tables and ports of manifests;
//! [`timeline`] changes them on the way; [`compare`] has a second one decide about the same packets.
//!
//! The packets are judged by the pipeline and the connection table of `penstock-dataplane`, the tables come from
//! `penstock-policy`, the manifests from `penstock-sources`. No socket and no daemon takes part. The `penstock` command, the
//! tests with captures and the benchmarks replay by this crate.
//!
//! Nothing depends on the clock or on chance: the same input gives the same octets. (The connection table's hash seed
//! is random, but decides only who makes room in a table that is full.)

pub mod batch;
pub mod capture;
pub mod cluster;
pub mod compare;
mod dedup;
pub mod kernel;
mod line;
mod output;
pub mod player;
mod ports;
mod rules;
mod run;
mod sinks;
pub mod summary;
pub mod timeline;

pub use output::OutputError;
pub use ports::{Mapping, PortError, PortMap, PortName};
pub use rules::{RuleBook, RuleId, Rules};
pub use run::{Options, ReplayError, Report, run};
pub use sinks::Paths;
