//! One or several nodes: each a network namespace with pods and a daemon, joined by a router. Needs root and a built
//! `penstock`.

mod cluster_conformance;
mod conformance;
mod fixture;
mod overlay;
mod reach;
mod ruleset;
mod suite;
mod topologies;
mod upgrade;
