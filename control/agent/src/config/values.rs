//! Types of config values. Each validates its value where it is read, so that any [`super::Config`] can run.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use penstock_dataplane::io::largest_mtu;
use penstock_policy::model::ObjectKey;
use penstock_sources::convert::{is_dns_subdomain, is_label_key};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a value is invalid, with the remedy; the reader of the file adds key, value and line.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct InvalidValue(String);

macro_rules! invalid {
    ($($argument:tt)+) => { InvalidValue::new(format!($($argument)+)) };
}
pub(super) use invalid;

/// Serialization and JSON schema of a type whose values are text in the file, and which has a `Display` of that form.
macro_rules! written_as_text {
    ($type:ty $(, $keyword:literal: $value:expr)*) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string" $(, $keyword: $value)* })
            }
        }
    };
}
pub(super) use written_as_text;

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
        if is_dns_subdomain(&name) {
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

written_as_text!(NodeName, "maxLength": 253, "pattern": "^[a-z0-9.-]+$");

/// Key of a taint: as that of a label, a name of at most 63 bytes, with a DNS subdomain and `/` before it or without.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct TaintKey(String);

impl TaintKey {
    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TaintKey {
    type Error = InvalidValue;

    fn try_from(key: String) -> Result<Self, InvalidValue> {
        match is_label_key(&key) {
            true => Ok(Self(key)),
            false => Err(invalid!("not the key of a taint; set one such as penstock.dev/not-ready")),
        }
    }
}

impl fmt::Display for TaintKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

written_as_text!(TaintKey, "minLength": 1, "maxLength": 317);

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

written_as_text!(InterfaceName, "minLength": 1, "maxLength": 15);

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

impl fmt::Display for InterfacePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.start, if self.whole { "" } else { "*" })
    }
}

written_as_text!(InterfacePattern, "minLength": 1, "maxLength": 16);

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
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(try_from = "Vec<u16>")]
#[schemars(extend("minItems" = 1, "uniqueItems" = true))]
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "u32")]
#[schemars(extend("enum" = [2048, 4096]))]
pub struct FrameSize(u32);

impl FrameSize {
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

/// An amount of memory, written `256MiB`, `1GiB` or `4096KiB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct MemorySize(u64);

impl MemorySize {
    /// This many MiB.
    pub(super) const fn mebibytes(count: u64) -> Self {
        Self(count << 20)
    }

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

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 >> 20 {
            mebibytes if mebibytes << 20 == self.0 => write!(f, "{mebibytes}MiB"),
            _ => write!(f, "{}KiB", self.0 >> 10),
        }
    }
}

written_as_text!(MemorySize, "pattern": "^[0-9]+ *(KiB|MiB|GiB)$");

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

impl fmt::Display for TableMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

written_as_text!(TableMapping, "pattern": "^(off|/.*[^/])$");

/// How long after a start a mid-stream packet may open a connection: a time, or `always`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "toml::Value")]
pub enum MidstreamPickup {
    /// For this long; never if zero.
    For(TimeSpan),
    Always,
}

impl TryFrom<toml::Value> for MidstreamPickup {
    type Error = InvalidValue;

    fn try_from(value: toml::Value) -> Result<Self, InvalidValue> {
        match value {
            toml::Value::String(text) if text == "always" => Ok(Self::Always),
            toml::Value::String(text) => TimeSpan::try_from(text).map(Self::For),
            _ => Err(invalid!("not a length of time; write \"60s\", \"0s\" for never, or \"always\"")),
        }
    }
}

impl fmt::Display for MidstreamPickup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::For(time) => time.fmt(f),
            Self::Always => f.write_str("always"),
        }
    }
}

written_as_text!(MidstreamPickup, "pattern": "^(always|[0-9]+ *(us|ms|s|m|h|d))$");

/// A DNS server whose answers count.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Resolver {
    /// The one behind a Service.
    Service(ObjectKey),
    /// Those with an address of a block.
    Block(IpNet),
    /// The one at this address, on a node that has it.
    Local(IpAddr),
}

/// Before an address that only counts where the node has it.
const LOCAL_RESOLVER: &str = "local:";

impl TryFrom<String> for Resolver {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Block(address.into()));
        }
        if let Some(Ok(address)) = text.strip_prefix(LOCAL_RESOLVER).map(str::parse) {
            return Ok(Self::Local(address));
        }
        if let Ok(block) = text.parse::<IpNet>() {
            return Ok(Self::Block(block.trunc()));
        }
        ObjectKey::parse(&text).map(Self::Service).ok_or_else(|| {
            invalid!("not a DNS server; write a Service as NAMESPACE/NAME, an address, a block such as 10.0.0.0/24, or local: and an address that counts only on nodes that have it")
        })
    }
}

impl fmt::Display for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(key) => key.fmt(f),
            Self::Block(block) if block.prefix_len() == block.max_prefix_len() => block.addr().fmt(f),
            Self::Block(block) => block.fmt(f),
            Self::Local(address) => write!(f, "{LOCAL_RESOLVER}{address}"),
        }
    }
}

written_as_text!(Resolver);

/// A span of time, written `50us`, `10ms`, `30s`, `2m`, `1h` or `5d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct TimeSpan(Duration);

impl TimeSpan {
    pub const fn microseconds(count: u64) -> Self {
        Self(Duration::from_micros(count))
    }

    /// As a standard `Duration`.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

/// The units of a [`TimeSpan`], each with its microseconds.
const TIME_UNITS: [(&str, u64); 6] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000), ("d", 86_400_000_000)];

impl fmt::Display for TimeSpan {
    /// In the largest unit of which it has at least two: `60s` rather than `1m`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = self.0.as_micros() as u64;
        let fits = |(_, unit): &&(&str, u64)| time.is_multiple_of(*unit) && time / unit >= 2;
        let (name, unit) = TIME_UNITS.iter().rev().find(fits).unwrap_or(&TIME_UNITS[0]);
        write!(f, "{}{name}", time / unit)
    }
}

written_as_text!(TimeSpan, "pattern": "^[0-9]+ *(us|ms|s|m|h|d)$");

impl From<Duration> for TimeSpan {
    fn from(time: Duration) -> Self {
        Self(time)
    }
}

impl TryFrom<String> for TimeSpan {
    type Error = InvalidValue;

    fn try_from(text: String) -> Result<Self, InvalidValue> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let unit = TIME_UNITS.iter().find(|(name, _)| *name == text[digits..].trim_start());
        match (text[..digits].parse::<u32>(), unit) {
            (Ok(count), Some((_, unit))) => Ok(Self(Duration::from_micros(count as u64 * unit))),
            _ => Err(invalid!("not a length of time; write a number and us, ms, s, m, h or d, such as 30s")),
        }
    }
}
