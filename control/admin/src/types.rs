//! What the admin API says: one set of types for the server and for the commands that ask it.
//!
//! Counters count from the daemon's start, rates are those of the last one or two seconds. A field that is added later
//! is no change of the interface; readers pass over what they do not know.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// `GET /v1/status`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Penstock's version.
    pub version: String,
    /// The node's name.
    pub node: String,
    /// The daemon's process id.
    pub process: u32,
    /// Since when it runs, in seconds.
    pub uptime_seconds: f64,
    /// How many NetworkPolicies the cluster has.
    pub policies: usize,
    /// The snapshot that was published last.
    pub published: u32,
    /// Whether it is in force on every worker.
    pub in_force: bool,
    /// The workers.
    pub workers: Vec<Worker>,
    /// The open ports.
    pub ports: Vec<Port>,
    /// The pods of this node.
    pub pods: Vec<Pod>,
    /// Packets dropped by cause, all ports together, those that are closed by now included.
    pub drops: BTreeMap<String, u64>,
    /// Where the frames of the UMEM are.
    pub frames: Frames,
    /// The connection table.
    pub connections: Connections,
    /// Where objects come from, by their kind.
    #[serde(default)]
    pub source: BTreeMap<String, Source>,
}

/// How the source does with one kind of objects.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Source {
    /// Whether all objects have been read at least once.
    pub synced: bool,
    /// Whether changes are told as they happen: not so in an outage.
    pub connected: bool,
    /// How long ago something last came from it.
    pub last_sign_seconds: Option<f64>,
    /// Objects there are.
    pub objects: u64,
    /// Those that are not understood, or not wholly.
    pub invalid: u64,
    /// How often it was lost.
    pub outages: u64,
}

/// A worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Worker {
    /// Its number.
    pub worker: usize,
    /// The core that it is pinned to.
    pub core: usize,
    /// The snapshot in force on it: no packet that it judges from now on is judged under an older one.
    pub epoch: u32,
    /// The share of its time in which it moved packets, from 0 to 1.
    pub busy: f64,
    /// The share of its time in which it did not sleep, from 0 to 1.
    pub awake: f64,
    /// Packets it received a second.
    pub packets_per_second: f64,
    /// Packets a batch.
    pub packets_per_batch: f64,
    /// How long half of its turns with packets took at most, in seconds, since the start.
    pub turn_median_seconds: Option<f64>,
    /// How long 99 of 100 of them took at most, in seconds.
    pub turn_p99_seconds: Option<f64>,
    /// Packets from other workers that wait for it.
    pub handed_over: usize,
    /// What packets cost it by stage.
    #[serde(default)]
    pub stages: Stages,
}

/// What packets cost a worker by stage, since the start: sums over one turn in many.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Stages {
    /// Packets received in the turns that were timed.
    pub packets: u64,
    /// Turns that were timed and left out, because the core was taken away from the worker in between.
    pub interrupted: u64,
    /// Clocks of the processor's time stamp counter, by stage.
    pub clocks: BTreeMap<String, u64>,
}

/// An open port.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Port {
    /// Its number.
    pub port: u16,
    /// Its interface.
    pub interface: String,
    /// `pod`, `host` or `uplink`.
    pub kind: String,
    /// The pod behind it, `namespace/name`.
    pub pod: Option<String>,
    /// Where its XDP program runs: `native` or `generic`.
    #[serde(default)]
    pub mode: String,
    /// Since the start.
    pub total: Counts,
    /// A second.
    pub rate: Rates,
    /// Packets that came in here and were dropped, by cause.
    pub drops: BTreeMap<String, u64>,
    /// Packets that the kernel lost at its sockets (`struct xdp_statistics`), by kind.
    pub kernel_drops: BTreeMap<String, u64>,
    /// What the XDP program did with packets, by outcome.
    pub xdp: BTreeMap<String, u64>,
    /// What waits in its rings.
    pub queue: Queue,
}

/// Packets and octets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Packets received: what a pod sent.
    pub rx_packets: u64,
    /// Octets of those, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets sent: what a pod was given.
    pub tx_packets: u64,
    /// Octets of those.
    pub tx_bytes: u64,
    /// Packets received and dropped, by a worker or by the kernel for want of room.
    pub dropped_packets: u64,
}

/// The same a second.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Packets received.
    pub rx_packets: f64,
    /// Octets received.
    pub rx_bytes: f64,
    /// Packets sent.
    pub tx_packets: f64,
    /// Octets sent.
    pub tx_bytes: f64,
    /// Packets dropped.
    pub dropped_packets: f64,
}

/// Frames in a port's rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Queue {
    /// With the kernel for receiving, or received and not yet read.
    pub receiving: u32,
    /// Being sent.
    pub sending: u32,
    /// Entries of each ring, all queues together.
    pub size: u32,
}

/// A pod of this node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pod {
    /// `namespace/name`.
    pub pod: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its interface; `None` while it is not attached, and so has no network.
    pub interface: Option<String>,
    /// The number of its port.
    pub port: Option<u16>,
    /// The snapshot with which its own rules, addresses or port changed last.
    pub changed: Option<u32>,
    /// The snapshot that was published last, if the pod is in it.
    pub published: Option<u32>,
    /// Whether what is known of it and of its peers is in force on every worker.
    pub enforced: bool,
    /// What it waits for, where it is not attached.
    pub waiting: Option<String>,
    /// Connections that count against its share of the table.
    pub connections: u32,
}

/// Frames of the UMEM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Frames {
    /// All.
    pub total: u32,
    /// With nobody.
    pub free: u32,
    /// With the kernel for receiving.
    pub fill: u32,
    /// Being sent, or on the way between workers.
    pub in_flight: u32,
}

/// The connection table.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Connections {
    /// How many it holds.
    pub entries: usize,
    /// For how many there is room.
    pub capacity: usize,
    /// What became of connections, by outcome.
    pub events: BTreeMap<String, u64>,
}

/// `GET /v1/flows`: the query.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowsQuery {
    /// Only connections with this pod or address on either end.
    pub end: Option<String>,
    /// Only connections in this state.
    pub state: Option<String>,
    /// Only connections of this protocol: by name or number.
    pub protocol: Option<String>,
    /// Only connections to this port.
    pub port: Option<u16>,
    /// No more than this many are listed.
    pub limit: Option<usize>,
}

/// `GET /v1/flows`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Flows {
    /// How many match.
    pub matching: usize,
    /// Those that are listed, in no order.
    pub flows: Vec<Flow>,
}

/// A connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Flow {
    /// The number that the verdict log calls it by.
    pub connection: String,
    /// TCP, UDP, SCTP, ICMP, ICMPv6 or `protocol N`.
    pub protocol: String,
    /// Who opened it.
    pub from: End,
    /// To whom.
    pub to: End,
    /// Its state, by the names that nf_conntrack has, or `CUT`.
    pub state: String,
    /// What lets the opener's egress pass today.
    pub egress: String,
    /// What lets the other end's ingress pass today.
    pub ingress: String,
    /// Seconds since its last packet, within a second.
    pub idle_seconds: u64,
    /// Seconds until it is forgotten if no packet comes, within a second.
    pub expires_seconds: u64,
}

/// One end of a connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct End {
    /// The address.
    pub address: IpAddr,
    /// The port, or the identifier of an ICMP echo; 0 where the protocol has none.
    pub port: u16,
    /// Whose address it is: `namespace/name` of a pod, `node NAME`, or nobody that is known.
    pub name: Option<String>,
}

/// `GET /v1/explain`: the query, with the words of `penstock explain`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExplainQuery {
    /// Who sends: `namespace/pod` or an address.
    pub from: String,
    /// Who receives.
    pub to: String,
    /// `PORT/PROTOCOL`, or a protocol without ports.
    pub port: String,
}

/// `GET /v1/explain`: the answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Explanation {
    /// Whether the flow is allowed.
    pub allowed: bool,
    /// Why, for a person.
    pub text: String,
    /// By which snapshot.
    pub epoch: u32,
}

/// `GET /v1/dump`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Dump {
    /// The files of the bundle.
    pub files: Vec<DumpFile>,
}

/// A file of a support bundle.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DumpFile {
    /// Its name.
    pub name: String,
    /// Its text.
    pub content: String,
}

/// What any request may be answered with instead.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Problem {
    /// One line: the thing, the value and the mend.
    pub error: String,
}
