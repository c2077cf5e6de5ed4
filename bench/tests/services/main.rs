//! What passes between workers and the node's own stack: Services that the kernel translates, packets in a pod's name that no
//! pod sent, and tunnels' packets from pods.
//!
//! As the system tests: the real daemon on real veths, each test with a node of its own.

#[path = "../system/fixture.rs"]
mod fixture;
#[path = "../faults/forger.rs"]
#[allow(dead_code, reason = "the faults' tests use the rest of it")]
mod forger;
mod names;
mod service;
mod translated;
mod tunnels;
