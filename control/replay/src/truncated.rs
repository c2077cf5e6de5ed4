//! Frames that a capture holds the beginning of.

use penstock_dataplane::packet::{Transport, parse};

/// Pads a frame that the snap length truncated to its length on the wire, if all headers are captured: the pipeline
/// reads no payload but that of DNS answers, and zeros are none. Returns whether it did.
pub fn fill_up(frame_start: usize, captured: u32, original: u32, frames: &mut Vec<u8>) -> bool {
    /// Longer than any frame that the pipeline accepts.
    const LONGEST: usize = 14 + 65_535;
    let original = (original as usize).min(LONGEST);
    if original <= captured as usize {
        return false;
    }
    let end = frames.len();
    frames.resize(frame_start + original, 0);
    let has_headers = parse(&frames[frame_start..]).is_ok_and(|packet| {
        let header = match packet.transport {
            Transport::Tcp(_) => 20,
            Transport::Sctp { .. } => 16,
            Transport::Udp | Transport::EchoRequest | Transport::EchoReply => 8,
            Transport::IcmpError { .. } => return false,
            Transport::LaterFragment | Transport::Unreadable | Transport::Other => 0,
        };
        usize::from(packet.layout.transport) + header <= captured as usize
    });
    if !has_headers {
        frames.truncate(end);
    }
    has_headers
}
