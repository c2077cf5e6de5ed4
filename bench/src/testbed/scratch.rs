//! Directories that are removed when they are dropped.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cleanup::CleanupGuard;

pub struct ScratchDir {
    path: PathBuf,
    _guard: CleanupGuard,
}

impl ScratchDir {
    pub fn new() -> Result<Self> {
        Self::made(tempfile::Builder::new().prefix("penstock-").tempdir()?)
    }

    /// Makes an empty directory in memory, where the machine has a place for it: what a measurement writes must not wait for a
    /// disk, and must not cost its cores what a disk costs.
    pub fn in_memory() -> Result<Self> {
        const MEMORY: &str = "/dev/shm";
        match tempfile::Builder::new().prefix("penstock-").tempdir_in(MEMORY) {
            Ok(directory) => Self::made(directory),
            Err(_) => Self::new(),
        }
    }

    fn made(directory: tempfile::TempDir) -> Result<Self> {
        let path = directory.keep();
        let guard = CleanupGuard::new({
            let path = path.clone();
            // Errors are ignored: what remains is in a directory for temporary files.
            move || drop(fs::remove_dir_all(path))
        });
        Ok(Self { path, _guard: guard })
    }

    /// Copies all files of `source` into the subdirectory `name` and returns the subdirectory's path.
    pub fn copy_in(&self, source: &Path, name: &str) -> Result<PathBuf> {
        let target = self.path.join(name);
        fs::create_dir(&target)?;
        for entry in fs::read_dir(source).with_context(|| format!("cannot read the directory {}", source.display()))? {
            let path = entry?.path();
            let file = path.file_name().with_context(|| format!("{} has no name", path.display()))?;
            fs::copy(&path, target.join(file)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
        Ok(target)
    }

    /// Replaces a file atomically: writes the new content beside it, then renames it.
    ///
    /// The new file is written in this directory, so that a watched subdirectory only sees the rename.
    pub fn save(&self, file: &Path, content: &str) -> Result<()> {
        let new = self.path.join("being-saved");
        fs::write(&new, content)?;
        fs::rename(&new, file).with_context(|| format!("cannot save {}", file.display()))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}
