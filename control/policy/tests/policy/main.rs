//! The meaning of NetworkPolicy: examples for each clause, and random clusters on which three evaluators must agree.
//!
//! The evaluators are the bitmap tables (the ones that the workers read), the flat six-tuple list, and a naive evaluator
//! that reads the objects and shares no code with either.

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
mod nft;
mod notes;
mod random;
mod services;
mod staged;
mod tiers;
mod usage;
mod v1beta1;
