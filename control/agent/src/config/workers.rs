//! The workers and the memory of their frames: `[workers]`, `[umem]`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::values::{Cores, FrameSize, MemorySize, RingSize, TimeSpan};

/// The worker threads (`[workers]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// Cores, each with one worker pinned to it. Default: with `offload`, where the process may use all cores, one worker on each
    /// core, for the packets that this core sends; otherwise one worker, on the last core that the process may use.
    pub cores: Option<Cores>,
    /// How a worker waits for packets.
    pub polling: Polling,
    /// How long an adaptive worker spins without a packet before it sleeps; up to four times as long while packets come soon after it
    /// fell asleep. Default: with a worker on each core `"0s"`, otherwise `"50us"`.
    pub spin: Option<TimeSpan>,
    /// Scheduling priority of the workers.
    pub priority: Priority,
    /// Packets of a queue that one system call sends, on Linux 6.17 and later: 32 to `umem.ring_size`. Earlier kernels
    /// send 32.
    pub send_budget: u32,
    /// Whether TCP segments of one connection that arrive together leave as one GSO packet.
    pub gso: bool,
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            cores: None,
            polling: Polling::Adaptive,
            spin: None,
            priority: Priority::Auto,
            send_budget: 1024,
            gso: true,
        }
    }
}

/// Scheduling priority of the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// `"realtime"` with a worker on each core, otherwise `"nice"`.
    Auto,
    /// Before all ordinary threads, to which a worker leaves a tenth of its core.
    RealTime,
    /// Before the other threads of its control group.
    Nice,
}

/// How a worker waits for packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Polling {
    /// Spins while packets arrive, sleeps when none do.
    #[default]
    Adaptive,
    /// Never sleeps: lowest delay, each core at 100 %.
    Busy,
}

/// The memory of all frames (`[umem]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Umem {
    /// Number of frames, at least 4 times `ring_size`. Not together with `memory`.
    #[schemars(extend("default" = DEFAULT_FRAMES))]
    pub frames: Option<u32>,
    /// Memory of all frames, instead of their number.
    pub memory: Option<MemorySize>,
    /// Bytes per frame: 2048 (packets up to 1778 bytes) or 4096 (up to 3826). From Linux 6.6 on longer packets take several frames.
    pub frame_size: FrameSize,
    /// Entries of each ring of a port, a power of two: the longest burst that a port holds until a worker polls it.
    pub ring_size: RingSize,
    /// Whether frames are in huge pages.
    pub huge_pages: HugePages,
}

/// Number of frames if neither `frames` nor `memory` is given: enough for 110 pods.
pub(super) const DEFAULT_FRAMES: u32 = 12_288;

impl Umem {
    /// The number of frames.
    pub fn frame_count(&self) -> u32 {
        let of_memory =
            |memory: MemorySize| (memory.bytes() / u64::from(self.frame_size.bytes())).try_into().unwrap_or(u32::MAX);
        self.frames.or(self.memory.map(of_memory)).unwrap_or(DEFAULT_FRAMES)
    }
}

/// Whether huge pages are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// If enough of them are free.
    #[default]
    Auto,
    /// No.
    Never,
}
