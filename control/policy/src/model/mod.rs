//! The objects of a cluster as the control side keeps them: validated, defaulted, free of the wire format.
//!
//! A value of these types is well-formed: a block's excepts lie inside it, a port range is in order, an
//! operator has the values it needs. Whoever converts from the API's own types says what is wrong, and where.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// Namespace and name of an object.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ObjectKey {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A Namespace.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    /// Its labels, `kubernetes.io/metadata.name` included.
    pub labels: Labels,
    /// Whether its annotation asks for v1beta1's DefaultDeny (ingress isolation of all its pods).
    pub default_deny_ingress: bool,
}

/// A Node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// All its addresses (`status.addresses` of the InternalIP and ExternalIP kinds).
    pub addresses: Vec<IpAddr>,
}

/// A Pod, as far as policy needs it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pod {
    /// Namespace and name.
    pub key: ObjectKey,
    /// Its labels.
    pub labels: Labels,
    /// `spec.nodeName`, once it is scheduled.
    pub node: Option<String>,
    /// `status.podIPs`, both families; empty until it has one.
    pub addresses: Vec<IpAddr>,
    /// `spec.hostNetwork`: it is its node then, and no selector finds it.
    pub host_network: bool,
    /// Succeeded or Failed: its address may already be another pod's.
    pub finished: bool,
    /// Named container ports; a name occurs once a protocol.
    pub ports: Vec<NamedPort>,
    /// What says how long it has had its addresses, and whether it still has them.
    pub lifetime: PodLifetime,
}

impl Pod {
    /// Whether an address that both pods claim is this one's rather than the other's.
    ///
    /// A kubelet may give a pod's address to the next while the API server still has the old pod's object. A finished pod
    /// has no address (`status.phase`, <https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/>), which is seen
    /// to elsewhere. One that is being deleted yields to one that is not, and then the one that started later has it.
    /// Where the times do not tell, names do: whoever asks gets the same answer, in whatever order the objects came.
    pub fn outranks(&self, other: &Self) -> bool {
        let rank = |pod: &Self| (!pod.lifetime.leaving, pod.lifetime.started, pod.lifetime.created);
        rank(self).cmp(&rank(other)).then_with(|| other.key.cmp(&self.key)).is_gt()
    }
}

/// The times of a pod that say which of two has an address. Seconds of Unix time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PodLifetime {
    /// `metadata.deletionTimestamp` is there: it is being deleted.
    pub leaving: bool,
    /// `status.startTime`.
    pub started: Option<i64>,
    /// `metadata.creationTimestamp`.
    pub created: Option<i64>,
}

/// A named port of a pod's container.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NamedPort {
    /// Its name.
    pub name: String,
    /// Its protocol.
    pub protocol: PortProtocol,
    /// Its number, 1 to 65535.
    pub number: u16,
}

/// A protocol that a NetworkPolicy port can name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum PortProtocol {
    /// TCP, also where none is given.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// A NetworkPolicy, `policyTypes` resolved.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NetworkPolicy {
    /// Namespace and name.
    pub key: ObjectKey,
    /// Which pods of its namespace it selects.
    pub pod_selector: Selector,
    /// Whether it isolates the pods that it selects. A policy of `extensions/v1beta1` does not: there only the
    /// namespace's annotation isolates, and a policy adds what is allowed then.
    pub isolates: bool,
    /// Its ingress rules, where it isolates for ingress (no rules: nothing is allowed).
    pub ingress: Option<Vec<Rule>>,
    /// Its egress rules, where it isolates for egress.
    pub egress: Option<Vec<Rule>>,
}

/// One rule: it allows where a peer *and* a port match.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Rule {
    /// Which peers.
    pub peers: Peers,
    /// Which ports.
    pub ports: Ports,
}

/// The peers of a rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Peers {
    /// None given: every peer.
    Every,
    /// At least one of these. Empty only in the v1beta1 meaning: nothing matches.
    AnyOf(Vec<Peer>),
}

/// The ports of a rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Ports {
    /// None given: every port and every protocol, ICMP included.
    Every,
    /// At least one of these. Empty only in the v1beta1 meaning: nothing matches.
    AnyOf(Vec<Port>),
}

/// One peer of a rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Peer {
    /// `podSelector` alone: pods of the policy's own namespace.
    Pods(Selector),
    /// `namespaceSelector` alone: all pods of the namespaces found.
    Namespaces(Selector),
    /// Both: pods found by the second in namespaces found by the first.
    PodsInNamespaces {
        /// Finds the namespaces.
        namespaces: Selector,
        /// Finds the pods in them.
        pods: Selector,
    },
    /// `ipBlock`.
    IpBlock(IpBlock),
}

/// An `ipBlock`: addresses in `cidr` and in none of `except`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct IpBlock {
    /// The block, host bits cleared.
    pub cidr: IpNet,
    /// Parts of it that do not match, each strictly inside `cidr`.
    pub except: Vec<IpNet>,
}

/// One port of a rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Port {
    /// Its protocol.
    pub protocol: PortProtocol,
    /// Which numbers of it.
    pub which: PortMatch,
}

/// Which port numbers match.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum PortMatch {
    /// No port given: all of the protocol.
    Every,
    /// From the first to the last, both included; a single number is a range of one.
    Range {
        /// First number.
        first: u16,
        /// Last number, not below the first.
        last: u16,
    },
    /// By name, resolved on the server pod.
    Name(String),
}

/// A label selector: all of its requirements must hold; none at all matches everything.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Selector {
    /// `matchLabels` as `In` with one value, then `matchExpressions`; sorted.
    pub requirements: Vec<Requirement>,
}

/// One requirement on a label.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Requirement {
    /// The label's key.
    pub key: String,
    /// What must hold of it.
    pub operator: LabelOperator,
}

/// What a requirement asks of a label.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum LabelOperator {
    /// Present, with one of these values (sorted, at least one).
    In(Vec<String>),
    /// Absent, or with none of these values (sorted, at least one).
    NotIn(Vec<String>),
    /// Present.
    Exists,
    /// Absent.
    DoesNotExist,
}

impl Selector {
    /// Whether an object with these labels is found.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                LabelOperator::In(values) => value.is_some_and(|value| values.contains(value)),
                LabelOperator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        })
    }
}

/// A change to one object, as every source reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Created or replaced.
    Set(Object),
    /// Gone.
    Delete(ObjectRef),
}

/// Any object that the control side keeps.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Object {
    /// A Namespace.
    Namespace(Namespace),
    /// A Node.
    Node(Node),
    /// A Pod.
    Pod(Pod),
    /// A NetworkPolicy.
    NetworkPolicy(NetworkPolicy),
}

/// Names any object.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum ObjectRef {
    /// A Namespace by its name.
    Namespace(String),
    /// A Node by its name.
    Node(String),
    /// A Pod.
    Pod(ObjectKey),
    /// A NetworkPolicy.
    NetworkPolicy(ObjectKey),
}

impl Object {
    /// What names this object.
    pub fn reference(&self) -> ObjectRef {
        match self {
            Self::Namespace(namespace) => ObjectRef::Namespace(namespace.name.clone()),
            Self::Node(node) => ObjectRef::Node(node.name.clone()),
            Self::Pod(pod) => ObjectRef::Pod(pod.key.clone()),
            Self::NetworkPolicy(policy) => ObjectRef::NetworkPolicy(policy.key.clone()),
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
        }
    }
}
