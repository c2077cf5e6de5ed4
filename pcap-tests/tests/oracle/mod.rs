//! An oracle for the pipeline: the simplest model that predicts the verdict on a packet.

pub(crate) mod connections;
pub(crate) mod fragments;
pub(crate) mod policy;
pub(crate) mod services;
