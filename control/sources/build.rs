//! Finds the conformance cases, which are not part of the project: tests that need them are ignored where they are not.
//!
//! Sets `CONFORMANCE_DATA` to their folder, `PENSTOCK_CONFORMANCE` or `../shared/conformance` beside the repository, and
//! `conformance_data` if it is there. Also the build script of `penstock-bench`.

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=PENSTOCK_CONFORMANCE");
    println!("cargo::rustc-check-cfg=cfg(conformance_data)");
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let repository = package.ancestors().find(|folder| folder.join("Cargo.lock").exists()).expect("a workspace");
    let beside = repository.parent().unwrap_or(Path::new("/")).join("shared/conformance");
    let folder = env::var_os("PENSTOCK_CONFORMANCE").map_or(beside, PathBuf::from);
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rustc-env=CONFORMANCE_DATA={}", folder.display());
    if folder.is_dir() {
        println!("cargo::rustc-cfg=conformance_data");
    }
}
