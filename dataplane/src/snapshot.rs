//! What the workers are told: one immutable value, published whole.

use crate::forward::Forwarding;
use crate::policy::PolicySet;

/// Counts published snapshots. A connection carries the low 24 bits of the epoch under which policy was last asked about
/// it; under a later one it is asked again at the connection's next packet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epoch(pub u32);

impl Epoch {
    /// The epoch of the next snapshot. Those whose low 24 bits are zero are left out: in a connection they stand for
    /// *never asked*.
    #[must_use]
    pub const fn next(self) -> Self {
        let next = self.0.wrapping_add(1);
        Self(if next & 0x00ff_ffff == 0 { next + 1 } else { next })
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
