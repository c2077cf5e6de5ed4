//! The admin API of the node service, shared by server and clients.
//!
//! [`types`] defines requests and answers, [`client`] sends requests over the unix socket, [`capture`] is the stream of a
//! capture's packets over a socket of its own, [`table`] prints tables the same way in the daemon's statistics and in
//! the commands, and [`printable`] is for all text that others have written. The server is in `penstock-agent`; clients are the
//! `penstock` command, the tests and the benchmarks.

pub mod capture;
pub mod client;
pub mod printable;
pub mod table;
pub mod types;
