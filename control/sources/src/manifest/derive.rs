//! EndpointSlices derived from selectors and pods, for manifests that have none.

use std::collections::BTreeMap;

use penstock_policy::model::{
    EndpointPort, EndpointSlice, Object, ObjectKey, Pod, Service, ServiceEndpoint, ServicePort, TargetPort,
};

use super::tree::YamlNode;

/// The ports of a Service at one pod.
type PortsOfPod = Vec<EndpointPort>;

/// An object, and whether it is a pod that is ready.
type ObjectReadiness<'a> = (&'a Object, bool);

/// If none of these objects is an EndpointSlice: those that the cluster's controller would make of them, and of how many
/// Services. Of each pod it must be known whether it is ready ([`Document::is_ready`](super::Document::is_ready)).
pub fn derive_endpoint_slices(objects: &[ObjectReadiness<'_>]) -> (Vec<EndpointSlice>, usize) {
    if objects.iter().any(|(object, _)| matches!(object, Object::EndpointSlice(_))) {
        return (Vec::new(), 0);
    }
    let services = objects.iter().filter_map(|(object, _)| match object {
        Object::Service(service) if service.selector.is_some() => Some(service),
        _ => None,
    });
    let (mut slices, mut derived) = (Vec::new(), 0);
    for service in services {
        let before = slices.len();
        slices.extend(of_service(service, objects));
        derived += usize::from(slices.len() > before);
    }
    (slices, derived)
}

/// One slice for each number that the Service's ports have at its pods.
fn of_service(service: &Service, objects: &[ObjectReadiness<'_>]) -> Vec<EndpointSlice> {
    let mut by_ports: Vec<(PortsOfPod, Vec<ServiceEndpoint>)> = Vec::new();
    for &(object, is_ready) in objects {
        let Object::Pod(pod) = object else { continue };
        let is_selected = pod.key.namespace == service.key.namespace
            && !pod.finished
            && service.selector.as_ref().is_some_and(|selector| selector.matches(&pod.labels));
        if !is_selected {
            continue;
        }
        let ports: PortsOfPod = service.ports.iter().filter_map(|port| port_at(port, pod)).collect();
        let endpoints = pod.addresses.iter().map(|&address| ServiceEndpoint {
            address,
            ready: is_ready && !pod.lifetime.leaving,
            serving: is_ready,
            terminating: pod.lifetime.leaving,
            node: pod.node.clone(),
            node_hints: Vec::new(),
            zone_hints: Vec::new(),
        });
        match by_ports.iter_mut().find(|(other, _)| *other == ports) {
            Some((_, known)) => known.extend(endpoints),
            None => by_ports.push((ports, endpoints.collect())),
        }
    }
    let slice = |(number, (ports, endpoints)): (usize, (PortsOfPod, Vec<ServiceEndpoint>))| EndpointSlice {
        key: ObjectKey {
            namespace: service.key.namespace.clone(),
            name: format!("{}-derived-{}", service.key.name, number + 1),
        },
        service: Some(service.key.name.clone()),
        ports,
        endpoints,
    };
    by_ports.into_iter().enumerate().map(slice).collect()
}

/// A Service's port at a pod; `None` if the pod has no port of its name.
fn port_at(port: &ServicePort, pod: &Pod) -> Option<EndpointPort> {
    let number = match &port.target {
        TargetPort::Number(number) => *number,
        TargetPort::Name(name) => {
            let named =
                |named: &&penstock_policy::model::NamedPort| (&named.name, named.protocol) == (name, port.protocol);
            pod.ports.iter().find(named)?.number
        }
    };
    Some(EndpointPort { name: port.name.clone(), protocol: port.protocol, number })
}

/// Whether the pod's status says that it is ready, or nothing about it: manifests are often written without a status.
pub(super) fn is_ready(pod: &YamlNode) -> bool {
    let value = pod.get("status").map(YamlNode::to_value).unwrap_or_default();
    let conditions = value["conditions"].as_array().cloned().unwrap_or_default();
    let statuses: BTreeMap<String, String> = conditions
        .iter()
        .filter_map(|condition| {
            Some((condition["type"].as_str()?.to_owned(), condition["status"].as_str()?.to_owned()))
        })
        .collect();
    statuses.get("Ready").is_none_or(|status| status == "True")
}
