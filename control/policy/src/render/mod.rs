//! Renders effective rules: bitmap tables for the workers, and the table of Services.

mod blocks;
pub mod services;
pub mod tables;
