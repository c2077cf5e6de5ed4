//! Faults and malicious pods: nothing passes without a verdict, others lose nothing, and losses are counted by reason.
//!
//! As in the system tests: the real daemon on real veths, a separate node for each test.

mod bridges;
mod busy_core;
mod changes;
mod clock;
mod floods;
mod floods_from_outside;
mod floods_of_streams;
mod forged;
mod forgotten;
mod fuzz;
mod gaps;
mod identity;
mod mends;
mod mutated;
mod offload;
mod operation;
mod paths;
pub(crate) mod repeated;
mod restarts;
mod revoked;
mod spoofing;
mod stopped;
mod traffic;
mod virtio;
