//! Services of the manifests, and where their ports lead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use penstock_policy::describe;
use penstock_policy::model::{Object, ObjectKey, Pod, PortMatch, PortProtocol, ServicePort};

/// Bits of a Service range's host part, at most: `maxCIDRBits` in `cmd/kube-apiserver/app/options/validation.go`. A wider
/// block means more than Services.
const MOST_RANGE_BITS: u8 = 20;
/// The Services of the manifests, and who else has addresses.
#[derive(Debug, Default)]
pub(super) struct Services {
    pub(super) ports: Vec<BackedPort>,
    addresses: BTreeMap<IpAddr, ObjectKey>,
    /// Addresses of pods, nodes and other endpoints.
    others: BTreeSet<IpAddr>,
}

/// A port of a Service, and where it leads.
#[derive(Debug)]
pub(super) struct BackedPort {
    pub(super) service: ObjectKey,
    /// Its place in the Service's list.
    pub(super) index: usize,
    pub(super) port: ServicePort,
    /// Address and port of each backend, whether it is ready or not.
    pub(super) backends: BTreeSet<(IpAddr, u16)>,
}

impl Services {
    pub(super) fn new(objects: &[Object]) -> Self {
        let mut services = Self::default();
        for object in objects {
            match object {
                Object::Service(service) => {
                    let addresses = service.addresses.iter().chain(&service.external);
                    services.addresses.extend(addresses.map(|address| (*address, service.key.clone())));
                    let ports = service.ports.iter().cloned().enumerate();
                    services.ports.extend(ports.map(|(index, port)| {
                        let backends = backends(objects, &service.key, &port);
                        BackedPort { service: service.key.clone(), index, port, backends }
                    }));
                }
                Object::Pod(pod) => services.others.extend(&pod.addresses),
                Object::Node(node) => services.others.extend(&node.addresses),
                Object::EndpointSlice(slice) => {
                    services.others.extend(slice.endpoints.iter().map(|endpoint| endpoint.address));
                }
                Object::Namespace(_) | Object::NetworkPolicy(_) | Object::ClusterNetworkPolicy(_) => {}
            }
        }
        services
    }

    /// The mistake in a block of addresses that can only mean Services: it has the address of one, that of no pod or
    /// node, and is no wider than a cluster's Service range can be.
    pub(super) fn problem_of_block(&self, block: &IpNet, except: &[IpNet]) -> Option<String> {
        let has = |address: &IpAddr| block.contains(address) && !except.iter().any(|except| except.contains(address));
        if block.max_prefix_len() - block.prefix_len() > MOST_RANGE_BITS || self.others.iter().any(has) {
            return None;
        }
        let (address, service) = self.addresses.iter().find(|(address, _)| has(address))?;
        let of = if IpNet::from(*address) == *block { "is" } else { "has only Services' addresses, such as" };
        Some(format!(
            "matches nothing: it {of} {address}, of Service {service}, whose backends are evaluated \
             instead; select them"
        ))
    }

    /// The mistake in a number of a rule's ports: it is that of a Service whose backends have another, on all `servers`.
    pub(super) fn problem_of_port(
        &self,
        servers: &[&Pod],
        protocol: PortProtocol,
        which: &PortMatch,
    ) -> Option<String> {
        let &PortMatch::Range { first: number, last } = which else { return None };
        let addresses: Vec<&[IpAddr]> = servers.iter().map(|pod| pod.addresses.as_slice()).collect();
        if number != last || servers.is_empty() {
            return None;
        }
        let listens = |port: &BackedPort| {
            let is_it = |(address, at): &(IpAddr, u16)| {
                *at == number && addresses.iter().any(|addresses| addresses.contains(address))
            };
            port.port.protocol == protocol && port.backends.iter().any(is_it)
        };
        let names = |pod: &&Pod| pod.ports.iter().any(|port| (port.number, port.protocol) == (number, protocol));
        if servers.iter().any(names) || self.ports.iter().any(listens) {
            return None;
        }
        let leads_to_all = |port: &&BackedPort| {
            (port.port.number, port.port.protocol) == (number, protocol)
                && addresses.iter().all(|addresses| port.backends.iter().any(|(it, _)| addresses.contains(it)))
        };
        let found = self.ports.iter().find(leads_to_all)?;
        let at: BTreeSet<String> = found.backends.iter().map(|(_, port)| port.to_string()).collect();
        let at: Vec<String> = at.into_iter().collect();
        let (service, protocol) = (&found.service, describe::protocol(protocol));
        Some(format!(
            "is the port of Service {service}, and its backends have {}/{protocol}: policy is evaluated for the backend's \
             port",
            at.join(", ")
        ))
    }
}

/// Address and port of each endpoint of a Service's port.
fn backends(objects: &[Object], service: &ObjectKey, port: &ServicePort) -> BTreeSet<(IpAddr, u16)> {
    let slices = objects.iter().filter_map(|object| match object {
        Object::EndpointSlice(slice) => Some(slice),
        _ => None,
    });
    let of_service = slices.filter(|slice| {
        slice.key.namespace == service.namespace && slice.service.as_deref() == Some(service.name.as_str())
    });
    let of_port = of_service.filter_map(|slice| {
        let found = slice.ports.iter().find(|it| (&it.name, it.protocol) == (&port.name, port.protocol))?;
        Some(slice.endpoints.iter().map(move |endpoint| (endpoint.address, found.number)))
    });
    of_port.flatten().collect()
}
