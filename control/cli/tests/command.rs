//! The command as its users run it, without a daemon. One test program, since each would link the same.

mod ceilings;
mod commands;
mod crates;
mod learn;
mod matrix;
mod modules;
mod replay_command;
mod replay_fragments;
mod replay_stream;
mod services;
