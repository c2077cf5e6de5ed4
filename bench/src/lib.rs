//! What the demo, the system tests and the benchmarks share.
//!
//! [`testbed`] builds nodes and pods out of network namespaces, [`probe`] sends real traffic between them,
//! [`load`] a lot of it; [`peers`] forward it, Penstock
//! among them;
//! [`cluster`] builds what manifests describe, [`judge`] knows what their policies allow, and [`matrix`] compares.

pub mod cluster;
pub mod in_memory;
pub mod judge;
pub mod load;
pub mod matrix;
pub mod peers;
pub mod probe;
pub mod testbed;
