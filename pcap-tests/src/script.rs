//! The text format of a case: a purpose, a cluster, and one packet per line.
//!
//! ```text
//! purpose: A datagram and its answer: the answer passes, although nothing else may leave db.
//! cluster: shop
//!
//! 0.000 web:40000 > db:53 udp len=20
//! 0.001 db:53 > web:40000 udp len=90
//! ```
//!
//! A packet is `TIME SOURCE > DESTINATION KIND WORDS…`. Times are seconds after 2026-01-01T00:00:00Z. Ends are names of
//! `HOSTS` below or addresses, with a port if the kind has ports (`[fd00::1]:80`). Kinds and words are listed at
//! [`super::packet::build`].

use std::net::{IpAddr, SocketAddr};

#[derive(Clone, Debug, Default)]
pub struct CaseScript {
    /// Purpose of the case, in one sentence.
    pub purpose: String,
    /// Directory of manifests under `clusters/`.
    pub cluster: String,
    /// Name of the node whose pods are local; all pods are local if absent.
    pub node: Option<String>,
    /// Mapping of interfaces to ports, as for the command's `--ports`.
    pub ports: Vec<String>,
    pub dedup: bool,
    /// Whether objects of the v1beta1 API and its annotation are read.
    pub v1beta1: bool,
    /// Whether a rule's action applies cluster-wide.
    pub cluster_wide: bool,
    pub link: LinkLayer,
    /// The blocks of cluster addresses, as for the command's `--service-cidrs`.
    pub service_cidrs: Vec<String>,
    /// Timeline in TOML.
    pub timeline: String,
    pub packets: Vec<PacketLine>,
}

/// Link layer of a case's capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LinkLayer {
    #[default]
    Ethernet,
    /// Linux cooked.
    Cooked,
    /// Linux cooked, version 2.
    Cooked2,
    /// None.
    Raw,
}

#[derive(Clone, Debug)]
pub struct PacketLine {
    /// Nanoseconds after the start of the case.
    pub time: u64,
    pub src: PacketEnd,
    pub dst: PacketEnd,
    pub kind: String,
    /// Modifiers: `word` or `word=value`.
    pub words: Vec<(String, String)>,
    /// File and line, for messages.
    pub place: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PacketEnd {
    pub address: IpAddr,
    /// Its port; 0 if none is given.
    pub port: u16,
}

/// Names of addresses in the clusters under `clusters/`; `v-` is for cluster addresses of Services.
const HOSTS: &[(&str, &str)] = &[
    ("web", "10.0.1.1"),
    ("db", "10.0.1.2"),
    ("api", "10.0.1.3"),
    ("open", "10.0.1.4"),
    ("shut", "10.0.1.5"),
    ("guest", "10.0.1.9"),
    ("far", "10.0.2.1"),
    ("node", "192.168.0.1"),
    ("node2", "192.168.0.2"),
    ("world", "203.0.113.7"),
    ("banned", "203.0.113.66"),
    ("elsewhere", "198.51.100.1"),
    ("v-api", "10.96.0.10"),
    ("v-mixed", "10.96.0.11"),
    ("v-dns", "10.96.0.12"),
    ("v-sticky", "10.96.0.13"),
    ("v-empty", "10.96.0.14"),
    ("v-local", "10.96.0.15"),
    ("v-shut", "10.96.0.16"),
    ("v-signals", "10.96.0.17"),
    ("v-legacy", "10.96.0.18"),
    ("v-agent", "10.96.0.19"),
    ("v-cached", "10.96.0.53"),
    ("v-api6", "fd00:96::10"),
    ("web6", "fd00:1::1"),
    ("db6", "fd00:1::2"),
    ("api6", "fd00:1::3"),
    ("open6", "fd00:1::4"),
    ("shut6", "fd00:1::5"),
    ("guest6", "fd00:1::9"),
    ("far6", "fd00:2::1"),
    ("node6", "fd00:ffff::1"),
    ("world6", "2001:db8::7"),
    ("banned6", "2001:db8::66"),
];

impl CaseScript {
    /// Parses a case.
    ///
    /// # Errors
    /// The mistake, with file and line.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let mut script = Self::default();
        for (number, line) in text.lines().enumerate() {
            let place = format!("{name}:{}", number + 1);
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.split_once(": ").filter(|(key, _)| key.chars().all(char::is_alphanumeric)) {
                Some((key, value)) => {
                    script.header(key, value.trim()).map_err(|problem| format!("{place}: {problem}"))?
                }
                None => script.packets.push(PacketLine::parse(line, place)?),
            }
        }
        for (value, what) in [(&script.purpose, "purpose"), (&script.cluster, "cluster")] {
            if value.is_empty() {
                return Err(format!("{name}: has no {what}"));
            }
        }
        Ok(script)
    }

    fn header(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "purpose" => self.purpose = value.to_owned(),
            "cluster" => self.cluster = value.to_owned(),
            "node" => self.node = Some(value.to_owned()),
            "ports" => self.ports = value.split_whitespace().map(str::to_owned).collect(),
            "servicecidrs" => self.service_cidrs = value.split_whitespace().map(str::to_owned).collect(),
            "dedup" => self.dedup = value == "yes",
            "v1beta1" => self.v1beta1 = value == "yes",
            "clusterwide" => self.cluster_wide = value == "yes",
            "link" => {
                self.link = match value {
                    "ethernet" => LinkLayer::Ethernet,
                    "cooked" => LinkLayer::Cooked,
                    "cooked2" => LinkLayer::Cooked2,
                    "raw" => LinkLayer::Raw,
                    other => return Err(format!("{other} is no link layer")),
                }
            }
            "timeline" => {
                self.timeline.push_str(value);
                self.timeline.push('\n');
            }
            other => return Err(format!("{other} is no header of a case")),
        }
        Ok(())
    }
}

impl PacketLine {
    fn parse(line: &str, place: String) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let mut next = |what: &str| words.next().ok_or_else(|| format!("{place}: {what} is missing"));
        let time = nanoseconds(next("time")?).ok_or_else(|| format!("{place}: the time is no number"))?;
        let src = PacketEnd::parse(next("source")?).map_err(|problem| format!("{place}: {problem}"))?;
        if next(">")? != ">" {
            return Err(format!("{place}: write SOURCE > DESTINATION"));
        }
        let dst = PacketEnd::parse(next("destination")?).map_err(|problem| format!("{place}: {problem}"))?;
        let kind = next("kind")?.to_owned();
        let words = words.map(|word| match word.split_once('=') {
            Some((word, value)) => (word.to_owned(), value.to_owned()),
            None => (word.to_owned(), String::new()),
        });
        let words = words.collect();
        Ok(Self { time, src, dst, kind, words, place })
    }

    /// The value of a word, if present.
    pub fn word(&self, word: &str) -> Option<&str> {
        self.words.iter().find(|(key, _)| key == word).map(|(_, value)| value.as_str())
    }

    /// The number of a word, if present.
    ///
    /// # Panics
    /// If it is not a number of this type.
    pub fn number<T: TryFrom<u64>>(&self, word: &str) -> Option<T> {
        let value = self.word(word)?;
        let number = value.strip_prefix("0x").map_or_else(|| value.parse(), |hex| u64::from_str_radix(hex, 16));
        let number = number.ok().and_then(|number| T::try_from(number).ok());
        Some(number.unwrap_or_else(|| panic!("{}: {word}={value} is no number that fits", self.place)))
    }
}

impl PacketEnd {
    fn parse(text: &str) -> Result<Self, String> {
        if let Ok(end) = text.parse::<SocketAddr>() {
            return Ok(Self { address: end.ip(), port: end.port() });
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self { address, port: 0 });
        }
        let (host, port) = text.split_once(':').unwrap_or((text, "0"));
        let (_, address) = HOSTS
            .iter()
            .find(|(name, _)| *name == host)
            .ok_or_else(|| format!("{host} is neither a host nor an address"))?;
        let port = port.parse().map_err(|_| format!("{port} is no port"))?;
        let address = address.parse().map_err(|_| format!("{address} is no address"))?;
        Ok(Self { address, port })
    }
}

/// Converts decimal seconds to nanoseconds.
fn nanoseconds(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = format!("{fraction:0<9}");
    Some(seconds.parse::<u64>().ok()? * 1_000_000_000 + digits.get(..9)?.parse::<u64>().ok()?)
}
