//! The testbed that the demo, the system tests and the benchmarks share: a node in network namespaces.
