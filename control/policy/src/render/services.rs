//! The backends that a new connection to a Service may get, which depend on the node where the client runs: [`select`] is
//! kube-proxy's decision (`pkg/proxy/topology.go`) for one port of a Service.

use std::collections::BTreeMap;

use penstock_dataplane::packet::{Address, Protocol};

use crate::model::{AddressFamily, EndpointSlice, ObjectKey, PortProtocol, Service, ServiceEndpoint, ServicePort};
use crate::state::ClusterState;

/// One end of a connection: an address and a port.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Backend {
    pub address: Address,
    pub port: u16,
}

/// The fate of a packet that opens a connection to a Service's port without a backend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum WithoutBackend {
    /// Refused. There is no backend anywhere.
    #[default]
    Refused,
    /// Dropped. There are backends, and none that this node may use.
    Dropped,
}

/// Where a client runs, which decides the backends that are close to it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClientPlace {
    /// Its node; empty if unknown.
    pub node: String,
    pub zone: Option<String>,
}

impl ClientPlace {
    pub fn on(node: &str, state: &ClusterState) -> Self {
        Self { node: node.to_owned(), zone: state.zone_of(node).map(str::to_owned) }
    }
}

/// The backends of one port of a Service, in one family.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selection {
    /// Those that a new connection may get, sorted, each once.
    pub backends: Vec<Backend>,
    /// The effect of having no `backends`.
    pub without: WithoutBackend,
}

/// An endpoint at the number of one port.
struct Candidate<'a> {
    endpoint: &'a ServiceEndpoint,
    number: u16,
}

impl Candidate<'_> {
    fn backend(&self) -> Backend {
        Backend { address: self.endpoint.address.into(), port: self.number }
    }

    /// Where no endpoint is ready.
    fn is_last_resort(&self) -> bool {
        self.endpoint.serving && self.endpoint.terminating
    }
}

/// Decides which backends a client at `place` may get for a port of a Service in one family.
pub fn select<'a>(
    service: &Service,
    port: &ServicePort,
    family: AddressFamily,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    place: &ClientPlace,
) -> Selection {
    let endpoints = candidates(port, family, slices);
    let of = |wanted: &dyn Fn(&Candidate<'_>) -> bool| -> Vec<Backend> {
        endpoints.values().filter(|candidate| wanted(candidate)).map(Candidate::backend).collect()
    };
    let closeness = if service.local_only { Closeness::Every } else { Closeness::of(&endpoints, place) };
    let ready = of(&|candidate| candidate.endpoint.ready && closeness.admits(candidate.endpoint));
    let anywhere = if ready.is_empty() { of(&|candidate| candidate.is_last_resort()) } else { ready };
    if !service.local_only {
        return Selection { backends: anywhere, without: WithoutBackend::Refused };
    }
    let is_local = |candidate: &Candidate<'_>| {
        !place.node.is_empty() && candidate.endpoint.node.as_deref() == Some(place.node.as_str())
    };
    let ready = of(&|candidate| candidate.endpoint.ready && is_local(candidate));
    let local =
        if ready.is_empty() { of(&|candidate| candidate.is_last_resort() && is_local(candidate)) } else { ready };
    let without = if anywhere.is_empty() { WithoutBackend::Refused } else { WithoutBackend::Dropped };
    Selection { backends: local, without }
}

/// The endpoints of a port in one family, each backend once. Of two endpoints with one backend, as where a new pod has the
/// address of one that terminates, the one that does not terminate counts.
fn candidates<'a>(
    port: &ServicePort,
    family: AddressFamily,
    slices: impl Iterator<Item = &'a EndpointSlice>,
) -> BTreeMap<Backend, Candidate<'a>> {
    let mut found: BTreeMap<Backend, Candidate<'a>> = BTreeMap::new();
    for slice in slices {
        let is_port =
            |other: &&crate::model::EndpointPort| (&other.name, other.protocol) == (&port.name, port.protocol);
        let Some(number) = slice.ports.iter().find(is_port).map(|port| port.number) else { continue };
        for endpoint in slice.endpoints.iter().filter(|endpoint| AddressFamily::of(endpoint.address) == family) {
            let candidate = Candidate { endpoint, number };
            let backend = candidate.backend();
            if !endpoint.terminating || !found.contains_key(&backend) {
                found.insert(backend, candidate);
            }
        }
    }
    found
}

enum Closeness<'a> {
    Every,
    /// Those with a hint for this node.
    Node(&'a str),
    /// Those with a hint for this zone.
    Zone(&'a str),
}

impl<'a> Closeness<'a> {
    /// Hints count if all ready endpoints have them and one of them is for the client's node, or else its zone.
    fn of(endpoints: &BTreeMap<Backend, Candidate<'_>>, place: &'a ClientPlace) -> Self {
        let ready = || endpoints.values().map(|candidate| candidate.endpoint).filter(|endpoint| endpoint.ready);
        let node = place.node.as_str();
        if !node.is_empty()
            && ready().all(|endpoint| !endpoint.node_hints.is_empty())
            && ready().any(|endpoint| Self::Node(node).admits(endpoint))
        {
            return Self::Node(node);
        }
        match place.zone.as_deref() {
            Some(zone)
                if ready().all(|endpoint| !endpoint.zone_hints.is_empty())
                    && ready().any(|endpoint| Self::Zone(zone).admits(endpoint)) =>
            {
                Self::Zone(zone)
            }
            _ => Self::Every,
        }
    }

    fn admits(&self, endpoint: &ServiceEndpoint) -> bool {
        match self {
            Self::Every => true,
            Self::Node(node) => endpoint.node_hints.iter().any(|hint| hint == node),
            Self::Zone(zone) => endpoint.zone_hints.iter().any(|hint| hint == zone),
        }
    }
}

/// A Service's port for display: `shop/api:http`, or `shop/api` without a name.
pub(crate) fn port_name(service: &ObjectKey, port: &ServicePort) -> String {
    if port.name.is_empty() { service.to_string() } else { format!("{service}:{}", port.name) }
}

pub(crate) fn protocol(protocol: PortProtocol) -> Protocol {
    match protocol {
        PortProtocol::Tcp => Protocol::TCP,
        PortProtocol::Udp => Protocol::UDP,
        PortProtocol::Sctp => Protocol::SCTP,
    }
}
