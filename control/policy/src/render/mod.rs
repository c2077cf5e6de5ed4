//! Renders effective rules: bitmap tables for the workers, the table of Services, six-tuples, an nftables ruleset.

pub mod acl;
mod blocks;
pub mod nft;
pub mod services;
pub mod tables;
