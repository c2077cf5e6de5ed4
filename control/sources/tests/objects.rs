//! Objects as they are read from manifests, and the conformance cases that they hold. One test program, since each would link the
//! same.

mod as_kept;
mod cluster_conformance;
mod conformance;
mod linear;
mod manifest_directory;
mod manifest_errors;
mod manifest_forms;
mod service_objects;
