//! Policies as manifests, with their evidence as comments.

use ipnet::IpNet;
use penstock_policy::describe;
use penstock_policy::learn::{
    Evidence, LearnedPeer, LearnedPolicy, LearnedPort, LearnedRule, PolicyUsage, PortName, RuleUsage, Workloads,
};
use penstock_policy::model::{LabelOperator, NetworkPolicy, Peer, Selector};
use penstock_policy::state::ClusterState;
use serde_json::{Map, Value, json};

use super::yaml::Comments;

pub(super) struct Manifest {
    pub(super) value: Value,
    /// The comment above its entries.
    pub(super) comments: Comments,
}

pub(super) fn learned(state: &ClusterState, workloads: &Workloads, learned: &LearnedPolicy) -> Manifest {
    let NetworkPolicy { key, pod_selector, ingress, egress, .. } = &learned.policy;
    let mut comments = Comments::new();
    comments.insert(String::new(), vec![pods(state, workloads, learned)]);
    let mut spec = Map::new();
    spec.insert("podSelector".to_owned(), selector(pod_selector));
    spec.insert("policyTypes".to_owned(), json!(["Ingress", "Egress"]));
    for (field, side, rules, evidence) in
        [("ingress", "from", ingress, &learned.ingress), ("egress", "to", egress, &learned.egress)]
    {
        let rules = rules.iter().flatten().zip(evidence).enumerate();
        let written = rules.map(|(number, (rule, evidence))| {
            let at = format!("/spec/{field}/{number}");
            note_evidence(&at, side, evidence, &mut comments);
            let peers = match &rule.peers {
                penstock_policy::model::Peers::Every => Vec::new(),
                penstock_policy::model::Peers::AnyOf(peers) => peers.iter().map(peer).collect(),
            };
            let ports: Vec<Value> = evidence.ports.iter().map(|(learned, _)| port(learned)).collect();
            json!({ side: peers, "ports": ports })
        });
        let written: Vec<Value> = written.collect();
        if written.is_empty() {
            comments.insert(format!("/spec/{field}"), vec!["none was seen: nothing is allowed".to_owned()]);
        }
        spec.insert(field.to_owned(), written.into());
    }
    let value = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "namespace": key.namespace, "name": key.name },
        "spec": spec,
    });
    Manifest { value, comments }
}

/// `2 pods: web/frontend-1, web/frontend-2`.
fn pods(state: &ClusterState, workloads: &Workloads, learned: &LearnedPolicy) -> String {
    const NAMED: usize = 3;
    let pods = &workloads.get(learned.workload).pods;
    let mut names: Vec<String> =
        pods.iter().take(NAMED).filter_map(|pod| state.pod(*pod)).map(|pod| pod.key.to_string()).collect();
    names.extend((pods.len() > NAMED).then(|| "...".to_owned()));
    let count = if pods.len() == 1 { "1 pod".to_owned() } else { format!("{} pods", pods.len()) };
    format!("{count}: {}", names.join(", "))
}

fn note_evidence(at: &str, side: &str, rule: &LearnedRule, comments: &mut Comments) {
    for (number, (peer, of_peer)) in rule.peers.iter().enumerate() {
        let seen = connections(of_peer);
        let text = match peer {
            LearnedPeer::Workload(_) => seen,
            LearnedPeer::ServiceAddress { service, .. } => format!("cluster address of Service {service}: {seen}"),
            LearnedPeer::Node { node, .. } => format!("node {node}: {seen}"),
            LearnedPeer::Backend { service, .. } => format!("backend of Service {service}: {seen}"),
            LearnedPeer::Outside(block) if block.holds() == 1 => seen,
            LearnedPeer::Outside(block) => {
                let addresses = if block.seen == 1 { "address" } else { "addresses" };
                format!("{} {addresses} seen of {} in the block: {seen}", block.seen, block.holds())
            }
        };
        comments.insert(format!("{at}/{side}/{number}"), vec![text]);
    }
    for (number, (port, of_port)) in rule.ports.iter().enumerate() {
        let text = match port.is_added {
            true => "DNS over TCP, for answers that do not fit a datagram: added, not seen".to_owned(),
            false if rule.ports.len() == 1 => continue,
            false => connections(of_port),
        };
        comments.insert(format!("{at}/ports/{number}"), vec![text]);
    }
}

/// `2 connections, 2026-01-01T00:00:00Z to 2026-01-01T00:01:00Z`.
pub(super) fn connections(evidence: &Evidence) -> String {
    let count = match evidence.connections {
        1 => "1 connection".to_owned(),
        more => format!("{more} connections"),
    };
    match evidence.seen.map(|seen| (stamp(seen.first), stamp(seen.last))) {
        None => count,
        Some((first, last)) if first == last => format!("{count}, {first}"),
        Some((first, last)) => format!("{count}, {first} to {last}"),
    }
}

/// RFC 3339, in whole seconds.
pub(super) fn stamp(nanoseconds: u64) -> String {
    const SECOND: u64 = 1_000_000_000;
    // Every second of the type is before the year 9999, where timestamps end.
    let second = i64::try_from(nanoseconds / SECOND).unwrap_or(i64::MAX);
    jiff::Timestamp::from_second(second).map_or_else(|_| second.to_string(), |time| time.to_string())
}

fn peer(peer: &Peer) -> Value {
    match peer {
        Peer::Pods(pods) => json!({ "podSelector": selector(pods) }),
        Peer::Namespaces(namespaces) => json!({ "namespaceSelector": selector(namespaces) }),
        Peer::PodsInNamespaces { namespaces, pods } => {
            json!({ "namespaceSelector": selector(namespaces), "podSelector": selector(pods) })
        }
        Peer::IpBlock(block) if block.except.is_empty() => json!({ "ipBlock": { "cidr": block.cidr } }),
        Peer::IpBlock(block) => json!({ "ipBlock": { "cidr": block.cidr, "except": block.except } }),
        // Peers of ClusterNetworkPolicies; a NetworkPolicy has blocks and selectors only.
        Peer::Networks(networks) => json!({ "networks": networks.iter().map(IpNet::to_string).collect::<Vec<_>>() }),
        Peer::Nodes(nodes) => json!({ "nodes": selector(nodes) }),
        Peer::DomainNames(names) => json!({ "domainNames": names }),
    }
}

fn port(port: &LearnedPort) -> Value {
    let which = match &port.which {
        PortName::Number(number) => json!(number),
        PortName::Name(name) => json!(name),
    };
    json!({ "protocol": describe::protocol(port.protocol), "port": which })
}

fn selector(selector: &Selector) -> Value {
    let (mut labels, mut expressions) = (Map::new(), Vec::new());
    for requirement in &selector.requirements {
        let key = &requirement.key;
        match &requirement.operator {
            LabelOperator::In(values) if values.len() == 1 => {
                labels.insert(key.clone(), values[0].clone().into());
            }
            LabelOperator::In(values) => expressions.push(json!({ "key": key, "operator": "In", "values": values })),
            LabelOperator::NotIn(values) => {
                expressions.push(json!({ "key": key, "operator": "NotIn", "values": values }));
            }
            LabelOperator::Exists => expressions.push(json!({ "key": key, "operator": "Exists" })),
            LabelOperator::DoesNotExist => expressions.push(json!({ "key": key, "operator": "DoesNotExist" })),
        }
    }
    let mut value = Map::new();
    if !labels.is_empty() {
        value.insert("matchLabels".to_owned(), labels.into());
    }
    if !expressions.is_empty() {
        value.insert("matchExpressions".to_owned(), expressions.into());
    }
    value.into()
}

/// A policy's own manifest without what was never used, and what that is as comments.
pub(super) fn narrowed(policy: &NetworkPolicy, usage: &PolicyUsage, mut value: Value) -> Manifest {
    let mut comments = Comments::new();
    comments.insert(String::new(), vec![format!("{} of its pods were seen", plural(usage.connections, "connection"))]);
    forget_server_fields(&mut value);
    let mut types = Vec::new();
    for (field, side, rules, usage, of_type) in [
        ("ingress", "from", &policy.ingress, &usage.ingress, "Ingress"),
        ("egress", "to", &policy.egress, &usage.egress, "Egress"),
    ] {
        if rules.is_none() {
            continue;
        }
        types.push(of_type);
        let Some(Value::Array(rules)) = value.pointer_mut(&format!("/spec/{field}")) else { continue };
        let removed = keep_used(rules, usage, side);
        if !removed.is_empty() {
            let removed = removed.into_iter().map(|what| format!("never used, left out: {field}{what}")).collect();
            comments.insert(format!("/spec/{field}"), removed);
        }
    }
    // Without policyTypes a policy isolates for egress only while it has egress rules.
    if policy.isolates
        && let Some(Value::Object(spec)) = value.get_mut("spec")
    {
        spec.insert("policyTypes".to_owned(), json!(types));
    }
    Manifest { value, comments }
}

/// Removes what was never used. Returns what that is: `[1]`, `[0].from[2]`.
fn keep_used(rules: &mut Vec<Value>, usage: &[RuleUsage], side: &str) -> Vec<String> {
    let mut removed = Vec::new();
    for (number, (rule, usage)) in rules.iter_mut().zip(usage).enumerate() {
        if usage.connections == 0 {
            removed.push(format!("[{number}]"));
            continue;
        }
        for (field, counts) in [(side, &usage.peers), ("ports", &usage.ports)] {
            if let Some(Value::Array(list)) = rule.get_mut(field) {
                let unused = (0..).zip(counts).filter(|(_, count)| **count == 0).map(|(place, _): (usize, _)| place);
                removed.extend(unused.map(|place| format!("[{number}].{field}[{place}]")));
                keep(list, counts);
            }
        }
    }
    let counts: Vec<u64> = usage.iter().map(|usage| usage.connections).collect();
    keep(rules, &counts);
    removed
}

fn keep(list: &mut Vec<Value>, counts: &[u64]) {
    let mut counts = counts.iter();
    list.retain(|_| counts.next().is_none_or(|count| *count > 0));
}

/// Fields that an API server adds to an object, and nobody writes.
fn forget_server_fields(value: &mut Value) {
    const OF_METADATA: [&str; 6] =
        ["creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid"];
    const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
    if let Value::Object(object) = value {
        object.remove("status");
    }
    if let Some(Value::Object(metadata)) = value.get_mut("metadata") {
        OF_METADATA.iter().for_each(|field| drop(metadata.remove(*field)));
        if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
            annotations.remove(LAST_APPLIED);
            if annotations.is_empty() {
                metadata.remove("annotations");
            }
        }
    }
}

/// `1 connection`, `2 connections`.
pub(super) fn plural(count: u64, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}
