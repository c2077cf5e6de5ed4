//! Findings about ClusterNetworkPolicies: rules that no flow reaches, and orders that nobody can rely on.

use ipnet::IpNet;
use penstock_policy::model::{
    ClusterNetworkPolicy, ClusterRule, ClusterTier, NetworkPolicy, Object, Peer, Peers, PolicyPort, PolicyPorts,
    PortMatch, Requirement, RuleAction, Selector,
};
use penstock_sources::convert::{FieldPath, FieldPathRef};
use penstock_sources::manifest::{Document, Manifests};
use serde_json::Value;

use super::cluster::LintObjects;
use super::{Finding, FindingKind, selector};

#[derive(Clone, Copy)]
struct PlacedRule<'a> {
    document: &'a Document,
    policy: &'a ClusterNetworkPolicy,
    rule: &'a ClusterRule,
    index: usize,
    /// `ingress` or `egress`.
    direction: &'static str,
}

pub(super) fn check(manifests: &Manifests, world: &LintObjects, findings: &mut Vec<Finding>) {
    let mut policies: Vec<(&Document, &ClusterNetworkPolicy)> = manifests
        .documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::ClusterNetworkPolicy(policy) => Some((document, policy)),
            _ => None,
        })
        .collect();
    policies.sort_by(|(_, a), (_, b)| a.order().cmp(&b.order()));
    for (place, (document, policy)) in policies.iter().enumerate() {
        check_subject(document, policy, world, findings);
        let earlier = policies[..place].iter().find(|(_, other)| is_tie(other, policy));
        if let Some((_, other)) = earlier {
            let message = format!(
                "equals that of {}, and their subjects can meet: which comes first is not defined, here it is {}",
                other.name, other.name
            );
            findings.push(Finding::new(document, path(&["spec", "priority"]), FindingKind::EqualPriority, message));
        }
    }
    for direction in ["ingress", "egress"] {
        let rules: Vec<PlacedRule<'_>> =
            policies.iter().flat_map(|(document, policy)| placed(document, policy, direction)).collect();
        for (place, rule) in rules.iter().enumerate() {
            check_rule(rule, &rules[..place], world, findings);
            if rule.rule.action == RuleAction::Pass && !leads_somewhere(rule, &rules, manifests, world) {
                let message = "passes to nothing: no later tier has a policy for its subject, so it accepts";
                findings.push(rule.finding(FindingKind::NoEffect, message.to_owned()));
            }
        }
    }
}

fn path(names: &[&str]) -> FieldPath {
    names.iter().map(|name| penstock_sources::convert::PathElement::Field((*name).to_owned())).collect()
}

fn placed<'a>(
    document: &'a Document,
    policy: &'a ClusterNetworkPolicy,
    direction: &'static str,
) -> impl Iterator<Item = PlacedRule<'a>> {
    let rules = if direction == "ingress" { &policy.ingress } else { &policy.egress };
    rules.iter().enumerate().map(move |(index, rule)| PlacedRule { document, policy, rule, index, direction })
}

fn check_subject(document: &Document, policy: &ClusterNetworkPolicy, world: &LintObjects, findings: &mut Vec<Finding>) {
    let subject = &policy.subject;
    let contradiction = [&subject.namespaces, &subject.pods].into_iter().find_map(selector::contradiction);
    if let Some(key) = contradiction {
        let message = format!("contradicts itself on {key}: no pod can match");
        findings.push(Finding::new(document, path(&["spec", "subject"]), FindingKind::NeverMatches, message));
    } else if world.pods_of(&subject.namespaces, &subject.pods).next().is_none() {
        let message = "selects nothing: no pod matches";
        findings.push(Finding::new(document, path(&["spec", "subject"]), FindingKind::SelectsNothing, message));
    }
}

/// Whether two policies have the same place in the order, and rules for one pod and direction.
fn is_tie(a: &ClusterNetworkPolicy, b: &ClusterNetworkPolicy) -> bool {
    let both_have = !(a.ingress.is_empty() || b.ingress.is_empty()) || !(a.egress.is_empty() || b.egress.is_empty());
    (a.tier, a.priority) == (b.tier, b.priority) && both_have && can_meet(a, b)
}

/// Whether one pod can be selected by both.
fn can_meet(a: &ClusterNetworkPolicy, b: &ClusterNetworkPolicy) -> bool {
    let both = |a: &Selector, b: &Selector| {
        let requirements: Vec<Requirement> = a.requirements.iter().chain(&b.requirements).cloned().collect();
        selector::contradiction(&Selector { requirements }).is_none()
    };
    both(&a.subject.namespaces, &b.subject.namespaces) && both(&a.subject.pods, &b.subject.pods)
}

/// Findings about one rule; `earlier` are the rules evaluated before it, of both tiers.
fn check_rule(placed: &PlacedRule<'_>, earlier: &[PlacedRule<'_>], world: &LintObjects, findings: &mut Vec<Finding>) {
    placed.host_bits(findings);
    placed.service_addresses(world, findings);
    let Peers::AnyOf(peers) = &placed.rule.matches.peers else { return };
    if !peers.is_empty() && peers.iter().all(can_never_match) {
        let message = "can never match: none of its peers can match".to_owned();
        return findings.push(placed.finding(FindingKind::NeverMatches, message));
    }
    // A flow that an Admin rule passes on reaches the Baseline tier, whatever later Admin rules match.
    let mut passed = false;
    for other in earlier
        .iter()
        .filter(|other| covers_subject(other.policy, placed.policy) || can_meet(other.policy, placed.policy))
    {
        let same_tier = other.policy.tier == placed.policy.tier;
        let is_hidden = same_tier || (other.rule.action != RuleAction::Pass && !passed);
        if is_hidden && covers_subject(other.policy, placed.policy) && covers(other.rule, placed.rule) {
            return findings.push(placed.finding(FindingKind::Shadowed, shadowed(other, same_tier)));
        }
        passed |= !same_tier && other.rule.action == RuleAction::Pass;
    }
}

fn shadowed(other: &PlacedRule<'_>, same_tier: bool) -> String {
    let PlacedRule { policy, index, direction, .. } = other;
    let action = match other.rule.action {
        RuleAction::Accept => "accepts",
        RuleAction::Deny => "denies",
        RuleAction::Pass => "passes",
    };
    let tier = if same_tier { "" } else { " of the Admin tier" };
    format!("is never reached: {direction}[{index}] of {}{tier} {action} all that it matches", policy.name)
}

/// Whether something behind a Pass can decide.
fn leads_somewhere(
    placed: &PlacedRule<'_>,
    rules: &[PlacedRule<'_>],
    manifests: &Manifests,
    world: &LintObjects,
) -> bool {
    if placed.policy.tier == ClusterTier::Baseline {
        // The default follows, but the Pass spares flows from the rules behind it.
        return rules.iter().any(|other| {
            other.policy.order() >= placed.policy.order()
                && (other.policy.name != placed.policy.name || other.index > placed.index)
                && other.rule.action == RuleAction::Deny
                && can_meet(other.policy, placed.policy)
        });
    }
    let baseline =
        rules.iter().any(|other| other.policy.tier == ClusterTier::Baseline && can_meet(other.policy, placed.policy));
    let isolates = |policy: &NetworkPolicy| {
        let applies = if placed.direction == "ingress" { policy.ingress.is_some() } else { policy.egress.is_some() };
        let subject = &placed.policy.subject;
        let mut pods = world.pods_of(&subject.namespaces, &subject.pods);
        applies && pods.any(|pod| pod.key.namespace == policy.key.namespace && policy.pod_selector.matches(&pod.labels))
    };
    baseline
        || manifests
            .documents
            .iter()
            .any(|document| matches!(&document.object, Object::NetworkPolicy(policy) if isolates(policy)))
}

impl PlacedRule<'_> {
    fn at(&self, within: impl FnOnce(&FieldPathRef<'_>) -> FieldPath) -> FieldPath {
        let at = FieldPathRef::OBJECT;
        let (spec, direction) = (at.field("spec"), self.direction);
        let rules = spec.field(direction);
        within(&rules.index(self.index))
    }

    fn finding(&self, kind: FindingKind, message: String) -> Finding {
        Finding::new(self.document, self.at(|rule| rule.path()), kind, message)
    }

    fn service_addresses(&self, world: &LintObjects, findings: &mut Vec<Finding>) {
        let Peers::AnyOf(peers) = &self.rule.matches.peers else { return };
        for (i, peer) in peers.iter().enumerate() {
            let Peer::Networks(networks) = peer else { continue };
            for (j, network) in networks.iter().enumerate() {
                let Some(message) = world.services().problem_of_block(network, &[]) else { continue };
                let at = self.at(|rule| rule.field("to").index(i).field("networks").index(j).path());
                findings.push(Finding::new(self.document, at, FindingKind::ServiceAddress, message));
            }
        }
    }

    /// A network whose address is not the first of it may mean one host, or another prefix.
    fn host_bits(&self, findings: &mut Vec<Finding>) {
        let Peers::AnyOf(peers) = &self.rule.matches.peers else { return };
        for (i, peer) in peers.iter().enumerate() {
            let Peer::Networks(networks) = peer else { continue };
            for (j, network) in networks.iter().enumerate() {
                let at = self.at(|rule| rule.field("to").index(i).field("networks").index(j).path());
                let Some(Value::String(text)) = self.document.value(&at) else { continue };
                if text.parse::<IpNet>().is_ok_and(|net| net.addr() != network.addr()) {
                    let message = format!("{text} is read as {network}: the address has bits beyond the prefix");
                    findings.push(Finding::new(self.document, at, FindingKind::HostBits, message));
                }
            }
        }
    }
}

/// Whether one policy selects every pod that another does.
fn covers_subject(wide: &ClusterNetworkPolicy, narrow: &ClusterNetworkPolicy) -> bool {
    covers_selector(&wide.subject.namespaces, &narrow.subject.namespaces)
        && covers_selector(&wide.subject.pods, &narrow.subject.pods)
}

/// Whether a selector matches all that another does: it asks for no more.
fn covers_selector(wide: &Selector, narrow: &Selector) -> bool {
    wide.requirements.iter().all(|requirement| narrow.requirements.contains(requirement))
}

/// Whether a rule matches all that another does.
fn covers(wide: &ClusterRule, narrow: &ClusterRule) -> bool {
    covers_peers(&wide.matches.peers, &narrow.matches.peers) && covers_ports(&wide.matches.ports, &narrow.matches.ports)
}

fn covers_peers(wide: &Peers, narrow: &Peers) -> bool {
    match (wide, narrow) {
        (Peers::Every, _) => true,
        (_, Peers::Every) => false,
        (Peers::AnyOf(wide), Peers::AnyOf(narrow)) => {
            narrow.iter().all(|narrow| wide.iter().any(|wide| covers_peer(wide, narrow)))
        }
    }
}

fn covers_peer(wide: &Peer, narrow: &Peer) -> bool {
    let every = Selector::default();
    let of_pods = |peer: &Peer| match peer {
        Peer::Namespaces(namespaces) => Some((namespaces.clone(), every.clone())),
        Peer::PodsInNamespaces { namespaces, pods } => Some((namespaces.clone(), pods.clone())),
        _ => None,
    };
    match (wide, narrow) {
        (Peer::Networks(wide), Peer::Networks(narrow)) => {
            narrow.iter().all(|narrow| wide.iter().any(|wide| wide.contains(narrow)))
        }
        // Both families, whatever is there.
        (Peer::Networks(wide), _) => [true, false]
            .into_iter()
            .all(|is_v4| wide.iter().any(|net| net.prefix_len() == 0 && net.addr().is_ipv4() == is_v4)),
        (Peer::Nodes(wide), Peer::Nodes(narrow)) => covers_selector(wide, narrow),
        (Peer::DomainNames(wide), Peer::DomainNames(narrow)) => {
            narrow.iter().all(|narrow| wide.iter().any(|wide| wide.covers(narrow)))
        }
        _ => match (of_pods(wide), of_pods(narrow)) {
            (Some(wide), Some(narrow)) => covers_selector(&wide.0, &narrow.0) && covers_selector(&wide.1, &narrow.1),
            _ => false,
        },
    }
}

fn covers_ports(wide: &PolicyPorts, narrow: &PolicyPorts) -> bool {
    let covers = |wide: &PolicyPort, narrow: &PolicyPort| {
        wide.protocol == narrow.protocol
            && match (&wide.which, &narrow.which) {
                (PortMatch::Range { first, last }, PortMatch::Range { first: from, last: to }) => {
                    first <= from && to <= last
                }
                (PortMatch::Range { first, last }, PortMatch::Name(_)) => (*first, *last) == (1, u16::MAX),
                (wide, narrow) => wide == narrow,
            }
    };
    match (wide, narrow) {
        (PolicyPorts::Every, _) => true,
        (_, PolicyPorts::Every) => false,
        (PolicyPorts::AnyOf(wide), PolicyPorts::AnyOf(narrow)) => {
            narrow.iter().all(|narrow| wide.iter().any(|wide| covers(wide, narrow)))
        }
    }
}

fn can_never_match(peer: &Peer) -> bool {
    let contradicts = |found: &Selector| selector::contradiction(found).is_some();
    match peer {
        Peer::Namespaces(found) | Peer::Nodes(found) => contradicts(found),
        Peer::PodsInNamespaces { namespaces, pods } => contradicts(namespaces) || contradicts(pods),
        Peer::Pods(_) | Peer::IpBlock(_) | Peer::Networks(_) | Peer::DomainNames(_) => false,
    }
}
