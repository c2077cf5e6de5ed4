//! What a dataplane is started with.

use std::time::Duration;

use super::Priority;
use crate::answer::OnCut;
use crate::conntrack;
use crate::io::HugePages;
use crate::pipeline::Mode;

/// A processor core by the kernel's number, as in `/proc/cpuinfo`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CoreId(pub usize);

/// How a worker waits for packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polling {
    /// Spins for this long after the last packet, then sleeps until the next.
    Adaptive {
        /// How long; zero sleeps at once.
        spin: Duration,
    },
    /// Spins always: the lowest delay, a core each at 100 %.
    Busy,
}

impl Default for Polling {
    fn default() -> Self {
        Self::Adaptive { spin: Duration::from_micros(50) }
    }
}

/// What a dataplane is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// How many frames the UMEM has. Each queue of a port keeps some of them for receiving, 64 to `ring_size`: by the bursts
    /// that it had, the pace of its packets and what is free. Beside a frame's own octets the kernel takes 128 for each frame and
    /// port.
    pub frames: u32,
    /// Octets a frame: 2048 or 4096.
    pub frame_size: u32,
    /// Entries of each ring of a queue: a power of two.
    pub ring_size: u32,
    /// How many packets of a queue the kernel sends at one wake-up, where it can be told (Linux 6.17); 32 elsewhere, and when
    /// this is no more than that. All is sent in any case, by as many wake-ups as it takes.
    pub tx_budget: u32,
    /// Whether TCP segments that were received together, follow one another and leave by the same port leave as one packet of
    /// the kernel's (GSO), where the port has one queue.
    pub gso: bool,
    /// Whether the UMEM lies on huge pages.
    pub huge_pages: HugePages,
    /// The cores that workers are pinned to, one each.
    pub cores: Vec<CoreId>,
    /// How workers wait for packets.
    pub polling: Polling,
    /// What workers go before on their cores, where the kernel lets them.
    pub priority: Priority,
    /// Whether one turn in many is timed by stage.
    pub time_stages: bool,
    /// The connection table.
    pub connections: conntrack::Config,
    /// How much of the pipeline runs.
    pub mode: Mode,
    /// What becomes of a connection that policy ends.
    pub on_cut: OnCut,
    /// What the threads are called, a dash and the worker's number behind it; the system keeps 15 octets of it.
    pub thread_name: String,
}

impl Default for Config {
    /// 32 MiB of 2 KiB frames, enough for 110 ports; one worker on core 0.
    fn default() -> Self {
        Self {
            frames: 16_384,
            frame_size: 2048,
            ring_size: 1024,
            tx_budget: 1024,
            gso: true,
            huge_pages: HugePages::Auto,
            cores: vec![CoreId(0)],
            polling: Polling::default(),
            priority: Priority::default(),
            time_stages: true,
            connections: conntrack::Config::default(),
            mode: Mode::Full,
            on_cut: OnCut::default(),
            thread_name: "worker".to_owned(),
        }
    }
}
