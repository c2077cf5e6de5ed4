//! Parses a file's text into a [`Config`], and finds the line of an error.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use penstock_dataplane::conntrack::Timeouts;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::values::{InvalidValue, invalid};
use super::workers::MIN_FRAMES;
use super::{Config, Fail, FailMode, MIN_CONNECTIONS, OnExit, Source};

/// All mistakes of a configuration that cannot be used.
#[derive(Debug)]
pub struct ConfigErrors(Vec<ConfigError>);

impl ConfigErrors {
    /// Each mistake in a line.
    pub fn lines(&self) -> Vec<String> {
        self.0.iter().map(ToString::to_string).collect()
    }
}

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        Self(vec![error])
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("; "))
    }
}

impl Error for ConfigErrors {}

/// A mistake in a configuration. One line: file, line, key, value, remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read it ({error}); give --config a readable file", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        error: std::io::Error,
    },
    /// A key that is set over the file is wrong.
    #[error("{origin}: {what}")]
    Overridden {
        /// The variable or the flag.
        origin: String,
        /// Key, value and remedy.
        what: String,
    },
    /// A key of the file, or its value, is wrong.
    #[error("{}:{line}: {what}", .path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Key, value and remedy.
        what: String,
    },
}

impl ConfigError {
    /// Its line in the file; none of a key over the file.
    fn line(&self) -> Option<usize> {
        match self {
            Self::Wrong { line, .. } => Some(*line),
            Self::Unreadable { .. } | Self::Overridden { .. } => None,
        }
    }
}

/// A key's path, and why its value does not fit.
type Unfit<'a> = (Vec<&'a str>, InvalidValue);

struct KeyError {
    /// The key, from the top level down with dots; empty for the whole file.
    key: String,
    what: String,
}

impl Config {
    /// The keys whose values do not fit each other.
    fn unfit(&self) -> impl Iterator<Item = Unfit<'_>> {
        self.unfit_source().into_iter().chain(self.unfit_sizes()).chain(self.unfit_fail())
    }

    fn unfit_source(&self) -> Option<Unfit<'_>> {
        let Source { manifests, kubeconfig, in_cluster, startup_taint } = &self.source;
        let given =
            [("manifests", manifests.is_some()), ("kubeconfig", kubeconfig.is_some()), ("in_cluster", *in_cluster)];
        let mut given = given.into_iter().filter_map(|(key, is_given)| is_given.then_some(key));
        let (key, why) = match (given.next(), given.next()) {
            (None, _) => {
                return Some((vec!["source"], invalid!("no source; set manifests, kubeconfig or in_cluster = true")));
            }
            (Some(one), Some(two)) => (two, invalid!("source.{one} is also set; remove one of the two")),
            (Some("manifests"), None) if startup_taint.is_some() => {
                ("startup_taint", invalid!("manifests have no Node to change; remove it, or follow an API server"))
            }
            (Some(_), None) => return None,
        };
        Some((vec!["source", key], why))
    }

    fn unfit_sizes(&self) -> Vec<Unfit<'_>> {
        let mut found = Vec::new();
        if self.umem.frame_count() < MIN_FRAMES {
            let least = (MIN_FRAMES * self.umem.frame_size.bytes()) >> 20;
            found.push((vec!["umem", "memory"], invalid!("too little for the rings; set at least \"{least}MiB\"")));
        }
        if self.conntrack.entries < MIN_CONNECTIONS {
            found.push((vec!["conntrack", "entries"], invalid!("too few; set at least {MIN_CONNECTIONS}")));
        }
        for name in self.conntrack.timeouts.keys().filter(|name| !Timeouts::NAMES.contains(&name.as_str())) {
            let why = invalid!("unknown timeout; use one of: {}", Timeouts::NAMES.join(", "));
            found.push((vec!["conntrack", "timeouts", name], why));
        }
        found.extend(self.flow_records.inconsistent().map(|(key, why)| (vec!["flow_records", key], why)));
        found
    }

    fn unfit_fail(&self) -> impl Iterator<Item = Unfit<'_>> {
        let Fail { mode, on_exit, repeat_answers, .. } = &self.fail;
        let keeps_nothing = *mode == FailMode::Open && *on_exit == OnExit::Keep;
        let keeps_nothing = keeps_nothing.then(|| {
            (vec!["fail", "on_exit"], invalid!("nothing is kept with fail.mode = \"open\"; remove one of them"))
        });
        let is_long = repeat_answers.duration() > Fail::LONGEST_REPEATS;
        let is_long = is_long.then(|| (vec!["fail", "repeat_answers"], invalid!("too long; set at most \"5d\"")));
        keeps_nothing.into_iter().chain(is_long)
    }
}

/// A key that is set over the file.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Override {
    /// The variable or the flag, as the user wrote it.
    pub(super) origin: String,
    /// The key's path, from the top level down.
    pub(super) path: Vec<String>,
    pub(super) value: Value,
}

/// A file's text and the settings over it.
pub(super) struct ConfigText<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
    pub(super) overrides: &'a [Override],
}

impl ConfigText<'_> {
    /// The keys of the file.
    pub(super) fn table(&self) -> Result<Table, ConfigError> {
        self.text.parse::<Table>().map_err(|error| ConfigError::Wrong {
            path: self.path.to_owned(),
            line: self.line_of(error.span().map_or(0, |at| at.start)),
            what: format!("not TOML: {}; correct the syntax", one_line(error.message())),
        })
    }

    /// Parses and validates `values`: the file's keys with the settings over them.
    pub(super) fn config(&self, values: &Table) -> Result<Config, ConfigErrors> {
        let (mut found, mut left) = (Vec::<KeyError>::new(), values.clone());
        // A key that is wrong is taken out, so that the next mistake is found.
        let read = loop {
            match read(&left) {
                Ok(config) => break Some(config),
                Err(problem) => {
                    let is_known = found.iter().any(|known| known.key == problem.key);
                    let goes_on = !is_known && take_out(&mut left, &problem.key);
                    found.extend((!is_known).then_some(problem));
                    if !goes_on {
                        break None;
                    }
                }
            }
        };
        if let Some(config) = &read {
            // A section with such a mistake lacks the key.
            let is_whole =
                |key: &[&str]| !found.iter().any(|known| known.key.split('.').next() == key.first().copied());
            let unfit = config.unfit().filter(|(key, _)| is_whole(key));
            found.extend(unfit.map(|(key, why)| key_error(values, &key, &why.to_string())).collect::<Vec<_>>());
        }
        match read {
            Some(mut config) if found.is_empty() => {
                config.start_paths_at(self.path.parent().unwrap_or(Path::new("")));
                Ok(config)
            }
            _ => {
                let mut errors: Vec<ConfigError> = found.into_iter().map(|problem| self.locate(problem)).collect();
                errors.sort_by_key(ConfigError::line);
                Err(ConfigErrors(errors))
            }
        }
    }

    /// Adds where the key was set: by a variable or a flag, or in a line of the file.
    fn locate(&self, problem: KeyError) -> ConfigError {
        let KeyError { key, what } = problem;
        let sets = |set: &&Override| {
            let path = set.path.join(".");
            path == key
                || key.starts_with(&format!("{path}."))
                || !key.is_empty() && path.starts_with(&format!("{key}."))
        };
        let set = self.overrides.iter().rev().find(sets);
        match (self.offset_of(&key), set) {
            // Both have the section: the file is reported, unless the variable sets this very key.
            (None, Some(set)) => ConfigError::Overridden { origin: set.origin.clone(), what },
            (_, Some(set)) if set.path.join(".") == key => ConfigError::Overridden { origin: set.origin.clone(), what },
            (at, _) => ConfigError::Wrong { path: self.path.to_owned(), line: self.line_of(at.unwrap_or(0)), what },
        }
    }

    fn line_of(&self, offset: usize) -> usize {
        1 + self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
    }

    /// The offset in the text of this key, or of its nearest parent.
    fn offset_of(&self, key: &str) -> Option<usize> {
        let mut table = DeTable::parse(self.text).ok()?.into_inner();
        let mut found = None;
        for part in key.split('.') {
            let part = part.split('[').next().unwrap_or(part);
            let Some((name, value)) = table.remove_entry(part) else { return found };
            found = Some(value.span().start);
            table = match value.into_inner() {
                DeValue::Table(inner) => inner,
                _ => return Some(name.span().start),
            };
        }
        found
    }
}

fn read(values: &Table) -> Result<Config, KeyError> {
    serde_path_to_error::deserialize(Value::Table(values.clone())).map_err(|error| {
        let key = error.path().to_string();
        let key = if key == "." { String::new() } else { key };
        from_serde(values, key, error.into_inner().message())
    })
}

/// Removes a key whose value is wrong; a required one gets a value that is right. Returns whether there was anything to change.
fn take_out(values: &mut Table, key: &str) -> bool {
    match key {
        "node" => drop(values.insert(key.to_owned(), "node".into())),
        "source" => {
            drop(values.insert(key.to_owned(), Table::from_iter([("in_cluster".to_owned(), true.into())]).into()))
        }
        _ => {
            let key = key.split('[').next().unwrap_or(key);
            let (section, name) = key.rsplit_once('.').map_or((None, key), |(section, name)| (Some(section), name));
            let sections = section.into_iter().flat_map(|section| section.split('.'));
            let table = sections.into_iter().try_fold(values, |table, name| table.get_mut(name)?.as_table_mut());
            return table.and_then(|table| table.remove(name)).is_some();
        }
    }
    true
}

/// The error of a key that serde rejected.
fn from_serde(values: &Table, key: String, message: &str) -> KeyError {
    let message = one_line(message);
    if let Some(rest) = message.strip_prefix("unknown field ") {
        let (name, known) = rest.split_once(", ").unwrap_or((rest, "no key is allowed here"));
        let known = known.trim_start_matches("expected ").trim_start_matches("one of ").replace('`', "");
        let name = name.trim_matches('`');
        let parent = key.strip_suffix(name).unwrap_or(&key).trim_end_matches('.');
        let key = if parent.is_empty() { name.to_owned() } else { format!("{parent}.{name}") };
        return KeyError { what: format!("{key}: unknown key; remove it, or use one of: {known}"), key };
    }
    if let Some(name) = message.strip_prefix("missing field ") {
        let dot = if key.is_empty() { "" } else { "." };
        let key = format!("{key}{dot}{}", name.trim_matches('`'));
        return KeyError { what: format!("{key}: missing; add this key"), key };
    }
    let message = message
        .strip_prefix("unknown variant ")
        .and_then(|rest| rest.split_once(", expected "))
        .map(|(_, known)| format!("unknown value; use {}", known.replace('`', "\"")))
        .unwrap_or_else(|| message.clone());
    let value = value_at(values, &key).map_or_else(String::new, |value| one_line(&value.to_string()));
    KeyError { what: format!("{key} = {value}: {message}"), key }
}

/// The error `why` of a key that is set, or has its default.
fn key_error(values: &Table, key: &[&str], why: &str) -> KeyError {
    let key = key.join(".");
    let what = match value_at(values, &key) {
        Some(Value::Table(_)) => format!("{key}: {why}"),
        Some(value) => format!("{key} = {}: {why}", one_line(&value.to_string())),
        None => format!("{key} (default): {why}"),
    };
    KeyError { key, what }
}

/// The value of a key such as `node_addresses[0]` or `conntrack.timeouts.udp_timeout`.
fn value_at<'a>(values: &'a Table, key: &str) -> Option<&'a Value> {
    let mut parts = key.split('.');
    let mut found = named(values, parts.next()?)?;
    for part in parts {
        found = named(found.as_table()?, part)?;
    }
    Some(found)
}

/// The value of one part of a key, which may end in an index.
fn named<'a>(table: &'a Table, part: &str) -> Option<&'a Value> {
    match part.split_once('[') {
        None => table.get(part),
        Some((name, index)) => table.get(name)?.as_array()?.get(index.trim_end_matches(']').parse::<usize>().ok()?),
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;

    const LEAST: &str = "node = \"worker-1\"\n[source]\nmanifests = \"manifests\"\n";

    fn parse(text: &str) -> Result<Config, ConfigErrors> {
        Config::parse(text, Path::new("/etc/penstock/penstock.toml"))
    }

    #[test]
    fn each_bad_key_is_one_line_with_place_value_and_remedy() {
        let cases = [
            ("", ":1: node: missing; add this key"),
            ("node = \"a\"\n", ":1: source: missing; add this key"),
            ("node = \"a\"\n[source]\n", ":2: source: no source; set manifests, kubeconfig or in_cluster"),
            (
                "node = \"a\"\n[source]\nmanifests = \"m\"\nin_cluster = true\n",
                ":4: source.in_cluster = true: source.manifests is also set; remove one of the two",
            ),
            (
                "node = \"a\"\n[source]\nin_cluster = true\nstartup_taint = \"no key\"\n",
                ":4: source.startup_taint = \"no key\": not the key of a taint; set one such as penstock.dev/not-ready",
            ),
            (
                "node = \"a\"\n[source]\nmanifests = \"m\"\nstartup_taint = \"penstock.dev/not-ready\"\n",
                ":4: source.startup_taint = \"penstock.dev/not-ready\": manifests have no Node to change; remove it, or follow",
            ),
            ("node = \"a\n", ":1: not TOML: "),
            ("node = \"Worker_1\"\n", ":1: node = \"Worker_1\": not a node's name; set the metadata.name"),
            ("\nnode = 7\n", ":2: node = 7: invalid type: integer `7`, expected a string"),
            (
                "nod = \"a\"\n",
                ":1: nod: unknown key; remove it, or use one of: node, node_addresses, service_cidrs, offload",
            ),
        ];
        let with_least = [
            ("[workers]\ncorse = [1]\n", ":5: workers.corse: unknown key; remove it, or use one of: cores or priority"),
            ("[workers]\ncores = []\n", ":5: workers.cores = []: no core; list at least one"),
            ("[workers]\ncores = [1, 2,\n 1]\n", ":5: workers.cores = [1, 2, 1]: core 1 is listed twice"),
            ("[workers]\ncores = [-1]\n", ":5: workers.cores[0] = -1: invalid value: integer `-1`, expected u16"),
            (
                "[workers]\npriority = \"auto\"\n",
                ":5: workers.priority = \"auto\": unknown value; use \"nice\" or \"realtime\"",
            ),
            (
                "[fail]\nrepeat_answers = \"5 parsecs\"\n",
                ":5: fail.repeat_answers = \"5 parsecs\": not a length of time; write",
            ),
            ("[umem]\nframe_size = 3000\n", ":5: umem.frame_size = 3000: frames have 2048 or 4096 bytes"),
            ("[umem]\nmemory = \"lots\"\n", ":5: umem.memory = \"lots\": not an amount of memory; write"),
            (
                "[umem]\nmemory = \"1MiB\"\n",
                ":5: umem.memory = \"1MiB\": too little for the rings; set at least \"8MiB\"",
            ),
            ("[conntrack]\nentries = 3\n", ":5: conntrack.entries = 3: too few; set at least 1024"),
            (
                "[conntrack]\non_revoke = \"reject\"\n",
                ":5: conntrack.on_revoke = \"reject\": unknown value; use \"drop\" or \"reset\"",
            ),
            (
                "[conntrack]\nmapping = \"here\"\n",
                ":5: conntrack.mapping = \"here\": not an absolute path of a file; set one on a tmpfs, or \"off\"",
            ),
            ("[log]\nlevel = \"loud\"\n", ":5: log.level = \"loud\": unknown value; use one of \"error\", \"warn\""),
            ("[admin]\nsocket = \"\"\n", ":5: admin.socket = \"\": no path; set one, or \"off\""),
            ("[capture]\nsocket = \"\"\n", ":5: capture.socket = \"\": no path; set one, or \"off\""),
            ("[deny]\nanswer = \"drop\"\n", ":5: deny.answer = \"drop\": unknown value; use \"none\" or \"reject\""),
            ("[metrics]\nlisten = \"9469\"\n", ":5: metrics.listen = \"9469\": not an address with a port; write"),
            ("[verdict_log]\noutput = \"\"\n", ":5: verdict_log.output = \"\": no file; set its path"),
        ];
        let before = [
            ("startup = \"shrug\"\n", ":1: startup = \"shrug\": unknown value; use \"closed\" or \"open\""),
            (
                "pod_interfaces = [\"*\"]\n",
                ":1: pod_interfaces[0] = \"*\": not an interface name or pattern; set a name, or",
            ),
            (
                "service_cidrs = [\"10.96.0.0/33\"]\n",
                ":1: service_cidrs[0] = \"10.96.0.0/33\": invalid IP address syntax",
            ),
            ("node_addresses = [\"10.0.0.300\"]\n", ":1: node_addresses[0] = \"10.0.0.300\": invalid IP address"),
        ];
        let all = cases.map(|(text, line)| (text.to_owned(), line)).into_iter();
        let all = all.chain(with_least.map(|(text, line)| (format!("{LEAST}{text}"), line)));
        for (text, expected) in all.chain(before.map(|(text, line)| (format!("{text}{LEAST}"), line))) {
            let errors = parse(&text).expect_err(&text).lines();
            let full = format!("/etc/penstock/penstock.toml{expected}");
            assert!(
                errors.iter().any(|error| error.starts_with(&full)),
                "{text}\n got      {errors:?}\n expected {full}"
            );
            assert!(errors.iter().all(|error| !error.contains('\n')), "{errors:?}");
        }
    }

    #[test]
    fn each_mistake_of_a_file_is_reported_once_in_the_order_of_the_lines() {
        let lines = |text: &str| -> Vec<String> {
            let errors = parse(text).unwrap_err().lines().into_iter();
            errors.map(|line| line.trim_start_matches("/etc/penstock/penstock.toml:").to_owned()).collect()
        };
        let text = "nod = \"a\"\npod_interfaces = [\"*\"]\n[source]\nmanifests = 7\n[workers]\ncores = []\nspin = \"0s\"\n\
                    [umem]\nmemory = \"1MiB\"\n[conntrack]\nentries = 3\ntimeouts = { one = \"1s\", two = \"2s\" }\n\
                    [log]\nlevel = \"loud\"\n[fail]\nmode = \"open\"\non_exit = \"keep\"\nrepeat_answers = \"6d\"\n";
        let expected = [
            "1: nod: unknown key",
            "1: node: missing",
            "2: pod_interfaces[0] = \"*\"",
            "4: source.manifests = 7",
            "6: workers.cores = []",
            "7: workers.spin: unknown key",
            "9: umem.memory = \"1MiB\"",
            "11: conntrack.entries = 3",
            "12: conntrack.timeouts.one",
            "12: conntrack.timeouts.two",
            "14: log.level = \"loud\"",
            "17: fail.on_exit = \"keep\"",
            "18: fail.repeat_answers = \"6d\"",
        ];
        let found = lines(text);
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (line, start) in found.iter().zip(expected) {
            assert!(line.starts_with(start), "{line} is not {start}: {found:#?}");
        }
        assert_eq!(lines("").len(), 2, "node and source are missing");
        assert_eq!(lines("node = 7\nsource = 8\n").len(), 2);
    }

    #[test]
    fn a_minimal_file_gives_the_defaults() {
        let config = parse(LEAST).unwrap();
        assert_eq!(config.node.as_str(), "worker-1");
        let manifests = Location::Manifests("/etc/penstock/manifests".into());
        assert_eq!(config.source.location(), manifests, "relative to the file");
        let kubeconfig = LEAST.replace("manifests = \"manifests\"", "kubeconfig = \"admin.conf\"");
        let path = "/etc/penstock/admin.conf".into();
        let access = Access::Kubeconfig { path, context: None };
        assert_eq!(parse(&kubeconfig).unwrap().source.location(), Location::ApiServer(access));
        let in_cluster = LEAST.replace("manifests = \"manifests\"", "in_cluster = true");
        assert_eq!(parse(&in_cluster).unwrap().source.location(), Location::ApiServer(Access::InCluster));
        assert_eq!((config.fail.mode, config.fail.on_exit), (FailMode::Closed, OnExit::Restore));
        assert!(config.pod_interfaces[0].matches("veth1a2b") && !config.pod_interfaces[0].matches("eth0"));
        assert_eq!(config.umem.frame_count(), 12_288);
        assert_eq!(config.umem.frame_size.largest_packet(), 1778);
    }

    #[test]
    fn the_annotated_file_shows_the_defaults() {
        let shipped = include_str!("../../../../configs/penstock.toml");
        // Each commented-out key shows its default: setting them all must change nothing.
        let set: String = shipped
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        assert!(set.lines().filter(|line| line.contains(" = ")).count() > 12, "keys were found: {set}");
        assert_eq!(parse(&set).unwrap(), parse(shipped).unwrap());
    }

    #[test]
    fn every_unit_is_read() {
        for (text, microseconds) in
            [("7us", 7), ("7 ms", 7_000), ("2s", 2_000_000), ("1m", 60_000_000), ("5d", 432_000_000_000u64)]
        {
            assert_eq!(TimeSpan::try_from(text.to_owned()).unwrap().duration().as_micros() as u64, microseconds);
        }
        for (text, bytes) in [("4KiB", 4096), ("3 MiB", 3 << 20), ("2GiB", 2u64 << 30)] {
            assert_eq!(MemorySize::try_from(text.to_owned()).unwrap().bytes(), bytes);
        }
        for text in ["", "s", "-3s", "3", "99999999999s"] {
            assert!(TimeSpan::try_from(text.to_owned()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Config::load(Path::new("/nowhere/penstock.toml")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/penstock.toml: cannot read it (No such file"), "{error}");
    }
}
