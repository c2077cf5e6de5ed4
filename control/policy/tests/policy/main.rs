//! The meaning of NetworkPolicy: examples for each clause, and random clusters on which two evaluators must agree.
//!
//! The evaluators are the bitmap tables that the workers read, and a naive evaluator that reads the objects and shares no
//! code with them.

mod agreement;
mod aside;
mod build;
mod classes;
mod clauses;
mod cluster_wide;
mod incremental;
mod kinds_of_services;
mod learn;
mod learn_services;
mod limits;
mod naive;
mod names;
mod notes;
mod owners;
mod random;
mod services;
mod staged;
mod tiers;
mod usage;
mod v1beta1;
