//! Whole nodes, and several: each a network namespace with its own pods and its own daemon, joined by a router. Needs
//! root and a built `penstock`.

mod conformance;
mod fixture;
mod reach;
mod topologies;
mod upgrade;
