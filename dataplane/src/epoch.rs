//! Numbers of snapshots.

/// Sequence number of published snapshots. A connection stores the low 23 bits of the epoch under which it was last
/// evaluated; under a later epoch it is evaluated again at its next packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// Number of low bits that a connection stores.
    pub(crate) const TAG_BITS: u32 = 23;

    /// The epoch of the next snapshot. Epochs whose low 23 bits are zero are skipped: in a connection they mean *never
    /// evaluated*.
    #[must_use]
    pub const fn next(self) -> Self {
        let next = self.0.wrapping_add(1);
        Self(if next & ((1 << Self::TAG_BITS) - 1) == 0 { next + 1 } else { next })
    }

    /// Whether it was published before the other, if fewer than 2^31 lie between both.
    pub const fn is_before(self, other: Self) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }
}
