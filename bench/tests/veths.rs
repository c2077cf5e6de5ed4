//! Everything that needs packets on real veths, in one test program: each test builds nodes of its own in network namespaces,
//! starts `penstock run` in them and sends packets, beside the other tests. Needs root, and `penstock` beside this program or in
//! `PENSTOCK_BIN`.
//!
//! `PENSTOCK_TEST_OFFLOAD=false` has workers forward all packets for a whole run.

mod api_server;
mod demo;
mod faults;
mod fixture;
mod forger;
mod nodes;
mod on_cluster;
mod services;
mod system;
mod testbed;
