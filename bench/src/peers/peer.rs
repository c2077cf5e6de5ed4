//! The peers, and the configuration of those that are Penstock.

use std::path::Path;

use crate::testbed::{DaemonConfig, ScratchDir};

use super::{Cores, NODE, capture_socket};

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Peer {
    Penstock {
        /// Whether policy is enforced; otherwise everything is forwarded.
        enforces: bool,
        sections: String,
    },
    Kernel,
    /// nftables with connection tracking, sets and verdict maps.
    Nftables,
    /// nftables with one rule per entry of the access lists, without connection tracking. Measured
    /// packets match last.
    Linear,
    Iptables,
    /// iptables that queues the first packets of a connection to a process (NFQUEUE) for a verdict.
    Nfqueue,
    /// Open vSwitch's userspace datapath with its connection tracker.
    OpenVSwitch,
    /// DPDK's testpmd over AF_XDP, which forwards without inspecting packets.
    Testpmd,
    /// A tcx program that redirects from one pod to the other and does nothing else.
    Redirect,
}

impl Peer {
    /// Penstock with its default configuration.
    pub fn penstock() -> Self {
        Self::Penstock { enforces: true, sections: String::new() }
    }

    /// The same by tcx. `offload`: whether its programs forward packets of established connections by themselves.
    pub fn penstock_by_tcx(offload: bool) -> Self {
        Self::Penstock { enforces: true, sections: format!("offload {offload}\n") }
    }

    /// The same where no program opens a connection by itself: each first packet meets a worker.
    pub fn penstock_by_tcx_without_repeats() -> Self {
        Self::Penstock { enforces: true, sections: format!("offload true\n{WITHOUT_REPEATS}") }
    }

    /// The same, with one worker.
    pub fn penstock_by_tcx_with_one_worker_without_repeats() -> Self {
        let sections = format!("offload true\none worker\n{SHARES_ITS_CORE}{WITHOUT_REPEATS}");
        Self::Penstock { enforces: true, sections }
    }

    /// Penstock with room for as many frames and connections as by default.
    pub fn penstock_as_shipped() -> Self {
        Self::Penstock {
            enforces: true,
            sections: format!("offload true\n{SHIPPED_FRAMES}conntrack entries = {SHIPPED_CONNECTIONS}\n"),
        }
    }

    /// The same, with one worker for all packets that the programs leave to workers. It is like those of the default, which share
    /// their cores with pods.
    pub fn penstock_by_tcx_with_one_worker() -> Self {
        Self::Penstock { enforces: true, sections: format!("offload true\none worker\n{SHARES_ITS_CORE}") }
    }

    /// Penstock by tcx with room for this many connections, none of which expires during a run.
    pub fn penstock_by_tcx_with_table(entries: usize) -> Self {
        let timeouts = format!("timeouts = {{ udp_timeout = \"{KEPT}s\", udp_timeout_stream = \"{KEPT}s\" }}");
        let sections = format!("offload true\nconntrack entries = {entries}\nconntrack {timeouts}\n");
        Self::Penstock { enforces: true, sections }
    }

    /// Penstock without policy and connection tracking.
    pub fn forward() -> Self {
        Self::Penstock { enforces: false, sections: String::new() }
    }

    /// The same by tcx: each packet goes through a worker's pair and back.
    pub fn forward_by_tcx() -> Self {
        Self::Penstock { enforces: false, sections: "offload false\n".to_owned() }
    }

    pub fn enforces(&self) -> bool {
        !matches!(self, Self::Kernel | Self::Testpmd | Self::Redirect | Self::Penstock { enforces: false, .. })
    }

    /// Whether it busy-polls, so that it must be stopped while another peer is measured.
    pub(super) fn always_polls(&self) -> bool {
        matches!(self, Self::OpenVSwitch | Self::Testpmd)
    }
}

/// Settings of a worker that shares its core, which it has by default where each core has one.
const SHARES_ITS_CORE: &str = "workers priority = \"realtime\"\n";

/// A line of a peer's sections: the programs open no connection by themselves.
const WITHOUT_REPEATS: &str = "environment WITHOUT_REPEATS\n";

pub(super) fn daemon_config(manifests: &Path, scratch: &ScratchDir, sections: &str, cores: Cores) -> DaemonConfig {
    let mut config = DaemonConfig::new(NODE, manifests);
    let mut conntrack = String::new();
    config.admin = Some(scratch.path().join("admin.sock"));
    let is_shipped = sections.contains(SHIPPED_FRAMES);
    let worker = cores.worker;
    // Where programs forward, the default: a worker on each core.
    let mut workers = match sections.contains("offload true") && !sections.contains("one worker") {
        true => String::new(),
        false => format!("cores = [{worker}]\n"),
    };
    let mut umem = if is_shipped { String::new() } else { format!("memory = \"{MEMORY}MiB\"\n") };
    let mut capture = String::new();
    // Lines of the peer go into the sections written here.
    for line in sections.lines() {
        match line.split_once(' ') {
            Some(("workers", line)) => workers += &format!("{line}\n"),
            Some(("umem", line)) => umem += &format!("{line}\n"),
            Some(("capture", _)) => {
                capture = format!("[capture]\nsocket = \"{}\"\n", capture_socket(scratch).display())
            }
            Some(("environment", name)) => config.environment.push((name.to_owned(), "1".to_owned())),
            Some(("offload", value)) => config.offload = value == "true",
            Some(("conntrack", line)) => conntrack += &format!("{line}\n"),
            _ => {}
        }
    }
    // Every peer has room for the connections of every scenario, the kernel too, unless the peer says otherwise.
    if conntrack.is_empty() {
        conntrack = format!("entries = {CONNECTIONS}\nquota = {CONNECTIONS}\n");
    }
    config.conntrack = format!("mapping = \"off\"\n{conntrack}");
    config.sections = format!("[workers]\n{workers}[umem]\n{umem}{capture}");
    config
}

/// A line of a peer's sections: as many frames as by default.
const SHIPPED_FRAMES: &str = "frames as shipped\n";

/// MiB of a UMEM for a few pods.
pub(super) const MEMORY: usize = 64;

/// The default of `conntrack.entries`.
const SHIPPED_CONNECTIONS: usize = 1 << 19;

/// Connections that every peer has room for.
pub const CONNECTIONS: usize = 1 << 22;

/// Seconds that idle UDP connections of a filled table are kept: longer than a run.
pub(super) const KEPT: u32 = 3 * 3600;
