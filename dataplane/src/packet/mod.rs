//! A packet: parsed once into a validated view, named by its flow, rewritten in place.

mod address;
mod flow;
mod transport;

pub use address::Address;
pub use flow::{Flow, FlowKey, Orientation, Protocol};
pub use transport::{SctpChunk, TcpFlags, TcpSegment, Transport};
