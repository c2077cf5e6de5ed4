//! The objects of a cluster as the control plane keeps them: validated, defaulted, independent of the wire format.
//!
//! Every value of these types is well-formed: a block contains its excepts, a port range is in order, an operator has the
//! values it needs. The conversion from the API's types reports errors with their field.

mod cluster_policy;
mod limits;
mod notes;
mod service;
mod staging;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use cluster_policy::{ClusterNetworkPolicy, ClusterRule, ClusterTier, DomainPattern, Subject};
pub use limits::{ConnectionLimit, ConnectionLimits};
pub use notes::{DenyAnswer, PolicyLog, PolicyNotes};
pub use penstock_dataplane::policy::RuleAction;
pub use service::{AddressFamily, EndpointPort, EndpointSlice, Service, ServiceEndpoint, ServicePort, TargetPort};
pub use staging::Staging;

pub type Labels = BTreeMap<String, String>;

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    /// `namespace/name`, of which neither is empty or has another slash.
    pub fn parse(text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        let is_key = !namespace.is_empty() && !name.is_empty() && !name.contains('/');
        is_key.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Namespace {
    pub name: String,
    /// Its labels, `kubernetes.io/metadata.name` included.
    pub labels: Labels,
    /// Whether v1beta1's DefaultDeny annotation isolates all its pods for ingress.
    pub default_deny_ingress: bool,
    /// Whether it is being deleted: its policies may be deleted before its pods, which still run.
    #[serde(default)]
    pub terminating: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Node {
    pub name: String,
    pub labels: Labels,
    /// The addresses that are the node itself: `status.addresses` of the InternalIP and ExternalIP kinds, and what else
    /// is known to be its own.
    pub addresses: Vec<IpAddr>,
    /// All IP addresses in `status.addresses`, which `nodes` peers match.
    pub status_addresses: Vec<IpAddr>,
}

/// A Pod, reduced to what policy needs.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Pod {
    pub key: ObjectKey,
    pub labels: Labels,
    /// `spec.nodeName`, once it is scheduled.
    pub node: Option<String>,
    /// `status.podIPs`, both families; empty until it has one.
    pub addresses: Vec<IpAddr>,
    /// `spec.hostNetwork`: the pod has its node's addresses, and selectors do not match it.
    pub host_network: bool,
    /// Succeeded or Failed: another pod may already have its address.
    pub finished: bool,
    /// Named container ports; a name occurs once for each protocol.
    pub ports: Vec<NamedPort>,
    /// Start, creation and deletion: they decide which of two pods owns an address.
    pub lifetime: PodLifetime,
    /// The workload that makes such pods anew, if one does. No policy depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<Controller>,
    /// Its interfaces beside the one with its addresses, as a plugin for several networks has noted them at the object. Policy is
    /// about the pod's addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_interfaces: Vec<String>,
    #[serde(default, skip_serializing_if = "ConnectionLimits::is_empty")]
    pub limits: ConnectionLimits,
}

/// The workload that makes a pod anew when it ends, as it is named across versions: a Deployment rather than one of its ReplicaSets, a
/// CronJob rather than one of its Jobs.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Controller {
    /// Its kind, such as `Deployment`.
    pub kind: String,
    pub name: String,
}

impl Pod {
    /// Whether this pod, not the other, owns an address that both claim.
    ///
    /// A kubelet may reuse a pod's address while the API server still has the old pod's object. Callers exclude finished
    /// pods first, which have no address (`status.phase`,
    /// <https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/>). A pod that is not being deleted outranks one
    /// that is, then the later start wins, then the later creation. Names break ties, so the result does not depend on
    /// the order of events.
    pub fn outranks(&self, other: &Self) -> bool {
        let rank = |pod: &Self| (!pod.lifetime.leaving, pod.lifetime.started, pod.lifetime.created);
        rank(self).cmp(&rank(other)).then_with(|| other.key.cmp(&self.key)).is_gt()
    }
}

/// The times that decide which of two pods owns an address. Seconds of Unix time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct PodLifetime {
    /// Whether `metadata.deletionTimestamp` is set.
    pub leaving: bool,
    /// `status.startTime`.
    pub started: Option<i64>,
    /// `metadata.creationTimestamp`.
    pub created: Option<i64>,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct NamedPort {
    pub name: String,
    pub protocol: PortProtocol,
    pub number: u16,
}

/// A protocol that a NetworkPolicy port can name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub enum PortProtocol {
    /// TCP, the default.
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// A NetworkPolicy, `policyTypes` resolved.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct NetworkPolicy {
    pub key: ObjectKey,
    pub pod_selector: Selector,
    /// Whether it isolates the pods it selects. A policy of `extensions/v1beta1` does not: there only the namespace's
    /// annotation isolates, and policies add what is allowed.
    pub isolates: bool,
    /// Its ingress rules, where it isolates for ingress (no rules: nothing is allowed).
    pub ingress: Option<Vec<Rule>>,
    /// Its egress rules, where it isolates for egress.
    pub egress: Option<Vec<Rule>>,
    #[serde(default, skip_serializing_if = "Staging::is_in_force")]
    pub staging: Staging,
    #[serde(default, skip_serializing_if = "PolicyNotes::is_empty")]
    pub notes: PolicyNotes,
}

/// One rule: matches a flow if a peer *and* a port match. A NetworkPolicy's rule allows what it matches.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Rule {
    pub peers: Peers,
    pub ports: PolicyPorts,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Peers {
    /// None listed: every peer.
    Every,
    /// At least one must match. Empty under v1beta1, or where an Accept rule is not understood: nothing matches.
    AnyOf(Vec<Peer>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PolicyPorts {
    /// None listed: every port and every protocol, ICMP included.
    Every,
    /// At least one must match. Empty only under v1beta1: nothing matches.
    AnyOf(Vec<PolicyPort>),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Peer {
    /// `podSelector` alone: pods of the policy's own namespace.
    Pods(Selector),
    /// `namespaceSelector` alone: all pods of the matching namespaces.
    Namespaces(Selector),
    /// Both: matching pods of matching namespaces.
    PodsInNamespaces {
        namespaces: Selector,
        pods: Selector,
    },
    IpBlock(IpBlock),
    /// `networks` of a ClusterNetworkPolicy, host bits cleared.
    Networks(Vec<IpNet>),
    /// `nodes` of a ClusterNetworkPolicy: the addresses of matching Nodes, whatever is there.
    Nodes(Selector),
    /// `domainNames` of a ClusterNetworkPolicy, of an egress rule that accepts: addresses that DNS answers gave the pod for a
    /// matching name.
    DomainNames(Vec<DomainPattern>),
}

/// An `ipBlock`: addresses in `cidr` and in none of `except`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct IpBlock {
    /// The block, host bits cleared.
    pub cidr: IpNet,
    /// Excluded parts, each strictly inside `cidr`.
    pub except: Vec<IpNet>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct PolicyPort {
    pub protocol: PortProtocol,
    pub which: PortMatch,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum PortMatch {
    /// No port listed: all of the protocol.
    Every,
    /// From first to last, both inclusive; a single number is a range of one.
    Range {
        first: u16,
        /// Last number, not below the first.
        last: u16,
    },
    /// By name, resolved on the server pod.
    Name(String),
}

/// A label selector: all requirements must hold; an empty one matches everything.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Selector {
    /// `matchLabels` as `In` with one value, then `matchExpressions`; sorted.
    pub requirements: Vec<Requirement>,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Requirement {
    pub key: String,
    pub operator: LabelOperator,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum LabelOperator {
    /// Present, with one of these values (sorted, at least one).
    In(Vec<String>),
    /// Absent, or with none of these values (sorted, at least one).
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    pub fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                LabelOperator::In(values) => value.is_some_and(|value| values.binary_search(value).is_ok()),
                LabelOperator::NotIn(values) => value.is_none_or(|value| values.binary_search(value).is_err()),
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// A change to one object, as every source reports it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "nearly all changes are objects")]
pub enum ObjectChange {
    /// Created or replaced.
    Set(Object),
    Delete(ObjectRef),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Object {
    Namespace(Namespace),
    Node(Node),
    Pod(Pod),
    NetworkPolicy(NetworkPolicy),
    ClusterNetworkPolicy(ClusterNetworkPolicy),
    Service(Service),
    EndpointSlice(EndpointSlice),
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum ObjectRef {
    Namespace(String),
    Node(String),
    Pod(ObjectKey),
    NetworkPolicy(ObjectKey),
    /// A ClusterNetworkPolicy by its name.
    ClusterNetworkPolicy(String),
    Service(ObjectKey),
    EndpointSlice(ObjectKey),
}

impl Object {
    pub fn reference(&self) -> ObjectRef {
        match self {
            Self::Namespace(namespace) => ObjectRef::Namespace(namespace.name.clone()),
            Self::Node(node) => ObjectRef::Node(node.name.clone()),
            Self::Pod(pod) => ObjectRef::Pod(pod.key.clone()),
            Self::NetworkPolicy(policy) => ObjectRef::NetworkPolicy(policy.key.clone()),
            Self::ClusterNetworkPolicy(policy) => ObjectRef::ClusterNetworkPolicy(policy.name.clone()),
            Self::Service(service) => ObjectRef::Service(service.key.clone()),
            Self::EndpointSlice(slice) => ObjectRef::EndpointSlice(slice.key.clone()),
        }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Pod(key) => write!(f, "Pod {key}"),
            Self::NetworkPolicy(key) => write!(f, "NetworkPolicy {key}"),
            Self::ClusterNetworkPolicy(name) => write!(f, "ClusterNetworkPolicy {name}"),
            Self::Service(key) => write!(f, "Service {key}"),
            Self::EndpointSlice(key) => write!(f, "EndpointSlice {key}"),
        }
    }
}
