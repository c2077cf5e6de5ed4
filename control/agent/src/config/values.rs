//! The values that a config key can hold: each is checked where it is read, so that a [`super::Config`] that
//! exists is one that can be run.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use penstock_dataplane::io::largest_mtu;
use serde::Deserialize;

/// Why a value was refused: says the mend; key, value and line are added by the reader of the file.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(String);

macro_rules! refused {
    ($($argument:tt)+) => { Refused::new(format!($($argument)+)) };
}
pub(super) use refused;

impl Refused {
    pub(super) fn new(why: String) -> Self {
        Self(why)
    }
}

/// Name of a Node object: a DNS subdomain name (RFC 1123), at most 253 octets.
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
    type Error = Refused;

    fn try_from(name: String) -> Result<Self, Refused> {
        let part = |part: &str| {
            let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
            part.bytes().all(|byte| inner(byte) || byte == b'-')
                && part.bytes().next().is_some_and(inner)
                && part.bytes().next_back().is_some_and(inner)
        };
        if name.len() <= 253 && name.split('.').all(part) {
            Ok(Self(name))
        } else {
            Err(refused!("not a node's name; give the metadata.name of this machine's Node object, such as worker-1"))
        }
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Name of a network interface: 1 to 15 octets without white space or `/` (`dev_valid_name` in net/core/dev.c).
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
    type Error = Refused;

    fn try_from(name: String) -> Result<Self, Refused> {
        let octet = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
        if (1..=15).contains(&name.len()) && name != "." && name != ".." && name.bytes().all(octet) {
            Ok(Self(name))
        } else {
            Err(refused!("not an interface's name; give 1 to 15 characters without space, / or :"))
        }
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names of network interfaces: one, or with a final `*` all that begin so.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct InterfacePattern {
    start: String,
    whole: bool,
}

impl InterfacePattern {
    /// Whether this interface is meant.
    pub fn matches(&self, name: &str) -> bool {
        if self.whole { name == self.start } else { name.starts_with(&self.start) }
    }
}

impl TryFrom<String> for InterfacePattern {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        let (start, whole) = text.strip_suffix('*').map_or((text.as_str(), true), |start| (start, false));
        if start.contains('*') || InterfaceName::try_from(start.to_owned()).is_err() {
            return Err(refused!(
                "not a name of interfaces; give a name, or how names begin and a *, such as \"veth*\""
            ));
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
    type Error = Refused;

    fn try_from(cores: Vec<u16>) -> Result<Self, Refused> {
        if cores.is_empty() {
            return Err(refused!("no core given; name at least one, or leave the key out"));
        }
        match cores.iter().enumerate().find(|(index, core)| cores[..*index].contains(core)) {
            Some((_, core)) => Err(refused!("core {core} is named twice; name each core once")),
            None => Ok(Self(cores)),
        }
    }
}

/// Octets of a frame of the UMEM: what AF_XDP takes in aligned mode, 2048 or 4096 (`xdp_umem_reg` in
/// net/xdp/xdp_umem.c: a power of two from 2048 to the page size).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "u32")]
pub struct FrameSize(u32);

impl FrameSize {
    /// In octets.
    pub const fn octets(self) -> u32 {
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
    type Error = Refused;

    fn try_from(octets: u32) -> Result<Self, Refused> {
        match octets {
            2048 | 4096 => Ok(Self(octets)),
            _ => Err(refused!("frames are 2048 or 4096 octets; give one of the two")),
        }
    }
}

/// Entries of each of a queue's rings: a power of two (linux/if_xdp.h), here from 64 to 32768.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "u32")]
pub struct RingSize(u32);

impl RingSize {
    /// How many.
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
    type Error = Refused;

    fn try_from(entries: u32) -> Result<Self, Refused> {
        match entries {
            64..=32_768 if entries.is_power_of_two() => Ok(Self(entries)),
            _ => Err(refused!("not a power of two from 64 to 32768; give one, such as 1024")),
        }
    }
}

/// An amount of memory, written `256MiB`, `1GiB` or `4096KiB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Memory(u64);

impl Memory {
    /// In octets.
    pub const fn octets(self) -> u64 {
        self.0
    }
}

impl TryFrom<String> for Memory {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        [("KiB", 10), ("MiB", 20), ("GiB", 30)]
            .into_iter()
            .find_map(|(unit, shift)| {
                text.strip_suffix(unit)?.trim_end().parse::<u32>().ok().map(|n| (n as u64) << shift)
            })
            .map(Self)
            .ok_or_else(|| refused!("not an amount of memory; write a number and KiB, MiB or GiB, such as 256MiB"))
    }
}

/// Where the connection table lives: a file, by its absolute path, or `off`: memory of its own, which ends with the
/// process.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub enum Mapping {
    /// In memory: after a restart all connections are new.
    Off,
    /// In this file: a restarted process finds its connections.
    File(PathBuf),
}

impl Default for Mapping {
    fn default() -> Self {
        Self::File("/run/penstock/conntrack".into())
    }
}

impl TryFrom<String> for Mapping {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
        match text.as_str() {
            "off" => Ok(Self::Off),
            path if path.starts_with('/') && !path.ends_with('/') => Ok(Self::File(text.into())),
            _ => Err(refused!("not an absolute path of a file; give one on a tmpfs, or \"off\"")),
        }
    }
}

/// How long after a start a packet from the middle of a connection may open one: a length of time, or `always`. Formerly
/// `true` (always) or `false` (never).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "toml::Value")]
pub enum PickUp {
    /// For so long; never, if that is nothing.
    For(Time),
    /// Always.
    Always,
    /// As it was written before there was a length of time.
    Former(bool),
}

impl TryFrom<toml::Value> for PickUp {
    type Error = Refused;

    fn try_from(value: toml::Value) -> Result<Self, Refused> {
        match value {
            toml::Value::Boolean(always) => Ok(Self::Former(always)),
            toml::Value::String(text) if text == "always" => Ok(Self::Always),
            toml::Value::String(text) => Time::try_from(text).map(Self::For),
            _ => Err(refused!("not a length of time; write \"60s\", \"0s\" for never, or \"always\"")),
        }
    }
}

/// A length of time, written `50us`, `10ms`, `30s`, `2m`, `1h` or `5d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(try_from = "String")]
pub struct Time(Duration);

impl Time {
    /// So many microseconds.
    pub const fn microseconds(count: u64) -> Self {
        Self(Duration::from_micros(count))
    }

    /// As the standard library has it.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

impl TryFrom<String> for Time {
    type Error = Refused;

    fn try_from(text: String) -> Result<Self, Refused> {
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
            _ => Err(refused!("not a length of time; write a number and us, ms, s, m, h or d, such as 30s")),
        }
    }
}
