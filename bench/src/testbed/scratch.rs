//! Directories that go when they are dropped.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cleanup::Guard;

/// A temporary directory of this process.
pub struct Scratch {
    path: PathBuf,
    _guard: Guard,
}

impl Scratch {
    /// Makes an empty one.
    pub fn new() -> Result<Self> {
        let path = tempfile::Builder::new().prefix("penstock-").tempdir()?.keep();
        let guard = Guard::new({
            let path = path.clone();
            // What cannot be removed from the temporary directory is left to whoever cleans that.
            move || drop(fs::remove_dir_all(path))
        });
        Ok(Self { path, _guard: guard })
    }

    /// Makes one with a copy of all files of `source` in the subdirectory `name`, and returns the latter's path.
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

    /// Replaces a file at once, as a careful editor saves: written beside it in full, then renamed.
    ///
    /// The new content is written in this directory itself, so that a watched subdirectory sees the rename alone.
    pub fn save(&self, file: &Path, content: &str) -> Result<()> {
        let new = self.path.join("being-saved");
        fs::write(&new, content)?;
        fs::rename(&new, file).with_context(|| format!("cannot save {}", file.display()))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
