//! Service and EndpointSlice.
//!
//! Parts of such an object that are not valid are left out and reported; the rest of it counts. The rules are those of
//! `pkg/apis/core/validation` and `pkg/apis/discovery/validation`.

use std::collections::HashSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use penstock_policy::model::{
    AddressFamily, EndpointPort, EndpointSlice, LabelOperator, Requirement, Selector, Service, ServiceEndpoint,
    ServicePort, TargetPort,
};

use super::cluster::unicast;
use super::distinct::Distinct;
use super::{FieldError, FieldPathRef, FieldProblem, names, port};

/// A Service with this label belongs to another proxy.
const PROXY_LABEL: &str = "service.kubernetes.io/service-proxy-name";
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// An object and its parts that are not valid, which are left out of it.
pub(super) type Partly<T> = (T, Vec<FieldError>);

/// Converts a Service.
pub fn service(service: &core::Service) -> Result<Partly<Service>, FieldError> {
    let key = super::key(&service.metadata)?;
    let mut wrong = Vec::new();
    let empty = core::ServiceSpec::default();
    let spec = service.spec.as_ref().unwrap_or(&empty);
    let at = FieldPathRef::OBJECT;
    let spec_at = at.field("spec");
    let converted = Service {
        key,
        addresses: if has_label(&service.metadata, PROXY_LABEL) {
            Vec::new()
        } else {
            cluster_addresses(spec, &spec_at, &mut wrong)
        },
        external: external_addresses(service, spec, &mut wrong),
        ports: service_ports(spec, &spec_at.field("ports"), &mut wrong),
        local_only: spec.internal_traffic_policy.as_deref() == Some("Local"),
        selector: spec.selector.as_ref().filter(|labels| !labels.is_empty()).map(|labels| Selector {
            requirements: labels
                .iter()
                .map(|(key, value)| Requirement { key: key.clone(), operator: LabelOperator::In(vec![value.clone()]) })
                .collect(),
        }),
    };
    Ok((converted, wrong))
}

fn has_label(meta: &ObjectMeta, label: &str) -> bool {
    meta.labels.as_ref().is_some_and(|labels| labels.contains_key(label))
}

/// `spec.clusterIPs`, or else `spec.clusterIP`.
fn cluster_addresses(spec: &core::ServiceSpec, at: &FieldPathRef<'_>, wrong: &mut Vec<FieldError>) -> Vec<IpAddr> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    if spec.type_.as_deref() == Some("ExternalName") {
        return addresses;
    }
    let list_at = at.field("clusterIPs");
    let mut take = |text: &str, at: &FieldPathRef<'_>| {
        if matches!(text, "" | "None") {
            return;
        }
        match unicast(text, at) {
            Ok(address) if addresses.contains(&address) => {}
            Ok(address) => match addresses.iter().find(|known| known.is_ipv4() == address.is_ipv4()) {
                Some(&first) => wrong.push(at.invalid(FieldProblem::SecondOfFamily { first, second: address })),
                None => addresses.push(address),
            },
            Err(error) => wrong.push(error),
        }
    };
    for (i, text) in spec.cluster_ips.iter().flatten().enumerate() {
        take(text, &list_at.index(i));
    }
    if spec.cluster_ips.as_ref().is_none_or(Vec::is_empty) {
        take(spec.cluster_ip.as_deref().unwrap_or_default(), &at.field("clusterIP"));
    }
    addresses
}

/// `spec.externalIPs` and `status.loadBalancer.ingress[].ip`, each once. Not those that the load balancer keeps for itself (`ipMode: Proxy`):
/// no node translates these.
fn external_addresses(service: &core::Service, spec: &core::ServiceSpec, wrong: &mut Vec<FieldError>) -> Vec<IpAddr> {
    let mut addresses = Distinct::default();
    let at = FieldPathRef::OBJECT;
    let (spec_at, status_at) = (at.field("spec"), at.field("status"));
    let (externals_at, balancer_at) = (spec_at.field("externalIPs"), status_at.field("loadBalancer"));
    let ingress_at = balancer_at.field("ingress");
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten();
    let mut take = |text: &str, at: &FieldPathRef<'_>| match unicast(text, at) {
        Ok(address) => addresses.push(address),
        Err(error) => wrong.push(error),
    };
    for (i, text) in spec.external_ips.iter().flatten().enumerate() {
        take(text, &externals_at.index(i));
    }
    for (i, point) in ingress.enumerate() {
        if let Some(text) = point.ip.as_ref().filter(|_| point.ip_mode.as_deref() != Some("Proxy")) {
            take(text, &ingress_at.index(i).field("ip"));
        }
    }
    addresses.into_vec()
}

fn service_ports(spec: &core::ServiceSpec, at: &FieldPathRef<'_>, wrong: &mut Vec<FieldError>) -> Vec<ServicePort> {
    let mut ports: Vec<ServicePort> = Vec::new();
    let (mut names, mut numbers) = (HashSet::new(), HashSet::new());
    for (i, given) in spec.ports.iter().flatten().enumerate() {
        let port_at = at.index(i);
        let is_new = |port: &ServicePort| {
            let repeated = |field, text| Err(port_at.field(field).invalid(FieldProblem::Repeated(text)));
            match (names.contains(&port.name), numbers.contains(&(port.number, port.protocol))) {
                (true, _) => repeated("name", port.name.clone()),
                (_, true) => repeated("port", port.number.to_string()),
                _ => Ok(()),
            }
        };
        match service_port(given, &port_at).and_then(|port| is_new(&port).map(|()| port)) {
            Ok(port) => {
                names.insert(port.name.clone());
                numbers.insert((port.number, port.protocol));
                ports.push(port);
            }
            Err(error) => wrong.push(error),
        }
    }
    ports
}

fn service_port(port: &core::ServicePort, at: &FieldPathRef<'_>) -> Result<ServicePort, FieldError> {
    let name = port.name.clone().unwrap_or_default();
    let number = port::number(port.port, &at.field("port"))?;
    let protocol = port::protocol(port.protocol.as_deref(), &at.field("protocol"))?;
    let target_at = at.field("targetPort");
    let target = match &port.target_port {
        None | Some(IntOrString::Int(0)) => TargetPort::Number(number),
        Some(IntOrString::Int(number)) => TargetPort::Number(port::number(*number, &target_at)?),
        Some(IntOrString::String(name)) if name.is_empty() => TargetPort::Number(number),
        Some(IntOrString::String(name)) => {
            names::port_name(name).map_err(|problem| target_at.invalid(problem))?;
            TargetPort::Name(name.clone())
        }
    };
    let node_port = port.node_port.filter(|number| *number != 0);
    let node_port = node_port.map(|number| port::number(number, &at.field("nodePort"))).transpose()?;
    if !name.is_empty() {
        names::dns_label(&name).map_err(|problem| at.field("name").invalid(problem))?;
    }
    Ok(ServicePort { name, protocol, number, target, node_port })
}

/// Converts an EndpointSlice. One of another `addressType` than an IP family has no endpoints.
pub fn endpoint_slice(slice: &discovery::EndpointSlice) -> Result<Partly<EndpointSlice>, FieldError> {
    let key = super::key(&slice.metadata)?;
    let (mut wrong, at) = (Vec::new(), FieldPathRef::OBJECT);
    let labels = slice.metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get(SERVICE_LABEL)).filter(|name| !name.is_empty()).cloned();
    let family = match slice.address_type.as_str() {
        "IPv4" => Some(AddressFamily::V4),
        "IPv6" => Some(AddressFamily::V6),
        "FQDN" => None,
        other => {
            wrong.push(at.field("addressType").invalid(FieldProblem::AddressType(other.to_owned())));
            None
        }
    };
    let ports = endpoint_ports(slice, &at.field("ports"), &mut wrong);
    let mut endpoints = Vec::new();
    let list_at = at.field("endpoints");
    for (i, given) in slice.endpoints.iter().flatten().enumerate().filter(|_| !has_label(&slice.metadata, PROXY_LABEL))
    {
        let Some(family) = family else { break };
        match endpoint(given, family, &list_at.index(i)) {
            Ok(endpoint) => endpoints.extend(endpoint),
            Err(error) => wrong.push(error),
        }
    }
    Ok((EndpointSlice { key, service, ports, endpoints }, wrong))
}

fn endpoint_ports(
    slice: &discovery::EndpointSlice,
    at: &FieldPathRef<'_>,
    wrong: &mut Vec<FieldError>,
) -> Vec<EndpointPort> {
    let (mut ports, mut names) = (Vec::new(), HashSet::new());
    for (i, given) in slice.ports.iter().flatten().enumerate() {
        let port_at = at.index(i);
        // Without a number it means every port, which no Service's port does.
        let Some(number) = given.port else { continue };
        let name = given.name.clone().unwrap_or_default();
        let port = port::number(number, &port_at.field("port")).and_then(|number| {
            let protocol = port::protocol(given.protocol.as_deref(), &port_at.field("protocol"))?;
            match names.contains(&name) {
                true => Err(port_at.field("name").invalid(FieldProblem::Repeated(name.clone()))),
                false => Ok(EndpointPort { name: name.clone(), protocol, number }),
            }
        });
        match port {
            Ok(port) => {
                names.insert(name);
                ports.push(port);
            }
            Err(error) => wrong.push(error),
        }
    }
    ports
}

/// One endpoint; `None` if it has no address.
fn endpoint(
    endpoint: &discovery::Endpoint,
    family: AddressFamily,
    at: &FieldPathRef<'_>,
) -> Result<Option<ServiceEndpoint>, FieldError> {
    // The addresses of an endpoint are interchangeable; every known proxy uses the first one.
    let Some(text) = endpoint.addresses.first() else { return Ok(None) };
    let list_at = at.field("addresses");
    let address_at = list_at.index(0);
    let address = unicast(text, &address_at)?;
    if AddressFamily::of(address) != family {
        return Err(address_at.invalid(FieldProblem::OtherFamily { address, family: family.name() }));
    }
    if is_link_local(address) {
        return Err(address_at.invalid(FieldProblem::NotUnicast(address)));
    }
    let conditions = endpoint.conditions.as_ref();
    let hints = endpoint.hints.as_ref();
    Ok(Some(ServiceEndpoint {
        address,
        ready: conditions.and_then(|conditions| conditions.ready).unwrap_or(true),
        serving: conditions.and_then(|conditions| conditions.serving).unwrap_or(true),
        terminating: conditions.and_then(|conditions| conditions.terminating).unwrap_or(false),
        node: endpoint.node_name.clone(),
        node_hints: hints
            .and_then(|hints| hints.for_nodes.as_ref())
            .map(|nodes| nodes.iter().map(|node| node.name.clone()).collect())
            .unwrap_or_default(),
        zone_hints: hints
            .and_then(|hints| hints.for_zones.as_ref())
            .map(|zones| zones.iter().map(|zone| zone.name.clone()).collect())
            .unwrap_or_default(),
    }))
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}
