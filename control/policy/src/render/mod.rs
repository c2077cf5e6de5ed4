//! Renders effective rules: bitmap tables for the workers, six-tuples, an nftables ruleset.

pub mod acl;
mod blocks;
pub mod nft;
pub mod tables;
