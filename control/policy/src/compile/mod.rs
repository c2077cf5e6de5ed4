//! From the policies of a pod to the effective rules of each direction, in the order of their tiers.
//!
//! A [`TableKey`] holds all that the rules of one direction of a pod depend on: pods with equal keys share one rule table, and the
//! rules of a table never change.
//! Effective rules are the policies' rules with port names resolved on the server. On ingress the server is the selected
//! pod itself. On egress it is the peer, so a rule is split by the numbers that pods have for the name.

mod matching;
mod provenance;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use penstock_dataplane::names::NamePattern;
use penstock_dataplane::policy::{Direction, PortRange, PortSpec};

use crate::model::{
    ClusterNetworkPolicy, ClusterRule, ClusterTier, IpBlock, NamedPort, NetworkPolicy, Peer, Peers, PolicyPort,
    PolicyPorts, PortMatch, PortProtocol, Rule, Selector,
};
use crate::state::{ClusterPolicyId, ClusterState, PeerSet, PodId, PolicyId, RulesSummary};

pub use matching::{Mismatch, RuleComparison, compare, compare_by_name};
pub(crate) use matching::{is_peer, is_port};
pub use provenance::{PeerKind, PolicyName, Provenance, RuleSource, SourcePolicy, Tier};

/// The key on which the effective rules of one direction of a pod depend. Equal keys have equal rules.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TableKey {
    pub direction: Direction,
    /// The ClusterNetworkPolicies of the Admin tier that apply, in order, each with the revision of its last change.
    pub admin: Vec<(ClusterPolicyId, u64)>,
    /// The NetworkPolicies that isolate the pod, sorted by namespace and name, each with the revision of its last
    /// change; `None` if it is not isolated.
    pub isolation: Option<Vec<(PolicyId, u64)>>,
    /// Those of the Baseline tier, in order; none if the pod is isolated, since the tier is never reached then.
    pub baseline: Vec<(ClusterPolicyId, u64)>,
    /// The named ports that the policies refer to, sorted: on ingress the pod's own, on egress those of all pods.
    pub ports: Vec<NamedPort>,
    /// The revision of Nodes, if rules name some.
    pub nodes: Option<u64>,
    /// Why its NetworkPolicies allow nothing, whatever they say.
    pub closed: Option<TooManyEntries>,
    /// How many entries its rules have: what it takes to compile them.
    pub entries: usize,
}

/// The NetworkPolicies of a pod or a namespace have too many entries: rules, peers, excepts and ports.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TooManyEntries {
    /// So many in one direction of the pod, more than [`MOST_ENTRIES`].
    OfPod(usize),
    /// So many in its namespace, or more than [`MOST_ENTRIES_IN_NAMESPACE`](crate::state::MOST_ENTRIES_IN_NAMESPACE) when a policy
    /// came, whose rules are not kept.
    OfNamespace(usize),
    /// The selectors in its namespace reach more than [`MOST_REACHED_FROM_NAMESPACE`](crate::state::MOST_REACHED_FROM_NAMESPACE).
    Reached,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EffectiveRule {
    /// The policy's rule it comes from; an egress rule with port names yields several, next to each other.
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
        /// Addresses that DNS answers gave the pod for these names, whether pods have them or not.
        names: Vec<NamePattern>,
    },
}

/// The table key of one direction of a pod; `None` if no policy applies to it.
pub fn table_key(state: &ClusterState, pod: PodId, direction: Direction) -> Option<TableKey> {
    let mut isolated = direction == Direction::Ingress && state.is_denied_by_default(pod);
    let mut policies = Vec::new();
    for (number, revision) in state.policies_of(pod) {
        let policy = state.policy(number).expect("the state lists only policies it has");
        if rules_of(policy, direction).is_some() {
            isolated |= policy.isolates;
            policies.push((number, revision));
        }
    }
    let (mut admin, mut baseline) = (Vec::new(), Vec::new());
    for (number, revision) in state.cluster_policies_of(pod) {
        let policy = state.cluster_policy(number).expect("the state lists only policies it has");
        match policy.tier {
            // A policy without rules for a direction does not touch it.
            _ if cluster_rules_of(policy, direction).is_empty() => {}
            ClusterTier::Admin => admin.push((number, revision)),
            ClusterTier::Baseline if isolated => {}
            ClusterTier::Baseline => baseline.push((number, revision)),
        }
    }
    if !isolated && admin.is_empty() && baseline.is_empty() {
        return None;
    }
    let isolation = isolated.then_some(policies);
    let (ports, nodes, closed, entries) = (Vec::new(), None, None, 0);
    let mut key = TableKey { direction, admin, isolation, baseline, ports, nodes, closed, entries };
    key.complete(state, pod);
    Some(key)
}

impl TableKey {
    /// Whether ClusterNetworkPolicies apply.
    pub fn is_tiered(&self) -> bool {
        !(self.admin.is_empty() && self.baseline.is_empty())
    }

    /// Finds what the policies' rules depend on besides themselves, and whether they are too many.
    fn complete(&mut self, state: &ClusterState, pod: PodId) {
        let isolating: Vec<&RulesSummary> = self.isolating(state).collect();
        let of_pod = self.entries_of(state, &isolating);
        self.closed = match (&self.isolation, state.too_many_entries(pod)) {
            (None, _) => None,
            (_, Some(in_namespace)) => Some(TooManyEntries::OfNamespace(in_namespace)),
            _ if state.pod(pod).is_some_and(|pod| state.reaches_too_far(&pod.key.namespace)) => {
                Some(TooManyEntries::Reached)
            }
            _ if of_pod > MOST_ENTRIES => Some(TooManyEntries::OfPod(of_pod)),
            _ => None,
        };
        let all: Vec<&RulesSummary> = self.summaries(state).collect();
        self.entries = self.entries_of(state, &all);
        let wanted: BTreeSet<&(String, PortProtocol)> =
            all.iter().flat_map(|summary| summary.names.iter().map(|(name, _)| name)).collect();
        self.ports = self.named_ports(state, pod, &wanted);
        self.ports.sort_unstable();
        self.ports.dedup();
        self.nodes = all.iter().any(|summary| summary.nodes).then(|| state.node_revision());
    }

    /// Those of the NetworkPolicies, whether they allow anything or not.
    fn isolating<'a>(&self, state: &'a ClusterState) -> impl Iterator<Item = &'a RulesSummary> {
        self.isolation.iter().flatten().map(|(policy, _)| state.policy_summary(*policy, self.direction))
    }

    /// Those of all policies that may decide.
    fn summaries<'a>(&self, state: &'a ClusterState) -> impl Iterator<Item = &'a RulesSummary> {
        let of_cluster = self.admin.iter().chain(&self.baseline);
        let of_cluster = of_cluster.map(|(policy, _)| state.cluster_policy_summary(*policy, self.direction));
        of_cluster.chain(self.isolating(state).filter(|_| self.closed.is_none()))
    }

    /// On egress, a rule with a port's name has a part for each number of it.
    fn entries_of(&self, state: &ClusterState, summaries: &[&RulesSummary]) -> usize {
        let parts = |summary: &&RulesSummary| match self.direction {
            Direction::Ingress => 0,
            Direction::Egress => {
                let of_name =
                    |((name, protocol), entries): &((String, _), usize)| entries * state.numbers(name, *protocol).len();
                summary.names.iter().map(of_name).sum()
            }
        };
        summaries.iter().map(|summary| summary.entries + parts(summary)).sum()
    }

    fn named_ports(
        &self,
        state: &ClusterState,
        pod: PodId,
        wanted: &BTreeSet<&(String, PortProtocol)>,
    ) -> Vec<NamedPort> {
        let is_wanted = |port: &&NamedPort| wanted.iter().any(|(name, of)| *name == port.name && *of == port.protocol);
        if self.direction == Direction::Ingress {
            let own = state.pod(pod).into_iter().flat_map(|pod| &pod.ports);
            return own.filter(is_wanted).cloned().collect();
        }
        let numbers = |(name, protocol): &&(String, PortProtocol)| {
            let port = |number| NamedPort { name: name.clone(), protocol: *protocol, number };
            state.numbers(name, *protocol).into_iter().map(port).collect::<Vec<_>>()
        };
        wanted.iter().flat_map(numbers).collect()
    }
}

/// The rules of a policy for a direction; `None` if the policy does not apply to it.
pub fn rules_of(policy: &NetworkPolicy, direction: Direction) -> Option<&[Rule]> {
    match direction {
        Direction::Egress => policy.egress.as_deref(),
        Direction::Ingress => policy.ingress.as_deref(),
    }
}

/// The rules of a ClusterNetworkPolicy for a direction.
pub fn cluster_rules_of(policy: &ClusterNetworkPolicy, direction: Direction) -> &[ClusterRule] {
    match direction {
        Direction::Egress => &policy.egress,
        Direction::Ingress => &policy.ingress,
    }
}

/// The most entries that a pod's NetworkPolicies may have in one direction: rules, blocks, excepts and ports. With more, none of
/// their rules allows anything: whoever may write policies for a pod of their own must not fill memory by what they take.
pub const MOST_ENTRIES: usize = 1 << 18;

/// All rules of a key's policies that can decide, in the order of their evaluation.
pub fn sources(state: &ClusterState, key: &TableKey) -> Vec<RuleSource> {
    let direction = key.direction;
    let of_cluster = |list: &[(ClusterPolicyId, u64)]| -> Vec<RuleSource> {
        let policies = list.iter().filter_map(|(number, _)| state.cluster_policy(*number));
        policies.flat_map(|policy| cluster_sources(policy, direction)).collect()
    };
    let is_closed = key.closed.is_some();
    let isolating =
        key.isolation.iter().flatten().filter(|_| !is_closed).filter_map(|(number, _)| state.policy(*number));
    let mut all = of_cluster(&key.admin);
    all.extend(isolating.flat_map(|policy| network_sources(policy, direction)));
    all.extend(of_cluster(&key.baseline));
    all
}

/// The rules of a NetworkPolicy for a direction, with their origin.
pub fn network_sources(policy: &Arc<NetworkPolicy>, direction: Direction) -> impl Iterator<Item = RuleSource> {
    let rules = rules_of(policy, direction).unwrap_or_default().len();
    (0..rules).map(move |rule| RuleSource { policy: SourcePolicy::Network(policy.clone()), direction, rule })
}

/// The rules of a ClusterNetworkPolicy for a direction, with their origin.
pub fn cluster_sources(policy: &Arc<ClusterNetworkPolicy>, direction: Direction) -> impl Iterator<Item = RuleSource> {
    let rules = cluster_rules_of(policy, direction).len();
    (0..rules).map(move |rule| RuleSource { policy: SourcePolicy::Cluster(policy.clone()), direction, rule })
}

/// The port names in a rule.
fn names(rule: &Rule) -> impl Iterator<Item = (&str, PortProtocol)> {
    let ports = match &rule.ports {
        PolicyPorts::Every => &[],
        PolicyPorts::AnyOf(ports) => ports.as_slice(),
    };
    ports.iter().filter_map(|port| match &port.which {
        PortMatch::Name(name) => Some((name.as_str(), port.protocol)),
        PortMatch::Every | PortMatch::Range { .. } => None,
    })
}

/// The port names in the rules of a key's policies, whose numbers on peers its rules depend on.
pub fn peers_names(state: &ClusterState, key: &TableKey) -> Vec<(String, PortProtocol)> {
    if key.direction == Direction::Ingress {
        return Vec::new();
    }
    let mut names: Vec<_> =
        key.summaries(state).flat_map(|summary| summary.names.iter().map(|(name, _)| name.clone())).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Appends the effective rules of one of a key's [`sources`]; none if it can match nothing: an empty list, a name that no pod has,
/// nodes that do not exist.
pub fn append_rules(state: &ClusterState, key: &TableKey, source: &RuleSource, into: &mut Vec<EffectiveRule>) {
    let rule = source.get();
    let peers = peers_with_nodes(state, &rule.peers);
    let Some(effective) = self::peers(source, &peers) else { return };
    let ports = match &rule.ports {
        PolicyPorts::Every => PortSpec::Every,
        PolicyPorts::AnyOf(ports) => PortSpec::AnyOf(ports.iter().flat_map(|port| ranges(key, port)).collect()),
    };
    if ports != PortSpec::AnyOf(Vec::new()) {
        into.push(EffectiveRule { source: source.clone(), peers: effective, ports });
    }
    if key.direction == Direction::Egress {
        let mut named: Vec<(&str, PortProtocol)> = names(rule).collect();
        named.sort_unstable();
        named.dedup();
        for (name, protocol) in named {
            for port in key.ports.iter().filter(|port| port.name == name && port.protocol == protocol) {
                into.push(on_peers_with(port.clone(), source, &peers));
            }
        }
    }
}

/// The peers, with `networks` and `nodes` as one block for each network and each address of a node.
fn peers_with_nodes<'a>(state: &ClusterState, peers: &'a Peers) -> Cow<'a, Peers> {
    let Peers::AnyOf(list) = peers else { return Cow::Borrowed(peers) };
    if !list.iter().any(|peer| matches!(peer, Peer::Networks(_) | Peer::Nodes(_))) {
        return Cow::Borrowed(peers);
    }
    let block = |cidr| Peer::IpBlock(IpBlock { cidr, except: Vec::new() });
    let resolved = list.iter().flat_map(|peer| match peer {
        Peer::Networks(networks) => networks.iter().copied().map(block).collect(),
        Peer::Nodes(nodes) => state.node_addresses(nodes).into_iter().map(|address| block(address.into())).collect(),
        other => vec![other.clone()],
    });
    Cow::Owned(Peers::AnyOf(resolved.collect()))
}

/// The part of an egress rule for peers with this number for a name. Only pods have port names, so only pods match, even
/// where the peer is a block or every address. Domain names beside a port's name match nothing: no pod is known by one.
fn on_peers_with(port: NamedPort, source: &RuleSource, peers: &Peers) -> EffectiveRule {
    let ports = PortSpec::AnyOf(vec![range(port.protocol, port.number, port.number)]);
    let peer_sets = match peers {
        Peers::Every => vec![PeerSet::Port(port)],
        Peers::AnyOf(peers) => {
            let with_port = |peer: &Peer| match peer {
                Peer::IpBlock(block) => Some(PeerSet::Block { block: block.clone(), port: port.clone() }),
                pods => peer_set(source, pods, Some(port.clone())),
            };
            peers.iter().filter_map(with_port).collect()
        }
    };
    let peers = EffectivePeers::AnyOf { every_pod: false, peer_sets, blocks: Vec::new(), names: Vec::new() };
    EffectiveRule { source: source.clone(), peers, ports }
}

/// The peers of a rule as peer sets and blocks; `None` if the list is empty.
fn peers(source: &RuleSource, peers: &Peers) -> Option<EffectivePeers> {
    let Peers::AnyOf(peers) = peers else { return Some(EffectivePeers::Every) };
    if peers.is_empty() {
        return None;
    }
    let (mut every_pod, mut peer_sets, mut blocks, mut names) = (false, Vec::new(), Vec::new(), Vec::new());
    for peer in peers {
        match peer {
            Peer::IpBlock(block) => blocks.push(block.clone()),
            Peer::DomainNames(found) => names.extend(found.iter().map(|name| name.pattern().clone())),
            peer if finds_every_pod(peer) => every_pod = true,
            pods => peer_sets.extend(peer_set(source, pods, None)),
        }
    }
    Some(EffectivePeers::AnyOf { every_pod, peer_sets, blocks, names })
}

fn finds_every_pod(peer: &Peer) -> bool {
    let every = |selector: &Selector| selector.requirements.is_empty();
    match peer {
        Peer::Namespaces(namespaces) => every(namespaces),
        Peer::PodsInNamespaces { namespaces, pods } => every(namespaces) && every(pods),
        Peer::Pods(_) | Peer::IpBlock(_) | Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_) => false,
    }
}

/// The peer set of pods that a selector peer matches, limited to those with the port if one is given; `None` for a block, and for names.
fn peer_set(source: &RuleSource, peer: &Peer, port: Option<NamedPort>) -> Option<PeerSet> {
    match peer {
        Peer::Pods(pods) => {
            let namespace = source.namespace()?.to_owned();
            Some(PeerSet::InNamespace { namespace, pods: pods.clone(), port })
        }
        Peer::Namespaces(namespaces) => {
            Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: Selector::default(), port })
        }
        Peer::PodsInNamespaces { namespaces, pods } => {
            Some(PeerSet::InNamespaces { namespaces: namespaces.clone(), pods: pods.clone(), port })
        }
        Peer::IpBlock(_) | Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_) => None,
    }
}

/// A rule's port as ranges. A name becomes the selected pod's number on ingress; on egress peers resolve it.
fn ranges(key: &TableKey, port: &PolicyPort) -> Vec<PortRange> {
    match &port.which {
        PortMatch::Every => vec![range(port.protocol, 0, u16::MAX)],
        PortMatch::Range { first, last } => vec![range(port.protocol, *first, *last)],
        PortMatch::Name(name) => {
            let own = key.ports.iter().filter(|_| key.direction == Direction::Ingress);
            let own = own.filter(|own| own.name == *name && own.protocol == port.protocol);
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
