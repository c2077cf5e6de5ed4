//! A verdict as a line of JSON.
//!
//! Hand-written: this is the hot path of a replay with `--verdicts`. No string but names needs escaping, and names are
//! escaped when they are created.

use std::fmt::Write as _;

use penstock_dataplane::packet::{Address, Flow, Packet, Protocol};
use rustc_hash::FxHashMap;

use super::capture::{SECOND, Time};
use super::cluster::ReplayCluster;
use super::kernel::addresses;
use super::player::{ConnectionState, Decision};
use super::rules::Rules;

/// A packet and its evaluation: the content of a line.
pub(super) struct EvaluatedPacket<'a> {
    /// Its number in the capture, from 1.
    pub(super) number: u64,
    pub(super) time: Time,
    pub(super) frame: &'a [u8],
    /// The parsed packet, if it could be parsed.
    pub(super) packet: Option<&'a Packet>,
    pub(super) decision: Decision,
    pub(super) connection_state: Option<ConnectionState>,
    /// The rules that allow its connection, or the one that denies it.
    pub(super) rules: Rules,
}

/// Writes lines. Caches text that repeats: the second of the time, and addresses.
#[derive(Debug, Default)]
pub(super) struct VerdictLineWriter {
    second: Option<u64>,
    second_text: String,
    addresses: FxHashMap<Address, Box<str>>,
}

/// Addresses whose text is cached; the cache is cleared when full.
const ADDRESSES_KEPT: usize = 1 << 16;

impl VerdictLineWriter {
    /// Clears the cached names: the cluster has changed.
    pub(super) fn forget_names(&mut self) {
        self.addresses.clear();
    }

    /// Appends the line, with its newline.
    pub(super) fn write(&mut self, evaluated: &EvaluatedPacket<'_>, cluster: &ReplayCluster, line: &mut Vec<u8>) {
        line.extend_from_slice(b"{\"n\":");
        decimal(evaluated.number, line);
        line.extend_from_slice(b",\"time\":\"");
        self.time(evaluated.time, line);
        line.extend_from_slice(b"\",\"src\":");
        let flow = evaluated.packet.map(|packet| packet.flow);
        let ends = flow.map(|flow| (flow.src, flow.dst)).or_else(|| addresses(evaluated.frame));
        match ends {
            Some((src, dst)) => {
                self.address(src, cluster, line);
                line.extend_from_slice(b",\"dst\":");
                self.address(dst, cluster, line);
            }
            None => line.extend_from_slice(b"null,\"dst\":null"),
        }
        line.extend_from_slice(b",\"protocol\":");
        protocol(flow, evaluated.frame, line);
        ports(evaluated.packet, line);
        line.extend_from_slice(b",\"verdict\":");
        let reason = match evaluated.decision {
            Decision::Allow => {
                line.extend_from_slice(b"\"allow\"");
                None
            }
            Decision::Deny(reason) => {
                line.extend_from_slice(b"\"deny\"");
                Some(reason.name())
            }
            Decision::Kernel(outcome) => {
                line.extend_from_slice(b"\"kernel\"");
                Some(outcome.name())
            }
        };
        line.extend_from_slice(b",\"reason\":");
        quoted(reason, line);
        line.extend_from_slice(b",\"rule\":");
        if evaluated.rules == Rules::default() {
            line.extend_from_slice(b"null");
        } else {
            line.push(b'"');
            cluster.rules().write_names(evaluated.rules, line);
            line.push(b'"');
        }
        line.extend_from_slice(b",\"conn\":");
        quoted(evaluated.connection_state.map(ConnectionState::name), line);
        line.extend_from_slice(b"}\n");
    }

    /// RFC 3339 with nanoseconds.
    fn time(&mut self, time: Time, line: &mut Vec<u8>) {
        let (second, nanoseconds) = (time.0 / SECOND, time.0 % SECOND);
        if self.second != Some(second) {
            self.second = Some(second);
            self.second_text = timestamp(second).strftime("%Y-%m-%dT%H:%M:%S.").to_string();
        }
        line.extend_from_slice(self.second_text.as_bytes());
        let mut digits = [b'0'; 9];
        let mut rest = nanoseconds as u32;
        for digit in digits.iter_mut().rev() {
            *digit += (rest % 10) as u8;
            rest /= 10;
        }
        line.extend_from_slice(&digits);
        line.push(b'Z');
    }

    /// The name of an address, or else the address.
    fn address(&mut self, address: Address, cluster: &ReplayCluster, line: &mut Vec<u8>) {
        if let Some(text) = self.addresses.get(&address) {
            line.extend_from_slice(text.as_bytes());
            return;
        }
        if self.addresses.len() >= ADDRESSES_KEPT {
            self.addresses.clear();
        }
        let text = serde_json::Value::from(cluster.display_name(address)).to_string().into_boxed_str();
        line.extend_from_slice(text.as_bytes());
        self.addresses.insert(address, text);
    }
}

/// A capture's second as a timestamp; every second of the type [`Time`] is in range.
fn timestamp(second: u64) -> jiff::Timestamp {
    jiff::Timestamp::from_second(second as i64).unwrap_or(jiff::Timestamp::MAX)
}

impl ConnectionState {
    /// Its name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Established => "established",
            Self::Related => "related",
            Self::Revoked => "revoked",
        }
    }
}

#[inline]
fn quoted(text: Option<&str>, line: &mut Vec<u8>) {
    match text {
        Some(text) => {
            line.push(b'"');
            line.extend_from_slice(text.as_bytes());
            line.push(b'"');
        }
        None => line.extend_from_slice(b"null"),
    }
}

fn ports(packet: Option<&Packet>, line: &mut Vec<u8>) {
    match packet.filter(|packet| packet.flow.protocol.has_ports() && !is_later_fragment(packet)) {
        Some(Packet { flow, .. }) => {
            line.extend_from_slice(b",\"sport\":");
            decimal(u64::from(flow.src_port), line);
            line.extend_from_slice(b",\"dport\":");
            decimal(u64::from(flow.dst_port), line);
        }
        None => line.extend_from_slice(b",\"sport\":null,\"dport\":null"),
    }
}

fn is_later_fragment(packet: &Packet) -> bool {
    packet.fragment.is_some_and(|fragment| !fragment.is_first())
}

/// The innermost protocol that the frame shows.
fn protocol(flow: Option<Flow>, frame: &[u8], line: &mut Vec<u8>) {
    let protocol = flow.map(|flow| flow.protocol).or_else(|| {
        addresses(frame)?;
        // For IPv6 this may be the number of an extension header that could not be parsed.
        Some(Protocol(if frame[12] == 0x08 { frame[23] } else { frame[20] }))
    });
    let known = match protocol {
        Some(Protocol::TCP) => "\"TCP\"",
        Some(Protocol::UDP) => "\"UDP\"",
        Some(Protocol::SCTP) => "\"SCTP\"",
        Some(Protocol::ICMP) => "\"ICMP\"",
        Some(Protocol::ICMPV6) => "\"ICMPv6\"",
        _ => {
            line.extend_from_slice(unusual(protocol, frame).as_bytes());
            return;
        }
    };
    line.extend_from_slice(known.as_bytes());
}

#[cold]
fn unusual(protocol: Option<Protocol>, frame: &[u8]) -> String {
    let mut text = String::from("\"");
    let ethertype = frame.get(12..14).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    // Writing to a string does not fail.
    let _ = match (protocol, ethertype) {
        (Some(protocol), _) => write!(text, "{protocol}"),
        (None, Some(0x0806)) => write!(text, "ARP"),
        (None, Some(0x0800)) => write!(text, "IPv4"),
        (None, Some(0x86dd)) => write!(text, "IPv6"),
        (None, Some(ethertype)) => write!(text, "ethertype {ethertype:#06x}"),
        (None, None) => return "null".to_owned(),
    };
    text.push('"');
    text
}

#[inline]
fn decimal(number: u64, line: &mut Vec<u8>) {
    line.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}
