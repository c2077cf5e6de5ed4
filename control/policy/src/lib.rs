//! What NetworkPolicies mean: from the objects of a cluster to the rule tables of a node.
//!
//! The way of a change: `state` (indexes) → `compile` (effective rules with provenance) → `render` (tables for the workers);
//! [`engine`] is the three in one. [`flow`] reads what a person calls the ends of a flow, [`describe`], [`explain`]
//! and [`listing`] put policies, verdicts and tables into words.
//!
//! Here is no input or output, no clock, no thread, no async runtime and no Kubernetes client: objects come in as
//! [`model`] has them, and out come values. Of the data plane only the tables' types, addresses and flows are used. Who
//! reads objects (`penstock-sources`), serves them (`penstock-agent`), replays packets against them (`penstock-replay`) or
//! answers questions about them (the `penstock` command) depends on this crate, never the other way round.

pub mod compile;
pub mod describe;
pub mod engine;
pub mod explain;
pub mod flow;
pub mod listing;
pub mod model;
pub mod render;
pub mod state;
