//! Packets: parsed once into a validated view, identified by their flow, rewritten in place.

mod address;
mod checksum;
mod flow;
mod gro;
mod icmp;
mod mac;
mod parse;
mod rewrite;
mod segment_size;
mod transport;

pub use address::{Address, AddressScope};
pub use checksum::Sum;
pub use flow::{Flow, FlowKey, Orientation, Protocol, QueryingEnd};
pub(crate) use gro::JoinedSegments;
pub use mac::Mac;
pub use parse::{ETHERNET_LEN, Fragment, Layout, Packet, parse, quoted_flow};
pub(crate) use parse::{parse_into, quoted_ends};
pub(crate) use rewrite::LEAST as LEAST_TO_JOIN;
pub use rewrite::{NextHop, OpenChecksum, TtlChange, finish_open, rewrite};
pub(crate) use segment_size::limit_segment_size;
pub use transport::{SctpChunk, TcpFlags, TcpSegment, Transport};
