//! Layers of settings: the file, the environment over it, the command line over both.
//!
//! `PENSTOCK_NODE=worker-1` sets a top-level key, `PENSTOCK_UMEM__MEMORY=1GiB` one of a section: two underscores stand
//! for the dot. Values are parsed as TOML; anything else is text.
//!
//! Not `figment` or `config`: both name the layer of an error, but neither its line in the file.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::Config;
use super::read::{ConfigError, ConfigErrors, ConfigText, Override};

/// Prefix of environment variables.
const PREFIX: &str = "PENSTOCK_";

/// A configuration file and the settings over it; can be loaded again.
#[derive(Clone, Debug)]
pub struct ConfigLayers {
    file: PathBuf,
    overrides: Vec<Override>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct LoadedConfig {
    /// The validated settings.
    pub config: Config,
    /// All keys that are set, from any layer.
    pub values: Table,
    /// The keys of the file alone.
    pub file: Table,
}

impl ConfigLayers {
    /// The file at `path`, over it this process's environment, and over that `settings`, each `KEY=VALUE` with a dot
    /// after the section, as in `umem.memory=1GiB`.
    pub fn new(path: &Path, settings: &[String]) -> Result<Self, ConfigErrors> {
        // Names and values that are not UTF-8 cannot be settings.
        let text =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let mut environment: Vec<(String, String)> = text.collect();
        environment.sort();
        Self::with_environment(path, &environment, settings)
    }

    fn with_environment(
        path: &Path,
        environment: &[(String, String)],
        settings: &[String],
    ) -> Result<Self, ConfigErrors> {
        let mut overrides: Vec<Override> =
            environment.iter().filter_map(|(name, value)| from_environment(name, value)).collect();
        for setting in settings {
            overrides.push(from_flag(setting)?);
        }
        Ok(Self { file: path.to_owned(), overrides })
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads the file and applies the other layers.
    pub fn load(&self) -> Result<LoadedConfig, ConfigErrors> {
        let text = fs::read_to_string(&self.file)
            .map_err(|error| ConfigError::Unreadable { path: self.file.clone(), error })?;
        self.parse(&text)
    }

    /// The same for a file with this text.
    pub(crate) fn parse(&self, text: &str) -> Result<LoadedConfig, ConfigErrors> {
        let text = ConfigText { path: &self.file, text, overrides: &self.overrides };
        let file = text.table()?;
        let mut values = file.clone();
        for Override { path, value, .. } in &self.overrides {
            set(&mut values, path, value.clone());
        }
        let config = text.config(&values)?;
        Ok(LoadedConfig { config, values, file })
    }

    /// The text at a key that the environment or the command line sets.
    pub(crate) fn overridden(&self, key: &[&str]) -> Option<String> {
        let set = self.overrides.iter().rev().find(|setting| setting.path == key)?;
        set.value.as_str().map(str::to_owned)
    }

    /// The text at a key of any layer, also if other keys are wrong.
    pub(crate) fn text_of(&self, key: &[&str]) -> Option<String> {
        let in_file = || {
            let mut value: Value = fs::read_to_string(&self.file).ok()?.parse::<Table>().ok()?.into();
            for part in key {
                value = value.as_table_mut()?.remove(*part)?;
            }
            value.as_str().map(str::to_owned)
        };
        self.overridden(key).or_else(in_file)
    }

    /// The file without other layers.
    pub(super) fn file_only(path: &Path) -> Self {
        Self { file: path.to_owned(), overrides: Vec::new() }
    }
}

impl Config {
    /// Reads and validates the file at `path` alone.
    pub fn load(path: &Path) -> Result<Self, ConfigErrors> {
        ConfigLayers::file_only(path).load().map(|loaded| loaded.config)
    }

    /// Validates `text` as if read from `path`: relative paths in it start at `path`'s directory.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigErrors> {
        ConfigLayers::file_only(path).parse(text).map(|loaded| loaded.config)
    }
}

fn set(table: &mut Table, path: &[String], value: Value) {
    let Some((first, rest)) = path.split_first() else { return };
    if rest.is_empty() {
        table.insert(first.clone(), value);
        return;
    }
    let inner = table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new()));
    // A parent that is no table is reported later, by its own key; the key below it is not set.
    if let Value::Table(inner) = inner {
        set(inner, rest, value);
    }
}

/// Each variable with the prefix is a setting, except those that a kubelet sets in each pod for a Service with such a name.
fn from_environment(name: &str, value: &str) -> Option<Override> {
    let key = name.strip_prefix(PREFIX)?.to_ascii_lowercase();
    let path: Vec<String> = key.split("__").map(str::to_owned).collect();
    (!is_service_link(&key)).then(|| Override { origin: name.to_owned(), path, value: parse_value(value) })
}

/// Whether a kubelet names a variable like this: `PENSTOCK_SERVICE_HOST`, `PENSTOCK_SERVICE_PORT_HTTP`, `PENSTOCK_PORT`,
/// `PENSTOCK_PORT_9469_TCP_ADDR` (pkg/kubelet/envvars/envvars.go).
fn is_service_link(key: &str) -> bool {
    let key = format!("_{key}");
    let of_port = key.rsplit_once("_port_").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()));
    key.ends_with("_service_host") || key.contains("_service_port") || key.ends_with("_port") || of_port
}

fn from_flag(setting: &str) -> Result<Override, ConfigError> {
    let wrong = || ConfigError::Overridden {
        origin: format!("--set {setting}"),
        what: "not KEY=VALUE; write it such as umem.memory=1GiB".to_owned(),
    };
    let (key, value) = setting.split_once('=').ok_or_else(wrong)?;
    let path: Vec<String> = key.trim().split('.').map(str::to_owned).collect();
    if path.iter().any(String::is_empty) {
        return Err(wrong());
    }
    Ok(Override { origin: format!("--set {key}"), path, value: parse_value(value.trim()) })
}

/// Parses TOML; anything else is text.
fn parse_value(text: &str) -> Value {
    #[derive(Deserialize)]
    struct Document {
        v: Value,
    }
    match toml::from_str::<Document>(&format!("v = {text}")) {
        // Not TOML if more than one value was written, or a date, which no key takes.
        Ok(Document { v }) if !text.contains('\n') && !matches!(v, Value::Datetime(_)) => v,
        _ => Value::String(text.to_owned()),
    }
}

/// The keys whose values differ, from the top level down with dots.
pub fn changed_keys(one: &Table, other: &Table) -> Vec<String> {
    let mut found = Vec::new();
    let mut names: Vec<&String> = one.keys().chain(other.keys()).collect();
    names.sort();
    names.dedup();
    let empty = Table::new();
    for name in names {
        match (one.get(name), other.get(name)) {
            (Some(Value::Table(one)), Some(Value::Table(other))) => found.extend(below(name, one, other)),
            (Some(Value::Table(one)), None) => found.extend(below(name, one, &empty)),
            (None, Some(Value::Table(other))) => found.extend(below(name, &empty, other)),
            (one, other) if one != other => found.push(name.clone()),
            _ => {}
        }
    }
    found
}

fn below(name: &str, one: &Table, other: &Table) -> Vec<String> {
    changed_keys(one, other).into_iter().map(|key| format!("{name}.{key}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "node = \"a\"\n[source]\nmanifests = \"/m\"\n[conntrack]\nentries = 2048\n[log]\nlevel = \"warn\"\n";

    fn load(environment: &[(&str, &str)], settings: &[&str]) -> Result<LoadedConfig, ConfigErrors> {
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        ConfigLayers::with_environment(Path::new("/etc/p.toml"), &environment, &settings)?.parse(FILE)
    }

    #[test]
    fn the_environment_overrides_the_file_and_flags_override_both() {
        let environment = [
            ("PENSTOCK_NODE", "worker-1.example"),
            ("PENSTOCK_CONNTRACK__ENTRIES", "4096"),
            ("PENSTOCK_CONNTRACK__TIMEOUTS__UDP_TIMEOUT", "7s"),
            ("PENSTOCK_WORKERS__CORES", "[0, 2]"),
            ("PENSTOCK_LOG__LEVEL", "debug"),
            ("PENSTOCK_SERVICE_HOST", "10.0.0.1"),
            ("PENSTOCK_SERVICE_PORT_HTTP", "80"),
            ("PENSTOCK_PORT", "tcp://10.0.0.1:80"),
            ("PENSTOCK_METRICS_PORT_9469_TCP_ADDR", "10.0.0.1"),
            ("HOME", "/root"),
        ];
        let config = load(&environment, &["log.level=error", "umem.memory = 64MiB"]).unwrap().config;
        assert_eq!(config.node.as_str(), "worker-1.example");
        assert_eq!(config.conntrack.entries, 4096);
        assert_eq!(config.conntrack.timeouts["udp_timeout"].duration().as_secs(), 7);
        assert_eq!(config.workers.cores.unwrap().numbers(), [0, 2]);
        assert_eq!(config.log.level, super::super::LogLevel::Error);
        assert_eq!(config.umem.memory.unwrap().bytes(), 64 << 20);
        assert_eq!(
            config.source.manifests.as_deref(),
            Some(Path::new("/m")),
            "keys of the file stay unless overridden"
        );
    }

    #[test]
    fn an_error_names_the_layer_that_set_the_value() {
        for (environment, settings, expected) in [
            (
                &[("PENSTOCK_CONNTRACK__ENTRIES", "3")][..],
                &[][..],
                "PENSTOCK_CONNTRACK__ENTRIES: conntrack.entries = 3: too few; set at least 1024",
            ),
            (
                &[("PENSTOCK_UMEM__SIZE", "3")],
                &[],
                "PENSTOCK_UMEM__SIZE: umem.size: unknown key; remove it, or use one of",
            ),
            (&[("PENSTOCK_NOWHERE__SIZE", "3")], &[], "PENSTOCK_NOWHERE__SIZE: nowhere: unknown key; remove it"),
            (&[("PENSTOCK_NODENAME", "b")], &[], "PENSTOCK_NODENAME: nodename: unknown key; remove it"),
            (&[("PENSTOCK_UMEM_MEMORY", "1GiB")], &[], "PENSTOCK_UMEM_MEMORY: umem_memory: unknown key; remove it"),
            (&[], &["log.level=loud"], "--set log.level: log.level = \"loud\": unknown value; use one of \"error\""),
            (&[], &["log.level"], "--set log.level: not KEY=VALUE; write it such as"),
            (&[], &["=3"], "--set =3: not KEY=VALUE; write it such as"),
            (&[], &["workers.cores=[1, 1]"], "--set workers.cores: workers.cores = [1, 1]: core 1 is listed twice"),
        ] {
            let error = load(environment, settings).unwrap_err().to_string();
            assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
        }
        // Errors in the file name its line, also if other layers set other keys.
        let layers =
            ConfigLayers::with_environment(Path::new("/etc/p.toml"), &[("PENSTOCK_NODE".into(), "b".into())], &[])
                .unwrap();
        let error = layers.parse(&FILE.replace("2048", "7")).unwrap_err().to_string();
        assert!(error.starts_with("/etc/p.toml:5: conntrack.entries = 7: too few"), "{error}");
    }

    #[test]
    fn changed_keys_are_listed() {
        let table = |text: &str| text.parse::<Table>().unwrap();
        let one = table("node = \"a\"\n[log]\nlevel = \"info\"\n[umem]\nmemory = \"1GiB\"\n");
        let other = table("node = \"a\"\npod_bridges = [\"br0\"]\n[log]\nlevel = \"debug\"\n");
        assert_eq!(changed_keys(&one, &other), ["log.level", "pod_bridges", "umem.memory"]);
        assert!(changed_keys(&one, &one).is_empty());
    }
}
