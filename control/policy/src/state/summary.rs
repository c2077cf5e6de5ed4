//! The parts of a policy's rules that tables depend on. They are read once for each version of the policy, so that a pod's table is
//! found without reading the rules again for each pod.

use crate::model::{
    ClusterNetworkPolicy, LabelOperator, NetworkPolicy, Peer, Peers, PolicyPorts, PortMatch, PortProtocol, Requirement,
    Rule, Selector,
};

use penstock_dataplane::policy::Direction;

/// The most entries that the NetworkPolicies of a namespace may have: rules, peers, excepts, ports and selectors' values of both
/// directions. What is beyond is not kept.
pub const MOST_ENTRIES_IN_NAMESPACE: usize = 1 << 19;

/// The parts of the rules of one direction of a policy that tables depend on.
#[derive(Default, Debug)]
pub struct RulesSummary {
    /// Rules, peers, excepts and ports.
    pub entries: usize,
    /// Port names, sorted, each with the entries that one number for it adds: its rules and their peers.
    pub names: Vec<((String, PortProtocol), usize)>,
    /// Whether a peer selects nodes.
    pub nodes: bool,
}

impl RulesSummary {
    fn of<'a>(rules: impl Iterator<Item = &'a Rule>) -> Self {
        let mut summary = Self::default();
        for rule in rules {
            summary.add(rule);
        }
        summary.names.sort_unstable();
        summary.names.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            kept.1 += if is_same { next.1 } else { 0 };
            is_same
        });
        summary
    }

    fn add(&mut self, rule: &Rule) {
        let peers = match &rule.peers {
            Peers::Every => 0,
            Peers::AnyOf(peers) => {
                self.nodes |= peers.iter().any(|peer| matches!(peer, Peer::Nodes(_)));
                peers.iter().map(entries).sum()
            }
        };
        let ports: &[_] = match &rule.ports {
            PolicyPorts::Every => &[],
            PolicyPorts::AnyOf(ports) => ports,
        };
        let named = ports.iter().filter_map(|port| match &port.which {
            PortMatch::Name(name) => Some(((name.clone(), port.protocol), 1 + peers)),
            PortMatch::Every | PortMatch::Range { .. } => None,
        });
        self.names.extend(named);
        self.entries += 1 + peers + ports.len();
    }
}

fn entries(peer: &Peer) -> usize {
    match peer {
        Peer::IpBlock(block) => 1 + block.except.len(),
        Peer::Networks(networks) => networks.len().max(1),
        Peer::DomainNames(names) => names.len().max(1),
        Peer::Pods(selector) | Peer::Namespaces(selector) | Peer::Nodes(selector) => selector_entries(selector),
        Peer::PodsInNamespaces { namespaces, pods } => selector_entries(namespaces) + selector_entries(pods) - 1,
    }
}

/// A selector counts by its values, and at least once.
pub(super) fn selector_entries(selector: &Selector) -> usize {
    let values = |requirement: &Requirement| match &requirement.operator {
        LabelOperator::In(values) | LabelOperator::NotIn(values) => values.len().max(1),
        LabelOperator::Exists | LabelOperator::DoesNotExist => 1,
    };
    selector.requirements.iter().map(values).sum::<usize>().max(1)
}

/// The summaries of both directions of a policy.
#[derive(Default, Debug)]
pub(super) struct PolicySummary {
    egress: RulesSummary,
    ingress: RulesSummary,
    /// Those of the selector of a NetworkPolicy's pods, beyond the first.
    selector: usize,
}

impl PolicySummary {
    pub(super) fn of(policy: &NetworkPolicy) -> Self {
        let rules = |rules: &Option<Vec<Rule>>| RulesSummary::of(rules.iter().flatten());
        let selector = selector_entries(&policy.pod_selector) - 1;
        Self { egress: rules(&policy.egress), ingress: rules(&policy.ingress), selector }
    }

    pub(super) fn of_cluster(policy: &ClusterNetworkPolicy) -> Self {
        let egress = RulesSummary::of(policy.egress.iter().map(|rule| &rule.matches));
        Self { egress, ingress: RulesSummary::of(policy.ingress.iter().map(|rule| &rule.matches)), selector: 0 }
    }

    /// The same of a policy whose rules are not kept.
    pub(super) fn without_names(self) -> Self {
        let counts = |summary: RulesSummary| RulesSummary { entries: summary.entries, ..RulesSummary::default() };
        Self { egress: counts(self.egress), ingress: counts(self.ingress), selector: self.selector }
    }

    pub(super) fn direction(&self, direction: Direction) -> &RulesSummary {
        match direction {
            Direction::Egress => &self.egress,
            Direction::Ingress => &self.ingress,
        }
    }

    pub(super) fn entries(&self) -> usize {
        self.egress.entries + self.ingress.entries + self.selector
    }
}
