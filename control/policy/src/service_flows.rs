//! Reads a question about a Service: one flow to each backend that the client may get.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use penstock_dataplane::packet::Flow;

use crate::engine::Engine;
use crate::flow::{self, FlowEndpoint, FlowError, PortRef, ProtocolPort};
use crate::model::{AddressFamily, ObjectKey, Service, ServicePort};
use crate::render::services::{ClientPlace, WithoutBackend, port_name, protocol, select};
use crate::state::{ClusterState, PodOrNode};

/// A client's way to a Service's port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServiceFlows {
    /// The Service's port: `shop/api:http`.
    pub name: String,
    pub frontend: SocketAddr,
    pub sent: Flow,
    /// The flow to each backend that a new connection may get.
    pub flows: Vec<Flow>,
    /// The effect of having no backend.
    pub without: Without,
}

/// The effect on a connection of having no backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Without {
    /// It is refused, or dropped.
    Backend(WithoutBackend),
    /// It may have some: EndpointSlices are not followed, and the Service has no selector.
    Knowledge,
}

impl Without {
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Backend(WithoutBackend::Refused) => "no backend anywhere: refused",
            Self::Backend(WithoutBackend::Dropped) => "no backend on the client's node: dropped",
            Self::Knowledge => "policy is for what answers, which is not known here: EndpointSlices are not followed",
        }
    }
}

/// Where a Service's port is found.
struct Frontend<'a> {
    service: Cow<'a, Service>,
    port: ServicePort,
    at: SocketAddr,
}

/// The flows of a client to a Service, by the first of its addresses for which the Service has one of the same family. The
/// port is one of the Service's, by number or by name. Backends are those close to the client's node.
pub fn service_flows(
    engine: &Engine,
    from: &FlowEndpoint,
    key: &ObjectKey,
    port: &ProtocolPort,
) -> Result<ServiceFlows, FlowError> {
    let state = engine.state();
    let service = state.service(key).ok_or_else(|| FlowError::NoService(key.clone()))?;
    let sources = flow::addresses(state, from)?;
    let of_family = |src: &IpAddr| service.addresses.iter().find(|address| address.is_ipv4() == src.is_ipv4());
    let ends = sources.iter().find_map(|src| Some((*src, *of_family(src)?)));
    let (src, address) = match ends {
        Some(ends) => ends,
        None if service.addresses.is_empty() => return Err(FlowError::NoClusterAddress(key.clone())),
        None => return Err(FlowError::Families(from.to_string(), format!("Service {key}"))),
    };
    let port = service_port(service, port)
        .ok_or_else(|| FlowError::NoServicePort { service: key.clone(), port: port.to_string() })?;
    let at = SocketAddr::new(address, port.number);
    Ok(flows(engine, src, &Frontend { service: Cow::Borrowed(service), port: port.clone(), at }))
}

/// The same for what a client sends to an address: if a Service answers there, at one of its own addresses or by a node port of the
/// client's own node, which translates them.
pub fn service_flows_at(engine: &Engine, from: &FlowEndpoint, to: IpAddr, port: &ProtocolPort) -> Option<ServiceFlows> {
    let state = engine.state();
    let sources = flow::addresses(state, from).ok()?;
    let src = *sources.iter().find(|src| src.is_ipv4() == to.is_ipv4())?;
    let found = at_own_address(state, src, to, port).or_else(|| at_own_node(state, src, to, port))?;
    Some(flows(engine, src, &found))
}

fn at_own_address<'a>(state: &'a ClusterState, src: IpAddr, to: IpAddr, port: &ProtocolPort) -> Option<Frontend<'a>> {
    // A load balancer on the nodes has their addresses: the client's own node translates, whoever else has it.
    let is_of_node = is_own_node(state, src, to);
    let is_its = |it: &&Arc<Service>| state.is_address_of(it, &to) || is_of_node && it.external.contains(&to);
    let services = state.services().filter(is_its);
    let found = services.filter_map(|service| Some((service, service_port(service, port)?)));
    let (service, port) = found.min_by_key(|(service, _)| &service.key)?;
    Some(Frontend { service: as_asked(service, to), port: port.clone(), at: SocketAddr::new(to, port.number) })
}

/// Another node translates its own node ports: policy here is for that node.
fn at_own_node<'a>(state: &'a ClusterState, src: IpAddr, to: IpAddr, port: &ProtocolPort) -> Option<Frontend<'a>> {
    let Some(PortRef::Number(number)) = port.port().filter(|_| is_own_node(state, src, to)) else { return None };
    let is_it = |it: &&ServicePort| it.node_port == Some(*number) && protocol(it.protocol) == port.protocol();
    let found = state.services().filter_map(|service| Some((service, service.ports.iter().find(is_it)?)));
    let (service, port) = found.min_by_key(|(service, _)| &service.key)?;
    let at = SocketAddr::new(to, *number);
    Some(Frontend { service: as_asked(service, to), port: port.clone(), at })
}

/// Whether an address is of the node on which the pod with the other address runs.
fn is_own_node(state: &ClusterState, pod: IpAddr, address: IpAddr) -> bool {
    let node = flow::pod_at(state, pod).and_then(|pod| pod.node.as_deref());
    let Some(PodOrNode::Node(owner)) = state.owner(&address) else { return false };
    node.is_some_and(|node| state.node_name(owner) == Some(node))
}

/// A Service as it is for what a pod sends to this address of it, or of the node: to another one than the cluster's any backend may answer,
/// whatever `internalTrafficPolicy` says (pkg/proxy/iptables/proxier.go, the chains `KUBE-EXT`).
pub(crate) fn as_asked(service: &Service, to: IpAddr) -> Cow<'_, Service> {
    match service.addresses.contains(&to) || !service.local_only {
        true => Cow::Borrowed(service),
        false => Cow::Owned(Service { local_only: false, ..service.clone() }),
    }
}

fn flows(engine: &Engine, src: IpAddr, frontend: &Frontend<'_>) -> ServiceFlows {
    let Frontend { service, port, at } = frontend;
    let state = engine.state();
    let node = flow::pod_at(state, src).and_then(|pod| pod.node.clone()).unwrap_or_default();
    let place = ClientPlace::on(&node, state);
    let slices = engine.endpoint_slices(service);
    let slices_are_known = slices.is_some();
    let slices = slices.unwrap_or_default();
    let selection = select(service, port, AddressFamily::of(src), slices.iter().map(|slice| &**slice), &place);
    let sent = Flow {
        src: src.into(),
        dst: at.ip().into(),
        protocol: protocol(port.protocol),
        src_port: flow::ANY_SOURCE_PORT,
        dst_port: at.port(),
    };
    let flows = selection.backends.iter().map(|backend| Flow { dst: backend.address, dst_port: backend.port, ..sent });
    ServiceFlows {
        name: port_name(&service.key, port),
        frontend: *at,
        sent,
        flows: flows.collect(),
        without: if slices_are_known { Without::Backend(selection.without) } else { Without::Knowledge },
    }
}

fn service_port<'a>(service: &'a Service, asked: &ProtocolPort) -> Option<&'a ServicePort> {
    service.ports.iter().find(|port| {
        protocol(port.protocol) == asked.protocol()
            && match asked.port() {
                Some(PortRef::Number(number)) => port.number == *number,
                Some(PortRef::Name(name)) => port.name == *name,
                None => false,
            }
    })
}
