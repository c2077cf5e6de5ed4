//! From effective rules to what enforces them.

pub mod tables;
