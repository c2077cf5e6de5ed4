//! The last good configuration: the file with which a daemon got ready last. It is kept in the state directory, and takes the
//! place of one that is refused. The environment and the command line stay as they are now: a mistake in them is not hidden.

use jiff::Timestamp;

use crate::config::{ConfigErrors, ConfigLayers, LoadedConfig, TableMapping};
use crate::state_file::{Identity, StateFile, StateFileError};

const VERSION: u32 = 2;

/// Suffix of the file, after the name of the connection table's file.
pub(crate) const SUFFIX: &str = ".config";

#[derive(Clone, Debug)]
pub struct LastGood {
    pub loaded: LoadedConfig,
    /// When a daemon got ready with it.
    pub since: Timestamp,
}

/// A configuration that was refused, while the last good one is in effect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RejectedConfig {
    /// Why, one line per problem.
    pub(crate) reasons: Vec<String>,
}

/// Why there is no last good configuration, though there is a file.
#[derive(Debug, thiserror::Error)]
pub enum LastGoodError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the last good configuration is refused, too: {0}")]
    Config(#[from] ConfigErrors),
}

/// Why a file of the state directory is not used.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct FileError(#[from] StateFileError);

/// Keeps a configuration with which the daemon is ready. Does nothing without a state directory.
pub(crate) fn keep(layers: &ConfigLayers, loaded: &LoadedConfig) -> Result<(), StateFileError> {
    match StateFile::beside(&loaded.config.conntrack.mapping, SUFFIX, identity(layers)) {
        Some(file) => file.write([loaded.file.to_string().as_bytes()]),
        None => Ok(()),
    }
}

/// The last good configuration, if there is one that `layers` may be replaced by.
pub fn find(layers: &ConfigLayers) -> Result<Option<LastGood>, LastGoodError> {
    let mapping = layers.text_of(&["conntrack", "mapping"]);
    let mapping = mapping.and_then(|text| TableMapping::try_from(text).ok()).unwrap_or_default();
    let Some(file) = StateFile::beside(&mapping, SUFFIX, identity(layers)) else { return Ok(None) };
    let Some(stored) = file.read().map_err(FileError)? else { return Ok(None) };
    let loaded = layers.parse(&String::from_utf8_lossy(&stored.content))?;
    Ok(Some(LastGood { loaded, since: stored.written }))
}

/// The same file and, where the environment or the command line names it, the same node.
fn identity(layers: &ConfigLayers) -> Identity {
    let node = layers.overridden(&["node"]).unwrap_or_default();
    Identity::new("a configuration", VERSION, &node, layers.file().display().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// A configuration whose state directory is that of the file.
    fn config() -> (tempfile::TempDir, PathBuf, String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("penstock.toml");
        let mapping = directory.path().join("conntrack").display().to_string();
        let text = format!("node = \"a\"\n[source]\nmanifests = \"m\"\n[conntrack]\nmapping = \"{mapping}\"\n");
        fs::write(&path, &text).unwrap();
        (directory, path, text)
    }

    #[test]
    fn the_last_good_configuration_is_found_with_its_overrides() {
        let (directory, path, text) = config();
        let layers = ConfigLayers::new(&path, &["umem.memory=64MiB".to_owned()]).unwrap();
        assert!(find(&layers).unwrap().is_none(), "none yet");
        let good = layers.load().unwrap();
        keep(&layers, &good).unwrap();
        fs::write(&path, format!("{text}entries = \"many\"\n")).unwrap();
        assert!(layers.load().is_err());
        let found = find(&layers).unwrap().unwrap();
        assert_eq!(found.loaded, good);
        assert_eq!(found.loaded.config.umem.memory.unwrap().bytes(), 64 << 20);
        assert_eq!(found.loaded.config.source.manifests, Some(directory.path().join("m")));
    }

    #[test]
    fn no_last_good_configuration_of_another_file_or_node() {
        let (directory, path, text) = config();
        let layers = ConfigLayers::new(&path, &["node=a".to_owned()]).unwrap();
        let mut good = layers.load().unwrap();
        keep(&layers, &good).unwrap();
        let other = ConfigLayers::new(&path, &["node=b".to_owned()]).unwrap();
        let error = find(&other).unwrap_err().to_string();
        assert!(error.contains("it is of node a, not of node b"), "{error}");
        let elsewhere = directory.path().join("other.toml");
        fs::write(&elsewhere, text).unwrap();
        let error = find(&ConfigLayers::new(&elsewhere, &["node=a".to_owned()]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("penstock.toml, not "), "{error}");
        // As by a version that knew another key.
        good.file.insert("unheard_of".into(), true.into());
        keep(&layers, &good).unwrap();
        let error = find(&layers).unwrap_err().to_string();
        assert!(
            error.starts_with("the last good configuration is refused, too: ") && error.contains("unheard_of"),
            "{error}"
        );
    }
}
