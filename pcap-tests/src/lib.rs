//! Captures with their expected verdicts, and the tests that replay them.
//!
//! A case is a text file under `cases/`: one sentence of purpose, the cluster (manifests under `clusters/`), and one
//! packet per line ([`script`]). Its capture and its expected verdicts are beside it. `PENSTOCK_BLESS=1 cargo test -p
//! penstock-pcap-tests` writes both again; review the diff.

pub mod capture;
pub mod case;
pub mod frame;
pub mod fuzz;
pub mod packet;
pub mod script;

pub use case::{CorpusCase, cases, real, root};
