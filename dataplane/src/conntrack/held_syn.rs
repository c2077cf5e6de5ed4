//! A SYN that a live connection has let through.

use crate::packet::TcpSegment;

/// Seven bits about a SYN that one side of a live connection has sent, stored besides its window. If the other side
/// acknowledges the SYN, both have lost the connection and open a new one. Otherwise the connection continues as if the
/// SYN had not been sent.
///
/// Bits 0–1 are the side's previous marks `FIN` and `FIN_ACKED`. Bits 2–6 are a hash of the number that
/// acknowledges the SYN with its data: enough to distinguish attempts. Security does not depend on it: only the receiver of a
/// SYN-ACK, which knows the number, continues with it, and policy is evaluated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct HeldSyn(pub(super) u8);

impl HeldSyn {
    pub(super) fn new(syn: &TcpSegment, marks: u8) -> Self {
        Self(Self::hash(syn.seq.wrapping_add(1).wrapping_add(syn.payload_len.into())) << 2 | marks >> 1)
    }

    const fn hash(ack: u32) -> u8 {
        (ack.wrapping_mul(0x9e37_79b1) >> 27) as u8
    }

    /// Whether this number acknowledges it.
    pub(super) const fn is_acked_by(self, ack: u32) -> bool {
        self.0 >> 2 == Self::hash(ack)
    }

    /// The previous marks of its side.
    pub(super) const fn marks(self) -> u8 {
        (self.0 & 3) << 1
    }
}
