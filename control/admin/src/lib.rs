//! The admin API of the node service, as both sides of it know it.
//!
//! [`types`] is what the daemon answers, [`client`] asks it over its unix socket, and [`table`] shows rows of figures
//! alike in the daemon's statistics and in the commands that ask for them. What the answers are made of is in
//! `penstock-agent`, which serves them; the `penstock` command, the tests and the benchmarks ask.

pub mod client;
pub mod table;
pub mod types;
