//! `penstock run` on a real node in network namespaces, through the binary.

mod bad_input;
mod enforcement;
mod fixture;
mod lifecycle;
#[path = "../../../agent/tests/netns/mod.rs"]
mod netns;
