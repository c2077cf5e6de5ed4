//! The packet path in memory, by its public interface: parser, pipeline, policy tables, names and journal. One test
//! program, since each would link the same.

mod early;
mod journal;
mod modules;
mod names;
mod own_direction;
mod parse;
mod pipeline;
mod policy_set;
mod via_host;
