//! Errors in the fields of an object.

use std::net::IpAddr;

use ipnet::IpNet;

use super::path::{FieldPath, FieldPathRef};

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct FieldError {
    pub field: FieldPath,
    pub problem: FieldProblem,
}

impl FieldPathRef<'_> {
    pub(crate) fn invalid(&self, problem: FieldProblem) -> FieldError {
        FieldError { field: self.path(), problem }
    }
}

/// The problem of a field: one line with value and remedy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FieldProblem {
    #[error("is missing: {0}")]
    Missing(&'static str),
    #[error("{value:?} is not a valid {what}: {rule}")]
    Name { value: String, what: &'static str, rule: &'static str },
    #[error("{0:?} is not an IP address: write it as 10.0.0.1 or fd00::1")]
    Address(String),
    /// An address that no pod or node can have.
    #[error("{0} cannot be the address of a pod or node: use a unicast address that is not loopback")]
    NotUnicast(IpAddr),
    /// An IPv4 address or block in IPv6's notation, which two address families could claim.
    #[error("{0:?} is an IPv4-mapped IPv6 address: write it as IPv4")]
    Mapped(String),
    #[error("{0:?} is not a CIDR block: write ADDRESS/PREFIX, such as 10.0.0.0/8 or fd00::/8")]
    Cidr(String),
    #[error("{except} is not strictly inside cidr {cidr}: remove it, or name a smaller part of {cidr}")]
    ExceptOutside { except: IpNet, cidr: IpNet },
    #[error("is an empty peer: set podSelector, namespaceSelector or ipBlock")]
    EmptyPeer,
    #[error("has both ipBlock and {0}: split them into two peers")]
    BlockBesideSelector(&'static str),
    #[error("{0} is not a port number: use 1 to 65535")]
    PortNumber(i32),
    #[error("{end} is below port {port}: use {port} to 65535")]
    EndBelowPort { port: u16, end: i32 },
    #[error("{0} has no port to start from: set port to a number")]
    EndWithoutPort(i32),
    #[error("{end} is set with the named port {name:?}: a range needs a number as its port")]
    EndWithName { end: i32, name: String },
    /// A protocol that a policy or a container port cannot name.
    #[error("{0:?} is not a port protocol: use TCP, UDP or SCTP")]
    Protocol(String),
    #[error("{0:?} is not a policy type: use Ingress or Egress")]
    PolicyType(String),
    #[error("{0:?} is not an operator: use In, NotIn, Exists or DoesNotExist")]
    Operator(String),
    #[error("operator {0} needs at least one value")]
    NoValues(&'static str),
    /// `Exists` or `DoesNotExist` with values.
    #[error("operator {0} takes no values: remove them, or use In or NotIn")]
    UnwantedValues(&'static str),
    /// The annotation of a namespace is not the JSON that the proposal defines.
    #[error("is not the isolation that v1beta1 defines ({0}): write {{\"ingress\":{{\"isolation\":\"DefaultDeny\"}}}}")]
    Annotation(String),
    #[error("is not part of extensions/v1beta1: write the policy as networking.k8s.io/v1")]
    NotInV1Beta1,
    /// A peer with both selectors, which v1beta1 did not have.
    #[error(
        "has podSelector beside namespaceSelector: extensions/v1beta1 takes exactly one, networking.k8s.io/v1 both"
    )]
    OneSelectorInV1Beta1,
    #[error("sets {set} of {}: set exactly one", .names.join(", "))]
    NotExactlyOne { set: usize, names: Vec<&'static str> },
    /// A list with too few or too many entries.
    #[error("has {count} entries: use {least} to {most}")]
    Entries { count: usize, least: usize, most: usize },
    #[error("{0:?} is in the list already: remove one")]
    Repeated(String),
    #[error("has {characters} characters: use at most {most}")]
    TooLong { characters: usize, most: usize },
    #[error("{0:?} is not a tier: use Admin or Baseline")]
    Tier(String),
    #[error("{0} is not a priority: use 0 to 1000; lower comes first")]
    Priority(i64),
    #[error("{0:?} is not an action: use Accept, Deny or Pass")]
    Action(String),
    #[error("start {start} is not below end {end}: for one port use number")]
    RangeOrder { start: u16, end: u16 },
    /// A peer that is no pod beside a named port.
    #[error("cannot stand beside destinationNamedPort, which only pods have: use tcp, udp or sctp with a number")]
    BesideNamedPort,
    #[error("{0:?} is not a domain name: write example.org or *.example.org")]
    DomainName(String),
    /// Domain names of a rule that does not accept.
    #[error("is for rules with action Accept only: use networks")]
    DomainNamesAction,
    #[error("{second} is of the same family as {first}: a Service has at most one address of each")]
    SecondOfFamily {
        /// The address that counts.
        first: IpAddr,
        /// The one that does not.
        second: IpAddr,
    },
    /// An endpoint of another family than its EndpointSlice.
    #[error("{address} is not {family}, which is the addressType: put it into an EndpointSlice of its own family")]
    OtherFamily { address: IpAddr, family: &'static str },
    #[error("{0:?} is not an address type: use IPv4, IPv6 or FQDN")]
    AddressType(String),
    #[error("{0:?} is neither \"true\" nor \"false\": write \"true\", or remove it")]
    Flag(String),
    #[error(
        "is not an annotation that this version knows: use staged, staged-for, staged-delete, log or deny-answer, or remove it"
    )]
    PolicyAnnotation,
    #[error(
        "is not an annotation of a pod that this version knows: use egress-connections-per-second, ingress-connections-per-second, egress-open-connections or ingress-open-connections, or remove it"
    )]
    PodAnnotation,
    #[error("{0:?} is not a number of connections: use 1 to {1}, or remove it")]
    ConnectionLimit(String, u32),
    #[error("{0:?} is not what of a policy is logged: use denied, allowed or all")]
    PolicyLog(String),
    #[error("{0:?} is not an answer to what a policy denies: use none or reject")]
    DenyAnswer(String),
    #[error("{0:?} is the policy itself: give the staged policy another name, or use staged or staged-delete")]
    StagedForItself(String),
    /// A policy that is staged, and staged for deletion.
    #[error("contradicts policy.penstock.dev/staged-delete beside it: remove one of them")]
    BesideStagedDelete,
    /// Domain names where nobody reads the DNS answers that they depend on.
    #[error("is not supported unless domain_names.enabled is set: use networks, or set it")]
    DomainNamesUnsupported,
}
