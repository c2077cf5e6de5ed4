//! Requests and answers of the admin API: one set of types for server and clients.
//!
//! Counters count from the daemon's start; rates cover the last one or two seconds. New fields may be added at any
//! time: clients ignore fields that they do not know.

mod rules;
mod trial;

use std::collections::BTreeMap;
use std::net::IpAddr;

pub use rules::{RuleUsage, Rules};
use serde::{Deserialize, Serialize};
pub use trial::{StagedChange, StagedVerdict, TrialManifest, TrialPolicies, TrialRequest, TrialStatus};

/// `GET /v1/status`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub node: String,
    pub process: u32,
    /// How long it has been running, in seconds.
    pub uptime_seconds: f64,
    pub policies: usize,
    /// The epoch that was published last.
    pub published: u32,
    /// Whether it is in effect on every worker.
    pub in_force: bool,
    pub workers: Vec<WorkerStatus>,
    pub ports: Vec<PortStatus>,
    pub pods: Vec<PodStatus>,
    /// Packets that workers dropped by reason, of all ports, including closed ones.
    pub drops: BTreeMap<String, u64>,
    /// Packets that the kernel lost at the sockets of all ports, including closed ones, by kind; none of them is in `drops`.
    #[serde(default)]
    pub kernel_drops: BTreeMap<String, u64>,
    /// Where the frames of the UMEM are.
    pub frames: FrameCounts,
    pub connections: TableStatus,
    /// Interfaces to other machines, and whether packets of pods may pass the node's stack by there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub host_routing: Vec<HostRoutingStatus>,
    /// Domain names that pods have learnt; `None` if no policy of theirs has some, or these are not followed.
    #[serde(default)]
    pub domain_names: Option<NamesStatus>,
    /// Why the configuration was refused at the start, if the last good one is in effect instead; one line per problem.
    #[serde(default)]
    pub configuration_refused: Vec<String>,
    /// Manifests that are not applied; their last valid objects are in effect, and the log says why.
    #[serde(default)]
    pub refused_files: u64,
    /// Set while the objects of an earlier run are in effect, because the source has not been read yet.
    #[serde(default)]
    pub stale: Option<StaleObjects>,
    #[serde(default)]
    pub capture: Option<CaptureStatus>,
    /// Records of flows; `None` if there are none.
    #[serde(default)]
    pub flow_records: Option<FlowRecordsStatus>,
    /// A pod or interface on which policy is not enforced, and why.
    #[serde(default)]
    pub not_enforced: Vec<NotEnforced>,
    /// What objects claim that they do not get: addresses of this node's pods, or more than a namespace's share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub object_problems: Vec<String>,
    /// State of the object source, by resource.
    #[serde(default)]
    pub source: BTreeMap<String, SourceStatus>,
}

impl Status {
    /// Packets lost by reason, of all ports: `drops`, and `kernel_drops` with `kernel_` before each kind.
    pub fn all_drops(&self) -> BTreeMap<String, u64> {
        with_kernel(&self.drops, &self.kernel_drops)
    }
}

/// An interface to other machines.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostRoutingStatus {
    pub interface: String,
    /// The reason why packets of IPv4 go by the node's stack; `None`: they need not.
    pub ipv4_kept_by: Option<String>,
    pub ipv6_kept_by: Option<String>,
}

/// Something on which policy is not enforced: a pod under policy that is neither served nor closed, or something of the node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NotEnforced {
    /// The pod, as `namespace/name`; `None` if it is about the node.
    pub pod: Option<String>,
    /// The reason with its remedy.
    pub reason: String,
}

/// Domain names that pods have learnt from DNS answers. A name counts once for each address that it was given for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NamesStatus {
    /// Names that are kept, expired ones included.
    pub kept: u64,
    /// Names that answers gave since the start, also those that were known.
    pub learnt: u64,
    /// Names that were evicted since the start, because a limit was reached.
    pub evicted: u64,
    /// Messages from DNS servers since the start that were no answer, or malformed.
    pub not_understood: u64,
    /// Answers since the start to something else than what the pod had asked.
    #[serde(default)]
    pub unasked: u64,
    /// Whether a DNS server is known whose answers count.
    #[serde(default)]
    pub has_resolver: bool,
}

/// `GET /v1/names`: the query.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamesQuery {
    /// Only what this pod has learnt, `namespace/name`.
    pub pod: Option<String>,
    /// Only this name, or those that `*.NAME` matches.
    pub name: Option<String>,
    pub limit: Option<usize>,
}

/// `GET /v1/names`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Names {
    pub matching: usize,
    /// The names, by pod, name and address.
    pub names: Vec<LearntName>,
    /// The DNS servers whose answers count, as they are configured.
    pub resolvers: Vec<String>,
    /// Whether one of them is known.
    pub has_resolver: bool,
}

/// A name that a DNS answer gave a pod for an address.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct LearntName {
    /// The pod, `namespace/name`.
    pub pod: String,
    pub name: String,
    pub address: IpAddr,
    /// For how many more seconds the pod may open connections to it by the name; 0: it has expired, and counts for those that are open.
    pub seconds: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FlowRecordsStatus {
    /// Records made, by event: `end`, `interval`, `denied`.
    pub made: BTreeMap<String, u64>,
    /// Losses: connections that ended too fast (`ended`), denied packets beyond the budget (`denied`), records that
    /// were not written (`file`) or not sent (`otlp`).
    pub lost: BTreeMap<String, u64>,
    /// Forwarded packets in no connection's counts: ICMP errors, later fragments, and packets of connections that were
    /// removed in the same batch.
    pub uncounted: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CaptureStatus {
    /// Seconds since it began.
    pub seconds: u64,
    /// The pod whose packets it wants; `None`: of all.
    pub pod: Option<String>,
    pub packets: u64,
    /// Packets that it lost, because its reader is too slow.
    pub lost: u64,
}

/// Objects of an earlier run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StaleObjects {
    /// When they were recorded, as in RFC 3339.
    pub recorded: String,
    pub objects: usize,
}

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SourceStatus {
    /// Whether all objects have been read at least once.
    pub synced: bool,
    /// Whether changes arrive as they happen; not so in an outage.
    pub connected: bool,
    /// Seconds since the last message from the source.
    pub last_sign_seconds: Option<f64>,
    pub objects: u64,
    /// Objects that are not understood, or only in part.
    pub invalid: u64,
    /// How often the connection was lost.
    pub outages: u64,
    /// The resourceVersion up to which all changes of this resource are in the snapshots that were published so far; `None` with
    /// manifests, and from daemons that do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct WorkerStatus {
    pub worker: usize,
    pub core: usize,
    /// The epoch in effect on it: it evaluates no packet under an older policy from now on.
    pub epoch: u32,
    /// The share of its time in which it moved packets, from 0 to 1.
    pub busy: f64,
    /// The share of its time in which it did not sleep, from 0 to 1.
    pub awake: f64,
    pub packets_per_second: f64,
    pub packets_per_batch: f64,
    /// Median duration of poll iterations with packets, in seconds, since the start.
    pub poll_iteration_median_seconds: Option<f64>,
    /// The 99th percentile of the same, in seconds.
    pub poll_iteration_p99_seconds: Option<f64>,
    /// Of its pair's socket.
    #[serde(default)]
    pub rings: RingDepth,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PortStatus {
    pub port: u16,
    pub interface: String,
    /// `pod`, `host` or `pair`.
    pub kind: String,
    /// The pod behind it, `namespace/name`.
    pub pod: Option<String>,
    /// How its programs are attached: `tcx`, `clsact` before Linux 6.6, or `xdp` at a worker's pair.
    #[serde(default)]
    pub program: String,
    /// Totals since the start.
    pub total: PortCounts,
    pub rate: PortRates,
    /// Packets that came in here and were dropped, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Packets that the kernel lost at its sockets (`struct xdp_statistics`), by kind; each packet is in one kind only.
    pub kernel_drops: BTreeMap<String, u64>,
    /// Packets that the programs on the interface have seen, by outcome.
    pub outcomes: BTreeMap<String, u64>,
}

impl PortStatus {
    /// Packets that came in here and were lost, by reason, as [`Status::all_drops`] names them.
    pub fn all_drops(&self) -> BTreeMap<String, u64> {
        with_kernel(&self.drops, &self.kernel_drops)
    }
}

fn with_kernel(drops: &BTreeMap<String, u64>, kernel: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let kernel = kernel.iter().map(|(name, count)| (format!("kernel_{name}"), *count));
    drops.clone().into_iter().chain(kernel).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct PortCounts {
    /// Packets received: sent by the pod.
    pub rx_packets: u64,
    /// Bytes of those, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets sent: delivered to the pod.
    pub tx_packets: u64,
    pub tx_bytes: u64,
    /// Packets received and dropped, by a worker, or by the kernel because no frame or ring entry was free.
    pub dropped_packets: u64,
}

/// The same per second.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PortRates {
    pub rx_packets: f64,
    pub rx_bytes: f64,
    pub tx_packets: f64,
    pub tx_bytes: f64,
    pub dropped_packets: f64,
}

impl std::ops::AddAssign<&Self> for PortRates {
    fn add_assign(&mut self, other: &Self) {
        self.rx_packets += other.rx_packets;
        self.rx_bytes += other.rx_bytes;
        self.tx_packets += other.tx_packets;
        self.tx_bytes += other.tx_bytes;
        self.dropped_packets += other.dropped_packets;
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct RingDepth {
    /// With the kernel for receiving, or received and not yet read.
    pub receiving: u32,
    pub sending: u32,
    /// Entries of each ring.
    pub size: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PodStatus {
    /// `namespace/name`.
    pub pod: String,
    pub addresses: Vec<IpAddr>,
    /// Its interface; `None` while it is not attached.
    pub interface: Option<String>,
    pub port: Option<u16>,
    /// The epoch of the last change of its own rules, addresses or port.
    pub changed: Option<u32>,
    /// The epoch that was published last, if it includes the pod.
    pub published: Option<u32>,
    /// Whether its policy and its peers' addresses are in effect on every worker.
    pub enforced: bool,
    /// Whether tables of its policies, which have many rules, are being built: what is in effect for it is older.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub building: bool,
    /// Why it is not attached yet.
    pub waiting: Option<String>,
    /// Which of its packets others have limits of bandwidth or filters for, and whether these hold.
    #[serde(default)]
    pub filtered: Option<String>,
    /// Its connections, which count against its quota of the table.
    pub connections: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<ConnectionLimitStatus>,
}

/// Limits of a pod's connections in one direction.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectionLimitStatus {
    /// `egress`: of what it opens. `ingress`: of what others open to it.
    pub direction: String,
    /// Most that are opened in a second.
    pub each_second: Option<u32>,
    pub most_open: Option<u32>,
    /// How many are open, where that is limited.
    pub open: Option<usize>,
    /// Packets that would have opened one too many in a second.
    pub refused_each_second: u64,
    /// Packets that would have opened one beside as many as may be open.
    pub refused_open: u64,
}

/// Frames of the UMEM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FrameCounts {
    pub total: u32,
    pub free: u32,
    /// In fill rings, for the kernel to receive into.
    pub fill: u32,
    /// In a transmit ring, or handed between workers.
    pub in_flight: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TableStatus {
    pub entries: usize,
    pub capacity: usize,
    pub events: BTreeMap<String, u64>,
}

/// `GET /v1/flows`: the query.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowsQuery {
    /// Only connections with this pod or address on either end.
    pub end: Option<String>,
    pub state: Option<String>,
    /// Only connections of this protocol: by name or number.
    pub protocol: Option<String>,
    /// Only connections to this destination port.
    pub port: Option<u16>,
    pub limit: Option<usize>,
}

/// `GET /v1/flows`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Flows {
    pub matching: usize,
    /// The listed connections, in no order.
    pub flows: Vec<ConnectionFlow>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectionFlow {
    /// Its identifier, the same as in the verdict log.
    pub connection: String,
    /// TCP, UDP, SCTP, ICMP, ICMPv6 or `protocol N`.
    pub protocol: String,
    /// The end that opened it.
    pub from: FlowEnd,
    /// The other end.
    pub to: FlowEnd,
    /// Its state, named as in nf_conntrack, or `REVOKED` if a policy change revoked it.
    pub state: String,
    /// Traffic of the end that opened it; `None` where connections have no counters: without `offload`,
    /// unless there are records of flows.
    #[serde(default)]
    pub sent: Option<Traffic>,
    #[serde(default)]
    pub received: Option<Traffic>,
    /// The rule that allows the opener's egress under the current policy, or the verdict.
    pub egress: String,
    /// The rule that allows the other end's ingress under the current policy, or the verdict.
    pub ingress: String,
    /// Seconds since its last packet, rounded down.
    pub idle_seconds: u64,
    /// Seconds until it expires if no packet comes, rounded down.
    pub expires_seconds: u64,
}

/// Forwarded packets and bytes of connections. A long segment counts as the packets that it is cut into, and with its own length.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets; of one connection and direction modulo 2³².
    pub packets: u64,
    /// Bytes from the IP header on; of one connection and direction modulo 2⁴².
    pub bytes: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FlowEnd {
    pub address: IpAddr,
    /// The port, or the identifier of an ICMP echo; 0 where the protocol has none.
    pub port: u16,
    /// The owner of the address: `namespace/name` of a pod, or `node NAME`; `None` if unknown.
    pub name: Option<String>,
}

/// `GET /v1/explain`: the query, with the arguments of `penstock explain`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainQuery {
    /// The sender: `namespace/pod` or an address.
    pub from: String,
    pub to: String,
    /// `PORT/PROTOCOL`, or a protocol without ports.
    pub port: String,
}

/// `GET /v1/explain`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Explanation {
    pub allowed: bool,
    pub text: String,
    /// The epoch that it is valid for.
    pub epoch: u32,
}

/// `GET /v1/dump`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Dump {
    pub files: Vec<DumpFile>,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DumpFile {
    pub name: String,
    pub content: String,
}

/// The body of any response other than 200.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ErrorBody {
    /// One line: the thing, its value and the remedy.
    pub error: String,
}

/// `POST /v1/pods`, at the socket of the CNI plugin: a pod of this node has just got its network.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewPod {
    pub namespace: String,
    pub name: String,
    /// Its addresses: at least one, at most [`NewPod::MOST_ADDRESSES`].
    pub addresses: Vec<IpAddr>,
    /// Names of the interfaces that plugins have made for it on the node, at most [`NewPod::MOST_INTERFACES`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<String>,
    /// How long the answer may wait for its policy to be in effect, in milliseconds; at most [`NewPod::LONGEST_WAIT`].
    pub wait_ms: u64,
}

impl NewPod {
    pub const MOST_ADDRESSES: usize = 16;
    pub const MOST_INTERFACES: usize = 16;
    /// The longest wait for one answer, in milliseconds: less than a client waits for any.
    pub const LONGEST_WAIT: u64 = 10_000;
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NewPodState {
    /// The thing that is awaited; nothing once its policy is in effect on every worker.
    pub awaits: Option<String>,
}
