//! Where objects come from: manifests in files and directories, later the API server.
//!
//! Every source ends in the same two things: validated objects of [`model`](crate::model), and changes to them.

pub mod convert;
pub mod directory;
pub mod manifest;
