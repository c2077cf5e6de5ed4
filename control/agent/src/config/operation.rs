//! What a running daemon can be asked and what it tells: `[admin]`, `[metrics]`, `[verdict_log]`; and `[debug]`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use penstock_admin::client::DEFAULT_SOCKET;
use penstock_dataplane::worker::VerdictBudget;
use serde::Deserialize;

use super::values::{Refused, Time, refused};

/// The admin API (`[admin]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// Where it listens.
    pub socket: AdminSocket,
}

/// The path of a unix socket, or `"off"`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct AdminSocket(Option<PathBuf>);

impl AdminSocket {
    /// The path, if it is on.
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    pub(super) fn start_at(&mut self, directory: &Path) {
        if let Some(path) = &mut self.0 {
            *path = directory.join(&path);
        }
    }
}

impl Default for AdminSocket {
    fn default() -> Self {
        Self(Some(DEFAULT_SOCKET.into()))
    }
}

/// Octets of a path in `struct sockaddr_un`, its final NUL included (unix(7)).
const LONGEST_SOCKET: usize = 108;

impl TryFrom<String> for AdminSocket {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            "" => Err(refused!("no path; give one, or \"off\"")),
            path if path.len() + ".4194304".len() >= LONGEST_SOCKET => {
                Err(refused!("too long for a socket; give a path of less than 100 octets"))
            }
            path => Ok(Self(Some(path.into()))),
        }
    }
}

/// Metrics and probes (`[metrics]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Where they are served.
    pub listen: MetricsAddress,
}

/// An address with a port, or `"off"`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct MetricsAddress(Option<SocketAddr>);

impl MetricsAddress {
    /// The address, if they are on.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0
    }
}

impl Default for MetricsAddress {
    fn default() -> Self {
        Self(Some(SocketAddr::from(([127, 0, 0, 1], 9469))))
    }
}

impl TryFrom<String> for MetricsAddress {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        match text.as_str() {
            "off" => Ok(Self(None)),
            text => match text.parse() {
                Ok(address) => Ok(Self(Some(address))),
                Err(_) => Err(refused!("not an address with a port; write it such as 127.0.0.1:9469, or \"off\"")),
            },
        }
    }
}

/// Faults on purpose, for tests of what holds then (`[debug]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// The first worker panics so long after the daemon is in force; none given: never.
    pub worker_panics_after: Option<Time>,
}

/// What is told of single packets (`[verdict_log]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VerdictLog {
    /// Where it goes.
    pub output: VerdictOutput,
    /// Most lines of one worker and one outcome (a drop cause, or a connection opened) in a second.
    pub each_second: u32,
    /// Whether connections that policy allows are told of when they are opened.
    pub opened: bool,
}

impl Default for VerdictLog {
    fn default() -> Self {
        Self { output: VerdictOutput::Off, each_second: 10, opened: false }
    }
}

impl VerdictLog {
    /// As the workers are told.
    pub fn budget(&self) -> VerdictBudget {
        match self.output {
            VerdictOutput::Off => VerdictBudget::default(),
            _ => VerdictBudget { each_second: self.each_second, opened: self.opened },
        }
    }
}

/// Where the verdict log goes: `"off"`, `"stdout"`, or a file that is appended to.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(try_from = "String")]
pub enum VerdictOutput {
    /// Nowhere.
    #[default]
    Off,
    /// To standard output.
    Stdout,
    /// Appended to this file.
    File(PathBuf),
}

impl VerdictOutput {
    pub(super) fn start_at(&mut self, directory: &Path) {
        if let Self::File(path) = self {
            *path = directory.join(&path);
        }
    }
}

impl TryFrom<String> for VerdictOutput {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        match text.as_str() {
            "off" => Ok(Self::Off),
            "stdout" => Ok(Self::Stdout),
            "" => Err(refused!("no file; give its path, \"stdout\" or \"off\"")),
            path => Ok(Self::File(path.into())),
        }
    }
}
