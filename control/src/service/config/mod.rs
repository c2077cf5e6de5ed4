//! The daemon's configuration: TOML, every key checked where it is read, unknown keys refused.
//!
//! `configs/penstock.toml` shows every key with its default. A problem is told in one line that names file,
//! line, key, value and mend.

mod encapsulation;
mod layers;
mod operation;
mod read;
mod values;
mod xdp;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use penstock_dataplane::conntrack;
use serde::Deserialize;

use crate::source::Location;
use crate::source::api_server::Access;

pub use encapsulation::{Encapsulation, FromPods};
pub use layers::{Layers, Loaded, differences};
pub use operation::{Admin, AdminSocket, Faults, Metrics, MetricsAddress, VerdictLog, VerdictOutput};
pub use read::ConfigError;
pub use values::{
    Cores, FrameSize, InterfaceName, InterfacePattern, Mapping, Memory, NodeName, PickUp, Refused, RingSize, Time,
};
pub use xdp::{Xdp, XdpMode};

/// All that `penstock run` is told.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The name of this machine's Node object: pods with this `spec.nodeName` are local.
    pub node: NodeName,
    /// Further addresses of this node. Those on its interfaces and in its Node object are known anyway.
    #[serde(default)]
    pub node_addresses: Vec<IpAddr>,
    /// Blocks that Services have their addresses from. An egress policy that denies one of these says so by a cause of its
    /// own.
    #[serde(default)]
    pub service_cidrs: Vec<IpNet>,
    /// NICs and tunnel devices on which packets for local pods arrive.
    #[serde(default)]
    pub uplinks: Vec<InterfaceName>,
    /// What becomes of a new veth's packets before its pod is known.
    #[serde(default)]
    pub startup: Startup,
    /// Names of the interfaces that the CNI plugin makes for pods.
    #[serde(default = "default_pod_interfaces")]
    pub pod_interfaces: Vec<InterfacePattern>,
    /// Names of the bridges whose ports may be pods'.
    #[serde(default = "default_pod_bridges")]
    pub pod_bridges: Vec<InterfacePattern>,
    /// Where objects come from.
    pub source: Source,
    /// The threads that move packets.
    #[serde(default)]
    pub workers: Workers,
    /// The memory that all frames live in.
    #[serde(default)]
    pub umem: Umem,
    /// Where XDP programs run.
    #[serde(default)]
    pub xdp: Xdp,
    /// The connection table.
    #[serde(default)]
    pub conntrack: Conntrack,
    /// The veth pair into the node's own stack.
    #[serde(default)]
    pub host_port: HostPort,
    /// What pods may send to nodes in a wrapping.
    #[serde(default)]
    pub encapsulation: Encapsulation,
    /// What holds while no daemon runs.
    #[serde(default)]
    pub fail: Fail,
    /// What the workers do with a packet.
    #[serde(default)]
    pub dataplane: Dataplane,
    /// What is logged, and how.
    #[serde(default)]
    pub log: Log,
    /// The admin API.
    #[serde(default)]
    pub admin: Admin,
    /// Metrics and probes.
    #[serde(default)]
    pub metrics: Metrics,
    /// What is told of single packets.
    #[serde(default)]
    pub verdict_log: VerdictLog,
    /// Faults on purpose.
    #[serde(default)]
    pub debug: Faults,
}

/// The keys of the top level that are no sections.
const KEYS: [&str; 6] = ["node", "node_addresses", "service_cidrs", "uplinks", "pod_interfaces", "startup"];

impl Config {
    /// Has relative paths start at `directory`.
    fn start_paths_at(&mut self, directory: &Path) {
        for path in [&mut self.source.manifests, &mut self.source.kubeconfig].into_iter().flatten() {
            *path = directory.join(&*path);
        }
        self.admin.socket.start_at(directory);
        self.verdict_log.output.start_at(directory);
    }
}

/// Where objects come from (`[source]`): exactly one of `manifests`, `kubeconfig` and `in_cluster`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Source {
    /// A directory of manifests; a relative path is meant from the directory of the config file.
    pub manifests: Option<PathBuf>,
    /// A kubeconfig file, for the API server that it names; relative as above.
    pub kubeconfig: Option<PathBuf>,
    /// The context in it; none given: its current one.
    pub context: Option<String>,
    /// The API server of the cluster, by the service account of the pod that this runs in.
    pub in_cluster: bool,
}

impl Source {
    /// Which source that is.
    pub fn location(&self) -> Location {
        match (&self.manifests, &self.kubeconfig) {
            (Some(directory), _) => Location::Manifests(directory.clone()),
            (None, Some(path)) => {
                Location::ApiServer(Access::Kubeconfig { path: path.clone(), context: self.context.clone() })
            }
            // A config without any of the three is not read.
            (None, None) => Location::ApiServer(Access::InCluster),
        }
    }
}

/// What becomes of a new veth's packets before its pod is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Startup {
    /// They are dropped and counted.
    #[default]
    Closed,
    /// They are the kernel's, which knows no policy.
    Open,
}

fn default_pod_interfaces() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("veth*".to_owned()).expect("a valid pattern")]
}

fn default_pod_bridges() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("cni0".to_owned()).expect("a valid pattern")]
}

/// What holds while no daemon runs (`[fail]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fail {
    /// Whether pods' packets pass when the daemon died.
    pub mode: FailMode,
    /// What a daemon leaves that is ended by SIGTERM or SIGINT.
    pub on_exit: OnExit,
    /// Where XDP links are pinned, in bpffs.
    pub pins: PathBuf,
}

impl Default for Fail {
    fn default() -> Self {
        Self { mode: FailMode::Closed, on_exit: OnExit::Restore, pins: "/sys/fs/bpf/penstock".into() }
    }
}

/// Whether pods' packets pass when the daemon died.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailMode {
    /// No: the programs stay on the pods' interfaces and drop what no worker takes.
    #[default]
    Closed,
    /// Yes: they go to the kernel, which knows no policy.
    Open,
}

/// What a daemon leaves that is ended by SIGTERM or SIGINT.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// The node as it was: programs, routes and settings are taken back.
    #[default]
    Restore,
    /// All as after a crash in mode `closed`: what comes next, such as a newer version, goes on from there.
    Keep,
}

/// The threads that move packets (`[workers]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// One worker is pinned to each of these; none given: one, on the last core that this process may use.
    pub cores: Option<Cores>,
    /// How a worker waits for packets.
    pub polling: Polling,
    /// How long an adaptive worker spins without a packet before it sleeps.
    pub spin: Time,
    /// What a worker goes before on its core.
    pub priority: Priority,
    /// How many packets of a queue the kernel sends at one wake-up, where it can be told.
    pub send_budget: u32,
    /// Whether TCP segments that came together leave as one packet of the kernel's.
    pub gso: bool,
    /// Whether one turn in many is timed by stage.
    pub time_stages: bool,
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            cores: None,
            polling: Polling::Adaptive,
            spin: Time::microseconds(50),
            priority: Priority::Nice,
            send_budget: 1024,
            gso: true,
            time_stages: true,
        }
    }
}

/// What a worker goes before on its core.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// All ordinary threads.
    RealTime,
    /// The threads of its own control group.
    Nice,
}

/// How a worker waits for packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Polling {
    /// Spins while packets come, sleeps in poll(2) when none do.
    #[default]
    Adaptive,
    /// Spins always: lowest delay, a core each at 100 %.
    Busy,
}

/// The memory that all frames live in (`[umem]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Umem {
    /// How many frames; not together with `memory`.
    pub frames: Option<u32>,
    /// How much memory; not together with `frames`.
    pub memory: Option<Memory>,
    /// Octets a frame.
    pub frame_size: FrameSize,
    /// Entries of each ring of a queue: how long a burst may be before a worker gets to it.
    pub ring_size: RingSize,
    /// Whether it lies on huge pages.
    pub huge_pages: HugePages,
}

/// How many frames there are when neither `frames` nor `memory` is given: enough for 110 pods.
const DEFAULT_FRAMES: u32 = 16_384;

impl Umem {
    /// How many frames there are to be.
    pub fn frame_count(&self) -> u32 {
        let of_memory =
            |memory: Memory| (memory.octets() / u64::from(self.frame_size.octets())).try_into().unwrap_or(u32::MAX);
        self.frames.or(self.memory.map(of_memory)).unwrap_or(DEFAULT_FRAMES)
    }
}

/// Whether huge pages are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// When there are any free.
    #[default]
    Auto,
    /// Never.
    Never,
}

/// The connection table (`[conntrack]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conntrack {
    /// How many connections it holds; about 74 octets each.
    pub entries: u32,
    /// Most connections of one pod; none given: a quarter of `entries`.
    pub quota: Option<u32>,
    /// How long after a start that found no table a segment from the middle of a TCP connection may open one.
    pub pick_up: PickUp,
    /// Where it lives.
    pub mapping: Mapping,
    /// What becomes of a connection that policy ends.
    pub on_cut: OnCut,
    /// How long an idle connection is kept, by the names that [`conntrack::Timeouts`] has.
    pub timeouts: BTreeMap<String, Time>,
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            entries: 1 << 20,
            quota: None,
            pick_up: PickUp::For(Time::microseconds(60_000_000)),
            mapping: Mapping::default(),
            on_cut: OnCut::Drop,
            timeouts: BTreeMap::new(),
        }
    }
}

impl Conntrack {
    /// The connection table's settings for a daemon that starts now. The error names a timeout that there is not.
    ///
    /// With [`FailMode::Open`] connections are opened past the table while no daemon runs, so that they may be picked up
    /// also where the table was found.
    pub fn settings(&self, fail: FailMode) -> Result<conntrack::Config, conntrack::ConfigError> {
        let mut timeouts = conntrack::Timeouts::default();
        for (name, time) in &self.timeouts {
            timeouts.set(name, time.duration())?;
        }
        Ok(conntrack::Config {
            entries: self.entries as usize,
            quota: self.quota,
            timeouts,
            midstream_pickup: match self.pick_up {
                PickUp::Always | PickUp::Former(true) => conntrack::MidStreamPickup::Always,
                PickUp::Former(false) => conntrack::MidStreamPickup::Never,
                PickUp::For(time) => {
                    let end = conntrack::Timestamp::now().plus(time.duration());
                    match fail {
                        FailMode::Closed => conntrack::MidStreamPickup::AfterLoss(end),
                        FailMode::Open => conntrack::MidStreamPickup::Until(end),
                    }
                }
            },
            mapping: match &self.mapping {
                Mapping::Off => None,
                Mapping::File(path) => Some(path.clone()),
            },
        })
    }
}

/// What becomes of a connection that policy ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnCut {
    /// Its packets are dropped.
    #[default]
    Drop,
    /// Its ends are told: by a TCP RST, or an ICMP error.
    Reset,
}

/// The veth pair into the node's own stack (`[host_port]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostPort {
    /// The node's end: the node's routes to its pods point into it.
    pub node: InterfaceName,
    /// The workers' end.
    pub workers: InterfaceName,
    /// The routing table that holds those routes; consulted before the node's main table.
    pub table: u32,
    /// Preference of the routing rule that points to that table, below the main table's 32766.
    pub rule: u32,
}

impl Default for HostPort {
    fn default() -> Self {
        let name = |name: &str| InterfaceName::try_from(name.to_owned()).expect("a valid name");
        Self { node: name("penstock-host"), workers: name("penstock0"), table: 11_200, rule: 90 }
    }
}

/// What the workers do with a packet (`[dataplane]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dataplane {
    /// All of it, or forwarding alone.
    pub mode: Mode,
}

/// How much of the packet path is walked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Policy, connections, forwarding.
    #[default]
    Full,
    /// Forwarding alone, for benchmarks: **no policy is enforced**.
    Forward,
}

/// What is logged, and how (`[log]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// From which level on.
    pub level: LogLevel,
    /// In which form.
    pub format: LogFormat,
}

/// A level of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What ends the service or leaves a pod without network.
    Error,
    /// What somebody should look at.
    Warn,
    /// What changed.
    #[default]
    Info,
    /// Each step.
    Debug,
    /// All there is.
    Trace,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// A form of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text an event.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}
