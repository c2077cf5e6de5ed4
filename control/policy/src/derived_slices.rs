//! EndpointSlices as the cluster's controller would make them of a Service's selector and pods, where none are known.

use crate::model::{
    EndpointPort, EndpointSlice, NamedPort, ObjectKey, Pod, Service, ServiceEndpoint, ServicePort, TargetPort,
};

/// The ports of a Service at one pod.
type PortsOfPod = Vec<EndpointPort>;

/// One slice for each number that the Service's ports have at its pods. Of each pod it must be known whether it is ready. None for a
/// Service without a selector.
pub fn derived_slices<'a>(service: &Service, pods: impl Iterator<Item = (&'a Pod, bool)>) -> Vec<EndpointSlice> {
    let mut by_ports: Vec<(PortsOfPod, Vec<ServiceEndpoint>)> = Vec::new();
    for (pod, is_ready) in pods {
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
            let named = |named: &&NamedPort| (&named.name, named.protocol) == (name, port.protocol);
            pod.ports.iter().find(named)?.number
        }
    };
    Some(EndpointPort { name: port.name.clone(), protocol: port.protocol, number })
}
