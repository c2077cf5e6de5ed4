//! From observed flows to what policy must allow: ends, directions and Services resolved, the rest counted by reason.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;

use penstock_dataplane::packet::{Flow, Protocol};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::flow::pod_at;
use crate::model::{AddressFamily, ObjectKey, Pod, PortProtocol, Service, ServicePort};
use crate::render::services::{Backend, ClientPlace, protocol, select};
use crate::service_flows::as_asked;
use crate::state::{ClusterState, PodOrNode};

use super::{LearnSettings, ObservedEnd, ObservedFlow, Opening, Outcome, SeenTimes};

/// The first port that Linux gives to clients unless set otherwise (`net.ipv4.ip_local_port_range`).
const FIRST_EPHEMERAL: u16 = 32768;
/// One behind the system ports (RFC 6335 section 6), which no client gets.
const FIRST_USER: u16 = 1024;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LearnableFlow {
    /// The flow in its opening direction, as it was observed.
    pub flow: Flow,
    /// The Service whose cluster address is its destination.
    pub service: Option<ObjectKey>,
    /// The flows that policy judges for it: the flow itself, or one to each backend of the Service.
    pub ends: Vec<Flow>,
    /// Whether policy judges the flow to the Service's cluster address, too.
    pub to_service_address: bool,
    pub seen: Option<SeenTimes>,
}

impl LearnableFlow {
    pub fn judged(&self) -> impl Iterator<Item = &Flow> {
        self.ends.iter().chain(self.to_service_address.then_some(&self.flow))
    }
}

/// Why a flow is not learnt. Displays as what the flows are and what can be done.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NotLearnt {
    /// A pod and its node, or itself: no NetworkPolicy applies.
    Exempt,
    /// Policy denied it when it was seen.
    Denied,
    /// TCP without an answer, or a datagram to a Service.
    Unanswered,
    /// Picked up in mid-stream.
    NoOpening,
    /// A reply whose opening packet was not seen.
    Reply,
    /// The source names a pod that the manifests do not have, or only as finished.
    UnknownPod(String),
    /// Within the pod networks, but no pod has the address.
    PodNetwork(IpAddr),
    NoPod,
    /// Neither end has an address, or the two have none of one family.
    NoAddress,
    /// To or from an address that is no host's.
    NotUnicast,
    /// A protocol that no port of a NetworkPolicy can name.
    Protocol(Protocol),
    /// Port 0, which no port of a NetworkPolicy can be.
    PortZero,
    NoServicePort(ObjectKey),
    NoBackend(ObjectKey),
    /// Neither end is in the namespace that is learnt.
    OtherNamespace,
}

impl fmt::Display for NotLearnt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exempt => {
                f.write_str("between a pod and its node (probes, host network) or itself: exempt from NetworkPolicy, no rule is needed")
            }
            Self::Denied => f.write_str("denied by policy when seen: not learnt"),
            Self::Unanswered => {
                f.write_str("TCP without an answer, or refused, or datagrams to a Service without an answer: not learnt; --unanswered learns attempts, too")
            }
            Self::NoOpening => f.write_str(
                "without an opening packet: who opened them is unknown; capture from before they open, or use flows of a daemon that saw it",
            ),
            Self::Reply => f.write_str("replies without the flow that they answer: who opened it was not seen"),
            Self::UnknownPod(pod) => write!(f, "of pod {pod}, which the manifests do not have as running: add its manifest"),
            Self::PodNetwork(address) => {
                write!(f, "of {address}, which is in a pod network, but no pod of the manifests has it: add its manifest")
            }
            Self::NoPod => f.write_str("between two ends of which neither is a pod: no NetworkPolicy applies"),
            Self::NoAddress => f.write_str("whose ends have no addresses of one family"),
            Self::NotUnicast => f.write_str("to or from multicast, loopback or unspecified addresses"),
            Self::Protocol(protocol) => {
                write!(f, "of {protocol}, which a NetworkPolicy can only allow together with every port: write that rule by hand if it is needed")
            }
            Self::PortZero => f.write_str("to port 0, which a NetworkPolicy cannot name"),
            Self::NoServicePort(service) => {
                write!(f, "to a port that Service {service} does not have: correct its manifest")
            }
            Self::NoBackend(service) => {
                write!(f, "to Service {service}, which has no backend: add the EndpointSlices or the pods")
            }
            Self::OtherNamespace => f.write_str("of other namespaces than --namespace"),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnusableFlows {
    pub count: u64,
    /// Index of the first among the observed flows.
    pub first: usize,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Resolution {
    /// Flows that can be learnt, in the order of the observed ones.
    pub learnable: Vec<LearnableFlow>,
    pub not_learnt: BTreeMap<NotLearnt, UnusableFlows>,
}

pub fn resolve(state: &ClusterState, observed: &[ObservedFlow], settings: &LearnSettings) -> Resolution {
    let mut resolver = Resolver::new(state, settings);
    resolver.note_destinations(observed);
    let mut resolution = Resolution::default();
    for (number, flow) in observed.iter().enumerate() {
        match resolver.resolve(flow) {
            Ok(learnable) => resolution.learnable.push(learnable),
            Err(reason) => {
                let unusable = UnusableFlows { count: 0, first: number };
                resolution.not_learnt.entry(reason).or_insert(unusable).count += 1;
            }
        }
    }
    resolution
}

/// A port at an address.
type Destination = (IpAddr, Protocol, u16);

struct Resolver<'a> {
    state: &'a ClusterState,
    settings: &'a LearnSettings,
    /// Services by their addresses: those of the cluster, external ones, and load balancers'.
    services: FxHashMap<IpAddr, &'a Service>,
    node_ports: FxHashMap<(Protocol, u16), (&'a Service, &'a ServicePort)>,
    /// Where flows went to, on ports that clients do not get.
    destinations: FxHashSet<Destination>,
    /// Backends by the client's node.
    backends: FxHashMap<(Option<String>, Destination), Rc<[Backend]>>,
}

impl<'a> Resolver<'a> {
    fn new(state: &'a ClusterState, settings: &'a LearnSettings) -> Self {
        let is_pods = |address: &IpAddr| matches!(state.owner(address), Some(PodOrNode::Pod(_)));
        let external = state.services().flat_map(|service| service.external.iter().map(move |at| (*at, &**service)));
        let external = external.filter(|(address, _)| !is_pods(address));
        let cluster = state.services().flat_map(|service| service.addresses.iter().map(move |at| (*at, &**service)));
        let services = external.chain(cluster).collect();
        let ports = state.services().flat_map(|service| service.ports.iter().map(move |port| (&**service, port)));
        let node_ports = ports
            .filter_map(|(service, port)| Some(((protocol(port.protocol), port.node_port?), (service, port))))
            .collect();
        let (destinations, backends) = (FxHashSet::default(), FxHashMap::default());
        Self { state, settings, services, node_ports, destinations, backends }
    }

    fn note_destinations(&mut self, observed: &[ObservedFlow]) {
        let opened = observed.iter().filter(|flow| flow.opening != Opening::Missing && flow.to.port < FIRST_EPHEMERAL);
        for flow in opened {
            if let Ok((_, dst)) = self.addresses(flow) {
                self.destinations.insert((dst, flow.protocol, flow.to.port));
            }
        }
    }

    fn resolve(&mut self, observed: &ObservedFlow) -> Result<LearnableFlow, NotLearnt> {
        match observed.outcome {
            Outcome::Denied => return Err(NotLearnt::Denied),
            Outcome::Unanswered if !self.settings.unanswered => return Err(NotLearnt::Unanswered),
            Outcome::Unanswered | Outcome::Silent | Outcome::Passed => {}
        }
        if observed.opening == Opening::Missing {
            return Err(NotLearnt::NoOpening);
        }
        let (src, dst) = self.addresses(observed)?;
        let ObservedFlow { protocol, ref from, ref to, .. } = *observed;
        let flow = Flow { src: src.into(), dst: dst.into(), protocol, src_port: from.port, dst_port: to.port };
        if observed.opening == Opening::Assumed && self.is_reply(&flow) {
            return Err(NotLearnt::Reply);
        }
        if [src, dst].iter().any(|address| !is_unicast(address)) {
            return Err(NotLearnt::NotUnicast);
        }
        let service = match self.services.get(&dst) {
            Some(service) if protocol.has_ports() => Some((*service, self.port_at(service, &flow)?)),
            Some(_) => None,
            None => self.at_own_node(&flow),
        };
        if service.is_some() && observed.outcome == Outcome::Silent && !self.settings.unanswered {
            // The node's kernel translates it, and policy may have denied it behind that.
            return Err(NotLearnt::Unanswered);
        }
        let mut ends = match service {
            Some((service, port)) => self.backends(service, port, &flow)?,
            None => vec![flow],
        };
        self.check_ends(&flow, &ends)?;
        ends.retain(|end| !self.is_exempt(end));
        let is_of_service = self.services.contains_key(&dst);
        let to_service_address = self.settings.service_addresses && is_of_service && pod_at(self.state, src).is_some();
        if ends.is_empty() && !to_service_address {
            return Err(NotLearnt::Exempt);
        }
        if !protocol.has_ports() {
            return Err(NotLearnt::Protocol(protocol));
        }
        if flow.dst_port == 0 || ends.iter().any(|end| end.dst_port == 0) {
            return Err(NotLearnt::PortZero);
        }
        let service = service.map(|(service, _)| service.key.clone());
        Ok(LearnableFlow { flow, service, ends, to_service_address, seen: observed.seen })
    }

    /// Refuses ends that are unknown, or that no written policy can be about.
    fn check_ends(&self, flow: &Flow, ends: &[Flow]) -> Result<(), NotLearnt> {
        let addresses = || ends.iter().flat_map(|end| [end.src, end.dst]).map(IpAddr::from);
        let is_lost = |address: &IpAddr| {
            self.state.owner(address).is_none() && self.settings.pod_networks.iter().any(|net| net.contains(address))
        };
        if let Some(lost) = addresses().find(is_lost) {
            return Err(NotLearnt::PodNetwork(lost));
        }
        let mut pods =
            addresses().chain([flow.src.into()]).filter_map(|address| pod_at(self.state, address)).peekable();
        if pods.peek().is_none() {
            return Err(NotLearnt::NoPod);
        }
        match pods.any(|pod| self.settings.covers(&pod.key.namespace)) {
            true => Ok(()),
            false => Err(NotLearnt::OtherNamespace),
        }
    }

    /// The first pair of the ends' addresses of one family.
    fn addresses(&self, observed: &ObservedFlow) -> Result<(IpAddr, IpAddr), NotLearnt> {
        let (sources, destinations) = (self.addresses_of(&observed.from)?, self.addresses_of(&observed.to)?);
        let mut pairs = sources.iter().flat_map(|src| destinations.iter().map(move |dst| (*src, *dst)));
        pairs.find(|(src, dst)| src.is_ipv4() == dst.is_ipv4()).ok_or(NotLearnt::NoAddress)
    }

    /// The addresses that an end may have: its own, or those that its pod has now.
    fn addresses_of(&self, end: &ObservedEnd) -> Result<Vec<IpAddr>, NotLearnt> {
        let Some(key) = &end.pod else { return Ok(end.address.into_iter().collect()) };
        let unknown = || NotLearnt::UnknownPod(key.to_string());
        let number = self.state.find_pod(key).ok_or_else(unknown)?;
        let pod: &Pod = self.state.pod(number).ok_or_else(unknown)?;
        if pod.host_network {
            return Ok(end.address.into_iter().chain(pod.addresses.iter().copied()).collect());
        }
        if !self.state.is_present(number) {
            return Err(unknown());
        }
        // The address that it had, if it still has it; otherwise one of the same family.
        let own = |address: &IpAddr| self.state.owner(address) == Some(PodOrNode::Pod(number));
        let rank = |address: &IpAddr| match end.address {
            Some(had) => (*address != had, address.is_ipv4() != had.is_ipv4()),
            None => (false, false),
        };
        let mut addresses: Vec<IpAddr> = pod.addresses.iter().copied().filter(own).collect();
        addresses.sort_by_key(rank);
        Ok(addresses)
    }

    /// Whether a flow goes from a port that serves to one that clients get: its opening packet was not seen.
    fn is_reply(&self, flow: &Flow) -> bool {
        let (src, dst) = (IpAddr::from(flow.src), IpAddr::from(flow.dst));
        let serves = |address: IpAddr, port: u16| self.declares(address, flow.protocol, port);
        flow.protocol.has_ports()
            && flow.dst_port >= FIRST_EPHEMERAL
            && !serves(dst, flow.dst_port)
            && (flow.src_port < FIRST_USER
                || serves(src, flow.src_port)
                || self.destinations.contains(&(src, flow.protocol, flow.src_port)))
    }

    /// Whether a pod or a Service declares a port.
    fn declares(&self, address: IpAddr, wanted: Protocol, number: u16) -> bool {
        let is_it = |of: PortProtocol, port: u16| (protocol(of), port) == (wanted, number);
        let by_pod =
            pod_at(self.state, address).is_some_and(|pod| pod.ports.iter().any(|p| is_it(p.protocol, p.number)));
        let service = self.services.get(&address);
        by_pod || service.is_some_and(|service| service.ports.iter().any(|p| is_it(p.protocol, p.number)))
    }

    /// A pod and itself, and a pod and its node.
    fn is_exempt(&self, flow: &Flow) -> bool {
        let owner = |address| self.state.owner(&IpAddr::from(address));
        match (owner(flow.src), owner(flow.dst)) {
            (Some(PodOrNode::Pod(a)), Some(PodOrNode::Pod(b))) => a == b,
            (Some(PodOrNode::Pod(pod)), Some(PodOrNode::Node(node)))
            | (Some(PodOrNode::Node(node)), Some(PodOrNode::Pod(pod))) => self.state.node_of(pod) == Some(node),
            _ => false,
        }
    }

    /// The port of a Service at one of its addresses.
    fn port_at(&self, service: &'a Service, flow: &Flow) -> Result<&'a ServicePort, NotLearnt> {
        let is_it = |port: &&ServicePort| (protocol(port.protocol), port.number) == (flow.protocol, flow.dst_port);
        service.ports.iter().find(is_it).ok_or_else(|| NotLearnt::NoServicePort(service.key.clone()))
    }

    /// The Service by whose node port a pod sends to its own node, which sends it on. Another node translates its own.
    fn at_own_node(&self, flow: &Flow) -> Option<(&'a Service, &'a ServicePort)> {
        let is_of_pod = pod_at(self.state, flow.src.into()).is_some();
        let is_to_node = matches!(self.state.owner(&IpAddr::from(flow.dst)), Some(PodOrNode::Node(_)));
        let found = || self.node_ports.get(&(flow.protocol, flow.dst_port)).copied();
        if is_of_pod && is_to_node && self.is_exempt(flow) { found() } else { None }
    }

    /// One flow to each backend that the client may get.
    fn backends(&mut self, service: &Service, port: &ServicePort, flow: &Flow) -> Result<Vec<Flow>, NotLearnt> {
        let (src, dst) = (IpAddr::from(flow.src), IpAddr::from(flow.dst));
        let node = pod_at(self.state, src).and_then(|pod| pod.node.clone());
        let key = (node, (dst, flow.protocol, flow.dst_port));
        let state = self.state;
        let found = self.backends.entry(key).or_insert_with_key(|(node, _)| {
            let place = ClientPlace::on(node.as_deref().unwrap_or_default(), state);
            let slices = state.endpoint_slices(&service.key).map(|slice| &**slice);
            select(&as_asked(service, dst), port, AddressFamily::of(dst), slices, &place).backends.into()
        });
        if found.is_empty() {
            return Err(NotLearnt::NoBackend(service.key.clone()));
        }
        Ok(found.iter().map(|backend| Flow { dst: backend.address, dst_port: backend.port, ..*flow }).collect())
    }
}

/// Whether an address can be a host's.
fn is_unicast(address: &IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !(address.is_multicast() || address.is_loopback() || address.is_unspecified() || is_broadcast)
}
