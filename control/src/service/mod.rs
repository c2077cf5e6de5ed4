//! The node service: what `penstock run` runs.

pub mod config;
