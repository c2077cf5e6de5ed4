//! What the workers are told: one immutable value, published whole.

use crate::forward::Forwarding;
use crate::policy::PolicySet;

/// Counts published snapshots. A connection carries the low 23 bits of the epoch under which policy was last asked about
/// it; under a later one it is asked again at the connection's next packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// How many of the low bits a connection carries.
    pub(crate) const TAG_BITS: u32 = 23;

    /// The epoch of the next snapshot. Those whose low 23 bits are zero are left out: in a connection they stand for
    /// *never asked*.
    #[must_use]
    pub const fn next(self) -> Self {
        let next = self.0.wrapping_add(1);
        Self(if next & ((1 << Self::TAG_BITS) - 1) == 0 { next + 1 } else { next })
    }
}

/// Policy and forwarding of one moment. Workers take it once a batch and never see a part of another.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Under which number it was published.
    pub epoch: Epoch,
    /// Who may talk to whom.
    pub policy: PolicySet,
    /// Which port leads where.
    pub forwarding: Forwarding,
}
