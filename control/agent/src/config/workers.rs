//! The workers and the memory of their frames: `[workers]`, `[umem]`.

use penstock_dataplane::worker::Priority;
use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Cores, FrameSize, MemorySize};

/// The worker threads (`[workers]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// Cores, each with one worker pinned to it. Default: with `offload`, where the process may use all cores, one worker on each
    /// core, for the packets that this core sends; otherwise one worker, on the last core that the process may use.
    pub cores: Option<Cores>,
    /// Scheduling priority of the workers. Default: `"realtime"` with a worker on each core, otherwise `"nice"`.
    pub priority: Option<Priority>,
}

/// The memory of all frames (`[umem]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Umem {
    /// Memory of all frames, at least 4,096 of them. A third of them may wait in a ring, of at most 4,096. Default: 12,288 frames, enough
    /// for 110 pods: `"24MiB"` of 2048 bytes each.
    pub memory: Option<MemorySize>,
    /// Bytes per frame: 2048 (packets up to 1778 bytes) or 4096 (up to 3826). From Linux 6.6 on longer packets take several frames.
    pub frame_size: FrameSize,
}

/// Number of frames if `memory` is not given.
const DEFAULT_FRAMES: u32 = 12_288;
/// The least number of frames: two rings of the least size that measured well, filled.
pub(super) const MIN_FRAMES: u32 = 4096;

impl Umem {
    /// The number of frames.
    pub fn frame_count(&self) -> u32 {
        let of_memory = |memory: MemorySize| memory.bytes() / u64::from(self.frame_size.bytes());
        self.memory.map_or(DEFAULT_FRAMES, |memory| of_memory(memory).try_into().unwrap_or(u32::MAX))
    }
}
