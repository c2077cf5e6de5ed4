//! Packets that pass between workers and the node's stack: Services that the kernel translates, packets with a pod's
//! source address that no pod sent, and tunnel packets from pods.
//!
//! As in the system tests: the real daemon on real veths, a separate node for each test.

mod answering;
mod bridged;
mod datagrams;
mod kube_proxy;
mod masquerade;
mod names;
mod repeated;
mod rolling;
pub(crate) mod service;
mod tools;
mod translated;
mod tunnels;
mod uplinks;
