//! Configuration of a dataplane.

use std::sync::Arc;
use std::time::Duration;

use super::{Priority, WaitingPackets};
use crate::conntrack;
use crate::io::takes_long_packets;
use crate::pipeline::{OriginalSources, PipelineMode};
use crate::reply::ReplySettings;

/// A CPU core by the kernel's number, as in `/proc/cpuinfo`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CoreId(pub usize);

#[derive(Clone, Debug)]
pub struct Config {
    /// Number of UMEM frames. Each pair keeps up to `ring_size` of them for receiving, all pairs together half of them. In addition to
    /// the frame itself the kernel allocates 128 bytes for each frame and pair.
    pub frames: u32,
    /// Bytes of a frame: 2048 or 4096.
    pub frame_size: u32,
    /// Entries of each ring of a pair's socket: a power of two.
    pub ring_size: u32,
    /// Whether consecutive TCP segments that were received together and leave on the same port are sent as one GSO packet.
    pub gso: bool,
    /// Whether workers take packets of several frames; [`takes_long_packets`] of the kernel.
    pub long_packets: bool,
    /// The cores that workers are pinned to, one each.
    pub cores: Vec<CoreId>,
    /// How long a worker spins without a packet before it sleeps; zero sleeps immediately.
    pub spin: Duration,
    /// Scheduling priority of workers, if permitted.
    pub priority: Priority,
    pub connections: conntrack::Config,
    pub mode: PipelineMode,
    pub replies: ReplySettings,
    /// Original sources of what the node's stack translates; without, policy sees the node's address.
    pub sources: Option<Arc<dyn OriginalSources>>,
    /// Where workers count what they have received through their pairs.
    pub waiting: Option<WaitingPackets>,
    /// Prefix of thread names, followed by a dash and the worker's number; the system truncates names to 15 bytes.
    pub thread_name: String,
}

impl Default for Config {
    /// 32 MiB of 2 KiB frames, enough for 110 ports; one worker on core 0.
    fn default() -> Self {
        Self {
            frames: 16_384,
            frame_size: 2048,
            ring_size: 1024,
            gso: true,
            long_packets: takes_long_packets(),
            cores: vec![CoreId(0)],
            spin: Duration::from_micros(50),
            priority: Priority::default(),
            connections: conntrack::Config::default(),
            mode: PipelineMode::Full,
            replies: ReplySettings::default(),
            sources: None,
            waiting: None,
            thread_name: "worker".to_owned(),
        }
    }
}
