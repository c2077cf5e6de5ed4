//! Shared by the demo, the system tests and the benchmarks.
//!
//! [`testbed`] builds nodes and pods out of network namespaces. [`probe`] sends single exchanges between them, [`load`]
//! sends traffic at rate. [`peers`] are the forwarders that are compared, Penstock among them. [`cluster`] builds what
//! manifests describe, [`expectation`] evaluates their policies, and [`matrix`] compares expected with observed
//! results. [`conformance`] has the cases of another project's suite. [`rulesets`] has other forms of the same policy.
//! [`figures`] and [`machine`] are what reports are made of.

pub mod cluster;
pub mod conformance;
pub mod expectation;
pub mod figures;
pub mod in_memory;
pub mod load;
pub mod machine;
pub mod matrix;
pub mod peers;
pub mod probe;
pub mod rulesets;
pub mod testbed;
