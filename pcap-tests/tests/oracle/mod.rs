//! An oracle beside the pipeline: the simplest thing that could say what becomes of a packet.

pub(crate) mod connections;
pub(crate) mod fragments;
pub(crate) mod policy;
