//! Captures: pcap and pcapng read as a stream of Ethernet frames with their times, and pcapng written.
//!
//! Formats: pcap (draft-ietf-opsawg-pcap: either byte order, microseconds or nanoseconds) and pcapng
//! (draft-ietf-opsawg-pcapng: several sections, interfaces and resolutions), each also compressed by gzip.

mod buffer;
mod error;
mod file;
mod link;
mod merge;
mod ng;
mod write;

pub use error::{CaptureError, Damage};
pub use file::CaptureFile;
pub use link::LinkType;
pub use merge::Captures;
pub use write::CaptureWriter;

/// A moment in nanoseconds since 1970-01-01T00:00:00Z; good until the year 2554.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// What a capture says of a packet besides its octets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// When it was seen.
    pub time: Time,
    /// Where it was seen: the number of the interface among those of all files.
    pub interface: InterfaceId,
    /// Octets of the frame that the capture holds, once it has an Ethernet header.
    pub captured: u32,
    /// Octets that the frame had on the wire, once it has an Ethernet header; more than `captured` where the capture's
    /// snap length cut it.
    pub original: u32,
}

/// An interface among those of all files read, in the order in which they were met.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InterfaceId(pub u32);

impl InterfaceId {
    /// As an array index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An interface of a capture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    /// Which of the files it is of, from 0.
    pub file: usize,
    /// Its name, where the capture tells one.
    pub name: Option<String>,
    /// What precedes the IP header in its packets.
    pub link: LinkType,
}
