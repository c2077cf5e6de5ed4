//! From the policies of a pod to the effective rules of each direction.
//!
//! A [`TableKey`] holds what the rules of one direction of a pod depend on: pods with equal keys share one rule table.
//! Effective rules are the policies' rules with port names resolved on the server. On ingress the server is the selected
//! pod itself. On egress it is the peer, so a rule is split by the numbers that pods have for the name.

mod matching;
mod provenance;

use std::sync::Arc;

use penstock_dataplane::policy::{Direction, PortRange, PortSpec};

use crate::model::{
    IpBlock, NamedPort, NetworkPolicy, Peer, Peers, PolicyPort, PolicyPorts, PortMatch, PortProtocol, Rule, Selector,
};
use crate::state::{ClusterState, PeerSet, PodId, PolicyId};

pub use matching::{Mismatch, RuleComparison, compare};
pub use provenance::{PeerKind, Provenance, RuleSource};

/// What the effective rules of one direction of an isolated pod depend on. Equal keys have equal rules.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TableKey {
    /// The direction.
    pub direction: Direction,
    /// The policies that apply, sorted by namespace and name, each with the revision of its last change.
    pub policies: Vec<(PolicyId, u64)>,
    /// On ingress, the pod's named ports that the policies refer to; sorted.
    pub ports: Vec<NamedPort>,
}

/// One effective rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EffectiveRule {
    /// The policy's rule it comes from; an egress rule with port names yields several.
    pub source: RuleSource,
    /// Which peers match.
    pub peers: EffectivePeers,
    /// Which destinations match.
    pub ports: PortSpec,
}

/// The peers of an effective rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EffectivePeers {
    /// Every address.
    Every,
    /// At least one of these.
    AnyOf {
        /// Whether every pod of every known namespace is a peer.
        every_pod: bool,
        /// Pods in these peer sets.
        peer_sets: Vec<PeerSet>,
        /// Addresses in these blocks, whether pods have them or not.
        blocks: Vec<IpBlock>,
    },
}

/// The table key of one direction of a pod; `None` if no policy isolates it.
pub fn table_key(state: &ClusterState, pod: PodId, direction: Direction) -> Option<TableKey> {
    let mut isolated = direction == Direction::Ingress && state.is_denied_by_default(pod);
    let (mut policies, mut ports) = (Vec::new(), Vec::new());
    for (number, revision) in state.policies_of(pod) {
        let policy = state.policy(number).expect("the state lists only policies it has");
        let Some(rules) = rules_of(policy, direction) else { continue };
        isolated |= policy.isolates;
        policies.push((number, revision));
        if direction == Direction::Ingress {
            let named = state.pod(pod).into_iter().flat_map(|pod| &pod.ports);
            ports.extend(
                named.filter(|port| names(rules).any(|name| name == (port.name.as_str(), port.protocol))).cloned(),
            );
        }
    }
    ports.sort_unstable();
    ports.dedup();
    isolated.then_some(TableKey { direction, policies, ports })
}

/// The rules of a policy for a direction; `None` if the policy does not apply to it.
pub fn rules_of(policy: &NetworkPolicy, direction: Direction) -> Option<&[Rule]> {
    match direction {
        Direction::Egress => policy.egress.as_deref(),
        Direction::Ingress => policy.ingress.as_deref(),
    }
}

/// The port names in these rules.
fn names(rules: &[Rule]) -> impl Iterator<Item = (&str, PortProtocol)> {
    let ports = rules.iter().flat_map(|rule| match &rule.ports {
        PolicyPorts::Every => &[],
        PolicyPorts::AnyOf(ports) => ports.as_slice(),
    });
    ports.filter_map(|port| match &port.which {
        PortMatch::Name(name) => Some((name.as_str(), port.protocol)),
        PortMatch::Every | PortMatch::Range { .. } => None,
    })
}

/// The port names that the rules of a key resolve on peers. When pods' numbers for them change, the rules change.
pub fn names_on_peers(state: &ClusterState, key: &TableKey) -> Vec<(String, PortProtocol)> {
    if key.direction == Direction::Ingress {
        return Vec::new();
    }
    let policies = key.policies.iter().filter_map(|(policy, _)| state.policy(*policy));
    let rules = policies.filter_map(|policy| rules_of(policy, key.direction));
    let mut all: Vec<_> = rules.flat_map(names).map(|(name, protocol)| (name.to_owned(), protocol)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The effective rules of a key, in the order of its policies and their rules. Leaves out a rule that can match nothing:
/// an empty list under v1beta1, a name that no pod has.
pub fn rules(state: &ClusterState, key: &TableKey) -> Vec<EffectiveRule> {
    let mut effective = Vec::new();
    for (number, _) in &key.policies {
        let policy = state.policy(*number).expect("a key lists only policies the state has");
        for (index, rule) in rules_of(policy, key.direction).unwrap_or_default().iter().enumerate() {
            let source = RuleSource { policy: policy.clone(), direction: key.direction, rule: index };
            one_rule(state, key, &source, rule, &mut effective);
        }
    }
    effective
}

fn one_rule(state: &ClusterState, key: &TableKey, source: &RuleSource, rule: &Rule, into: &mut Vec<EffectiveRule>) {
    let namespace = &source.policy.key.namespace;
    let Some(peers) = peers(namespace, &rule.peers) else { return };
    let ports = match &rule.ports {
        PolicyPorts::Every => PortSpec::Every,
        PolicyPorts::AnyOf(ports) => PortSpec::AnyOf(ports.iter().flat_map(|port| ranges(key, port)).collect()),
    };
    if ports != PortSpec::AnyOf(Vec::new()) {
        into.push(EffectiveRule { source: source.clone(), peers, ports });
    }
    if key.direction == Direction::Egress {
        let mut named: Vec<(&str, PortProtocol)> = names(std::slice::from_ref(rule)).collect();
        named.sort_unstable();
        named.dedup();
        for (name, protocol) in named {
            for number in state.numbers(name, protocol) {
                let port = NamedPort { name: name.to_owned(), protocol, number };
                into.push(on_peers_with(port, source, namespace, &rule.peers));
            }
        }
    }
}

/// The part of an egress rule for peers with this number for a name. Only pods have port names, so only pods match, even
/// where the peer is a block or every address.
fn on_peers_with(port: NamedPort, source: &RuleSource, namespace: &str, peers: &Peers) -> EffectiveRule {
    let ports = PortSpec::AnyOf(vec![range(port.protocol, port.number, port.number)]);
    let peer_sets = match peers {
        Peers::Every => vec![PeerSet::Port(port)],
        Peers::AnyOf(peers) => {
            let with_port = |peer: &Peer| match peer {
                Peer::IpBlock(block) => Some(PeerSet::Block { block: block.clone(), port: port.clone() }),
                pods => peer_set(namespace, pods, Some(port.clone())),
            };
            peers.iter().filter_map(with_port).collect()
        }
    };
    let peers = EffectivePeers::AnyOf { every_pod: false, peer_sets, blocks: Vec::new() };
    EffectiveRule { source: source.clone(), peers, ports }
}

/// The peers of a rule as peer sets and blocks; `None` if the list is empty.
fn peers(namespace: &str, peers: &Peers) -> Option<EffectivePeers> {
    let Peers::AnyOf(peers) = peers else { return Some(EffectivePeers::Every) };
    if peers.is_empty() {
        return None;
    }
    let (mut every_pod, mut peer_sets, mut blocks) = (false, Vec::new(), Vec::new());
    for peer in peers {
        match peer {
            Peer::IpBlock(block) => blocks.push(block.clone()),
            peer if finds_every_pod(peer) => every_pod = true,
            pods => peer_sets.extend(peer_set(namespace, pods, None)),
        }
    }
    Some(EffectivePeers::AnyOf { every_pod, peer_sets, blocks })
}

fn finds_every_pod(peer: &Peer) -> bool {
    let every = |selector: &Selector| selector.requirements.is_empty();
    match peer {
        Peer::Namespaces(namespaces) => every(namespaces),
        Peer::PodsInNamespaces { namespaces, pods } => every(namespaces) && every(pods),
        Peer::Pods(_) | Peer::IpBlock(_) => false,
    }
}

/// The peer set of pods that a selector peer matches, limited to those with the port if one is given; `None` for a block.
fn peer_set(namespace: &str, peer: &Peer, port: Option<NamedPort>) -> Option<PeerSet> {
    match peer {
        Peer::Pods(pods) => Some(PeerSet::InNamespace { namespace: namespace.to_owned(), pods: pods.clone(), port }),
        Peer::Namespaces(namespaces) => {
            Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: Selector::default(), port })
        }
        Peer::PodsInNamespaces { namespaces, pods } => {
            Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: pods.clone(), port })
        }
        Peer::IpBlock(_) => None,
    }
}

/// A rule's port as ranges. A name becomes the selected pod's number on ingress; on egress peers resolve it.
fn ranges(key: &TableKey, port: &PolicyPort) -> Vec<PortRange> {
    match &port.which {
        PortMatch::Every => vec![range(port.protocol, 0, u16::MAX)],
        PortMatch::Range { first, last } => vec![range(port.protocol, *first, *last)],
        PortMatch::Name(name) => {
            let own = key.ports.iter().filter(|own| own.name == *name && own.protocol == port.protocol);
            own.map(|own| range(own.protocol, own.number, own.number)).collect()
        }
    }
}

fn range(protocol: PortProtocol, first: u16, last: u16) -> PortRange {
    PortRange { protocol: protocol.into(), first, last }
}

impl From<PortProtocol> for penstock_dataplane::policy::PortProtocol {
    fn from(protocol: PortProtocol) -> Self {
        match protocol {
            PortProtocol::Tcp => Self::Tcp,
            PortProtocol::Udp => Self::Udp,
            PortProtocol::Sctp => Self::Sctp,
        }
    }
}

impl PartialEq for RuleSource {
    fn eq(&self, other: &Self) -> bool {
        (Arc::ptr_eq(&self.policy, &other.policy) || self.policy == other.policy)
            && (self.direction, self.rule) == (other.direction, other.rule)
    }
}

impl Eq for RuleSource {}
