//! Least-privilege policies from observed flows.
//!
//! [`resolve()`] judges each flow: who opened it, between which pods, through which Service; what cannot be learnt is counted
//! with its reason. [`policies`] writes one NetworkPolicy for each workload. [`denied`] proves them: an engine that has them
//! must allow every flow. [`closed`] counts what they close, [`usage`] and [`narrowed`] find what existing policies allow
//! and nobody uses.
//!
//! A workload is the pods of a namespace with equal stable labels. Its selector matches these pods and no other present
//! pod: where another workload has more labels, the selector asks for their absence. An allowed flow that was not seen is
//! therefore one between the same workloads on the same port, one of a block's stated addresses, or DNS over TCP.

mod blocks;
mod proof;
mod resolve;
mod rules;
mod tighten;
mod workloads;

use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::packet::Protocol;

use crate::model::ObjectKey;

pub use blocks::{Block, BlockLimits, cover};
pub use proof::{ClosedWays, DeniedFlow, closed, denied, split};
pub use resolve::{LearnableFlow, NotLearnt, Resolution, UnusableFlows, resolve};
pub use rules::{LearnedPeer, LearnedPolicy, LearnedPort, LearnedRule, PortName, policies};
pub use tighten::{PolicyUsage, RuleUsage, narrowed, usage};
pub use workloads::{Workload, WorkloadId, Workloads};

/// Labels that differ between the pods of one workload, or from one version of it to the next. A `*` at the end stands for
/// any rest.
///
/// The first ones are those that controllers add
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/>), the last two those of Helm and of the recommended
/// labels that change with each release.
pub const UNSTABLE_LABELS: [&str; 11] = [
    "pod-template-hash",
    "controller-revision-hash",
    "pod-template-generation",
    "statefulset.kubernetes.io/pod-name",
    "apps.kubernetes.io/pod-index",
    "batch.kubernetes.io/*",
    "job-name",
    "controller-uid",
    "topology.kubernetes.io/*",
    "helm.sh/chart",
    "app.kubernetes.io/version",
];

/// How many addresses that were not seen a block may add unless set otherwise: with two seen, a block of 256.
pub const WIDENING: u64 = 254;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LearnSettings {
    /// Only policies of this namespace; flows without an end in it are left out.
    pub namespace: Option<String>,
    /// Labels that do not identify a workload, as in [`UNSTABLE_LABELS`].
    pub unstable_labels: Vec<String>,
    /// The most addresses that were not seen which a block may add.
    pub widening: u64,
    /// Where pods' addresses are: one without a pod is unknown there, and not outside.
    pub pod_networks: Vec<IpNet>,
    /// Whether a flow to a Service's address allows that address, too.
    pub service_addresses: bool,
    /// Whether to learn TCP connections, and datagrams to Services, that nobody answered.
    pub unanswered: bool,
}

impl Default for LearnSettings {
    fn default() -> Self {
        Self {
            namespace: None,
            unstable_labels: UNSTABLE_LABELS.map(str::to_owned).to_vec(),
            widening: WIDENING,
            pod_networks: Vec::new(),
            service_addresses: true,
            unanswered: false,
        }
    }
}

impl LearnSettings {
    pub(crate) fn is_stable(&self, label: &str) -> bool {
        !self.unstable_labels.iter().any(|unstable| match unstable.strip_suffix('*') {
            Some(start) => label.starts_with(start),
            None => label == unstable,
        })
    }

    pub(crate) fn covers(&self, namespace: &str) -> bool {
        self.namespace.as_deref().is_none_or(|only| only == namespace)
    }
}

/// One end of an observed flow, as its source names it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ObservedEnd {
    /// Its address, if the source has it; otherwise the name decides.
    pub address: Option<IpAddr>,
    /// Its port, 0 if the protocol has none.
    pub port: u16,
    /// The pod that had the address then, if the source knows it. It outweighs the address: another pod may have that now.
    pub pod: Option<ObjectKey>,
}

/// How certain it is that the first end opened the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opening {
    /// Its opening packet was seen: a SYN, an INIT, an echo request.
    Seen,
    /// It sent the first packet that was seen, by a protocol or in a source that does not show who opens.
    Assumed,
    /// The connection was picked up in mid-stream.
    Missing,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It was let through, and answered where its protocol answers.
    Passed,
    /// It was let through, without an answer, which its protocol need not have.
    Silent,
    /// TCP without an answer, or refused: an attempt.
    Unanswered,
    Denied,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObservedFlow {
    /// Who opened it.
    pub from: ObservedEnd,
    /// The other end.
    pub to: ObservedEnd,
    pub protocol: Protocol,
    /// How certain its direction is.
    pub opening: Opening,
    pub outcome: Outcome,
    pub seen: Option<SeenTimes>,
}

/// When something was seen, in nanoseconds of Unix time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SeenTimes {
    pub first: u64,
    /// Last, not before the first.
    pub last: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evidence {
    pub connections: u64,
    /// From the first to the last of those with a time.
    pub seen: Option<SeenTimes>,
}

impl Evidence {
    pub(crate) fn one(seen: Option<SeenTimes>) -> Self {
        Self { connections: 1, seen }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.connections += other.connections;
        self.seen = match (self.seen, other.seen) {
            (Some(a), Some(b)) => Some(SeenTimes { first: a.first.min(b.first), last: a.last.max(b.last) }),
            (one, None) | (None, one) => one,
        };
    }
}
