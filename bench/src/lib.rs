//! What the demo, the system tests and the benchmarks share.
//!
//! [`testbed`] builds nodes and pods out of network namespaces, [`probe`] sends real traffic between them,
//! [`load`] a lot of it.

pub mod load;
pub mod probe;
pub mod testbed;
