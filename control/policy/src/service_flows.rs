//! Reads a question about a Service: one flow to each backend that the client may get.

use std::net::IpAddr;

use penstock_dataplane::packet::Flow;
use penstock_dataplane::services::WithoutBackend;

use crate::flow::{self, FlowEndpoint, FlowError, PortRef, ProtocolPort};
use crate::model::{AddressFamily, ObjectKey, Service, ServicePort};
use crate::render::services::{ClientPlace, port_name, protocol, select};
use crate::state::ClusterState;

/// A client's way to a Service's port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServiceFlows {
    /// The Service's port: `shop/api:http`.
    pub name: String,
    /// The cluster address that the client uses.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// The flow to each backend that a new connection may get.
    pub flows: Vec<Flow>,
    /// The effect of having no backend.
    pub without: WithoutBackend,
}

/// The flows of a client to a Service, by the first of its addresses for which the Service has one of the same family. The
/// port is one of the Service's, by number or by name. Backends are those close to the client's node.
pub fn service_flows(
    state: &ClusterState,
    from: &FlowEndpoint,
    key: &ObjectKey,
    port: &ProtocolPort,
) -> Result<ServiceFlows, FlowError> {
    let service = state.service(key).ok_or_else(|| FlowError::NoService(key.clone()))?;
    let sources = flow::addresses(state, from)?;
    let of_family = |src: &IpAddr| service.addresses.iter().find(|address| address.is_ipv4() == src.is_ipv4());
    let ends = sources.iter().find_map(|src| Some((*src, *of_family(src)?)));
    let (src, address) = match ends {
        Some(ends) => ends,
        None if service.addresses.is_empty() => return Err(FlowError::NoClusterAddress(key.clone())),
        None => return Err(FlowError::Families(from.to_string(), format!("Service {key}"))),
    };
    let of_service = service_port(service, port)
        .ok_or_else(|| FlowError::NoServicePort { service: key.clone(), port: port.to_string() })?;
    let node = flow::pod_at(state, src).and_then(|pod| pod.node.clone()).unwrap_or_default();
    let place = ClientPlace::on(&node, state);
    let slices = state.endpoint_slices(key).map(|slice| &**slice);
    let selection = select(service, of_service, AddressFamily::of(address), slices, &place);
    let flows = selection.backends.iter().map(|backend| Flow {
        src: src.into(),
        dst: backend.address,
        protocol: protocol(of_service.protocol),
        src_port: flow::ANY_SOURCE_PORT,
        dst_port: backend.port,
    });
    let flows = flows.collect();
    let name = port_name(key, of_service);
    Ok(ServiceFlows { name, address, port: of_service.number, flows, without: selection.without })
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

/// The effect of having no backend, in words.
pub const fn describe_without(without: WithoutBackend) -> &'static str {
    match without {
        WithoutBackend::Refused => "no backend anywhere: refused",
        WithoutBackend::Dropped => "no backend on the client's node: dropped",
    }
}
