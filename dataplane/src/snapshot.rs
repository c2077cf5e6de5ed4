//! What the workers are told: one immutable value, published whole.

use crate::forward::Forwarding;
use crate::policy::PolicySet;

/// Counts published snapshots. A connection carries the epoch under which it was last judged; an older one
/// is judged again at its next packet. Compared for equality only, so that wrapping is harmless.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Epoch(pub u32);

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
