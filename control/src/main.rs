//! The `penstock` command.

fn main() {}
