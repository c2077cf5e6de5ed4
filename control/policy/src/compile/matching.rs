//! Compares one rule with one flow, read directly from the policy. Explanations use it: a table says only which rule matched.

use std::net::IpAddr;

use ipnet::IpNet;
use penstock_dataplane::packet::{Flow, Protocol};
use penstock_dataplane::policy::Direction;

use crate::model::{Peer, Peers, Pod, PolicyPort, PolicyPorts, PortMatch};
use crate::state::{ClusterState, PodOrNode};

use super::provenance::{PeerKind, Provenance, RuleSource};

/// The result of comparing a rule with a flow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleComparison {
    /// The rule, with the peer and the port that matched. Where one did not match: the first that the rule lists.
    pub provenance: Provenance,
    /// The mismatches; none if the rule allows the flow.
    pub mismatches: Vec<Mismatch>,
}

/// Why a rule does not allow a flow.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Mismatch {
    /// None of the rule's peers matches.
    Peer,
    /// The address is in one of the rule's blocks, but also in this `except`.
    Excepted(IpNet),
    /// No port of the rule matches, or only one of another protocol.
    Port,
    /// The rule names a port, and the server pod has no port of this name and protocol.
    PortName(String),
}

/// The part of a rule by which a flow matches if DNS has given its pod the destination for a name of the rule: the rule's
/// first peer with names. `None` if the rule has no names, or a port of the flow does not match.
pub fn compare_by_name(state: &ClusterState, source: &RuleSource, flow: &Flow) -> Option<Provenance> {
    let rule = source.get();
    let Peers::AnyOf(peers) = &rule.peers else { return None };
    let peer = peers.iter().position(|peer| matches!(peer, Peer::DomainNames(_)))?;
    let (port, lacks_port) = compare_ports(state, &rule.ports, flow);
    let (policy, direction) = (source.policy.name(), source.direction);
    let is_numbered = match &rule.ports {
        PolicyPorts::Every => true,
        PolicyPorts::AnyOf(ports) => ports.get(port).is_some_and(|port| !matches!(port.which, PortMatch::Name(_))),
    };
    let found = Provenance { policy, direction, rule: source.rule, kind: PeerKind::DomainNames, peer, port };
    (lacks_port.is_none() && is_numbered).then_some(found)
}

/// Compares a rule with a flow. Domain names match nothing.
pub fn compare(state: &ClusterState, source: &RuleSource, flow: &Flow) -> RuleComparison {
    let rule = source.get();
    let peer_address = match source.direction {
        Direction::Egress => flow.dst,
        Direction::Ingress => flow.src,
    };
    let (kind, peer, lacks_peer) = compare_peers(state, source, &rule.peers, peer_address.into());
    let (port, lacks_port) = compare_ports(state, &rule.ports, flow);
    let (policy, direction) = (source.policy.name(), source.direction);
    RuleComparison {
        provenance: Provenance { policy, direction, rule: source.rule, kind, peer, port },
        mismatches: lacks_peer.into_iter().chain(lacks_port).collect(),
    }
}

fn compare_peers(
    state: &ClusterState,
    source: &RuleSource,
    peers: &Peers,
    address: IpAddr,
) -> (PeerKind, usize, Option<Mismatch>) {
    let Peers::AnyOf(peers) = peers else { return (PeerKind::All, 0, None) };
    let pod = pod_at(state, address);
    let kind = |peer: &Peer| PeerKind::of(peer, source);
    if let Some(place) = peers.iter().position(|peer| is_peer(state, source.namespace(), peer, pod, &address)) {
        return (kind(&peers[place]), place, None);
    }
    let excepted = peers.iter().enumerate().find_map(|(place, peer)| match peer {
        Peer::IpBlock(block) if block.cidr.contains(&address) => {
            let except = block.except.iter().find(|except| except.contains(&address))?;
            Some((PeerKind::IpBlock, place, Some(Mismatch::Excepted(*except))))
        }
        _ => None,
    });
    excepted.unwrap_or_else(|| (peers.first().map_or(PeerKind::All, kind), 0, Some(Mismatch::Peer)))
}

/// Whether a peer of a policy in a namespace matches an address, which this pod owns.
pub(crate) fn is_peer(
    state: &ClusterState,
    namespace: Option<&str>,
    peer: &Peer,
    pod: Option<&Pod>,
    address: &IpAddr,
) -> bool {
    let in_namespace = |pod: &Pod, selector: &crate::model::Selector| {
        state.namespace_labels(&pod.key.namespace).is_some_and(|labels| selector.matches(labels))
    };
    match (peer, pod) {
        (Peer::IpBlock(block), _) => block.contains(address),
        (Peer::Networks(networks), _) => networks.iter().any(|network| network.contains(address)),
        (Peer::Nodes(nodes), _) => state.node_addresses(nodes).contains(address),
        // Only the pod's DNS answers say so.
        (Peer::DomainNames(_), _) => false,
        (_, None) => false,
        (Peer::Pods(pods), Some(pod)) => namespace == Some(pod.key.namespace.as_str()) && pods.matches(&pod.labels),
        (Peer::Namespaces(namespaces), Some(pod)) => in_namespace(pod, namespaces),
        (Peer::PodsInNamespaces { namespaces, pods }, Some(pod)) => {
            in_namespace(pod, namespaces) && pods.matches(&pod.labels)
        }
    }
}

fn compare_ports(state: &ClusterState, ports: &PolicyPorts, flow: &Flow) -> (usize, Option<Mismatch>) {
    let PolicyPorts::AnyOf(ports) = ports else { return (0, None) };
    let server = pod_at(state, flow.dst.into());
    if let Some(place) = ports.iter().position(|port| is_port(port, server, flow)) {
        return (place, None);
    }
    let names = |port: &PolicyPort| match &port.which {
        PortMatch::Name(name) if !has_name(server, name, port) => Some(name.clone()),
        _ => None,
    };
    let lacking =
        ports.iter().enumerate().find_map(|(place, port)| Some((place, Some(Mismatch::PortName(names(port)?)))));
    lacking.unwrap_or((0, Some(Mismatch::Port)))
}

fn has_name(server: Option<&Pod>, name: &str, port: &PolicyPort) -> bool {
    server.is_some_and(|pod| pod.ports.iter().any(|own| own.name == name && own.protocol == port.protocol))
}

/// Whether a port matches a flow to this pod.
pub(crate) fn is_port(port: &PolicyPort, server: Option<&Pod>, flow: &Flow) -> bool {
    let protocol: penstock_dataplane::policy::PortProtocol = port.protocol.into();
    let protocol: Protocol = protocol.number();
    protocol == flow.protocol
        && match &port.which {
            PortMatch::Every => true,
            PortMatch::Range { first, last } => (*first..=*last).contains(&flow.dst_port),
            PortMatch::Name(name) => server
                .into_iter()
                .flat_map(|pod| &pod.ports)
                .any(|own| own.name == *name && own.protocol == port.protocol && own.number == flow.dst_port),
        }
}

fn pod_at(state: &ClusterState, address: IpAddr) -> Option<&Pod> {
    match state.owner(&address)? {
        PodOrNode::Pod(pod) => state.pod(pod),
        PodOrNode::Node(_) => None,
    }
}
