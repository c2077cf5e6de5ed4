//! Other forms of the policy that the tables enforce: access lists of six-tuples, and an nftables ruleset.
//!
//! The benchmarks configure the forwarders they compare with them, and a test loads the ruleset as an oracle for verdicts.

pub mod acl;
pub mod nft;
