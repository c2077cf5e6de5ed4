//! Findings about Services. Workers or the node's kernel translate a Service's address, and policy on both sides is for the backend, its address
//! and its port.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use penstock_dataplane::packet::{Flow, Protocol};
use penstock_policy::describe;
use penstock_policy::engine::Engine;
use penstock_policy::model::{
    ClusterNetworkPolicy, NetworkPolicy, Object, ObjectKey, Peers, Pod, PolicyPorts, PortMatch, PortProtocol, Rule,
    RuleAction,
};
use penstock_sources::convert::{FieldPath, FieldPathRef, PathElement};
use penstock_sources::manifest::{Document, Manifests};

use super::cluster::LintObjects;
use super::service_ports::BackedPort;
use super::{Finding, FindingKind};

/// The port of DNS (RFC 1035, 4.2).
const DNS_PORT: u16 = 53;
/// The label by which the cluster's DNS Service is known, whatever it is called, and its value.
const DNS_LABEL: (&str, &str) = ("k8s-app", "kube-dns");
/// Names of that Service in `kube-system`, where it has no labels.
const DNS_NAMES: [&str; 2] = ["kube-dns", "coredns"];

/// Findings about Services' ports that nobody may reach, and about policies that forget DNS.
pub(super) fn check(manifests: &Manifests, world: &LintObjects, engine: &Engine, findings: &mut Vec<Finding>) {
    for document in &manifests.documents {
        if let Object::Service(service) = &document.object {
            for port in world.services().ports.iter().filter(|port| port.service == service.key) {
                check_reached(document, port, manifests, world, findings);
            }
        }
    }
    check_dns(manifests, world, engine, findings);
}

/// The pods behind a port, each with the number that it has there. `None` if one of them is no pod that policy sees.
fn pods_behind<'a>(port: &BackedPort, world: &'a LintObjects) -> Option<Vec<(&'a Pod, u16)>> {
    let pod = |address: &IpAddr| world.pods().find(|pod| pod.addresses.contains(address));
    port.backends.iter().map(|(address, number)| Some((pod(address)?, *number))).collect()
}

fn check_reached(
    document: &Document,
    port: &BackedPort,
    manifests: &Manifests,
    world: &LintObjects,
    findings: &mut Vec<Finding>,
) {
    let Some(pods) = pods_behind(port, world).filter(|pods| !pods.is_empty()) else { return };
    let is_closed = |(pod, number): &(&Pod, u16)| {
        let policies = || network_policies(manifests).filter(|(_, policy)| selects(policy, pod));
        let rules = || policies().filter_map(|(_, policy)| policy.ingress.as_ref());
        let matches = |rule: &Rule| allows_someone(rule) && allows_port(rule, pod, port.port.protocol, *number);
        let accepts = cluster_policies(manifests)
            .filter(|policy| world.is_subject(policy, pod))
            .flat_map(|policy| &policy.ingress)
            .any(|rule| rule.action == RuleAction::Accept && matches(&rule.matches));
        policies().any(|(_, policy)| policy.isolates && policy.ingress.is_some())
            && !rules().flatten().any(matches)
            && !accepts
    };
    if !pods.iter().all(is_closed) {
        return;
    }
    let numbers: BTreeSet<String> = pods.iter().map(|(_, number)| number.to_string()).collect();
    let numbers: Vec<String> = numbers.into_iter().collect();
    let message = format!(
        "nobody may reach it: each backend is isolated for ingress, and no policy allows {}/{} from anyone",
        numbers.join(", "),
        describe::protocol(port.port.protocol)
    );
    let at = FieldPathRef::OBJECT;
    let spec = at.field("spec");
    let field = spec.field("ports").index(port.index).path();
    findings.push(Finding::new(document, field, FindingKind::ClosedPort, message));
}

fn network_policies(manifests: &Manifests) -> impl Iterator<Item = (&Document, &NetworkPolicy)> {
    manifests.documents.iter().filter_map(|document| match &document.object {
        Object::NetworkPolicy(policy) => Some((document, policy)),
        _ => None,
    })
}

fn cluster_policies(manifests: &Manifests) -> impl Iterator<Item = &ClusterNetworkPolicy> {
    manifests.documents.iter().filter_map(|document| match &document.object {
        Object::ClusterNetworkPolicy(policy) => Some(policy),
        _ => None,
    })
}

fn selects(policy: &NetworkPolicy, pod: &Pod) -> bool {
    policy.key.namespace == pod.key.namespace && policy.pod_selector.matches(&pod.labels)
}

fn allows_someone(rule: &Rule) -> bool {
    rule.peers != Peers::AnyOf(Vec::new())
}

/// Whether a rule's ports have this one of the pod.
fn allows_port(rule: &Rule, pod: &Pod, protocol: PortProtocol, number: u16) -> bool {
    let PolicyPorts::AnyOf(ports) = &rule.ports else { return true };
    ports.iter().filter(|port| port.protocol == protocol).any(|port| match &port.which {
        PortMatch::Every => true,
        PortMatch::Range { first, last } => (*first..=*last).contains(&number),
        PortMatch::Name(name) => {
            pod.ports.iter().any(|own| (&own.name, own.protocol, own.number) == (name, protocol, number))
        }
    })
}

/// Pods that may send something, and no DNS query. A pod that may send nothing has no use for names.
fn check_dns(manifests: &Manifests, world: &LintObjects, engine: &Engine, findings: &mut Vec<Finding>) {
    let is_dns = |port: &&BackedPort| {
        (port.port.number, port.port.protocol) == (DNS_PORT, PortProtocol::Udp)
            && manifests.documents.iter().any(|document| is_dns_service(document, &port.service))
    };
    let servers: Vec<&BackedPort> = world.services().ports.iter().filter(is_dns).collect();
    let Some(name) = servers.first().map(|port| &port.service) else { return };
    let backends: Vec<(IpAddr, u16)> = servers.iter().flat_map(|port| &port.backends).copied().collect();
    let mut forgotten: BTreeMap<&ObjectKey, Vec<&ObjectKey>> = BTreeMap::new();
    for pod in world.pods().filter(|_| !backends.is_empty()) {
        let policies = || network_policies(manifests).map(|(_, policy)| policy).filter(|policy| selects(policy, pod));
        let rules = |policy: &NetworkPolicy| policy.egress.clone().unwrap_or_default();
        // The one that its author would add DNS to.
        let mut allowing = policies().filter(|policy| policy.isolates && rules(policy).iter().any(allows_someone));
        let Some(first) = allowing.next() else { continue };
        if !policies().any(|policy| rules(policy).iter().any(names_dns)) && !reaches_any(engine, pod, &backends) {
            forgotten.entry(&first.key).or_default().push(&pod.key);
        }
    }
    for (document, policy) in network_policies(manifests) {
        let Some(pods) = forgotten.get(&policy.key) else { continue };
        let more = if pods.len() > 1 { format!(" and {} more", pods.len() - 1) } else { String::new() };
        let message = format!(
            "forgets DNS: {}{more} may reach no backend of Service {name}, and no rule has 53/UDP; allow it to the pods \
             of that Service",
            pods[0]
        );
        let field = ["spec", "egress"].map(|name| PathElement::Field(name.to_owned())).into_iter().collect();
        findings.push(Finding::new(document, field, FindingKind::NoDns, message));
    }
}

/// Whether a document is this Service, and the cluster's DNS.
fn is_dns_service(document: &Document, key: &ObjectKey) -> bool {
    let Object::Service(service) = &document.object else { return false };
    let label: FieldPath =
        ["metadata", "labels", DNS_LABEL.0].map(|name| PathElement::Field(name.to_owned())).into_iter().collect();
    let is_labelled = document.value(&label).is_some_and(|value| value == DNS_LABEL.1);
    let is_named = key.namespace == "kube-system" && DNS_NAMES.contains(&key.name.as_str());
    service.key == *key && (is_labelled || is_named)
}

/// Whether a rule is about DNS, whoever its peers are: it names the port.
fn names_dns(rule: &Rule) -> bool {
    let PolicyPorts::AnyOf(ports) = &rule.ports else { return false };
    let has_dns = |which: &PortMatch| {
        matches!(which, PortMatch::Range { first, last } if (*first..=*last).contains(&DNS_PORT))
            || *which == PortMatch::Every
    };
    ports.iter().any(|port| port.protocol == PortProtocol::Udp && has_dns(&port.which))
}

/// Whether a pod may send queries to one of these.
fn reaches_any(engine: &Engine, pod: &Pod, backends: &[(IpAddr, u16)]) -> bool {
    let pairs = pod.addresses.iter().flat_map(|src| backends.iter().map(move |backend| (*src, *backend)));
    pairs.filter(|(src, (dst, _))| src.is_ipv4() == dst.is_ipv4()).any(|(src, (dst, dst_port))| {
        let (src, dst) = (src.into(), dst.into());
        let flow = Flow { src, dst, protocol: Protocol::UDP, src_port: 49152, dst_port };
        engine.evaluate_through_service(&flow).egress.is_allowed()
    })
}
