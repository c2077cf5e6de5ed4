//! NetworkPolicy semantics: from the objects of a cluster to the rule tables of a node.
//!
//! A change passes through `state` (indexes), `compile` (effective rules with provenance) and `render` (tables for the
//! workers); [`engine`] combines the three. [`flow`] resolves what users write to flows; [`describe`], [`explain`] and
//! [`listing`] print policies, verdicts and tables. [`classes`] finds pods that policy does not tell apart. [`learn`] writes policies
//! from observed flows.
//! [`staging`] leaves staged policies out, or counts them as promoted.
//!
//! No I/O, clock, thread, async runtime or Kubernetes client: objects come in as [`model`] types, values come out. Of the
//! data plane it uses only table types, addresses and flows. The crates that read objects (`penstock-sources`), run the
//! daemon (`penstock-agent`), replay packets (`penstock-replay`) or answer questions (the `penstock` command) depend on
//! this one, never the reverse.

pub mod classes;
pub mod compile;
pub mod derived_slices;
pub mod describe;
pub mod engine;
pub mod explain;
pub mod flow;
pub mod learn;
pub mod listing;
pub mod model;
pub mod render;
pub mod service_flows;
pub mod staging;
pub mod state;
