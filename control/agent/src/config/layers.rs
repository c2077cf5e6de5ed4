//! Where a setting can come from: the file, then the environment over it, then the command line over that.
//!
//! `PENSTOCK_NODE=worker-1` sets a key of the top level, `PENSTOCK_UMEM__MEMORY=1GiB` one of a section: two underscores
//! stand for the dot. A value is read as TOML, and where it is none, as text.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::read::{ConfigError, Override, Text};
use super::{Config, KEYS};

/// What variables of the environment begin with.
const PREFIX: &str = "PENSTOCK_";

/// A configuration's file and what is set over it; can be read again.
#[derive(Clone, Debug)]
pub struct Layers {
    file: PathBuf,
    overrides: Vec<Override>,
}

/// A configuration that was read.
#[derive(Clone, PartialEq, Debug)]
pub struct Loaded {
    /// The checked settings.
    pub config: Config,
    /// All keys that are set, wherever.
    pub values: Table,
}

impl Layers {
    /// The file at `path`; over it this process's environment, and over that `settings`, each `KEY=VALUE` with sections
    /// before a dot, as in `umem.memory=1GiB`.
    pub fn new(path: &Path, settings: &[String]) -> Result<Self, ConfigError> {
        // What is no text cannot name a key.
        let text =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let mut environment: Vec<(String, String)> = text.collect();
        environment.sort();
        Self::over(path, &environment, settings)
    }

    fn over(path: &Path, environment: &[(String, String)], settings: &[String]) -> Result<Self, ConfigError> {
        let mut overrides: Vec<Override> =
            environment.iter().filter_map(|(name, value)| from_environment(name, value)).collect();
        for setting in settings {
            overrides.push(from_flag(setting)?);
        }
        Ok(Self { file: path.to_owned(), overrides })
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Reads the file, and sets over it what is to be set.
    pub fn load(&self) -> Result<Loaded, ConfigError> {
        let text = fs::read_to_string(&self.file)
            .map_err(|error| ConfigError::Unreadable { path: self.file.clone(), error })?;
        self.parse(&text)
    }

    /// The same of a file with this text.
    pub(super) fn parse(&self, text: &str) -> Result<Loaded, ConfigError> {
        let text = Text { path: &self.file, text, overrides: &self.overrides };
        let mut values = text.table()?;
        for Override { path, value, .. } in &self.overrides {
            set(&mut values, path, value.clone());
        }
        let config = text.config(&values)?;
        Ok(Loaded { config, values })
    }

    /// Without anything set over the file.
    pub(super) fn none(path: &Path) -> Self {
        Self { file: path.to_owned(), overrides: Vec::new() }
    }
}

impl Config {
    /// Reads and validates the file at `path`, and nothing else.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Layers::none(path).load().map(|loaded| loaded.config)
    }

    /// Validates `text`, which is said to come from `path`: relative paths in it start at `path`'s directory.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        Layers::none(path).parse(text).map(|loaded| loaded.config)
    }
}

fn set(table: &mut Table, path: &[String], value: Value) {
    let Some((first, rest)) = path.split_first() else { return };
    if rest.is_empty() {
        table.insert(first.clone(), value);
        return;
    }
    let inner = table.entry(first.clone()).or_insert_with(|| Value::Table(Table::new()));
    // What is no table here will be refused as what it is; the key below it goes with it.
    if let Value::Table(inner) = inner {
        set(inner, rest, value);
    }
}

/// A variable is a setting if it has a section, or names a key of the top level. All else that begins like one is
/// somebody else's: a cluster sets `PENSTOCK_PORT` and the like in pods beside a Service of that name.
fn from_environment(name: &str, value: &str) -> Option<Override> {
    let key = name.strip_prefix(PREFIX)?.to_ascii_lowercase();
    let path: Vec<String> = key.split("__").map(str::to_owned).collect();
    let known = path.iter().all(|part| !part.is_empty()) && (path.len() > 1 || KEYS.contains(&key.as_str()));
    known.then(|| Override { origin: name.to_owned(), path, value: value_of(value) })
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
    Ok(Override { origin: format!("--set {key}"), path, value: value_of(value.trim()) })
}

/// As TOML where it is TOML, else as it stands.
fn value_of(text: &str) -> Value {
    #[derive(Deserialize)]
    struct One {
        v: Value,
    }
    match toml::from_str::<One>(&format!("v = {text}")) {
        // More than a value was written, or a date, which no key takes.
        Ok(One { v }) if !text.contains('\n') && !matches!(v, Value::Datetime(_)) => v,
        _ => Value::String(text.to_owned()),
    }
}

/// The keys whose values differ, each from the top level down with dots.
pub fn differences(one: &Table, other: &Table) -> Vec<String> {
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
    differences(one, other).into_iter().map(|key| format!("{name}.{key}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "node = \"a\"\n[source]\nmanifests = \"/m\"\n[conntrack]\nentries = 2048\n[log]\nlevel = \"warn\"\n";

    fn load(environment: &[(&str, &str)], settings: &[&str]) -> Result<Loaded, ConfigError> {
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        Layers::over(Path::new("/etc/p.toml"), &environment, &settings)?.parse(FILE)
    }

    #[test]
    fn the_environment_goes_over_the_file_and_flags_over_both() {
        let environment = [
            ("PENSTOCK_NODE", "worker-1.example"),
            ("PENSTOCK_CONNTRACK__ENTRIES", "4096"),
            ("PENSTOCK_CONNTRACK__TIMEOUTS__UDP_TIMEOUT", "7s"),
            ("PENSTOCK_WORKERS__CORES", "[0, 2]"),
            ("PENSTOCK_LOG__LEVEL", "debug"),
            ("PENSTOCK_SERVICE_HOST", "10.0.0.1"),
            ("PENSTOCK_BIN", "/bin/penstock"),
            ("HOME", "/root"),
        ];
        let config = load(&environment, &["log.level=error", "umem.memory = 64MiB"]).unwrap().config;
        assert_eq!(config.node.as_str(), "worker-1.example");
        assert_eq!(config.conntrack.entries, 4096);
        assert_eq!(config.conntrack.timeouts["udp_timeout"].duration().as_secs(), 7);
        assert_eq!(config.workers.cores.unwrap().numbers(), [0, 2]);
        assert_eq!(config.log.level, super::super::LogLevel::Error);
        assert_eq!(config.umem.memory.unwrap().octets(), 64 << 20);
        assert_eq!(config.source.manifests.as_deref(), Some(Path::new("/m")), "what nothing is set over stays");
    }

    #[test]
    fn a_bad_value_is_told_with_where_it_was_set() {
        for (environment, settings, told) in [
            (
                &[("PENSTOCK_CONNTRACK__ENTRIES", "3")][..],
                &[][..],
                "PENSTOCK_CONNTRACK__ENTRIES: conntrack.entries = 3: too few; give at least 1024",
            ),
            (
                &[("PENSTOCK_UMEM__SIZE", "3")],
                &[],
                "PENSTOCK_UMEM__SIZE: umem.size: unknown key; take it out, or use one of",
            ),
            (&[("PENSTOCK_NOWHERE__SIZE", "3")], &[], "PENSTOCK_NOWHERE__SIZE: nowhere: unknown key; take it out"),
            (&[], &["log.level=loud"], "--set log.level: log.level = \"loud\": not known; use one of \"error\""),
            (&[], &["log.level"], "--set log.level: not KEY=VALUE; write it such as"),
            (&[], &["=3"], "--set =3: not KEY=VALUE; write it such as"),
            (&[], &["workers.cores=[1, 1]"], "--set workers.cores: workers.cores = [1, 1]: core 1 is named twice"),
        ] {
            let error = load(environment, settings).unwrap_err().to_string();
            assert!(error.starts_with(told) && !error.contains('\n'), "{error}");
        }
        // What the file says wrong is told by its line, also where other keys are set over it.
        let layers = Layers::over(Path::new("/etc/p.toml"), &[("PENSTOCK_NODE".into(), "b".into())], &[]).unwrap();
        let error = layers.parse(&FILE.replace("2048", "7")).unwrap_err().to_string();
        assert!(error.starts_with("/etc/p.toml:5: conntrack.entries = 7: too few"), "{error}");
    }

    #[test]
    fn differences_are_named_by_key() {
        let table = |text: &str| text.parse::<Table>().unwrap();
        let one = table("node = \"a\"\n[log]\nlevel = \"info\"\n[umem]\nmemory = \"1GiB\"\n");
        let other = table("node = \"a\"\nuplinks = [\"eth0\"]\n[log]\nlevel = \"debug\"\n");
        assert_eq!(differences(&one, &other), ["log.level", "umem.memory", "uplinks"]);
        assert!(differences(&one, &one).is_empty());
    }
}
