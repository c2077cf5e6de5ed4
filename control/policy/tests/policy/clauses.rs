//! Examples for each clause of the specification. The number in a test's name is the clause's.

use penstock_dataplane::policy::{Direction, DirectionVerdict};
use penstock_policy::engine::Engine;
use penstock_policy::model::*;

use super::build::*;

/// Two namespaces, two nodes; every pod is on `n1` unless stated otherwise.
fn base() -> Vec<Object> {
    vec![
        namespace("shop", "team=red env=prod"),
        namespace("lab", "team=blue"),
        node("n1", &["192.168.0.1", "fd00:1::1"]),
        node("n2", &["192.168.0.2"]),
        Object::Pod(pod("shop/web", "app=web tier=front", &["10.0.1.1", "fd00::1:1"], &["http:tcp/80", "dns:udp/53"])),
        Object::Pod(pod("shop/db", "app=db", &["10.0.1.2", "fd00::1:2"], &["http:tcp/8080", "sql:tcp/5432"])),
        Object::Pod(pod("lab/web", "app=web", &["10.0.2.1"], &["http:tcp/81", "dns:tcp/53"])),
        Object::Pod(Pod { node: Some("n2".to_owned()), ..pod("lab/probe", "app=probe", &["10.0.2.2"], &[]) }),
    ]
}

fn with(policies: impl IntoIterator<Item = Object>) -> Cluster {
    Cluster::new(base().into_iter().chain(policies))
}

fn ingress(peers: &[&str], ports: &[&str]) -> Object {
    policy("shop/p", "app=db", Some(vec![rule(peers, ports)]), None)
}

fn egress(peers: &[&str], ports: &[&str]) -> Object {
    policy("shop/p", "app=web", None, Some(vec![rule(peers, ports)]))
}

#[test]
fn clause_1_egress_and_ingress_must_both_allow() {
    let out = policy("shop/out", "app=web", None, Some(vec![rule(&[], &["tcp/1-100"])]));
    let into = policy("shop/in", "app=db", Some(vec![rule(&[], &["tcp/50-200"])]), None);
    with([out, into]).check(&[
        ("shop/web", "shop/db", "tcp/75", true),
        ("shop/web", "shop/db", "tcp/10", false),
        ("shop/web", "shop/db", "tcp/150", false),
        ("lab/web", "shop/db", "tcp/150", true),
        ("shop/web", "lab/web", "tcp/10", true),
        ("shop/db", "shop/web", "tcp/9", true),
    ]);
}

#[test]
fn clause_2_an_unselected_pod_is_open_and_policies_only_add() {
    let mut cluster = with([]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true), ("8.8.8.8", "shop/db", "icmp", true)]);
    cluster.set(policy("shop/none", "app=db", Some(vec![]), None));
    cluster.check(&[
        ("shop/web", "shop/db", "tcp/1", false),
        ("shop/db", "shop/web", "tcp/1", true),
        ("8.8.8.8", "shop/db", "tcp/1", false),
        ("shop/web", "lab/web", "tcp/1", true),
    ]);
    cluster.set(policy("shop/some", "app=db", Some(vec![rule(&[], &["tcp/1"])]), None));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true), ("shop/web", "shop/db", "tcp/2", false)]);
}

#[test]
fn clause_2_hundreds_of_policies_on_one_pod_all_count() {
    let policies = (1..=300).map(|n| {
        policy(&format!("shop/p{n}"), "app=db", Some(vec![rule(&["pods app=web"], &[&format!("tcp/{n}")])]), None)
    });
    let mut cluster = with(policies);
    for port in [1, 63, 64, 65, 128, 129, 299, 300] {
        cluster.check(&[("shop/web", "shop/db", &format!("tcp/{port}"), true)]);
        let name = format!("shop-ingress-p{port}-0-podSelector-0-0");
        assert_eq!(cluster.rule("shop/web", "shop/db", &format!("tcp/{port}"), Direction::Ingress), name);
    }
    cluster.check(&[("shop/web", "shop/db", "tcp/301", false), ("lab/web", "shop/db", "tcp/1", false)]);
}

#[test]
fn clause_3_peers_and_ports_combine_within_one_rule_only() {
    let rules = vec![rule(&["pods app=web"], &["tcp/80"]), rule(&["namespaces team=blue"], &["udp/53", "tcp/90"])];
    with([policy("shop/p", "app=db", Some(rules), None)]).check(&[
        ("shop/web", "shop/db", "tcp/80", true),
        ("shop/web", "shop/db", "tcp/90", false),
        ("shop/web", "shop/db", "udp/53", false),
        ("lab/web", "shop/db", "tcp/90", true),
        ("lab/web", "shop/db", "udp/53", true),
        ("lab/web", "shop/db", "tcp/80", false),
    ]);
}

#[test]
fn clause_3_no_peers_or_ports_is_every_peer_or_port() {
    with([ingress(&[], &["tcp/80"])]).check(&[
        ("8.8.8.8", "shop/db", "tcp/80", true),
        ("lab/probe", "shop/db", "tcp/80", true),
        ("8.8.8.8", "shop/db", "icmp", false),
    ]);
    with([ingress(&["pods app=web"], &[])]).check(&[
        ("shop/web", "shop/db", "sctp/9", true),
        ("shop/web", "shop/db", "icmp", true),
        ("shop/web", "shop/db", "esp", true),
        ("lab/web", "shop/db", "icmp", false),
    ]);
    with([ingress(&[], &[])]).check(&[("8.8.8.8", "shop/db", "esp", true)]);
}

#[test]
fn clause_3_a_portless_protocol_needs_a_rule_without_ports() {
    with([ingress(&[], &["tcp", "udp", "sctp"])]).check(&[
        ("shop/web", "shop/db", "tcp/1", true),
        ("shop/web", "shop/db", "udp/65535", true),
        ("shop/web", "shop/db", "sctp/1", true),
        ("shop/web", "shop/db", "icmp", false),
        ("fd00::1:1", "fd00::1:2", "icmpv6", false),
        ("shop/web", "shop/db", "esp", false),
    ]);
}

#[test]
fn clause_4_selectors_match_by_their_operators() {
    for (text, from_web, from_db_namespace_pods) in [
        ("pods app=web", true, false),
        ("pods", true, false),
        ("pods app=web|api", true, false),
        ("pods app=db", false, false),
        ("pods app!=db", true, false),
        ("pods tier!=back", true, false),
        ("pods absent!=x", true, false),
        ("pods tier", true, false),
        ("pods absent", false, false),
        ("pods !absent", true, false),
        ("pods !tier", false, false),
        ("pods app=web tier=front", true, false),
        ("pods app=web !tier", false, false),
        ("namespaces", true, true),
        ("namespaces team=blue", false, true),
        ("namespaces env!=prod", false, true),
        ("namespaces env", true, false),
        ("namespaces !env", false, true),
        ("namespaces kubernetes.io/metadata.name=shop", true, false),
        ("namespaces team=blue / pods app=web", false, true),
        ("namespaces team=blue / pods app=probe", false, false),
        ("namespaces / pods app=web", true, true),
        ("namespaces team=red / pods", true, false),
    ] {
        with([ingress(&[text], &[])]).check(&[
            ("shop/web", "shop/db", "tcp/1", from_web),
            ("lab/web", "shop/db", "tcp/1", from_db_namespace_pods),
            ("8.8.8.8", "shop/db", "tcp/1", false),
        ]);
    }
}

#[test]
fn clause_4_a_policy_selects_only_pods_of_its_own_namespace() {
    with([policy("shop/p", "", Some(vec![]), None)]).check(&[
        ("lab/web", "shop/db", "tcp/1", false),
        ("lab/web", "shop/web", "tcp/1", false),
        ("shop/db", "lab/web", "tcp/1", true),
    ]);
}

#[test]
fn clause_4_a_block_matches_except_in_its_own_excepts() {
    let cluster = |peers: &[&str]| with([ingress(peers, &[])]);
    cluster(&["172.16.0.0/12 except 172.16.1.0/24 172.16.1.128/25 172.17.0.0/16"]).check(&[
        ("172.16.0.1", "shop/db", "tcp/1", true),
        ("172.16.1.1", "shop/db", "tcp/1", false),
        ("172.16.1.200", "shop/db", "tcp/1", false),
        ("172.16.2.0", "shop/db", "tcp/1", true),
        ("172.17.255.255", "shop/db", "tcp/1", false),
        ("172.18.0.0", "shop/db", "tcp/1", true),
        ("172.32.0.0", "shop/db", "tcp/1", false),
    ]);
    // An address that one block excludes may be in another block of the same rule.
    cluster(&["172.16.0.0/12 except 172.16.1.0/24", "172.16.1.0/25 except 172.16.1.64/26"]).check(&[
        ("172.16.1.1", "shop/db", "tcp/1", true),
        ("172.16.1.65", "shop/db", "tcp/1", false),
        ("172.16.1.129", "shop/db", "tcp/1", false),
        ("172.16.2.1", "shop/db", "tcp/1", true),
    ]);
    cluster(&["172.16.0.0/12 except 172.16.1.0/24", "172.16.0.0/16 except 172.16.2.0/24 172.16.3.0/24"]).check(&[
        ("172.16.1.1", "shop/db", "tcp/1", true),
        ("172.16.2.1", "shop/db", "tcp/1", true),
        ("172.17.3.1", "shop/db", "tcp/1", true),
    ]);
    cluster(&["0.0.0.0/0 except 10.0.0.0/8"]).check(&[
        ("8.8.8.8", "shop/db", "tcp/1", true),
        ("shop/web", "shop/db", "tcp/1", false),
        ("fd00::1:1", "fd00::1:2", "tcp/1", false),
    ]);
}

#[test]
fn clause_4_a_block_matches_a_pods_address_too() {
    with([ingress(&["10.0.2.0/24 except 10.0.2.2/32"], &[])]).check(&[
        ("lab/web", "shop/db", "tcp/1", true),
        ("lab/probe", "shop/db", "tcp/1", false),
        ("shop/web", "shop/db", "tcp/1", false),
    ]);
    with([egress(&["10.0.1.2/32"], &[])])
        .check(&[("shop/web", "shop/db", "tcp/1", true), ("shop/web", "lab/web", "tcp/1", false)]);
}

#[test]
fn clause_5_ports_by_number_range_and_protocol() {
    with([ingress(&[], &["tcp/80", "tcp/8000-8010", "udp", "sctp/7"])]).check(&[
        ("shop/web", "shop/db", "tcp/80", true),
        ("shop/web", "shop/db", "tcp/81", false),
        ("shop/web", "shop/db", "tcp/7999", false),
        ("shop/web", "shop/db", "tcp/8000", true),
        ("shop/web", "shop/db", "tcp/8010", true),
        ("shop/web", "shop/db", "tcp/8011", false),
        ("shop/web", "shop/db", "udp/0", true),
        ("shop/web", "shop/db", "udp/65535", true),
        ("shop/web", "shop/db", "sctp/7", true),
        ("shop/web", "shop/db", "sctp/80", false),
    ]);
}

#[test]
fn clause_5_an_ingress_port_name_is_the_selected_pods() {
    with([policy("shop/p", "", Some(vec![rule(&[], &["tcp/http"])]), None)]).check(&[
        ("lab/web", "shop/web", "tcp/80", true),
        ("lab/web", "shop/web", "tcp/8080", false),
        ("lab/web", "shop/db", "tcp/8080", true),
        ("lab/web", "shop/db", "tcp/80", false),
        ("lab/web", "shop/db", "udp/8080", false),
        // The client's own number for the name does not count.
        ("lab/web", "shop/db", "tcp/81", false),
    ]);
}

#[test]
fn clause_5_a_port_name_on_egress_is_resolved_on_each_peer() {
    with([egress(&["namespaces"], &["tcp/http"])]).check(&[
        ("shop/web", "shop/db", "tcp/8080", true),
        ("shop/web", "shop/db", "tcp/80", false),
        ("shop/web", "shop/db", "tcp/81", false),
        ("shop/web", "lab/web", "tcp/81", true),
        ("shop/web", "lab/web", "tcp/8080", false),
        ("shop/web", "lab/probe", "tcp/81", false),
    ]);
}

#[test]
fn clause_5_a_port_name_needs_that_name_and_protocol() {
    with([egress(&["namespaces"], &["tcp/dns"])]).check(&[
        ("shop/web", "lab/web", "tcp/53", true),
        ("shop/web", "lab/web", "udp/53", false),
        ("shop/web", "shop/db", "tcp/53", false),
    ]);
    with([policy("shop/p", "", Some(vec![rule(&[], &["tcp/dns"])]), None)]).check(&[
        ("lab/web", "shop/web", "tcp/53", false),
        ("lab/web", "shop/web", "udp/53", false),
        ("lab/web", "shop/db", "tcp/53", false),
    ]);
}

#[test]
fn clause_5_a_port_name_matches_only_pods() {
    with([egress(&["10.0.0.0/16 except 10.0.2.1/32"], &["tcp/http"])]).check(&[
        ("shop/web", "shop/db", "tcp/8080", true),
        ("shop/web", "lab/web", "tcp/81", false),
        ("shop/web", "10.0.9.9", "tcp/8080", false),
    ]);
    with([egress(&[], &["tcp/http", "udp/53"])]).check(&[
        ("shop/web", "shop/db", "tcp/8080", true),
        ("shop/web", "lab/web", "tcp/81", true),
        ("shop/web", "lab/web", "tcp/8080", false),
        ("shop/web", "8.8.8.8", "tcp/8080", false),
        ("shop/web", "8.8.8.8", "udp/53", true),
    ]);
    // The block has one of the pod's two addresses.
    with([egress(&["fd00::1:0/112"], &["tcp/http"])])
        .check(&[("fd00::1:1", "fd00::1:2", "tcp/8080", true), ("shop/web", "shop/db", "tcp/8080", false)]);
}

#[test]
fn clause_7_a_host_network_pod_counts_as_its_node() {
    let agent = |node: &str, address: &str| {
        let pod = pod("lab/agent", "app=web", &[address], &["http:tcp/80"]);
        Object::Pod(Pod { host_network: true, node: Some(node.to_owned()), ..pod })
    };
    let mut cluster = with([ingress(&["namespaces"], &[]), agent("n2", "192.168.0.2")]);
    cluster.check(&[("192.168.0.2", "shop/db", "tcp/1", false), ("lab/web", "shop/db", "tcp/1", true)]);
    // Also if its node is not known otherwise; policies do not select it.
    cluster.set(agent("n1", "192.168.0.77"));
    cluster.set(policy("lab/deny", "", Some(vec![]), Some(vec![])));
    cluster.check(&[("192.168.0.77", "shop/db", "tcp/1", true), ("shop/db", "192.168.0.77", "tcp/1", true)]);
    cluster.apply(vec![ObjectChange::Delete(ObjectRef::Pod(key("lab/agent")))]);
    cluster.check(&[("192.168.0.77", "shop/db", "tcp/1", false)]);
}

/// A node's packets to its own pods are exempt: no pod's status takes that away.
#[test]
fn clause_7_a_pod_with_a_nodes_address_does_not_become_the_node() {
    let taken = "192.168.0.1";
    let of_node = || node("here", &[taken]);
    let thief = || Object::Pod(pod("lab/thief", "app=thief", &[taken], &[]));
    for objects in [[of_node(), thief()], [thief(), of_node()]] {
        let mut cluster = with([ingress(&["namespaces / pods app=thief"], &[])]);
        objects.into_iter().for_each(|object| cluster.set(object));
        let owner = cluster.engine.state().owner(&taken.parse().unwrap());
        assert!(matches!(owner, Some(penstock_policy::state::PodOrNode::Node(_))), "{owner:?}");
        let flow = cluster.flow(taken, "shop/db", "tcp/1");
        assert!(!cluster.engine.evaluate(&flow).is_allowed(), "the thief's label counts for nothing");
    }
}

#[test]
fn clause_7_no_finished_or_addressless_pod_is_matched() {
    let mut cluster = with([ingress(&["pods app=web"], &[]), egress(&["namespaces"], &["tcp/http"])]);
    cluster.set(policy("shop/more", "app=db", Some(vec![rule(&["pods app=web"], &[])]), None));
    cluster.check(&[("10.0.1.1", "shop/db", "tcp/8080", true)]);
    let web = pod("shop/web", "app=web tier=front", &["10.0.1.1"], &[]);
    cluster.set(Object::Pod(Pod { finished: true, ..web.clone() }));
    cluster.check(&[("10.0.1.1", "shop/db", "tcp/8080", false)]);
    cluster.set(Object::Pod(Pod { addresses: Vec::new(), ..web.clone() }));
    cluster.check(&[("10.0.1.1", "shop/db", "tcp/8080", false)]);
    cluster.set(Object::Pod(web));
    cluster.check(&[("10.0.1.1", "shop/db", "tcp/8080", true)]);
}

#[test]
fn clause_7_an_address_moves_in_either_order_of_events() {
    let old = || Object::Pod(pod("lab/old", "app=old", &["10.0.2.9"], &[]));
    let new = || Object::Pod(pod("lab/new", "app=new", &["10.0.2.9"], &[]));
    let gone = || ObjectChange::Delete(ObjectRef::Pod(key("lab/old")));
    let mut cluster = with([ingress(&["namespaces / pods app=new"], &[]), old()]);
    cluster.check(&[("10.0.2.9", "shop/db", "tcp/1", false)]);
    cluster.apply(vec![gone()]);
    cluster.set(new());
    cluster.check(&[("10.0.2.9", "shop/db", "tcp/1", true)]);

    let mut cluster = with([ingress(&["namespaces / pods app=new"], &[]), old()]);
    cluster.engine.apply([ObjectChange::Set(new())]);
    let flow = cluster.flow("10.0.2.9", "shop/db", "tcp/1");
    assert!(cluster.engine.evaluate(&flow).is_allowed(), "the last one to claim an address has it");
    // An event of the old pod that claims nothing new does not take it back.
    cluster.engine.apply([ObjectChange::Set(Object::Pod(pod("lab/old", "app=old x=y", &["10.0.2.9"], &[])))]);
    assert!(cluster.engine.evaluate(&flow).is_allowed());
    cluster.engine.apply([gone()]);
    assert!(cluster.engine.evaluate(&flow).is_allowed());

    // The new pod is deleted first: the old one owns the address again.
    let mut cluster = with([ingress(&["namespaces / pods app=old"], &[]), old(), new()]);
    assert!(!cluster.engine.evaluate(&flow).is_allowed());
    cluster.engine.apply([ObjectChange::Delete(ObjectRef::Pod(key("lab/new")))]);
    assert!(cluster.engine.evaluate(&flow).is_allowed());
}

#[test]
fn clause_7_no_selector_matches_an_unknown_namespaces_pod() {
    let stray = Object::Pod(pod("stray/a", "app=web", &["10.0.3.1"], &["http:tcp/80"]));
    let rules = vec![rule(&["namespaces", "namespaces x!=y"], &[]), rule(&["10.0.3.0/24"], &["udp/1"])];
    let mut cluster = with([policy("shop/p", "app=db", Some(rules), Some(vec![rule(&["namespaces"], &[])])), stray]);
    cluster.check(&[
        ("stray/a", "shop/db", "tcp/1", false),
        ("stray/a", "shop/db", "udp/1", true),
        ("shop/db", "stray/a", "tcp/80", false),
        ("lab/web", "shop/db", "tcp/1", true),
    ]);
    cluster.set(namespace("stray", ""));
    cluster.check(&[("stray/a", "shop/db", "tcp/1", true), ("shop/db", "stray/a", "tcp/80", true)]);
    cluster.apply(vec![ObjectChange::Delete(ObjectRef::Namespace("stray".to_owned()))]);
    cluster.check(&[("stray/a", "shop/db", "tcp/1", false)]);
}

/// A namespace's controller deletes its objects in any order, policies before pods that end slowly.
#[test]
fn a_terminating_namespaces_policies_outlast_its_pods() {
    let deny = || policy("shop/deny", "", Some(vec![]), None);
    let ending = |terminating| match namespace("shop", "") {
        Object::Namespace(namespace) => ObjectChange::Set(Object::Namespace(Namespace { terminating, ..namespace })),
        _ => unreachable!(),
    };
    let gone = || ObjectChange::Delete(ObjectRef::NetworkPolicy(key("shop/deny")));
    let cluster = with([deny()]);
    let flow = cluster.flow("lab/web", "shop/db", "tcp/1");
    let pods: Vec<ObjectKey> = cluster.engine.state().pods().map(|(_, pod)| pod.key.clone()).collect();
    let pods_gone = |namespace: &str| {
        let of = pods.iter().filter(|key| key.namespace == namespace);
        of.map(|key| ObjectChange::Delete(ObjectRef::Pod(key.clone()))).collect::<Vec<_>>()
    };
    let count = |engine: &Engine| engine.state().statistics().policies;

    let mut engine = with([deny()]).engine;
    engine.apply([gone()]);
    assert!(engine.evaluate(&flow).is_allowed(), "the namespace stays");

    let mut engine = with([deny()]).engine;
    engine.apply([ending(true)]);
    engine.apply([gone()]);
    assert!(!engine.evaluate(&flow).is_allowed(), "its pods still run");
    engine.apply(pods_gone("lab"));
    assert_eq!(count(&engine), 1, "pods of another namespace");
    // The Namespace's own event may come before those of its pods.
    engine.apply([ObjectChange::Delete(ObjectRef::Namespace("shop".to_owned()))]);
    assert!(!engine.evaluate(&flow).is_allowed());
    engine.apply(pods_gone("shop"));
    assert_eq!(count(&engine), 0, "no pod is left");

    let mut engine = with([deny()]).engine;
    engine.apply([ending(true), gone(), ending(false)]);
    assert!(engine.evaluate(&flow).is_allowed(), "another namespace of this name");

    let mut engine = with([deny()]).engine;
    engine.apply([ending(true), gone(), ObjectChange::Set(deny())]);
    engine.apply([ending(false)]);
    assert!(!engine.evaluate(&flow).is_allowed(), "made anew");
}

#[test]
fn clause_8_a_pod_always_reaches_itself_and_its_node() {
    let deny = |namespace: &str| policy(&format!("{namespace}/deny"), "", Some(vec![]), Some(vec![]));
    let mut cluster = with([deny("shop"), deny("lab")]);
    cluster.check(&[
        ("192.168.0.1", "shop/db", "tcp/1", true),
        ("shop/db", "192.168.0.1", "icmp", true),
        ("fd00:1::1", "fd00::1:2", "tcp/1", true),
        ("192.168.0.2", "shop/db", "tcp/1", false),
        ("shop/db", "192.168.0.2", "tcp/1", false),
        ("192.168.0.2", "lab/probe", "tcp/1", true),
        ("192.168.0.1", "lab/probe", "tcp/1", false),
        ("shop/db", "shop/db", "tcp/1", true),
        ("fd00::1:2", "shop/db", "udp/1", true),
        ("shop/db", "shop/web", "tcp/1", false),
    ]);
    let flow = cluster.flow("shop/db", "shop/db", "tcp/1");
    assert_eq!(cluster.evaluate(&flow).egress, DirectionVerdict::Exempt);
}

#[test]
fn clause_10_every_address_of_a_pod_counts() {
    with([ingress(&["pods app=web"], &["tcp/80"])]).check(&[
        ("fd00::1:1", "fd00::1:2", "tcp/80", true),
        ("fd00::1:1", "fd00::1:2", "tcp/81", false),
        ("fd00::99", "fd00::1:2", "tcp/80", false),
    ]);
    with([ingress(&["fd00::/64 except fd00::1:0/112", "::/0 except fd00::/8"], &[])]).check(&[
        ("fd00::2:1", "fd00::1:2", "tcp/80", true),
        ("fd00::1:1", "fd00::1:2", "tcp/80", false),
        ("2001:db8::1", "fd00::1:2", "tcp/80", true),
        ("8.8.8.8", "shop/db", "tcp/80", false),
    ]);
}

#[test]
fn a_rule_is_named_by_policy_direction_peer_and_port() {
    let into = vec![
        rule(&["172.17.0.0/16 except 172.17.1.0/24", "namespaces team=blue", "pods app=web"], &["tcp/1", "tcp/6379"]),
        rule(&[], &["tcp/http"]),
    ];
    let out = vec![rule(&[], &["udp/9"]), rule(&["10.0.2.0/24", "namespaces / pods app=probe"], &[])];
    let mut cluster = with([policy("shop/p", "", Some(into), Some(out))]);
    for (from, to, port, direction, expected) in [
        ("172.17.2.2", "shop/db", "tcp/6379", Direction::Ingress, "shop-ingress-p-0-ipBlock-0-1"),
        ("lab/web", "shop/db", "tcp/1", Direction::Ingress, "shop-ingress-p-0-namespaceSelector-1-0"),
        ("shop/web", "shop/db", "tcp/6379", Direction::Ingress, "shop-ingress-p-0-podSelector-2-1"),
        ("8.8.8.8", "shop/db", "tcp/8080", Direction::Ingress, "shop-ingress-p-1-all-0-0"),
        ("172.17.1.2", "shop/db", "tcp/6379", Direction::Ingress, "none"),
        ("shop/db", "8.8.8.8", "udp/9", Direction::Egress, "shop-egress-p-0-all-0-0"),
        ("shop/db", "lab/probe", "icmp", Direction::Egress, "shop-egress-p-1-ipBlock-0-0"),
        ("lab/web", "lab/probe", "icmp", Direction::Egress, "none"),
    ] {
        assert_eq!(cluster.rule(from, to, port, direction), expected, "{from} to {to} {port}");
    }
}

#[test]
fn a_denial_names_isolating_policies_and_the_nearest_rule() {
    use penstock_policy::compile::Mismatch;
    let into = vec![rule(&["pods app=web"], &["tcp/80"]), rule(&["10.0.2.0/24 except 10.0.2.2/32"], &["tcp/sql"])];
    let cluster = with([policy("shop/p", "app=db", Some(into), None), policy("shop/q", "", Some(vec![]), None)]);
    for (from, port, name, mismatches) in [
        ("shop/web", "tcp/81", "shop-ingress-p-0-podSelector-0-0", vec![Mismatch::Port]),
        ("8.8.8.8", "tcp/80", "shop-ingress-p-0-podSelector-0-0", vec![Mismatch::Peer]),
        (
            "lab/probe",
            "tcp/5432",
            "shop-ingress-p-1-ipBlock-0-0",
            vec![Mismatch::Excepted("10.0.2.2/32".parse().unwrap())],
        ),
        ("lab/web", "tcp/7", "shop-ingress-p-1-ipBlock-0-0", vec![Mismatch::Port]),
    ] {
        let side = cluster.engine.explain(&cluster.flow(from, "shop/db", port)).ingress;
        assert_eq!(side.policies, [key("shop/p"), key("shop/q")]);
        assert!(side.isolated && !side.default_deny);
        let nearest = side.nearest.expect("there are rules");
        assert_eq!(
            (nearest.rule.to_string().as_str(), nearest.mismatches),
            (name, mismatches),
            "from {from} to {port}"
        );
    }
    let open = cluster.engine.explain(&cluster.flow("lab/web", "lab/probe", "tcp/1")).ingress;
    assert_eq!((open.verdict, open.isolated, open.policies.len()), (DirectionVerdict::Open, false, 0));
}
