//! Interfaces of a running daemon to its operator: `[admin]`, `[capture]`, `[metrics]`, `[verdict_log]`.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use penstock_admin::client::DEFAULT_SOCKET;
use penstock_dataplane::worker::VerdictBudget;
use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{InvalidValue, invalid, written_as_text};

/// The admin API (`[admin]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Path of the admin API's unix socket, at most 90 bytes; or `"off"`.
    pub socket: SocketPath,
    /// Whether `penstock trial start` may have policies of files judged beside what is in effect. They change no verdict, but
    /// cost the daemon a second compilation of all policies. SIGHUP applies it.
    pub trials: bool,
}

/// The path of a unix socket, or `"off"`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct SocketPath(Option<PathBuf>);

impl SocketPath {
    /// The path, unless it is off.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    pub(super) fn start_at(&mut self, directory: &Path) {
        if let Some(path) = &mut self.0 {
            *path = directory.join(&path);
        }
    }
}

impl fmt::Display for SocketPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("off"),
            Some(path) => path.display().fmt(f),
        }
    }
}

written_as_text!(SocketPath);

impl Default for SocketPath {
    fn default() -> Self {
        Self(Some(DEFAULT_SOCKET.into()))
    }
}

/// Bytes of a path in `struct sockaddr_un`, its final NUL included (unix(7)).
const LONGEST_SOCKET: usize = 108;

impl TryFrom<String> for SocketPath {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            "" => Err(invalid!("no path; set one, or \"off\"")),
            path if path.len() + ".handover.4194304".len() >= LONGEST_SOCKET => {
                Err(invalid!("too long for a socket; set a path of at most 90 bytes"))
            }
            path => Ok(Self(Some(path.into()))),
        }
    }
}

/// Captures (`[capture]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Capture {
    /// Path of the unix socket, at most 90 bytes, by which its owner alone gets copies of packets with what pods say to each
    /// other; or `"off"`.
    pub socket: SocketPath,
}

impl Default for Capture {
    fn default() -> Self {
        Self { socket: SocketPath(None) }
    }
}

/// Metrics and probes (`[metrics]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Address and TCP port of `/metrics`, `/healthz` and `/readyz`; or `"off"`.
    pub listen: MetricsAddress,
}

/// An address with a port, or `"off"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct MetricsAddress(Option<SocketAddr>);

impl MetricsAddress {
    /// The address, unless they are off.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            None => f.write_str("off"),
            Some(address) => address.fmt(f),
        }
    }
}

written_as_text!(MetricsAddress);

impl Default for MetricsAddress {
    fn default() -> Self {
        Self(Some(SocketAddr::from(([127, 0, 0, 1], 9469))))
    }
}

impl TryFrom<String> for MetricsAddress {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            text => match text.parse() {
                Ok(address) => Ok(Self(Some(address))),
                Err(_) => Err(invalid!("not an address with a port; write it such as 127.0.0.1:9469, or \"off\"")),
            },
        }
    }
}

/// The log of single packets' verdicts (`[verdict_log]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct VerdictLog {
    /// Where JSON lines about single packets go: a file to append to, `"stdout"`, or `"off"`.
    pub output: VerdictOutput,
    /// Maximum lines per second, worker and outcome (a drop reason, or a connection opened).
    pub each_second: u32,
    /// Whether opened connections are logged; drops always are.
    pub opened: bool,
}

impl Default for VerdictLog {
    fn default() -> Self {
        Self { output: VerdictOutput::Off, each_second: 10, opened: false }
    }
}

impl VerdictLog {
    /// The budget as the workers take it.
    pub fn budget(&self) -> VerdictBudget {
        match self.output {
            VerdictOutput::Off => VerdictBudget::default(),
            _ => VerdictBudget { each_second: self.each_second, opened: self.opened },
        }
    }
}

/// The output of the verdict log: `"off"`, `"stdout"`, or a file to append to.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub enum VerdictOutput {
    /// No output.
    #[default]
    Off,
    /// Standard output.
    Stdout,
    /// Append to this file.
    File(PathBuf),
}

impl fmt::Display for VerdictOutput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Stdout => f.write_str("stdout"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

written_as_text!(VerdictOutput);

impl VerdictOutput {
    pub(super) fn start_at(&mut self, directory: &Path) {
        if let Self::File(path) = self {
            *path = directory.join(&path);
        }
    }
}

impl TryFrom<String> for VerdictOutput {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self::Off),
            "stdout" => Ok(Self::Stdout),
            "" => Err(invalid!("no file; set its path, \"stdout\" or \"off\"")),
            path => Ok(Self::File(path.into())),
        }
    }
}
