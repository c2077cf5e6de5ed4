//! The workers' table of Services, kept consistent with the state.
//!
//! Which backends a new connection may get depends on the node where the client runs: [`select`] is kube-proxy's decision
//! (`pkg/proxy/topology.go`) for one port of a Service. [`ServiceTables::update`] decides again for the Services that the
//! state reports, and for no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::Hasher;
use std::net::IpAddr;
use std::sync::Arc;

use penstock_dataplane::packet::Protocol;
use penstock_dataplane::services::{Affinity, Backend, Frontend, FrontendKey, ServiceSet, WithoutBackend};
use rustc_hash::FxHashMap;
use siphasher::sip::SipHasher13;

use crate::describe;
use crate::model::{AddressFamily, EndpointSlice, ObjectKey, PortProtocol, Service, ServiceEndpoint, ServicePort};
use crate::state::ClusterState;

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
    /// All that serve, sorted, each once.
    pub serving: Vec<Backend>,
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
    let serving = of(&|candidate| candidate.endpoint.serving || candidate.endpoint.ready);
    if !service.local_only {
        return Selection { backends: anywhere, serving, without: WithoutBackend::Refused };
    }
    let is_local = |candidate: &Candidate<'_>| {
        !place.node.is_empty() && candidate.endpoint.node.as_deref() == Some(place.node.as_str())
    };
    let ready = of(&|candidate| candidate.endpoint.ready && is_local(candidate));
    let local =
        if ready.is_empty() { of(&|candidate| candidate.is_last_resort() && is_local(candidate)) } else { ready };
    let without = if anywhere.is_empty() { WithoutBackend::Refused } else { WithoutBackend::Dropped };
    Selection { backends: local, serving, without }
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

/// Something in Services that cannot be as written. The rest counts.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ServiceProblem {
    SharedAddress {
        first: ObjectKey,
        /// The Service that does not get it.
        second: ObjectKey,
        address: IpAddr,
        port: u16,
        protocol: PortProtocol,
    },
}

impl fmt::Display for ServiceProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::SharedAddress { first, second, address, port, protocol } = self;
        write!(
            f,
            "Service {second}: spec.clusterIPs: {address} port {port}/{} is that of Service {first}, which keeps it: \
             delete one of the two",
            describe::protocol(*protocol)
        )
    }
}

/// A Service that claims a frontend. The oldest one comes first, and of those of unknown age, which are last, the first by
/// name: a later Service takes no address away.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Claimant {
    created: i64,
    key: ObjectKey,
}

impl Claimant {
    fn of(service: &Service) -> Self {
        Self { created: service.created.unwrap_or(i64::MAX), key: service.key.clone() }
    }
}

#[derive(Debug)]
struct Claimed {
    claimant: Claimant,
    frontends: Vec<(FrontendKey, Arc<Frontend>)>,
}

/// The table of Services for clients of one node.
#[derive(Debug, Default)]
pub struct ServiceTables {
    place: ClientPlace,
    /// By Service the frontends that it claims.
    claimed: FxHashMap<ObjectKey, Claimed>,
    /// By frontend the Services that claim it: the first one has it.
    claims: FxHashMap<FrontendKey, BTreeSet<Claimant>>,
    disputed: BTreeSet<FrontendKey>,
    set: ServiceSet,
}

impl ServiceTables {
    /// No Services yet, for clients of this node.
    pub fn new(node: &str) -> Self {
        Self { place: ClientPlace { node: node.to_owned(), zone: None }, ..Self::default() }
    }

    pub fn set(&self) -> &ServiceSet {
        &self.set
    }

    /// Decides again for these Services; for all, if the node's zone has changed. Returns whether the table changed.
    pub fn update<'a>(&mut self, state: &ClusterState, outdated: impl IntoIterator<Item = &'a ObjectKey>) -> bool {
        let before = self.set.clone();
        let place = ClientPlace::on(&self.place.node, state);
        if place == self.place {
            outdated.into_iter().for_each(|key| self.update_one(state, key));
        } else {
            self.place = place;
            let all: BTreeSet<ObjectKey> =
                self.claimed.keys().cloned().chain(state.services().map(|service| service.key.clone())).collect();
            all.iter().for_each(|key| self.update_one(state, key));
        }
        !self.set.is_same(&before)
    }

    fn update_one(&mut self, state: &ClusterState, key: &ObjectKey) {
        let service = state.service(key);
        let after = service
            .map(|service| Claimed { claimant: Claimant::of(service), frontends: self.frontends(state, service) });
        let mut touched: BTreeSet<FrontendKey> = BTreeSet::new();
        if let Some(Claimed { claimant, frontends }) = self.claimed.remove(key) {
            for (frontend, _) in &frontends {
                touched.insert(*frontend);
                if let Some(claims) = self.claims.get_mut(frontend) {
                    claims.remove(&claimant);
                }
            }
        }
        if let Some(after) = after.filter(|after| !after.frontends.is_empty()) {
            for (frontend, _) in &after.frontends {
                touched.insert(*frontend);
                self.claims.entry(*frontend).or_default().insert(after.claimant.clone());
            }
            self.claimed.insert(key.clone(), after);
        }
        touched.into_iter().for_each(|frontend| self.settle(frontend));
    }

    /// Gives a frontend to the first of the Services that claim it.
    fn settle(&mut self, key: FrontendKey) {
        let claims = self.claims.get(&key).map_or(0, BTreeSet::len);
        let owner = self.claims.get(&key).and_then(BTreeSet::first);
        let claimed = owner.and_then(|owner| self.claimed.get(&owner.key));
        let frontend =
            claimed.and_then(|it| it.frontends.iter().find(|(other, _)| *other == key)).map(|(_, it)| it.clone());
        self.set.set(key, frontend);
        match claims {
            0 => {
                self.claims.remove(&key);
                self.disputed.remove(&key);
            }
            1 => drop(self.disputed.remove(&key)),
            _ => drop(self.disputed.insert(key)),
        }
    }

    fn frontends(&self, state: &ClusterState, service: &Service) -> Vec<(FrontendKey, Arc<Frontend>)> {
        let mut frontends = Vec::new();
        for &address in &service.addresses {
            for port in &service.ports {
                let slices = state.endpoint_slices(&service.key).map(|slice| &**slice);
                let Selection { backends, serving, without } =
                    select(service, port, AddressFamily::of(address), slices, &self.place);
                let key = FrontendKey { address: address.into(), protocol: protocol(port.protocol), port: port.number };
                let affinity = service.affinity_seconds.map(|seconds| Affinity { id: id(service, port), seconds });
                let name = port_name(&service.key, port).into();
                let frontend = Frontend { name, backends: backends.into(), serving: serving.into(), without, affinity };
                frontends.push((key, Arc::new(frontend)));
            }
        }
        frontends
    }

    /// Services that cannot be as written, in order.
    pub fn problems(&self) -> BTreeSet<ServiceProblem> {
        let mut problems = BTreeSet::new();
        for key in &self.disputed {
            let mut claims = self.claims.get(key).into_iter().flatten();
            let Some(first) = claims.next() else { continue };
            for second in claims {
                problems.insert(ServiceProblem::SharedAddress {
                    first: first.key.clone(),
                    second: second.key.clone(),
                    address: key.address.into(),
                    port: key.port,
                    protocol: match key.protocol {
                        Protocol::UDP => PortProtocol::Udp,
                        Protocol::SCTP => PortProtocol::Sctp,
                        _ => PortProtocol::Tcp,
                    },
                });
            }
        }
        problems
    }
}

/// A Service's port for display: `shop/api:http`, or `shop/api` without a name.
pub(crate) fn port_name(service: &ObjectKey, port: &ServicePort) -> String {
    if port.name.is_empty() { service.to_string() } else { format!("{service}:{}", port.name) }
}

/// Identifies a Service's port, the same in every process.
fn id(service: &Service, port: &ServicePort) -> u64 {
    let mut hasher = SipHasher13::new_with_keys(0, 0);
    for text in [&service.key.namespace, &service.key.name, &port.name] {
        hasher.write(text.as_bytes());
        hasher.write_u8(0xff);
    }
    hasher.write_u8(port.protocol as u8);
    hasher.finish()
}

pub(crate) fn protocol(protocol: PortProtocol) -> Protocol {
    match protocol {
        PortProtocol::Tcp => Protocol::TCP,
        PortProtocol::Udp => Protocol::UDP,
        PortProtocol::Sctp => Protocol::SCTP,
    }
}
