//! Captures: reads pcap and pcapng as a stream of Ethernet frames with times, writes pcapng.
//!
//! Formats: pcap (draft-ietf-opsawg-pcap: either byte order, microseconds or nanoseconds) and pcapng
//! (draft-ietf-opsawg-pcapng: several sections, interfaces and resolutions), each also compressed by gzip.
//!
//! `pcap-parser` (0.17) parses headers and blocks. Its readers are not used: they drop the cause of a failed read. `pcap-file`
//! (2.0) takes every timestamp for nanoseconds, and needs 88 ns to write a packet where [`CaptureWriter`] needs 42.

mod buffer;
mod error;
mod file;
pub mod filter;
mod interface_description;
mod link;
mod merge;
mod verdict_file;
mod write;

use penstock_dataplane::conntrack::Timestamp;

pub use error::{CaptureError, Damage};
pub use file::CaptureFile;
pub use link::LinkType;
pub use merge::Captures;
pub use verdict_file::VerdictFile;
pub use write::CaptureWriter;

/// A time in nanoseconds since 1970-01-01T00:00:00Z; reaches to the year 2554.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// The same time for a connection table that lives by the capture's clock.
    pub(super) const fn on_table_clock(self) -> Timestamp {
        Timestamp::from_millis(self.0 / 1_000_000)
    }
}

pub const SECOND: u64 = 1_000_000_000;

/// A packet's record in a capture, besides its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    pub time: Time,
    /// Where it was captured: index of the interface among those of all files.
    pub interface: InterfaceId,
    /// Bytes of the frame in the capture, after conversion to Ethernet.
    pub captured: u32,
    /// Bytes of the frame on the wire, after conversion to Ethernet; more than `captured` if the snap length truncated it.
    pub original: u32,
}

/// Index of an interface among those of all files, in the order of their first appearance.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InterfaceId(pub u32);

impl InterfaceId {
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureInterface {
    /// The index of its file, from 0.
    pub file: usize,
    pub name: Option<String>,
    pub link: LinkType,
}
