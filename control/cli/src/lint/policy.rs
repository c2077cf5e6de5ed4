//! Findings about rules of a policy that have no effect.

use penstock_policy::describe;
use penstock_policy::model::{
    NetworkPolicy, Object, Peer, Peers, Pod, PolicyPort, PolicyPorts, PortMatch, Rule, Selector,
};
use penstock_sources::convert::FieldPathRef;
use penstock_sources::manifest::Document;
use serde_json::Value;

use super::blocks::RuleBlocks;
use super::cluster::LintObjects;
use super::{Finding, FindingKind, blocks, selector};

struct DirectionCheck<'a> {
    document: &'a Document,
    policy: &'a NetworkPolicy,
    world: &'a LintObjects,
    peers: &'static str,
    is_ingress: bool,
}

pub(super) fn check(document: &Document, world: &LintObjects, findings: &mut Vec<Finding>) {
    let Object::NetworkPolicy(policy) = &document.object else { return };
    let at = FieldPathRef::OBJECT;
    let spec = at.field("spec");
    let selector_at = spec.field("podSelector");
    let namespace = &policy.key.namespace;
    if let Some(key) = selector::contradiction(&policy.pod_selector) {
        let message = format!("contradicts itself on {key}: no pod can match");
        findings.push(Finding::new(document, selector_at.path(), FindingKind::NeverMatches, message));
    } else if world.pods_in(namespace, &policy.pod_selector).next().is_none() {
        let message = format!("selects nothing: no pod matches in {namespace}");
        findings.push(Finding::new(document, selector_at.path(), FindingKind::SelectsNothing, message));
    }
    for (direction, rules, peers) in [("ingress", &policy.ingress, "from"), ("egress", &policy.egress, "to")] {
        let rules_at = spec.field(direction);
        match rules {
            Some(rules) => {
                let looked = DirectionCheck { document, policy, world, peers, is_ingress: direction == "ingress" };
                for (i, rule) in rules.iter().enumerate() {
                    looked.rule(rule, &rules_at.index(i), findings);
                }
            }
            None if is_filled(document, &rules_at) => {
                let message = format!("has no effect: policyTypes does not list {}", capital(direction));
                findings.push(Finding::new(document, rules_at.path(), FindingKind::NoEffect, message));
            }
            None => {}
        }
    }
}

fn capital(direction: &str) -> &'static str {
    if direction == "ingress" { "Ingress" } else { "Egress" }
}

fn is_filled(document: &Document, at: &FieldPathRef<'_>) -> bool {
    matches!(document.value(&at.path()), Some(Value::Array(items)) if !items.is_empty())
}

impl DirectionCheck<'_> {
    fn rule(&self, rule: &Rule, at: &FieldPathRef<'_>, findings: &mut Vec<Finding>) {
        let mut report = |at: &FieldPathRef<'_>, kind, message: String| {
            findings.push(Finding::new(self.document, at.path(), kind, message));
        };
        let (peers_at, ports_at) = (at.field(self.peers), at.field("ports"));
        for (list_at, every, none) in [
            (&peers_at, rule.peers == Peers::Every, rule.peers == Peers::AnyOf(Vec::new())),
            (&ports_at, rule.ports == PolicyPorts::Every, rule.ports == PolicyPorts::AnyOf(Vec::new())),
        ] {
            // A list whose items were all commented out is null.
            let is_empty = match self.document.value(&list_at.path()) {
                Some(Value::Array(items)) => items.is_empty(),
                value => value.is_some_and(|value| value.is_null()),
            };
            if is_empty && every {
                report(
                    list_at,
                    FindingKind::EmptyList,
                    "is empty, and so matches everything, as if it were not there".to_owned(),
                );
            } else if none {
                report(
                    list_at,
                    FindingKind::NeverMatches,
                    "is empty: it matches nothing in extensions/v1beta1".to_owned(),
                );
            }
        }
        if let Peers::AnyOf(peers) = &rule.peers {
            let blocks = RuleBlocks::of(peers);
            for (i, peer) in peers.iter().enumerate() {
                self.peer(peer, i, &blocks, &peers_at.index(i), &mut report);
            }
            if !peers.is_empty() && peers.iter().all(can_never_match) {
                report(at, FindingKind::NeverMatches, "can never match: none of its peers can match".to_owned());
            }
        }
        if let PolicyPorts::AnyOf(ports) = &rule.ports {
            for (i, port) in ports.iter().enumerate() {
                let port_at = ports_at.index(i);
                if let PortMatch::Name(name) = &port.which {
                    self.port_name(name, port, rule, &port_at, &mut report);
                }
                let servers = self.known_servers(rule);
                if let Some(message) = self.world.services().problem_of_port(&servers, port.protocol, &port.which) {
                    report(&port_at.field("port"), FindingKind::ServicePort, message);
                }
            }
        }
    }

    fn peer(
        &self,
        peer: &Peer,
        place: usize,
        blocks: &RuleBlocks<'_>,
        at: &FieldPathRef<'_>,
        report: &mut dyn FnMut(&FieldPathRef<'_>, FindingKind, String),
    ) {
        let (pods_at, namespaces_at, block_at) =
            (at.field("podSelector"), at.field("namespaceSelector"), at.field("ipBlock"));
        let contradiction = |found: &Selector| {
            selector::contradiction(found).map(|key| format!("contradicts itself on {key}: nothing can match"))
        };
        let (namespaces, pods) = match peer {
            Peer::IpBlock(block) => {
                for (except, kind, message) in blocks.pointless(place) {
                    match except {
                        None => report(&block_at.field("cidr"), kind, message),
                        Some(i) => report(&block_at.field("except").index(i), kind, message),
                    }
                }
                if let Some(message) = self.world.services().problem_of_block(&block.cidr, &block.except) {
                    report(&block_at, FindingKind::ServiceAddress, message);
                }
                return self.host_bits(&block_at, report);
            }
            // Not in a NetworkPolicy.
            Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_) => return,
            Peer::Pods(pods) => (None, Some(pods)),
            Peer::Namespaces(namespaces) => (Some(namespaces), None),
            Peer::PodsInNamespaces { namespaces, pods } => (Some(namespaces), Some(pods)),
        };
        for (found, at) in [(namespaces, &namespaces_at), (pods, &pods_at)] {
            if let Some(message) = found.and_then(contradiction) {
                return report(at, FindingKind::NeverMatches, message);
            }
        }
        if let Some(namespaces) = namespaces.filter(|namespaces| !self.world.finds_namespace(namespaces)) {
            let message = format!("matches nothing: no namespace has {}", describe::selector(namespaces));
            return report(&namespaces_at, FindingKind::MatchesNothing, message);
        }
        if self.peers_of(peer).next().is_none() {
            let message =
                format!("matches nothing: no pod matches ({})", describe::peer(peer, Some(&self.policy.key.namespace)));
            report(if pods.is_some() { &pods_at } else { &namespaces_at }, FindingKind::MatchesNothing, message);
        }
    }

    /// A block whose address is not the first of it may mean one host, or another prefix.
    fn host_bits(&self, block_at: &FieldPathRef<'_>, report: &mut dyn FnMut(&FieldPathRef<'_>, FindingKind, String)) {
        let mut look = |at: &FieldPathRef<'_>| {
            let Some(Value::String(text)) = self.document.value(&at.path()) else { return };
            let Ok(net) = text.parse::<ipnet::IpNet>() else { return };
            if net.addr() != net.network() {
                report(
                    at,
                    FindingKind::HostBits,
                    format!("{text} is read as {}: the address has bits beyond the prefix", net.trunc()),
                );
            }
        };
        look(&block_at.field("cidr"));
        let excepts_at = block_at.field("except");
        let excepts = match self.document.value(&excepts_at.path()) {
            Some(Value::Array(excepts)) => excepts.len(),
            _ => 0,
        };
        (0..excepts).for_each(|i| look(&excepts_at.index(i)));
    }

    fn port_name(
        &self,
        name: &str,
        port: &PolicyPort,
        rule: &Rule,
        at: &FieldPathRef<'_>,
        report: &mut dyn FnMut(&FieldPathRef<'_>, FindingKind, String),
    ) {
        let servers = self.servers(rule);
        let numbers = |protocol| {
            servers.iter().flat_map(|pod| &pod.ports).filter(move |own| own.name == name && protocol == own.protocol)
        };
        if numbers(port.protocol).next().is_some() {
            return;
        }
        let other = servers.iter().flat_map(|pod| &pod.ports).find(|own| own.name == name);
        let whose = if self.is_ingress { "pod that the policy selects" } else { "pod among the peers" };
        let protocol = describe::protocol(port.protocol);
        let message = match other {
            Some(other) => {
                let has = describe::protocol(other.protocol);
                format!("matches nothing: {name:?} is a port of {has}, not of {protocol}, on every {whose}")
            }
            None => format!("matches nothing: no {whose} has a port {name:?} of {protocol}"),
        };
        report(&at.field("port"), FindingKind::UnknownPort, message);
    }

    /// The pods whose ports a rule is about.
    fn servers<'a>(&'a self, rule: &'a Rule) -> Vec<&'a Pod> {
        match (self.is_ingress, &rule.peers) {
            (true, _) => self.world.pods_in(&self.policy.key.namespace, &self.policy.pod_selector).collect(),
            (false, Peers::Every) => self.world.pods().collect(),
            (false, Peers::AnyOf(peers)) => peers.iter().flat_map(|peer| self.peers_of(peer)).collect(),
        }
    }

    /// The same, if it is about pods alone: an address outside may have any port.
    fn known_servers<'a>(&'a self, rule: &'a Rule) -> Vec<&'a Pod> {
        let is_of_pods =
            |peer: &Peer| matches!(peer, Peer::Pods(_) | Peer::Namespaces(_) | Peer::PodsInNamespaces { .. });
        match &rule.peers {
            Peers::AnyOf(peers) if self.is_ingress || peers.iter().all(is_of_pods) => self.servers(rule),
            Peers::Every if self.is_ingress => self.servers(rule),
            Peers::AnyOf(_) | Peers::Every => Vec::new(),
        }
    }

    fn peers_of<'a>(&'a self, peer: &'a Peer) -> Box<dyn Iterator<Item = &'a Pod> + 'a> {
        match peer {
            Peer::Pods(pods) => Box::new(self.world.pods_in(&self.policy.key.namespace, pods)),
            Peer::Namespaces(namespaces) => Box::new(self.world.pods_of(namespaces, &EVERY)),
            Peer::PodsInNamespaces { namespaces, pods } => Box::new(self.world.pods_of(namespaces, pods)),
            Peer::IpBlock(block) => {
                Box::new(self.world.pods().filter(|pod| pod.addresses.iter().any(|address| block.contains(address))))
            }
            // Not in a NetworkPolicy.
            Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_) => Box::new(std::iter::empty()),
        }
    }
}

static EVERY: Selector = Selector { requirements: Vec::new() };

fn can_never_match(peer: &Peer) -> bool {
    let contradicts = |found: &Selector| selector::contradiction(found).is_some();
    match peer {
        Peer::Pods(found) | Peer::Namespaces(found) => contradicts(found),
        Peer::PodsInNamespaces { namespaces, pods } => contradicts(namespaces) || contradicts(pods),
        Peer::IpBlock(block) => blocks::is_covered(block),
        // Not in a NetworkPolicy.
        Peer::Networks(_) | Peer::Nodes(_) | Peer::DomainNames(_) => false,
    }
}
