//! Resolves what users write (pods, addresses, port names) to a flow.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use penstock_dataplane::names::DomainName;
use penstock_dataplane::packet::{Flow, Protocol};

use crate::model::{ObjectKey, Pod, PortProtocol};
use crate::state::{ClusterState, PodOrNode};

/// The source port of flows that users ask about; policies do not match on it.
pub(crate) const ANY_SOURCE_PORT: u16 = 49152;

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FlowEndpoint {
    Pod(ObjectKey),
    /// An address. If a pod has it, the endpoint is that pod.
    Address(IpAddr),
    /// A Service by namespace and name, as a destination.
    Service(ObjectKey),
    /// A domain name, as a destination.
    Name(DomainName),
}

/// A protocol, with a port where the protocol has ports.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ProtocolPort {
    protocol: Protocol,
    port: Option<PortRef>,
}

/// A port by its number, or by the name that the server pod gives to it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum PortRef {
    /// A number from 1 to 65535.
    Number(u16),
    /// A name from the pod's spec.
    Name(String),
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FlowError {
    #[error(
        "{0:?} is not an endpoint: write NAMESPACE/POD, an address, or svc/NAMESPACE/SERVICE or a domain name as a destination"
    )]
    Endpoint(String),
    /// An IPv4-mapped IPv6 address, which no packet carries.
    #[error("{0} is an IPv4-mapped IPv6 address: write it as IPv4")]
    Mapped(IpAddr),
    #[error("pod {0} is unknown: correct its name, or use an address")]
    NoPod(ObjectKey),
    #[error("pod {0} has finished: use a running pod, or an address")]
    Finished(ObjectKey),
    #[error("pod {0} has no address yet: set status.podIPs")]
    NoAddress(ObjectKey),
    #[error("Service {0} is unknown: correct its name, or add its manifest")]
    NoService(ObjectKey),
    /// The Service is headless, or of type ExternalName.
    #[error("Service {0} has no cluster address: ask about its pods")]
    NoClusterAddress(ObjectKey),
    #[error("Service {service} has no port {port}: use one of its own, by number or by name")]
    NoServicePort { service: ObjectKey, port: String },
    #[error("Service {0} is no single end: use a pod or an address")]
    ServiceIsNoEnd(ObjectKey),
    /// A domain name where it is no destination of `explain`.
    #[error("{0} is no single end: use a pod or an address, or ask penstock explain --to {0}")]
    NameIsNoEnd(DomainName),
    /// One end has IPv4 addresses only, the other IPv6 addresses only.
    #[error("{0} and {1} have no address family in common: use endpoints of one family")]
    Families(String, String),
    /// Neither a port with its protocol nor a protocol.
    #[error(
        "{0:?} is not a port: write PORT/PROTOCOL such as 80/TCP or http/TCP, or a protocol without ports such as ICMP"
    )]
    Port(String),
    #[error("{0:?} is not a protocol: write TCP, UDP, SCTP, ICMP, ICMPv6 or a number up to 255")]
    Protocol(String),
    #[error("{0:?} is not a port: write the port before its protocol, {1}")]
    Reversed(String, String),
    #[error("{0} is no pod: write an address of node {1}{2}")]
    NodeIsNoEnd(ObjectKey, String, String),
    #[error("{0} is no pod, and no node {1} is known: use an address")]
    NoNode(ObjectKey, String),
    #[error("{0} needs a port: add its number, or its name on the destination pod")]
    PortMissing(Protocol),
    #[error("{0} has no ports: remove the port")]
    PortGiven(Protocol),
    /// The destination pod has no port of this name and protocol.
    #[error("{to} has no port named {name:?} for {protocol}: correct the name, or use the number")]
    PortName { to: String, name: String, protocol: Protocol },
}

impl FromStr for FlowEndpoint {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<Self, FlowError> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return match address {
                IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Err(FlowError::Mapped(address)),
                _ => Ok(Self::Address(address)),
            };
        }
        let service = text.strip_prefix("svc/").and_then(ObjectKey::parse).map(Self::Service);
        let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
        let is_name = |name: &DomainName| name.as_str().rsplit_once('.').is_some_and(|(_, last)| !is_number(last));
        let name = || DomainName::new(text).filter(is_name).map(Self::Name);
        service
            .or_else(|| ObjectKey::parse(text).map(Self::Pod))
            .or_else(name)
            .ok_or_else(|| FlowError::Endpoint(text.to_owned()))
    }
}

impl fmt::Display for FlowEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(key) => key.fmt(f),
            Self::Address(address) => address.fmt(f),
            Self::Service(key) => write!(f, "svc/{key}"),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl FromStr for PortRef {
    type Err = FlowError;

    /// Parses a number from 1 to 65535, or a name.
    fn from_str(text: &str) -> Result<Self, FlowError> {
        let is_number = text.bytes().all(|c| c.is_ascii_digit());
        match text.parse() {
            Ok(number) if number > 0 => Ok(Self::Number(number)),
            Err(_) if !is_number => Ok(Self::Name(text.to_owned())),
            _ => Err(FlowError::Port(text.to_owned())),
        }
    }
}

/// Parses a protocol's name, in either case, or its number.
pub fn protocol(text: &str) -> Result<Protocol, FlowError> {
    match text.to_ascii_uppercase().as_str() {
        "TCP" => Ok(Protocol::TCP),
        "UDP" => Ok(Protocol::UDP),
        "SCTP" => Ok(Protocol::SCTP),
        "ICMP" => Ok(Protocol::ICMP),
        "ICMPV6" => Ok(Protocol::ICMPV6),
        _ => text.parse().map(Protocol).map_err(|_| FlowError::Protocol(text.to_owned())),
    }
}

impl ProtocolPort {
    /// A protocol, with a port if and only if the protocol has ports.
    pub fn new(protocol: Protocol, port: Option<PortRef>) -> Result<Self, FlowError> {
        match (protocol.has_ports(), &port) {
            (true, None) => Err(FlowError::PortMissing(protocol)),
            (false, Some(_)) => Err(FlowError::PortGiven(protocol)),
            _ => Ok(Self { protocol, port }),
        }
    }

    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    pub fn port(&self) -> Option<&PortRef> {
        self.port.as_ref()
    }

    pub fn number(protocol: Protocol, number: u16) -> Self {
        Self { protocol, port: Some(PortRef::Number(number)) }
    }
}

impl FromStr for ProtocolPort {
    type Err = FlowError;

    /// Parses `80/TCP`, `http/TCP`, `80` (TCP), `ICMP`.
    fn from_str(text: &str) -> Result<Self, FlowError> {
        if let Some((port, name)) = text.split_once('/') {
            if let (Ok(protocol), true) = (protocol(port), name.parse::<u16>().is_ok())
                && protocol.has_ports()
                && port.parse::<u16>().is_err()
            {
                return Err(FlowError::Reversed(text.to_owned(), format!("{name}/{protocol}")));
            }
            return Self::new(protocol(name)?, Some(port.parse()?));
        }
        match text.parse() {
            Ok(port @ PortRef::Number(_)) => Self::new(Protocol::TCP, Some(port)),
            Ok(PortRef::Name(name)) => match protocol(&name) {
                Ok(protocol) => Self::new(protocol, None),
                Err(_) => Err(FlowError::Port(text.to_owned())),
            },
            Err(error) => Err(error),
        }
    }
}

impl fmt::Display for ProtocolPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.port {
            None => self.protocol.fmt(f),
            Some(PortRef::Number(number)) => write!(f, "{number}/{}", self.protocol),
            Some(PortRef::Name(name)) => write!(f, "{name}/{}", self.protocol),
        }
    }
}

/// The flows between two endpoints: one for each pair of their addresses of one family, in the order of the addresses. At
/// least one. Policy may decide differently by family, so each must be evaluated.
pub fn flows(
    state: &ClusterState,
    from: &FlowEndpoint,
    to: &FlowEndpoint,
    port: &ProtocolPort,
) -> Result<Vec<Flow>, FlowError> {
    let (sources, destinations) = (addresses(state, from)?, addresses(state, to)?);
    let pairs = sources.iter().flat_map(|src| destinations.iter().map(move |dst| (*src, *dst)));
    let pairs = pairs.filter(|(src, dst)| src.is_ipv4() == dst.is_ipv4());
    let flows: Vec<Flow> = pairs.map(|(src, dst)| flow(state, to, (src, dst), port)).collect::<Result<_, _>>()?;
    match flows.is_empty() {
        true => Err(FlowError::Families(from.to_string(), to.to_string())),
        false => Ok(flows),
    }
}

fn flow(
    state: &ClusterState,
    to: &FlowEndpoint,
    (src, dst): (IpAddr, IpAddr),
    port: &ProtocolPort,
) -> Result<Flow, FlowError> {
    // ICMP between IPv6 addresses means ICMPv6.
    let protocol = match port.protocol {
        Protocol::ICMP if dst.is_ipv6() => Protocol::ICMPV6,
        other => other,
    };
    let (src_port, dst_port) = match &port.port {
        None => (0, 0),
        Some(PortRef::Number(number)) => (ANY_SOURCE_PORT, *number),
        Some(PortRef::Name(name)) => (ANY_SOURCE_PORT, resolve(state, to, dst, name, protocol)?),
    };
    Ok(Flow { src: src.into(), dst: dst.into(), protocol, src_port, dst_port })
}

pub fn addresses(state: &ClusterState, end: &FlowEndpoint) -> Result<Vec<IpAddr>, FlowError> {
    let key = match end {
        FlowEndpoint::Address(address) => return Ok(vec![*address]),
        FlowEndpoint::Service(key) => return Err(FlowError::ServiceIsNoEnd(key.clone())),
        FlowEndpoint::Name(name) => return Err(FlowError::NameIsNoEnd(name.clone())),
        FlowEndpoint::Pod(key) => key,
    };
    let pod = state.find_pod(key).and_then(|pod| state.pod(pod)).ok_or_else(|| unknown_pod(state, key))?;
    match pod {
        Pod { finished: true, .. } => Err(FlowError::Finished(key.clone())),
        Pod { addresses, .. } if addresses.is_empty() => Err(FlowError::NoAddress(key.clone())),
        Pod { addresses, .. } => Ok(addresses.clone()),
    }
}

fn resolve(
    state: &ClusterState,
    to: &FlowEndpoint,
    address: IpAddr,
    name: &str,
    protocol: Protocol,
) -> Result<u16, FlowError> {
    let server = pod_at(state, address);
    let is_it = |own: PortProtocol| penstock_dataplane::policy::PortProtocol::from(own).number() == protocol;
    let found = server.into_iter().flat_map(|pod| &pod.ports).find(|port| port.name == name && is_it(port.protocol));
    let missing = || FlowError::PortName { to: to.to_string(), name: name.to_owned(), protocol };
    found.map(|port| port.number).ok_or_else(missing)
}

/// The pod that owns an address; `None` for a node's address (its host-network pods included) and an unknown one.
pub(crate) fn pod_at(state: &ClusterState, address: IpAddr) -> Option<&Pod> {
    match state.owner(&address)? {
        PodOrNode::Pod(pod) => state.pod(pod),
        PodOrNode::Node(_) => None,
    }
}

/// Why there is no pod of this name: `node/n1` may be meant for a node.
fn unknown_pod(state: &ClusterState, key: &ObjectKey) -> FlowError {
    let of_node = |owner: PodOrNode| match owner {
        PodOrNode::Node(node) => state.node_name(node) == Some(key.name.as_str()),
        PodOrNode::Pod(_) => false,
    };
    let mut addresses: Vec<IpAddr> =
        state.addresses().filter(|(_, owner)| of_node(*owner)).map(|(address, _)| address).collect();
    addresses.sort_unstable();
    match addresses.first() {
        _ if key.namespace != "node" || state.namespace_labels("node").is_some() => FlowError::NoPod(key.clone()),
        Some(address) => FlowError::NodeIsNoEnd(key.clone(), key.name.clone(), format!(", such as {address}")),
        None if state.find_node(&key.name).is_some() => {
            FlowError::NodeIsNoEnd(key.clone(), key.name.clone(), String::new())
        }
        None => FlowError::NoNode(key.clone(), key.name.clone()),
    }
}

/// The Service that has this address, if an end is an address.
pub fn service_at(state: &ClusterState, end: &FlowEndpoint) -> Option<ObjectKey> {
    let FlowEndpoint::Address(address) = end else { return None };
    let mut services = state.services();
    let found = services.find(|service| state.is_address_of(service, address))?;
    Some(found.key.clone())
}

/// The owner of an address as text: `shop/web-1`, `node worker-1`; `None` if unknown.
pub fn name(state: &ClusterState, address: IpAddr) -> Option<String> {
    match state.owner(&address)? {
        PodOrNode::Pod(pod) => state.pod(pod).map(|pod| pod.key.to_string()),
        PodOrNode::Node(node) => state.node_name(node).map(|node| format!("node {node}")),
    }
}

/// An address with its owner's name: `shop/web-1 (10.1.0.1)`.
pub(crate) fn describe(state: &ClusterState, address: IpAddr) -> String {
    name(state, address).map_or_else(|| address.to_string(), |name| format!("{name} ({address})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_protocols_parse() {
        let number = |protocol, number| Ok(ProtocolPort::number(protocol, number));
        let none = |protocol| Ok(ProtocolPort { protocol, port: None });
        for (text, expected) in [
            ("80", number(Protocol::TCP, 80)),
            ("tcp/80", Err(FlowError::Reversed("tcp/80".into(), "80/TCP".into()))),
            ("80/TCP", number(Protocol::TCP, 80)),
            ("53/udp", number(Protocol::UDP, 53)),
            ("65535/SCTP", number(Protocol::SCTP, 65535)),
            ("ICMP", none(Protocol::ICMP)),
            ("icmpv6", none(Protocol::ICMPV6)),
            ("http/TCP", Ok(ProtocolPort { protocol: Protocol::TCP, port: Some(PortRef::Name("http".to_owned())) })),
            ("http", Err(FlowError::Port("http".to_owned()))),
            ("TCP", Err(FlowError::PortMissing(Protocol::TCP))),
            ("7/ICMP", Err(FlowError::PortGiven(Protocol::ICMP))),
            ("0/TCP", Err(FlowError::Port("0".to_owned()))),
            ("65536/TCP", Err(FlowError::Port("65536".to_owned()))),
            ("80/HTTP", Err(FlowError::Protocol("HTTP".to_owned()))),
        ] {
            assert_eq!(text.parse::<ProtocolPort>(), expected, "{text}");
        }
    }

    #[test]
    fn endpoints_parse_as_pods_or_addresses() {
        let pod = |namespace: &str, name: &str| {
            FlowEndpoint::Pod(ObjectKey { namespace: namespace.into(), name: name.into() })
        };
        assert_eq!("shop/web-1".parse(), Ok(pod("shop", "web-1")));
        let service = ObjectKey { namespace: "shop".into(), name: "api".into() };
        assert_eq!("svc/shop/api".parse(), Ok(FlowEndpoint::Service(service)));
        assert_eq!("svc/api".parse(), Ok(pod("svc", "api")), "a namespace may have this name");
        assert_eq!("10.0.0.1".parse(), Ok(FlowEndpoint::Address([10, 0, 0, 1].into())));
        let name = DomainName::new("www.example.org").unwrap();
        assert_eq!("WWW.example.org.".parse(), Ok(FlowEndpoint::Name(name)));
        for text in ["", "web-1", "/web", "shop/", "a/b/c", "10.0.0.0/8x/y", "10.0.0.256"] {
            assert!(text.parse::<FlowEndpoint>().is_err(), "{text}");
        }
        assert!(matches!("::ffff:10.0.0.1".parse::<FlowEndpoint>(), Err(FlowError::Mapped(_))));
    }
}
