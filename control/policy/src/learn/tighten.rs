//! Finds what existing NetworkPolicies allow and no flow uses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::Direction;
use rustc_hash::FxHashMap;

use crate::compile::{is_peer, is_port, rules_of};
use crate::flow::pod_at;
use crate::model::{NetworkPolicy, ObjectKey, Peers, Pod, PolicyPorts, Rule};
use crate::state::{ClusterState, PodId, PodOrNode};

use super::LearnableFlow;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PolicyUsage {
    /// Connections with an end in a pod that it selects, in a direction that it isolates.
    pub connections: u64,
    /// Its ingress rules, in its order.
    pub ingress: Vec<RuleUsage>,
    /// Its egress rules, in its order.
    pub egress: Vec<RuleUsage>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleUsage {
    pub connections: u64,
    /// For each peer that it lists, the connections that it allows on one of the rule's ports.
    pub peers: Vec<u64>,
    /// For each port that it lists, the connections that it allows with one of the rule's peers.
    pub ports: Vec<u64>,
}

impl RuleUsage {
    fn of(rule: &Rule) -> Self {
        let peers = match &rule.peers {
            Peers::Every => 0,
            Peers::AnyOf(peers) => peers.len(),
        };
        let ports = match &rule.ports {
            PolicyPorts::Every => 0,
            PolicyPorts::AnyOf(ports) => ports.len(),
        };
        Self { connections: 0, peers: vec![0; peers], ports: vec![0; ports] }
    }

    /// Whether a part of it, or all of it, was never used.
    pub fn has_unused(&self) -> bool {
        self.connections == 0 || self.peers.contains(&0) || self.ports.contains(&0)
    }
}

impl PolicyUsage {
    fn of(policy: &NetworkPolicy) -> Self {
        let rules = |direction| rules_of(policy, direction).unwrap_or_default().iter().map(RuleUsage::of).collect();
        Self { connections: 0, ingress: rules(Direction::Ingress), egress: rules(Direction::Egress) }
    }

    fn rules_mut(&mut self, direction: Direction) -> &mut [RuleUsage] {
        match direction {
            Direction::Ingress => &mut self.ingress,
            Direction::Egress => &mut self.egress,
        }
    }

    /// Whether a part of the policy was never used.
    pub fn has_unused(&self) -> bool {
        self.ingress.iter().chain(&self.egress).any(RuleUsage::has_unused)
    }
}

/// Counts what these flows use of each NetworkPolicy. A flow that several rules allow uses all of them.
pub fn usage<'a>(
    state: &ClusterState,
    flows: impl IntoIterator<Item = &'a LearnableFlow>,
) -> BTreeMap<ObjectKey, PolicyUsage> {
    let mut found: BTreeMap<ObjectKey, PolicyUsage> =
        state.policies().map(|(policy, _)| (policy.key.clone(), PolicyUsage::of(policy))).collect();
    // Connections between the same ends match the same rules.
    let mut counts: FxHashMap<Flow, u64> = FxHashMap::default();
    for flow in flows.into_iter().flat_map(LearnableFlow::judged) {
        *counts.entry(Flow { src_port: 0, ..*flow }).or_default() += 1;
    }
    for (flow, count) in counts {
        for (direction, own) in [(Direction::Egress, flow.src), (Direction::Ingress, flow.dst)] {
            if let Some(PodOrNode::Pod(pod)) = state.owner(&own.into()) {
                count_side(state, pod, direction, &flow, count, &mut found);
            }
        }
    }
    found
}

fn count_side(
    state: &ClusterState,
    pod: PodId,
    direction: Direction,
    flow: &Flow,
    count: u64,
    found: &mut BTreeMap<ObjectKey, PolicyUsage>,
) {
    for policy in state.policies_of(pod).filter_map(|(policy, _)| state.policy(policy)) {
        let Some(rules) = rules_of(policy, direction) else { continue };
        let Some(usage) = found.get_mut(&policy.key) else { continue };
        usage.connections += count;
        let place = Place { state, namespace: &policy.key.namespace, direction, flow };
        for (rule, usage) in rules.iter().zip(usage.rules_mut(direction)) {
            place.count(rule, count, usage);
        }
    }
}

/// A flow on one side of it.
struct Place<'a> {
    state: &'a ClusterState,
    namespace: &'a str,
    direction: Direction,
    flow: &'a Flow,
}

impl Place<'_> {
    fn count(&self, rule: &Rule, count: u64, usage: &mut RuleUsage) {
        let (peers, ports) = (self.peers(&rule.peers), self.ports(&rule.ports));
        let matches = |list: &Option<Vec<bool>>| list.as_ref().is_none_or(|list| list.contains(&true));
        if !matches(&peers) || !matches(&ports) {
            return;
        }
        usage.connections += count;
        let add = |counts: &mut [u64], list: Option<Vec<bool>>| {
            for (own, matched) in counts.iter_mut().zip(list.unwrap_or_default()) {
                *own += if matched { count } else { 0 };
            }
        };
        add(&mut usage.peers, peers);
        add(&mut usage.ports, ports);
    }

    /// Which of the peers match; `None` if every peer does.
    fn peers(&self, peers: &Peers) -> Option<Vec<bool>> {
        let Peers::AnyOf(peers) = peers else { return None };
        let address = IpAddr::from(match self.direction {
            Direction::Egress => self.flow.dst,
            Direction::Ingress => self.flow.src,
        });
        let pod = pod_at(self.state, address);
        Some(peers.iter().map(|peer| is_peer(self.state, Some(self.namespace), peer, pod, &address)).collect())
    }

    /// Which of the ports match; `None` if every port does.
    fn ports(&self, ports: &PolicyPorts) -> Option<Vec<bool>> {
        let PolicyPorts::AnyOf(ports) = ports else { return None };
        let server: Option<&Pod> = pod_at(self.state, self.flow.dst.into());
        Some(ports.iter().map(|port| is_port(port, server, self.flow)).collect())
    }
}

/// The policy without what was never used; `None` if all of it was, or if no flow concerns its pods: nothing is known then.
///
/// It isolates the same pods in the same directions.
pub fn narrowed(policy: &NetworkPolicy, usage: &PolicyUsage) -> Option<NetworkPolicy> {
    if usage.connections == 0 || !usage.has_unused() {
        return None;
    }
    let rules = |rules: &Option<Vec<Rule>>, usage: &[RuleUsage]| {
        let used = |rules: &Vec<Rule>| {
            let pairs = rules.iter().zip(usage).filter(|(_, usage)| usage.connections > 0);
            pairs.map(|(rule, usage)| narrowed_rule(rule, usage)).collect()
        };
        rules.as_ref().map(used)
    };
    Some(NetworkPolicy {
        ingress: rules(&policy.ingress, &usage.ingress),
        egress: rules(&policy.egress, &usage.egress),
        ..policy.clone()
    })
}

/// The used parts of a used rule: of each list at least one.
fn narrowed_rule(rule: &Rule, usage: &RuleUsage) -> Rule {
    fn used<T: Clone>(list: &[T], counts: &[u64]) -> Vec<T> {
        list.iter().zip(counts).filter(|(_, count)| **count > 0).map(|(item, _)| item.clone()).collect()
    }
    Rule {
        peers: match &rule.peers {
            Peers::Every => Peers::Every,
            Peers::AnyOf(peers) => Peers::AnyOf(used(peers, &usage.peers)),
        },
        ports: match &rule.ports {
            PolicyPorts::Every => PolicyPorts::Every,
            PolicyPorts::AnyOf(ports) => PolicyPorts::AnyOf(used(ports, &usage.ports)),
        },
    }
}
