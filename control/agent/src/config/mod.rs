//! The daemon's configuration: TOML, with every key validated where it is read and unknown keys rejected.
//!
//! `configs/penstock.toml` shows every key with its default. An error is one line that names file, line, key, value and
//! remedy. The first paragraph behind each field and value is what users read: the JSON schema and the table of
//! `docs/config.md` are generated from these types ([`schema`]). A default that a type cannot give ends the text, as
//! `Default: …`.

mod flow_records;
mod layers;
mod network;
mod operation;
mod read;
pub mod schema;
mod values;
mod workers;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use penstock_dataplane::conntrack;
use penstock_dataplane::reply::{OnDeny, OnRevoke};
use penstock_sources::Location;
use penstock_sources::api_server::Access;
use penstock_sources::convert::ConversionSettings;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use flow_records::{FlowRecords, OtlpEndpoint, RecordsFile};
pub use layers::{ConfigLayers, LoadedConfig, changed_keys};
pub use network::{Encapsulation, FromPods};
pub use operation::{Admin, Capture, Metrics, MetricsAddress, SocketPath, VerdictLog, VerdictOutput};
pub use read::{ConfigError, ConfigErrors};
pub use values::{
    Cores, FrameSize, InterfaceName, InterfacePattern, InvalidValue, MemorySize, MidstreamPickup, NodeName, Resolver,
    TableMapping, TaintKey, TimeSpan,
};
pub use workers::{Umem, Workers};

/// The configuration of `penstock run`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(title = "penstock.toml")]
pub struct Config {
    /// `metadata.name` of this machine's Node object. Pods with this `spec.nodeName` are local.
    pub node: NodeName,
    /// Addresses of this node, in addition to those on its interfaces and in its Node object.
    #[serde(default)]
    pub node_addresses: Vec<IpAddr>,
    /// Address blocks of Services. What egress policy denies there is counted as `service_denied`.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub service_cidrs: Vec<IpNet>,
    /// Whether the programs forward packets of established connections by themselves. Otherwise all
    /// packets go through the workers. Only on x86-64.
    #[serde(default = "yes")]
    pub offload: bool,
    /// With `offload`: whether packets between pods and other machines pass the node's stack by.
    #[serde(default)]
    pub host_routing: HostRouting,
    /// Whether a new veth's packets pass before its pod is known.
    #[serde(default)]
    pub startup: StartupMode,
    /// Interfaces that the CNI plugin makes for pods: names, or a prefix and `*`.
    #[serde(default = "default_pod_interfaces")]
    pub pod_interfaces: Vec<InterfacePattern>,
    /// Bridges whose ports may be pods': names, or a prefix and `*`.
    #[serde(default = "default_pod_bridges")]
    pub pod_bridges: Vec<InterfacePattern>,
    /// Where the container runtime keeps the results of CNI plugins, which say whose an interface is.
    #[serde(default = "default_cni_results")]
    pub cni_results: Vec<PathBuf>,
    /// Where objects come from: exactly one of `manifests`, `kubeconfig` and `in_cluster`.
    pub source: Source,
    /// The worker threads.
    #[serde(default)]
    pub workers: Workers,
    /// The memory of all frames.
    #[serde(default)]
    pub umem: Umem,
    /// The connection table.
    #[serde(default)]
    pub conntrack: Conntrack,
    /// The answer to a denied connection.
    #[serde(default)]
    pub deny: Deny,
    /// Domain names in policies.
    #[serde(default)]
    pub domain_names: DomainNames,
    /// Which encapsulated packets pods may send to nodes.
    #[serde(default)]
    pub encapsulation: Encapsulation,
    /// The rules while no daemon runs.
    #[serde(default)]
    pub fail: Fail,
    /// Log level and format.
    #[serde(default)]
    pub log: Log,
    /// The admin API.
    #[serde(default)]
    pub admin: Admin,
    /// Captures.
    #[serde(default)]
    pub capture: Capture,
    /// Metrics and probes.
    #[serde(default)]
    pub metrics: Metrics,
    /// The log of single packets' verdicts.
    #[serde(default)]
    pub verdict_log: VerdictLog,
    /// Records of flows.
    #[serde(default)]
    pub flow_records: FlowRecords,
}

impl Config {
    /// How objects are read.
    pub(crate) fn conversion(&self) -> ConversionSettings {
        ConversionSettings { domain_names: self.domain_names.enabled, ..ConversionSettings::default() }
    }

    /// Makes relative paths start at `directory`.
    fn start_paths_at(&mut self, directory: &Path) {
        for path in [&mut self.source.manifests, &mut self.source.kubeconfig].into_iter().flatten() {
            *path = directory.join(&*path);
        }
        self.admin.socket.start_at(directory);
        self.capture.socket.start_at(directory);
        self.verdict_log.output.start_at(directory);
        self.flow_records.start_at(directory);
    }
}

/// Where objects come from (`[source]`): exactly one of `manifests`, `kubeconfig` and `in_cluster`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(transform = schema::exactly_one_source)]
pub struct Source {
    /// A directory of YAML and JSON manifests, watched with its subdirectories. Exactly one of `manifests`, `kubeconfig` and `in_cluster` is set.
    pub manifests: Option<PathBuf>,
    /// A kubeconfig file: follow the API server of its current context.
    pub kubeconfig: Option<PathBuf>,
    /// Whether to follow the API server of the cluster that this runs in, with the pod's service account.
    pub in_cluster: bool,
    /// The key of a taint of this machine's Node object, whatever its effect, that the daemon removes once policy is in effect on
    /// every worker. Nodes are registered with it, so that pods are scheduled there only then. Needs an API server.
    pub startup_taint: Option<TaintKey>,
}

impl Source {
    /// The source that is configured.
    pub fn location(&self) -> Location {
        match (&self.manifests, &self.kubeconfig) {
            (Some(directory), _) => Location::Manifests(directory.clone()),
            (None, Some(path)) => Location::ApiServer(Access::Kubeconfig { path: path.clone(), context: None }),
            // `consistent` rejects a config without any of the three.
            (None, None) => Location::ApiServer(Access::InCluster),
        }
    }
}

/// Whether packets from a new veth pass until its pod is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StartupMode {
    /// They are dropped and counted.
    #[default]
    Closed,
    /// The kernel forwards them, without policy.
    Open,
}

/// Domain names in policies (`[domain_names]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DomainNames {
    /// Whether `domainNames` of ClusterNetworkPolicies are understood. Workers then read what pods with such rules ask of DNS, and the answers;
    /// nothing else changes. Otherwise a rule with them is not understood, and accepts nothing.
    pub enabled: bool,
    /// The DNS servers whose answers count: Services as `namespace/name`, addresses, and blocks of addresses. An address after `local:` counts only
    /// on nodes that have it.
    pub resolvers: Vec<Resolver>,
}

impl Default for DomainNames {
    fn default() -> Self {
        // NodeLocal DNSCache listens at this address of each node
        // (https://kubernetes.io/docs/tasks/administer-cluster/nodelocaldns/). Where a node doesn't have it, anybody on the link may.
        let resolvers = ["kube-system/kube-dns", "local:169.254.20.10"];
        Self {
            enabled: true,
            resolvers: resolvers.map(|text| Resolver::try_from(text.to_owned()).expect("a resolver")).to_vec(),
        }
    }
}

fn yes() -> bool {
    true
}

fn default_pod_interfaces() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("veth*".to_owned()).expect("a valid pattern")]
}

fn default_pod_bridges() -> Vec<InterfacePattern> {
    vec![InterfacePattern::try_from("cni0".to_owned()).expect("a valid pattern")]
}

/// That of libcni, and that of Multus for the networks that it makes.
fn default_cni_results() -> Vec<PathBuf> {
    ["/var/lib/cni/results", "/var/lib/cni/multus/results"].map(PathBuf::from).to_vec()
}

/// Whether packets between pods and other machines pass the node's stack by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HostRouting {
    /// Each packet in which nothing on the node has a say: no netfilter hook, such as kube-proxy's, no IPsec policy, no filter of somebody else;
    /// and which the node's routes and neighbours are ready for.
    #[default]
    Auto,
    /// None.
    Never,
}

/// The rules while no daemon runs (`[fail]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Fail {
    /// Whether pods' packets pass after the daemon has died.
    pub mode: FailMode,
    /// How a daemon leaves the node when SIGTERM or SIGINT ends it.
    pub on_exit: OnExit,
    /// Directory of the pinned links, in bpffs. bpffs is mounted at `/sys/fs/bpf` if it is not.
    pub pins: PathBuf,
    /// How long the programs go on opening connections when no daemon runs, with mode `closed`: under the last policy, and
    /// for each pod a quarter of its share at most. At most `"5d"`; `"0s"`: not at all.
    pub repeat_answers: TimeSpan,
}

impl Default for Fail {
    fn default() -> Self {
        Self {
            mode: FailMode::Closed,
            on_exit: OnExit::Restore,
            pins: "/sys/fs/bpf/penstock".into(),
            repeat_answers: TimeSpan::microseconds(600_000_000),
        }
    }
}

impl Fail {
    /// The longest time for which programs open connections without a daemon: their clock has few bits.
    pub(crate) const LONGEST_REPEATS: Duration = Duration::from_secs(5 * 86_400);
}

/// Whether pods' packets pass after the daemon has died.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FailMode {
    /// They are dropped: the programs stay on the pods' interfaces until the next start.
    #[default]
    Closed,
    /// The kernel forwards them, without policy.
    Open,
}

/// How a daemon leaves the node when SIGTERM or SIGINT ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// The node as it was: programs and interfaces of Penstock are removed.
    #[default]
    Restore,
    /// Everything, as after a crash with mode `closed`, for the next daemon: an upgrade opens nothing.
    Keep,
}

/// Minimum entries of the connection table.
const MIN_CONNECTIONS: u32 = 1_024;

/// The connection table (`[conntrack]`).
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Conntrack {
    /// Connections that the table holds, allocated at start: about 82 bytes each, 114 where programs forward packets too.
    #[schemars(range(min = MIN_CONNECTIONS))]
    pub entries: u32,
    /// Maximum connections that one pod opens, and as many that others open to it. Default: a quarter of `entries`.
    pub quota: Option<u32>,
    /// When a mid-stream TCP segment may open a connection that policy allows: `"always"`, `"0s"` for never, or a time after a
    /// start that found no table.
    pub midstream_pickup: MidstreamPickup,
    /// The table's file by its absolute path, best on a tmpfs: a restarted daemon finds its connections there. Where programs
    /// forward packets too, connections are in BPF maps beside the pinned links (`fail.pins`) instead. Beside the path are in
    /// both cases the last good configuration and the API server's objects. `"off"`: after a restart all connections are new,
    /// and neither is kept.
    pub mapping: TableMapping,
    /// Whether packets of a connection that a policy change revokes are answered.
    pub on_revoke: OnRevoke,
    /// How long an idle connection is kept, by state, under the names of the kernel's nf_conntrack settings: for
    /// example `{ tcp_timeout_established = "5d", udp_timeout = "30s" }`. Default: those of a node with kube-proxy.
    #[schemars(schema_with = "schema::timeouts")]
    pub timeouts: BTreeMap<String, TimeSpan>,
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            entries: 1 << 19,
            quota: None,
            midstream_pickup: MidstreamPickup::Always,
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
                MidstreamPickup::Always => conntrack::MidStreamPickup::Always,
                MidstreamPickup::For(time) => {
                    let end = conntrack::Timestamp::now().plus(time.duration());
                    match fail {
                        FailMode::Closed => conntrack::MidStreamPickup::AfterLoss(end),
                        FailMode::Open => conntrack::MidStreamPickup::Until(end),
                    }
                }
            },
            memory: match &self.mapping {
                TableMapping::Off => conntrack::TableMemory::Anonymous,
                TableMapping::File(path) => conntrack::TableMemory::File(path.clone()),
            },
            ended: 0,
            repeats: None,
        })
    }
}

/// The answer to a denied connection (`[deny]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Deny {
    /// The answer to a packet of a pod or a node that policy does not let open a connection. Machines outside the cluster get none.
    /// A policy says otherwise for what it denies by the annotation `policy.penstock.dev/deny-answer`.
    pub answer: OnDeny,
}

/// Log level and format (`[log]`).
#[derive(Clone, PartialEq, Eq, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// The lowest level that is logged.
    pub level: LogLevel,
    /// Format of the log.
    pub format: LogFormat,
}

/// A level of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Faults that end the service or leave a pod without network.
    Error,
    /// Conditions that an operator should check.
    Warn,
    /// Changes.
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text per event.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
