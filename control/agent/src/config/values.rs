//! Types of config values. Each validates its value where it is read, so that any [`super::Config`] can run.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use penstock_dataplane::io::largest_mtu;
use serde::Deserialize;

/// Why a value is invalid, with the remedy; the reader of the file adds key, value and line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidValue(String);

macro_rules! invalid {
    ($($argument:tt)+) => { InvalidValue::new(format!($($argument)+)) };
}
pub(super) use invalid;

impl InvalidValue {
    pub(super) fn new(why: String) -> Self {
        Self(why)
    }
}

/// Name of a Node object: a DNS subdomain name (RFC 1123), at most 253 bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct NodeName(String);

impl NodeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NodeName {
    type Error = InvalidValue;

    fn try_from(name: String) -> Result<Self, InvalidValue> {
        let part = |part: &str| {
            let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            part.bytes().all(|byte| inner(byte) || byte == b'-')
                && part.bytes().next().is_some_and(inner)
                && part.bytes().next_back().is_some_and(inner)
        };
        if name.len() <= 253 && name.split('.').all(part) {
            Ok(Self(name))
        } else {
            Err(invalid!("not a node's name; set the metadata.name of this machine's Node object, such as worker-1"))
        }
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Name of a network interface: 1 to 15 bytes without white space or `/` (`dev_valid_name` in net/core/dev.c).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct InterfaceName(String);

impl InterfaceName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for InterfaceName {
    type Error = InvalidValue;

    fn try_from(name: String) -> Result<Self, InvalidValue> {
        let byte = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
        if (1..=15).contains(&name.len()) && name != "." && name != ".." && name.bytes().all(byte) {
            Ok(Self(name))
        } else {
            Err(invalid!("not an interface's name; set 1 to 15 characters without space, / or :"))
        }
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names of network interfaces: one name, or a prefix with a final `*`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct InterfacePattern {
    start: String,
    whole: bool,
}

impl InterfacePattern {
    /// Whether the pattern matches this name.
    pub fn matches(&self, name: &str) -> bool {
        if self.whole { name == self.start } else { name.starts_with(&self.start) }
    }
}

impl TryFrom<String> for InterfacePattern {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        let (start, whole) = text.strip_suffix('*').map_or((text.as_str(), true), |start| (start, false));
        if start.contains('*') || InterfaceName::try_from(start.to_owned()).is_err() {
            return Err(invalid!("not an interface name or pattern; set a name, or a prefix and *, such as \"veth*\""));
        }
        Ok(Self { start: start.to_owned(), whole })
    }
}

/// The cores that workers are pinned to: at least one, each once.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "Vec<u16>")]
pub struct Cores(Vec<u16>);

impl Cores {
    /// Their numbers, as in `/proc/cpuinfo`, in the order given.
    pub fn numbers(&self) -> &[u16] {
        &self.0
    }
}

impl TryFrom<Vec<u16>> for Cores {
    type Error = InvalidValue;

    fn try_from(cores: Vec<u16>) -> Result<Self, InvalidValue> {
        if cores.is_empty() {
            return Err(invalid!("no core; list at least one, or remove the key"));
        }
        match cores.iter().enumerate().find(|(index, core)| cores[..*index].contains(core)) {
            Some((_, core)) => Err(invalid!("core {core} is listed twice; list each core once")),
            None => Ok(Self(cores)),
        }
    }
}

/// Bytes per frame of the UMEM: AF_XDP's aligned mode allows powers of two from 2048 to the page size (`xdp_umem_reg`
/// in net/xdp/xdp_umem.c), so 2048 or 4096.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "u32")]
pub struct FrameSize(u32);

impl FrameSize {
    /// In bytes.
    pub const fn bytes(self) -> u32 {
        self.0
    }

    /// The largest IP packet that a frame holds.
    pub const fn largest_packet(self) -> u32 {
        largest_mtu(self.0)
    }
}

impl Default for FrameSize {
    fn default() -> Self {
        Self(2048)
    }
}

impl TryFrom<u32> for FrameSize {
    type Error = InvalidValue;

    fn try_from(bytes: u32) -> Result<Self, InvalidValue> {
        match bytes {
            2048 | 4096 => Ok(Self(bytes)),
            _ => Err(invalid!("frames have 2048 or 4096 bytes; set one of the two")),
        }
    }
}

/// Entries of each of a queue's rings: a power of two (linux/if_xdp.h), here from 64 to 32768.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "u32")]
pub struct RingSize(u32);

impl RingSize {
    /// The number of entries.
    pub const fn entries(self) -> u32 {
        self.0
    }
}

impl Default for RingSize {
    fn default() -> Self {
        Self(1024)
    }
}

impl TryFrom<u32> for RingSize {
    type Error = InvalidValue;

    fn try_from(entries: u32) -> Result<Self, InvalidValue> {
        match entries {
            64..=32_768 if entries.is_power_of_two() => Ok(Self(entries)),
            _ => Err(invalid!("not a power of two from 64 to 32768; set one, such as 1024")),
        }
    }
}

/// An amount of memory, written `256MiB`, `1GiB` or `4096KiB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct MemorySize(u64);

impl MemorySize {
    /// In bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl TryFrom<String> for MemorySize {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        [("KiB", 10), ("MiB", 20), ("GiB", 30)]
            .into_iter()
            .find_map(|(unit, shift)| {
                text.strip_suffix(unit)?.trim_end().parse::<u32>().ok().map(|n| (n as u64) << shift)
            })
            .map(Self)
            .ok_or_else(|| invalid!("not an amount of memory; write a number and KiB, MiB or GiB, such as 256MiB"))
    }
}

/// The file that the connection table is mapped from, by its absolute path, or `off`: private memory, which ends with
/// the process.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum TableMapping {
    /// In private memory: after a restart all connections are new.
    Off,
    /// In this file: a restarted process keeps its connections.
    File(PathBuf),
}

impl Default for TableMapping {
    fn default() -> Self {
        Self::File("/run/penstock/conntrack".into())
    }
}

impl TryFrom<String> for TableMapping {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        match text.as_str() {
            "off" => Ok(Self::Off),
            path if path.starts_with('/') && !path.ends_with('/') => Ok(Self::File(text.into())),
            _ => Err(invalid!("not an absolute path of a file; set one on a tmpfs, or \"off\"")),
        }
    }
}

/// How long after a start a mid-stream packet may open a connection: a time, or `always`. Deprecated: `true` (always)
/// or `false` (never).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "toml::Value")]
pub enum MidstreamPickup {
    /// For this long; never if zero.
    For(TimeSpan),
    /// Always.
    Always,
    /// The deprecated form, a Boolean.
    Deprecated(bool),
}

impl TryFrom<toml::Value> for MidstreamPickup {
    type Error = InvalidValue;

    fn try_from(value: toml::Value) -> Result<Self, InvalidValue> {
        match value {
            toml::Value::Boolean(always) => Ok(Self::Deprecated(always)),
            toml::Value::String(text) if text == "always" => Ok(Self::Always),
            toml::Value::String(text) => TimeSpan::try_from(text).map(Self::For),
            _ => Err(invalid!("not a length of time; write \"60s\", \"0s\" for never, or \"always\"")),
        }
    }
}

/// A span of time, written `50us`, `10ms`, `30s`, `2m`, `1h` or `5d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct TimeSpan(Duration);

impl TimeSpan {
    /// This many microseconds.
    pub const fn microseconds(count: u64) -> Self {
        Self(Duration::from_micros(count))
    }

    /// As a standard `Duration`.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

impl TryFrom<String> for TimeSpan {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let unit = match text[digits..].trim_start() {
            "us" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            "m" => 60_000_000,
            "h" => 3_600_000_000,
            "d" => 86_400_000_000,
            _ => 0,
        };
        match text[..digits].parse::<u32>() {
            Ok(count) if unit > 0 => Ok(Self(Duration::from_micros(count as u64 * unit))),
            _ => Err(invalid!("not a length of time; write a number and us, ms, s, m, h or d, such as 30s")),
        }
    }
}
