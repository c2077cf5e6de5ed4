//! One or several nodes: each a network namespace with pods and a daemon, joined by a router. The same policy as an
//! nftables ruleset, without a daemon. Needs root, `nft` and a built `penstock`.

mod cluster_conformance;
mod conformance;
mod exec_server;
mod fixture;
mod kubectl;
mod overlay;
mod random_services;
mod reach;
mod ruleset;
mod suite;
mod topologies;
mod upgrade;
