//! Packets that pass between workers and the node's stack: Services that the kernel translates, packets with a pod's
//! source address that no pod sent, and tunnel packets from pods.
//!
//! As in the system tests: the real daemon on real veths, a separate node for each test.

mod answering;
mod beside;
mod bridged;
mod datagrams;
#[path = "../system/fixture.rs"]
mod fixture;
#[path = "../faults/forger.rs"]
#[allow(dead_code, reason = "the faults' tests use the rest of it")]
mod forger;
mod kube_proxy;
mod masquerade;
mod names;
mod service;
mod translated;
mod tunnels;
mod uplinks;
mod workers;
