//! Services as the Kubernetes API documentation words them: which backends a client may get.

use std::net::IpAddr;

use penstock_policy::model::{EndpointSlice, Object, PortProtocol, Service, ServiceEndpoint, ServicePort};

use super::policy::{ClusterObjects, Flow};

/// A backend: address and port.
pub(crate) type Backend = (IpAddr, u16);

/// The backends of a Service's port.
pub(crate) struct Backends {
    /// Those that a client may get.
    pub(crate) eligible: Vec<Backend>,
    pub(crate) serving: Vec<Backend>,
}

impl ClusterObjects {
    fn services(&self) -> impl Iterator<Item = &Service> {
        self.objects.iter().filter_map(|object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        })
    }

    /// The backends for a pod's packet with this flow, if it is to a Service's port.
    pub(crate) fn backends_of(&self, flow: &Flow) -> Option<Backends> {
        if self.is_own_node(flow.dst) {
            return None;
        }
        let service = self.services().find(|service| service.addresses.contains(&flow.dst))?;
        let number = |protocol| match protocol {
            PortProtocol::Tcp => 6,
            PortProtocol::Udp => 17,
            PortProtocol::Sctp => 132,
        };
        let is_port = |port: &&ServicePort| (number(port.protocol), port.number) == (flow.protocol, flow.dport);
        let port = service.ports.iter().find(is_port)?;
        let backends = |wanted: &dyn Fn(&ServiceEndpoint) -> bool| self.backends(service, port, flow.dst, wanted);
        let is_here = |endpoint: &ServiceEndpoint| {
            !service.local_only || self.node.is_some() && endpoint.node.as_deref() == self.node.as_deref()
        };
        let ready = backends(&|endpoint| endpoint.ready && is_here(endpoint));
        let leaving = backends(&|endpoint| endpoint.serving && endpoint.terminating && is_here(endpoint));
        Some(Backends {
            eligible: if ready.is_empty() { leaving } else { ready },
            serving: backends(&|endpoint| endpoint.serving || endpoint.ready),
        })
    }

    fn backends(
        &self,
        service: &Service,
        port: &ServicePort,
        address: IpAddr,
        wanted: &dyn Fn(&ServiceEndpoint) -> bool,
    ) -> Vec<Backend> {
        let slices = self.objects.iter().filter_map(|object| match object {
            Object::EndpointSlice(slice) => Some(slice),
            _ => None,
        });
        let is_own = |slice: &&EndpointSlice| {
            slice.key.namespace == service.key.namespace && slice.service.as_ref() == Some(&service.key.name)
        };
        let mut found = Vec::new();
        for slice in slices.filter(is_own) {
            let same = |other: &&penstock_policy::model::EndpointPort| {
                (&other.name, other.protocol) == (&port.name, port.protocol)
            };
            let Some(at) = slice.ports.iter().find(same) else { continue };
            let fitting = |end: &&ServiceEndpoint| end.address.is_ipv4() == address.is_ipv4() && wanted(end);
            found.extend(slice.endpoints.iter().filter(fitting).map(|endpoint| (endpoint.address, at.number)));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}
