//! Penstock's control side: from the objects of a cluster to the tables of a node.
//!
//! The way of a change: `source` (manifests, later the API server) → `state` (indexes) → `compile` (effective
//! rules with provenance) → `render` (tables for the workers) → published by `service`. The middle three are
//! free of I/O and clock. `discovery` finds the pods' interfaces; `cli` holds one file a command.

pub mod cli;
pub mod compile;
pub mod discovery;
pub mod engine;
pub mod model;
pub mod privileges;
pub mod render;
pub mod replay;
pub mod service;
pub mod source;
pub mod state;
