//! Services as the Kubernetes API documentation words them: which backends a client may get, and which connections have one.

use std::collections::HashMap;
use std::net::IpAddr;

use penstock_policy::model::{EndpointSlice, Object, PortProtocol, Service, ServiceEndpoint, ServicePort};

use super::policy::{ClusterObjects, Flow};

/// A backend: address and port.
pub(crate) type Backend = (IpAddr, u16);

/// The owner of a flow's destination.
pub(crate) enum Target {
    /// No Service.
    Other,
    /// An address of a Service without this port, or an address that only a Service may have.
    Nothing,
    /// A Service's port: the backends that a client may get, those that serve, and for how long a client keeps its own.
    Port { name: String, eligible: Vec<Backend>, serving: Vec<Backend>, affinity: Option<u32> },
}

/// Connections to Services, and what clients had before.
#[derive(Default)]
pub(crate) struct Translations {
    /// By the flow that the client sends, the flow to its backend.
    pub(crate) inner: HashMap<Flow, Flow>,
    /// By client and Service's port: its backend, and when it got it.
    pub(crate) kept: HashMap<(IpAddr, String), (Backend, u64)>,
    /// All flows of the capture.
    pub(crate) captured: Vec<Flow>,
}

impl Translations {
    /// The flow between client and backend of a packet that shows either side of a translation.
    pub(crate) fn known(&self, flow: Flow) -> Option<Flow> {
        let reversed = |flow: Flow| Flow { src: flow.dst, dst: flow.src, sport: flow.dport, dport: flow.sport, ..flow };
        self.inner.iter().find_map(|(frontend, inner)| {
            if flow == *frontend || flow == *inner || flow == to_itself(*frontend, *inner) {
                Some(*inner)
            } else if flow == reversed(*frontend)
                || flow == reversed(*inner)
                || flow == reversed(to_itself(*frontend, *inner))
            {
                Some(reversed(*inner))
            } else {
                None
            }
        })
    }

    /// The backend among these that the capture shows for a client's port.
    pub(crate) fn shown(&self, flow: &Flow, eligible: &[Backend]) -> Option<Backend> {
        let of_client =
            |other: &&Flow| (other.src, other.sport, other.protocol) == (flow.src, flow.sport, flow.protocol);
        let ends = self.captured.iter().filter(of_client).map(|other| (other.dst, other.dport));
        ends.into_iter().find(|end| eligible.contains(end))
    }
}

/// A client that is its own backend gets its packet from the Service's address.
fn to_itself(frontend: Flow, inner: Flow) -> Flow {
    if inner.src == inner.dst { Flow { src: frontend.dst, ..inner } } else { inner }
}

impl ClusterObjects {
    fn services(&self) -> impl Iterator<Item = &Service> {
        self.objects.iter().filter_map(|object| match object {
            Object::Service(service) => Some(service),
            _ => None,
        })
    }

    /// The destination to which a pod's packet with this flow is sent.
    pub(crate) fn target(&self, flow: &Flow) -> Target {
        if !self.translates || self.is_own_node(flow.dst) {
            return Target::Other;
        }
        let Some(service) = self.services().find(|service| service.addresses.contains(&flow.dst)) else {
            let is_inside = self.service_blocks.iter().any(|block| block.contains(&flow.dst));
            return if is_inside { Target::Nothing } else { Target::Other };
        };
        let number = |protocol| match protocol {
            PortProtocol::Tcp => 6,
            PortProtocol::Udp => 17,
            PortProtocol::Sctp => 132,
        };
        let is_port = |port: &&ServicePort| (number(port.protocol), port.number) == (flow.protocol, flow.dport);
        let Some(port) = service.ports.iter().find(is_port) else { return Target::Nothing };
        let backends = |wanted: &dyn Fn(&ServiceEndpoint) -> bool| self.backends(service, port, flow.dst, wanted);
        let is_here = |endpoint: &ServiceEndpoint| {
            !service.local_only || self.node.is_some() && endpoint.node.as_deref() == self.node.as_deref()
        };
        let ready = backends(&|endpoint| endpoint.ready && is_here(endpoint));
        let leaving = backends(&|endpoint| endpoint.serving && endpoint.terminating && is_here(endpoint));
        Target::Port {
            name: format!("{}:{}", service.key, port.name),
            eligible: if ready.is_empty() { leaving } else { ready },
            serving: backends(&|endpoint| endpoint.serving || endpoint.ready),
            affinity: service.affinity_seconds,
        }
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
