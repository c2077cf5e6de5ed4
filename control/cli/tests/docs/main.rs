//! The documentation, checked: links and anchors lead somewhere, files and tests that it names exist, and the commands
//! that it shows print what it says.
//!
//! A command that needs a node stands in a block marked `console,captured`: its output is from a real run, and is not
//! run here.

mod commands;
mod links;
mod names;
mod pages;
mod settings;
