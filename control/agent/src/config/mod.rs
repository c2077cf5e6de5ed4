//! The daemon's configuration: TOML, with every key validated where it is read and unknown keys rejected.
//!
//! `configs/penstock.toml` shows every key with its default. An error is one line that names file, line, key, value and
//! remedy.

mod layers;
mod network;
mod operation;
mod read;
mod values;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use penstock_dataplane::conntrack;
use penstock_sources::Location;
use penstock_sources::api_server::Access;
use serde::Deserialize;

pub use layers::{ConfigLayers, LoadedConfig, changed_keys};
pub use network::{Encapsulation, FromPods, HostVeth, Xdp, XdpMode};
pub use operation::{Admin, AdminSocketPath, FaultInjection, Metrics, MetricsAddress, VerdictLog, VerdictOutput};
pub use read::ConfigError;
pub use values::{
    Cores, FrameSize, InterfaceName, InterfacePattern, InvalidValue, MemorySize, MidstreamPickup, NodeName, RingSize,
    TableMapping, TimeSpan,
};

/// The configuration of `penstock run`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The name of this machine's Node object: pods with this `spec.nodeName` are local.
    pub node: NodeName,
    /// Additional addresses of this node. Those on its interfaces and in its Node object are known without this.
    #[serde(default)]
    pub node_addresses: Vec<IpAddr>,
    /// Address blocks of Services. Denied egress to one of these has a drop reason of its own.
    #[serde(default)]
    pub service_cidrs: Vec<IpNet>,
    /// NICs and tunnel devices on which packets for local pods arrive.
    #[serde(default)]
    pub uplinks: Vec<InterfaceName>,
    /// What happens to a new veth's packets before its pod is known.
    #[serde(default)]
    pub startup: StartupMode,
    /// Names of the interfaces that the CNI plugin makes for pods.
    #[serde(default = "default_pod_interfaces")]
    pub pod_interfaces: Vec<InterfacePattern>,
    /// Names of the bridges whose ports may be pods'.
    #[serde(default = "default_pod_bridges")]
    pub pod_bridges: Vec<InterfacePattern>,
    /// Where objects come from.
    pub source: Source,
    /// The worker threads.
    #[serde(default)]
    pub workers: Workers,
    /// The memory of all frames.
    #[serde(default)]
    pub umem: Umem,
    /// The XDP mode.
    #[serde(default)]
    pub xdp: Xdp,
    /// The connection table.
    #[serde(default)]
    pub conntrack: Conntrack,
    /// The veth pair into the node's network stack.
    #[serde(default)]
    pub host_veth: HostVeth,
    /// Which encapsulated packets pods may send to nodes.
    #[serde(default)]
    pub encapsulation: Encapsulation,
    /// What applies while no daemon runs.
    #[serde(default)]
    pub fail: Fail,
    /// What the workers do with packets.
    #[serde(default)]
    pub dataplane: Dataplane,
    /// Log level and format.
    #[serde(default)]
    pub log: Log,
    /// The admin API.
    #[serde(default)]
    pub admin: Admin,
    /// Metrics and probes.
    #[serde(default)]
    pub metrics: Metrics,
    /// The log of single packets' verdicts.
    #[serde(default)]
    pub verdict_log: VerdictLog,
    /// Fault injection.
    #[serde(default)]
    pub debug: FaultInjection,
    /// Deprecated keys that are set, each with the key that replaces it.
    #[serde(skip)]
    pub deprecated_keys: Vec<(&'static str, &'static str)>,
}

/// The top-level keys that are not sections.
const KEYS: [&str; 6] = ["node", "node_addresses", "service_cidrs", "uplinks", "pod_interfaces", "startup"];

/// Keys that were renamed: the deprecated name and the current one. Both are accepted.
const RENAMED_KEYS: [(&str, &str); 3] = [
    ("host_port", "host_veth"),
    ("conntrack.on_cut", "conntrack.on_revoke"),
    ("conntrack.pick_up", "conntrack.midstream_pickup"),
];

impl Config {
    /// Makes relative paths start at `directory`.
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
    /// A directory of manifests; relative to the config file's directory.
    pub manifests: Option<PathBuf>,
    /// A kubeconfig file, for the API server that it names; relative to the config file's directory.
    pub kubeconfig: Option<PathBuf>,
    /// The context in it; default: its current one.
    pub context: Option<String>,
    /// The cluster's API server, with the service account of the pod that this runs in.
    pub in_cluster: bool,
}

impl Source {
    /// The source that is configured.
    pub fn location(&self) -> Location {
        match (&self.manifests, &self.kubeconfig) {
            (Some(directory), _) => Location::Manifests(directory.clone()),
            (None, Some(path)) => {
                Location::ApiServer(Access::Kubeconfig { path: path.clone(), context: self.context.clone() })
            }
            // `consistent` rejects a config without any of the three.
            (None, None) => Location::ApiServer(Access::InCluster),
        }
    }
}

/// What happens to a new veth's packets before its pod is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartupMode {
    /// They are dropped and counted.
    #[default]
    Closed,
    /// The kernel forwards them, without any policy.
    Open,
}

fn default_pod_interfaces() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("veth*".to_owned()).expect("a valid pattern")]
}

fn default_pod_bridges() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("cni0".to_owned()).expect("a valid pattern")]
}

/// What applies while no daemon runs (`[fail]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fail {
    /// Whether pods' packets pass after the daemon died.
    pub mode: FailMode,
    /// What a daemon leaves when SIGTERM or SIGINT ends it.
    pub on_exit: OnExit,
    /// Where XDP links are pinned, in bpffs.
    pub pins: PathBuf,
}

impl Default for Fail {
    fn default() -> Self {
        Self { mode: FailMode::Closed, on_exit: OnExit::Restore, pins: "/sys/fs/bpf/penstock".into() }
    }
}

/// Whether pods' packets pass after the daemon died.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FailMode {
    /// No: the programs stay on the pods' interfaces and drop everything.
    #[default]
    Closed,
    /// Yes: the kernel forwards them, without any policy.
    Open,
}

/// What a daemon leaves when SIGTERM or SIGINT ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// The node as it was: programs, routes and settings are removed or restored.
    #[default]
    Restore,
    /// Everything, as after a crash in mode `closed`: the next daemon, such as a newer version, takes over.
    Keep,
}

/// The worker threads (`[workers]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// One worker is pinned to each of these cores; default: one, on the last core that this process may use.
    pub cores: Option<Cores>,
    /// How a worker waits for packets.
    pub polling: Polling,
    /// How long an adaptive worker spins without a packet before it sleeps.
    pub spin: TimeSpan,
    /// Scheduling priority of the workers.
    pub priority: Priority,
    /// How many packets of a queue the kernel sends per wake-up, if the kernel allows to set it.
    pub send_budget: u32,
    /// Whether TCP segments that arrived together are sent as one GSO packet.
    pub gso: bool,
    /// Whether one poll iteration in many is timed by stage.
    pub time_stages: bool,
}

impl Default for Workers {
    fn default() -> Self {
        Self {
            cores: None,
            polling: Polling::Adaptive,
            spin: TimeSpan::microseconds(50),
            priority: Priority::Nice,
            send_budget: 1024,
            gso: true,
            time_stages: true,
        }
    }
}

/// Scheduling priority of the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// Before all ordinary threads.
    RealTime,
    /// Before the threads of its own control group.
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

/// The memory of all frames (`[umem]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Umem {
    /// Number of frames; excludes `memory`.
    pub frames: Option<u32>,
    /// Amount of memory; excludes `frames`.
    pub memory: Option<MemorySize>,
    /// Bytes per frame.
    pub frame_size: FrameSize,
    /// Entries of each ring of a queue: the longest burst that a queue holds until a worker polls it.
    pub ring_size: RingSize,
    /// Whether it uses huge pages.
    pub huge_pages: HugePages,
}

/// Number of frames if neither `frames` nor `memory` is given: enough for 110 pods.
const DEFAULT_FRAMES: u32 = 16_384;

impl Umem {
    /// The number of frames.
    pub fn frame_count(&self) -> u32 {
        let of_memory =
            |memory: MemorySize| (memory.bytes() / u64::from(self.frame_size.bytes())).try_into().unwrap_or(u32::MAX);
        self.frames.or(self.memory.map(of_memory)).unwrap_or(DEFAULT_FRAMES)
    }
}

/// Whether huge pages are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePages {
    /// If any are free.
    #[default]
    Auto,
    /// Never.
    Never,
}

/// The connection table (`[conntrack]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Conntrack {
    /// Capacity in connections; about 74 bytes each.
    pub entries: u32,
    /// Most connections of one pod; default: a quarter of `entries`.
    pub quota: Option<u32>,
    /// How long after a start that found no table a mid-stream TCP segment may open a connection.
    pub midstream_pickup: MidstreamPickup,
    /// The file that it lives in.
    pub mapping: TableMapping,
    /// What happens to a connection that a policy change denies.
    pub on_revoke: OnRevoke,
    /// Idle timeouts, by the names of [`conntrack::Timeouts`].
    pub timeouts: BTreeMap<String, TimeSpan>,
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            entries: 1 << 20,
            quota: None,
            midstream_pickup: MidstreamPickup::For(TimeSpan::microseconds(60_000_000)),
            mapping: TableMapping::default(),
            on_revoke: OnRevoke::Drop,
            timeouts: BTreeMap::new(),
        }
    }
}

impl Conntrack {
    /// The connection table's settings for a daemon that starts now. Fails for an unknown timeout.
    ///
    /// With [`FailMode::Open`] pods open connections past the table while no daemon runs, so mid-stream pickup is also
    /// allowed if the table was found.
    pub fn settings(&self, fail: FailMode) -> Result<conntrack::Config, conntrack::ConfigError> {
        let mut timeouts = conntrack::Timeouts::default();
        for (name, time) in &self.timeouts {
            timeouts.set(name, time.duration())?;
        }
        Ok(conntrack::Config {
            entries: self.entries as usize,
            quota: self.quota,
            timeouts,
            midstream_pickup: match self.midstream_pickup {
                MidstreamPickup::Always | MidstreamPickup::Deprecated(true) => conntrack::MidStreamPickup::Always,
                MidstreamPickup::Deprecated(false) => conntrack::MidStreamPickup::Never,
                MidstreamPickup::For(time) => {
                    let end = conntrack::Timestamp::now().plus(time.duration());
                    match fail {
                        FailMode::Closed => conntrack::MidStreamPickup::AfterLoss(end),
                        FailMode::Open => conntrack::MidStreamPickup::Until(end),
                    }
                }
            },
            mapping: match &self.mapping {
                TableMapping::Off => None,
                TableMapping::File(path) => Some(path.clone()),
            },
        })
    }
}

/// What happens to a connection that a policy change denies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnRevoke {
    /// Its packets are dropped.
    #[default]
    Drop,
    /// Both ends get a TCP RST or an ICMP error.
    Reset,
}

/// What the workers do with a packet (`[dataplane]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dataplane {
    /// The full path, or forwarding only.
    pub mode: Mode,
}

/// How much of the packet path runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Policy, connection tracking, forwarding.
    #[default]
    Full,
    /// Forwarding only, for benchmarks: **no policy is enforced**.
    Forward,
}

/// Log level and format (`[log]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// The lowest level that is logged.
    pub level: LogLevel,
    /// The format.
    pub format: LogFormat,
}

/// A level of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What ends the service or leaves a pod without network.
    Error,
    /// What an operator should check.
    Warn,
    /// What changed.
    #[default]
    Info,
    /// Each step.
    Debug,
    /// Everything.
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

/// A format of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
