//! Errors of captures, each one line.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[error("{}: {damage}", file.display())]
pub struct CaptureError {
    pub file: PathBuf,
    pub damage: Damage,
}

impl CaptureError {
    pub(super) fn new(file: &Path, damage: Damage) -> Self {
        Self { file: file.to_owned(), damage }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Damage {
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("is not a capture: use a pcap or pcapng file, as tcpdump and Wireshark write them")]
    NotACapture,
    #[error(
        "link type {0} is not supported: capture on Ethernet (1), Linux cooked (113, 276) or raw IP (101, 228, 229)"
    )]
    LinkType(u32),
    /// A packet of an interface without a description block.
    #[error("the packet at byte {at} refers to interface {interface}, which no block describes: the file is damaged")]
    Interface { at: u64, interface: u32 },
    #[error(
        "interface {interface} has time resolution {resolution:#04x}: supported are 10^-0 to 10^-19 and 2^-0 to 2^-63"
    )]
    Resolution { interface: usize, resolution: u8 },
    #[error("the record at byte {at} claims {length} bytes, more than any packet: the file is damaged there")]
    TooLong {
        at: u64,
        /// The length it claims.
        length: u64,
    },
    #[error("no valid packet or block at byte {0}: the file is damaged there")]
    Malformed(u64),
}
