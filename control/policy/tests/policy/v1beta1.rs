//! Clause 11: the meaning of the original NetworkPolicy proposal.

use penstock_policy::model::*;

use super::build::*;

fn isolated_namespace(name: &str, text: &str) -> Object {
    match namespace(name, text) {
        Object::Namespace(namespace) => Object::Namespace(Namespace { default_deny_ingress: true, ..namespace }),
        _ => unreachable!("made as a namespace"),
    }
}

/// A policy of v1beta1 adds what is allowed and isolates nothing.
fn adding(name: &str, pods: &str, rules: Vec<Rule>) -> Object {
    match policy(name, pods, Some(rules), None) {
        Object::NetworkPolicy(policy) => Object::NetworkPolicy(NetworkPolicy { isolates: false, ..policy }),
        _ => unreachable!("made as a policy"),
    }
}

fn pods() -> Vec<Object> {
    vec![
        Object::Pod(pod("myns/front", "role=frontend", &["10.0.0.1"], &[])),
        Object::Pod(pod("myns/back", "role=backend", &["10.0.0.2"], &[])),
        Object::Pod(pod("bob/any", "", &["10.0.0.3"], &[])),
        namespace("bob", "user=bob"),
    ]
}

#[test]
fn clause_11_the_annotation_isolates_its_namespaces_ingress() {
    let mut cluster = Cluster::new(pods().into_iter().chain([isolated_namespace("myns", "")]));
    let isolated = [("bob/any", "myns/back", "tcp/1", false), ("myns/back", "bob/any", "tcp/1", true)];
    cluster.check(&isolated);
    let side = cluster.engine.explain(&cluster.flow("bob/any", "myns/back", "tcp/1")).ingress;
    assert!(side.default_deny && side.isolated && side.policies.is_empty());
    cluster.set(namespace("myns", ""));
    cluster.check(&[("bob/any", "myns/back", "tcp/1", true)]);
    cluster.set(isolated_namespace("myns", ""));
    cluster.check(&isolated);
}

#[test]
fn clause_11_a_policy_adds_only_in_an_isolated_namespace() {
    let allow = || adding("myns/allow-frontend", "role=backend", vec![rule(&["pods role=frontend"], &["tcp/6379"])]);
    let mut cluster = Cluster::new(pods().into_iter().chain([isolated_namespace("myns", ""), allow()]));
    cluster.check(&[
        ("myns/front", "myns/back", "tcp/6379", true),
        ("myns/front", "myns/back", "tcp/6380", false),
        ("bob/any", "myns/back", "tcp/6379", false),
        ("myns/back", "myns/front", "tcp/6379", false),
    ]);
    cluster.set(namespace("myns", ""));
    cluster.check(&[("bob/any", "myns/back", "tcp/1", true), ("myns/front", "myns/back", "tcp/6380", true)]);
}

#[test]
fn clause_11_an_empty_list_is_nothing_an_absent_one_all() {
    let nothing = |peers: Peers, ports: PolicyPorts| Rule { peers, ports };
    for (rule, expected) in [
        (nothing(Peers::AnyOf(Vec::new()), PolicyPorts::Every), false),
        (nothing(Peers::Every, PolicyPorts::AnyOf(Vec::new())), false),
        (nothing(Peers::Every, PolicyPorts::Every), true),
        (rule(&["namespaces user=bob"], &["tcp/443"]), true),
    ] {
        let allow = adding("myns/p", "role=frontend", vec![rule]);
        let mut cluster = Cluster::new(pods().into_iter().chain([isolated_namespace("myns", ""), allow]));
        cluster.check(&[("bob/any", "myns/front", "tcp/443", expected), ("bob/any", "myns/back", "tcp/443", false)]);
    }
}
