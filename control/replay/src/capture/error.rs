//! What is wrong with a capture, in one line.

use std::io;
use std::path::{Path, PathBuf};

/// A capture that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {damage}", file.display())]
pub struct CaptureError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub damage: Damage,
}

impl CaptureError {
    pub(super) fn new(file: &Path, damage: Damage) -> Self {
        Self { file: file.to_owned(), damage }
    }
}

/// What is wrong with a capture.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// It cannot be opened or read.
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// Neither format's magic number.
    #[error("is not a capture: give a file in pcap or pcapng format, as tcpdump and Wireshark write")]
    NotACapture,
    /// A link type without a meaning here.
    #[error("link type {0} is not read: capture on Ethernet (1), Linux cooked (113, 276) or raw IP (101, 228, 229)")]
    LinkType(u32),
    /// A packet of an interface that was not described.
    #[error("the packet at octet {at} names interface {interface} that no block describes: the file is damaged")]
    Interface {
        /// Where its block begins.
        at: u64,
        /// The number it gives.
        interface: u32,
    },
    /// A time resolution that cannot be.
    #[error(
        "interface {interface} has time resolution {resolution:#04x}: 10^-0 to 10^-19 or 2^-0 to 2^-63 can be read"
    )]
    Resolution {
        /// Its number in its section.
        interface: usize,
        /// The option's value.
        resolution: u8,
    },
    /// A record or block that is longer than any can be.
    #[error("what begins at octet {at} is {length} octets long, more than any packet: the file is damaged there")]
    TooLong {
        /// Where it begins.
        at: u64,
        /// How long it says that it is.
        length: u64,
    },
    /// A record or block that contradicts itself.
    #[error("what begins at octet {0} is no packet and no block: the file is damaged there")]
    Malformed(u64),
}
