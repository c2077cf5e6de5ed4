//! From effective rules to what enforces them: bitmap tables for the workers, flat six-tuples, an nftables ruleset.

pub mod acl;
mod blocks;
pub mod nft;
pub mod tables;
