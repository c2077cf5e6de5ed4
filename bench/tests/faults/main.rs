//! Things go wrong, or a pod means ill: nothing passes unjudged, nobody else loses anything, and it is told by cause.
//!
//! As the system tests: the real daemon on real veths, each test with a node of its own.

mod busy_core;
mod changes;
mod clock;
#[path = "../system/fixture.rs"]
mod fixture;
mod floods;
mod floods_from_outside;
mod forged;
mod forger;
mod forgotten;
mod mutated;
mod operation;
mod paths;
mod restarts;
mod revoked;
mod rings;
mod spoofing;
mod stopped;
mod traffic;
mod waits;
