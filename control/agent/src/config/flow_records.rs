//! Records of flows (`[flow_records]`).

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{InvalidValue, MemorySize, TimeSpan, invalid, written_as_text};

/// Records of flows (`[flow_records]`): of each connection when it ends and while it lives, and of those that were denied.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FlowRecords {
    /// The file that JSON lines are appended to, for its owner alone; or `"off"`. Its directory must exist.
    pub file: RecordsFile,
    /// How long the file may get before it is renamed and a new one begun: from 64KiB.
    pub file_size: MemorySize,
    /// How many files are kept, with the one that is written: 1 to 1000. The others end in `.1`, the newest, to the oldest.
    #[schemars(range(min = *KEPT.start(), max = *KEPT.end()))]
    pub files: u16,
    /// How often an open connection that has sent something has a record: 1s to 1d.
    pub interval: TimeSpan,
    /// Packets per second and worker that were denied as the first of a connection, and that may get into records: 1 to
    /// 100000. More are only counted.
    #[schemars(range(min = *DENIED.start(), max = *DENIED.end()))]
    pub denied_each_second: u32,
    /// The OpenTelemetry collector that records are sent to as logs by OTLP over HTTP: `http://` or `https://`, host
    /// and port, and a path if it is not `/v1/logs`; or `"off"`.
    pub otlp: OtlpEndpoint,
    /// A file of PEM certificates that the collector's is checked against. Default: those that the system trusts.
    pub otlp_ca_file: Option<PathBuf>,
    /// A file of HTTP headers that are sent along, one `Name: value` a line, such as `Authorization`. It is read at the start.
    pub otlp_headers_file: Option<PathBuf>,
}

/// Numbers of files.
const KEPT: RangeInclusive<u16> = 1..=1000;
/// Denied packets that may get into records.
const DENIED: RangeInclusive<u32> = 1..=100_000;
/// A file that is renamed at each chunk of lines would keep nothing.
const SMALLEST_FILE: u64 = 64 << 10;
/// Connections that end between two looks at the queue, a tenth of a second: those of a full sweep step, with room. Some 7 MB.
const ENDED_QUEUE: usize = 1 << 16;

impl Default for FlowRecords {
    fn default() -> Self {
        Self {
            file: RecordsFile::default(),
            file_size: MemorySize::mebibytes(100),
            files: 5,
            interval: TimeSpan::microseconds(60_000_000),
            denied_each_second: 1000,
            otlp: OtlpEndpoint::default(),
            otlp_ca_file: None,
            otlp_headers_file: None,
        }
    }
}

impl FlowRecords {
    /// Whether there are any.
    pub fn is_on(&self) -> bool {
        self.file.path().is_some() || self.otlp.0.is_some()
    }

    /// Where logs are sent to, unless it is off.
    pub fn otlp_url(&self) -> Option<String> {
        let CollectorUrl { base, path } = self.otlp.0.as_ref()?;
        // As in the specification of the exporters (OTEL_EXPORTER_OTLP_ENDPOINT): a base URL gets the path of the signal.
        Some(format!("{base}{}", path.as_deref().unwrap_or("/v1/logs")))
    }

    /// How many ended connections may wait for their records.
    pub(crate) fn queue(&self) -> usize {
        if self.is_on() { ENDED_QUEUE } else { 0 }
    }

    pub(super) fn start_at(&mut self, directory: &Path) {
        let files = [self.file.0.as_mut(), self.otlp_ca_file.as_mut(), self.otlp_headers_file.as_mut()];
        files.into_iter().flatten().for_each(|path| *path = directory.join(&*path));
    }

    /// The first key whose value does not fit, and why.
    pub(super) fn inconsistent(&self) -> Option<(&'static str, InvalidValue)> {
        let (second, day) = (1, 86_400);
        let without_collector =
            |key| Some((key, invalid!("no collector is set; set flow_records.otlp, or remove this key")));
        if self.file_size.bytes() < SMALLEST_FILE {
            return Some(("file_size", invalid!("too small; set at least {}KiB", SMALLEST_FILE >> 10)));
        }
        if !KEPT.contains(&self.files) {
            return Some(("files", invalid!("out of range; set {} to {}", KEPT.start(), KEPT.end())));
        }
        if !(second..=day).contains(&self.interval.duration().as_secs()) {
            return Some(("interval", invalid!("out of range; set 1s to 1d")));
        }
        if !DENIED.contains(&self.denied_each_second) {
            return Some(("denied_each_second", invalid!("out of range; set {} to {}", DENIED.start(), DENIED.end())));
        }
        match (&self.otlp.0, &self.otlp_ca_file, &self.otlp_headers_file) {
            (None, Some(_), _) => without_collector("otlp_ca_file"),
            (None, None, Some(_)) => without_collector("otlp_headers_file"),
            (Some(url), Some(_), _) if url.base.starts_with("http:") => {
                Some(("otlp_ca_file", invalid!("http:// has no certificates; set flow_records.otlp to https://")))
            }
            _ => None,
        }
    }
}

/// A file of records, or `"off"`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct RecordsFile(Option<PathBuf>);

impl RecordsFile {
    /// The file, unless it is off.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }
}

impl fmt::Display for RecordsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("off"),
            Some(path) => path.display().fmt(f),
        }
    }
}

written_as_text!(RecordsFile);

impl TryFrom<String> for RecordsFile {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            path if path.is_empty() || path.ends_with('/') => {
                Err(invalid!("no file; set its path, such as /var/log/penstock/flows.jsonl, or \"off\""))
            }
            path => Ok(Self(Some(path.into()))),
        }
    }
}

/// The URL of a collector, or `"off"`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub struct OtlpEndpoint(Option<CollectorUrl>);

/// Scheme, host and port; and the path, if one is given.
#[derive(Clone, PartialEq, Eq, Debug)]
struct CollectorUrl {
    base: String,
    path: Option<String>,
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("off"),
            Some(CollectorUrl { base, path }) => write!(f, "{base}{}", path.as_deref().unwrap_or_default()),
        }
    }
}

written_as_text!(OtlpEndpoint);

impl TryFrom<String> for OtlpEndpoint {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        if text == "off" {
            return Ok(Self(None));
        }
        let wrong = || invalid!("not a collector's URL; write it such as http://collector.example:4318, or \"off\"");
        let uri: axum::http::Uri = text.parse().map_err(|_| wrong())?;
        let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(wrong());
        };
        if authority.host().is_empty() || authority.as_str().contains('@') || uri.query().is_some() {
            return Err(wrong());
        }
        let path = Some(uri.path().trim_end_matches('/')).filter(|path| !path.is_empty());
        let base = format!("{}://{authority}", uri.scheme_str().unwrap_or("http"));
        Ok(Self(Some(CollectorUrl { base, path: path.map(str::to_owned) })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(section: &str) -> Result<FlowRecords, String> {
        let text = format!("node = \"n\"\n[source]\nmanifests = \"m\"\n[flow_records]\n{section}\n");
        Config::parse(&text, Path::new("/etc/penstock/penstock.toml"))
            .map(|config| config.flow_records)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn records_are_off_until_a_file_or_a_collector_is_set() {
        let off = read("").unwrap();
        assert_eq!((off.is_on(), off.queue()), (false, 0));
        let file = read("file = \"flows.jsonl\"").unwrap();
        assert_eq!(file.file.path(), Some(Path::new("/etc/penstock/flows.jsonl")));
        assert!(file.is_on() && file.queue() > 0);
        for (given, expected) in [
            ("http://collector:4318", "http://collector:4318/v1/logs"),
            ("https://collector/", "https://collector/v1/logs"),
            ("http://[fd00::1]:4318/otlp/logs", "http://[fd00::1]:4318/otlp/logs"),
        ] {
            let read = read(&format!("otlp = \"{given}\"")).unwrap();
            assert_eq!((read.otlp_url().as_deref(), read.is_on()), (Some(expected), true), "{given}");
        }
    }

    #[test]
    fn bad_values_are_refused_with_key_value_and_remedy() {
        for (section, parts) in [
            ("file = \"\"", ["flow_records.file", "set its path"]),
            ("file = \"logs/\"", ["logs/", "set its path"]),
            ("file_size = \"1KiB\"", ["flow_records.file_size", "at least 64KiB"]),
            ("files = 0", ["flow_records.files", "1 to 1000"]),
            ("interval = \"10ms\"", ["flow_records.interval", "1s to 1d"]),
            ("interval = \"2d\"", ["flow_records.interval", "1s to 1d"]),
            ("denied_each_second = 0", ["flow_records.denied_each_second", "1 to 100000"]),
            ("otlp = \"collector:4318\"", ["flow_records.otlp", "http://collector.example:4318"]),
            ("otlp = \"ftp://collector\"", ["ftp://collector", "http://collector.example:4318"]),
            ("otlp = \"http://user:secret@collector\"", ["flow_records.otlp", "not a collector's URL"]),
            ("otlp_ca_file = \"ca.pem\"", ["flow_records.otlp_ca_file", "set flow_records.otlp"]),
            ("otlp_headers_file = \"h\"", ["flow_records.otlp_headers_file", "set flow_records.otlp"]),
            ("otlp = \"http://c\"\notlp_ca_file = \"ca.pem\"", ["flow_records.otlp_ca_file", "https://"]),
            ("protocol = \"ipfix\"", ["protocol", "unknown"]),
        ] {
            let error = read(section).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{section}: {error}");
        }
    }
}
