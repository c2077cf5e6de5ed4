//! A daemon's answers as text for people: what `penstock` prints of one node and `kubectl penstock` of all, and how these commands
//! end; and the arguments that both have.

pub mod arguments;
pub mod failure;
pub mod flows;
pub mod number;
pub mod rules;
pub mod trial;
