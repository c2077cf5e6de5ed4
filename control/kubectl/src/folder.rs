//! Folders with a part for each node.

use std::fs;
use std::path::Path;

use super::Failure;

/// Creates a folder, or takes one that is empty.
pub(super) fn create(directory: &Path) -> Result<(), Failure> {
    let name = directory.display();
    fs::create_dir_all(directory)
        .map_err(|error| Failure::bad_input(format!("{name}: cannot be created ({error}); give another folder")))?;
    let mut entries = fs::read_dir(directory)
        .map_err(|error| Failure::bad_input(format!("{name}: cannot be read ({error}); give another folder")))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(Failure::bad_input(format!("{name}: has files already; give an empty or a new folder"))),
    }
}

/// A node's name as the name of a folder: a DNS subdomain in Kubernetes.
pub(super) fn name_of(node: &str) -> Result<&str, String> {
    let is_plain = node.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte));
    match is_plain && !node.is_empty() && !node.starts_with('.') {
        true => Ok(node),
        false => Err(format!("node {node:?}: no name for a folder; leave it out with --node")),
    }
}
