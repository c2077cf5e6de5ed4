//! ClusterNetworkPolicy: examples of how tiers, priorities and actions decide, and of what peers match.

use penstock_dataplane::policy::{Direction, DirectionVerdict};
use penstock_policy::compile::Tier;
use penstock_policy::engine::TierOutcome;
use penstock_policy::model::RuleAction::{Accept, Deny, Pass};
use penstock_policy::model::*;

use super::build::*;

/// `shop/web`, `shop/db` and `lab/web` on node `n1`, `lab/far` on `n2`.
fn with(policies: impl IntoIterator<Item = Object>) -> Cluster {
    let objects = [
        namespace("shop", "team=shop"),
        namespace("lab", "team=lab"),
        node("n1", &["192.168.0.1"]),
        node("n2", &["192.168.0.2", "fd00:ffff::2"]),
        Object::Pod(pod("shop/web", "app=web", &["10.0.0.1", "fd00::1"], &[])),
        Object::Pod(pod("shop/db", "app=db", &["10.0.0.2", "fd00::2"], &["sql:tcp/5432", "sql:udp/5433"])),
        Object::Pod(pod("lab/web", "app=web", &["10.0.1.1"], &[])),
        Object::Pod(Pod { node: Some("n2".to_owned()), ..pod("lab/far", "app=far", &["10.0.2.1"], &["sql:tcp/99"]) }),
    ];
    Cluster::new(objects.into_iter().chain(policies))
}

fn admin(priority: u16, ingress: Vec<ClusterRule>, egress: Vec<ClusterRule>) -> Object {
    cluster_policy(&format!("Admin {priority} a{priority}"), "app=db", ingress, egress)
}

fn baseline(ingress: Vec<ClusterRule>, egress: Vec<ClusterRule>) -> Object {
    cluster_policy("Baseline 0 base", "app=db", ingress, egress)
}

const EVERY_POD: &[&str] = &["namespaces"];

#[test]
fn tiers_decide_in_order_and_a_pass_goes_to_the_next() {
    let network_policy = || policy("shop/db", "app=db", Some(vec![rule(&["pods app=web"], &["tcp/1"])]), None);
    let pass = || admin(5, vec![ordered(Pass, EVERY_POD, &[]), ordered(Deny, EVERY_POD, &[])], vec![]);
    let deny = || baseline(vec![ordered(Deny, EVERY_POD, &[])], vec![]);
    for (policies, expected) in [
        // Flows that reach shop/db: from shop/web on 1 and on 2, from lab/web on 1.
        (vec![], [true, true, true]),
        (vec![network_policy()], [true, false, false]),
        (vec![deny()], [false, false, false]),
        (vec![pass()], [true, true, true]),
        (vec![pass(), network_policy()], [true, false, false]),
        (vec![pass(), deny()], [false, false, false]),
        (vec![pass(), network_policy(), deny()], [true, false, false]),
        (vec![admin(5, vec![ordered(Deny, EVERY_POD, &["tcp/1"])], vec![]), network_policy()], [false, false, false]),
        (vec![admin(5, vec![ordered(Accept, EVERY_POD, &["tcp/2"])], vec![]), network_policy()], [true, true, false]),
        (vec![admin(5, vec![ordered(Accept, EVERY_POD, &["tcp/2"])], vec![]), deny()], [false, true, false]),
    ] {
        let text = format!("{policies:?}");
        let mut cluster = with(policies);
        let got = [("shop/web", "tcp/1"), ("shop/web", "tcp/2"), ("lab/web", "tcp/1")].map(|(from, port)| {
            let flow = cluster.flow(from, "shop/db", port);
            cluster.evaluate(&flow).is_allowed()
        });
        assert_eq!(got, expected, "{text}");
    }
}

#[test]
fn a_pass_of_the_baseline_tier_leads_to_the_default() {
    let mut cluster =
        with([baseline(vec![ordered(Pass, EVERY_POD, &["tcp/1"]), ordered(Deny, EVERY_POD, &[])], vec![])]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true), ("shop/web", "shop/db", "tcp/2", false)]);
    let flow = cluster.flow("shop/web", "shop/db", "tcp/1");
    assert_eq!(cluster.evaluate(&flow).ingress, DirectionVerdict::Default);
}

#[test]
fn lower_priority_numbers_come_first_and_equal_ones_by_name() {
    let rules = |action| vec![ordered(action, EVERY_POD, &["tcp/1"])];
    let mut cluster = with([admin(20, rules(Deny), vec![]), admin(3, rules(Accept), vec![])]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true)]);
    assert_eq!(cluster.rule("shop/web", "shop/db", "tcp/1", Direction::Ingress), "Admin-ingress-a3-0-namespaces-0-0");
    cluster.set(cluster_policy("Admin 3 Z", "app=db", rules(Deny), vec![]));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", false)]);
    assert_eq!(cluster.rule("shop/web", "shop/db", "tcp/1", Direction::Ingress), "Admin-ingress-Z-0-namespaces-0-0");
    // Its place changes with its priority.
    cluster.set(cluster_policy("Admin 4 Z", "app=db", rules(Deny), vec![]));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true)]);
}

#[test]
fn the_first_rule_that_matches_decides_also_beyond_64_rules() {
    let mut rules: Vec<ClusterRule> =
        (1..=200).map(|port| ordered(Accept, EVERY_POD, &[&format!("tcp/{port}")])).collect();
    rules.insert(100, ordered(Deny, EVERY_POD, &["tcp/50-150"]));
    let mut cluster = with([admin(1, rules, vec![])]);
    cluster.check(&[
        ("shop/web", "shop/db", "tcp/100", true),
        ("shop/web", "shop/db", "tcp/101", false),
        ("shop/web", "shop/db", "tcp/150", false),
        ("shop/web", "shop/db", "tcp/151", true),
    ]);
}

#[test]
fn a_policy_touches_only_the_directions_for_which_it_has_rules() {
    let mut cluster = with([admin(1, vec![ordered(Deny, EVERY_POD, &[])], vec![])]);
    cluster.check(&[("shop/db", "shop/web", "tcp/1", true), ("shop/web", "shop/db", "tcp/1", false)]);
    let flow = cluster.flow("shop/db", "shop/web", "tcp/1");
    assert_eq!(cluster.evaluate(&flow).egress, DirectionVerdict::Open);
    // Isolated for ingress by a NetworkPolicy, the pod still meets the egress rules of the Baseline tier.
    let isolated = policy("shop/db", "app=db", Some(vec![]), None);
    let mut cluster = with([isolated, baseline(vec![], vec![ordered(Deny, EVERY_POD, &[])])]);
    cluster.check(&[("shop/db", "lab/web", "tcp/1", false), ("lab/web", "shop/db", "tcp/1", false)]);
}

#[test]
fn both_ends_must_accept() {
    let accept = cluster_policy("Admin 1 out", "app=web", vec![], vec![ordered(Accept, EVERY_POD, &[])]);
    let mut cluster = with([accept, admin(2, vec![ordered(Deny, EVERY_POD, &[])], vec![])]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", false), ("shop/web", "lab/far", "tcp/1", true)]);
}

#[test]
fn networks_match_whatever_is_there_and_only_their_own_family() {
    let mut cluster = with([admin(1, vec![], vec![ordered(Deny, &["networks 0.0.0.0/0"], &[])])]);
    cluster.check(&[
        ("shop/db", "shop/web", "tcp/1", false),
        ("shop/db", "8.8.8.8", "icmp", false),
        ("shop/db", "192.168.0.2", "tcp/1", false),
        ("fd00::2", "fd00::1", "tcp/1", true),
        ("shop/web", "shop/db", "tcp/1", true),
    ]);
}

#[test]
fn nodes_match_the_addresses_of_their_status_and_follow_labels() {
    let rules = vec![ordered(Deny, &["nodes name=n2"], &["tcp/1"])];
    let mut cluster = with([admin(1, vec![], rules)]);
    cluster.check(&[
        ("shop/db", "192.168.0.2", "tcp/1", false),
        ("fd00::2", "fd00:ffff::2", "tcp/1", false),
        ("shop/db", "192.168.0.1", "tcp/1", true),
        ("shop/db", "lab/far", "tcp/1", true),
    ]);
    let Object::Node(mut renamed) = node("n2", &["192.168.0.2"]) else { unreachable!() };
    renamed.labels = labels("name=other");
    cluster.set(Object::Node(renamed.clone()));
    cluster.check(&[("shop/db", "192.168.0.2", "tcp/1", true)]);
    renamed.labels = labels("name=n2");
    // An address of an interface is the node's own, and no address of its status.
    renamed.addresses = ips(&["192.168.0.2", "172.17.0.1"]);
    cluster.set(Object::Node(renamed));
    cluster.check(&[("shop/db", "192.168.0.2", "tcp/1", false), ("shop/db", "172.17.0.1", "tcp/1", true)]);
    cluster.apply(vec![ObjectChange::Delete(ObjectRef::Node("n2".to_owned()))]);
    cluster.check(&[("shop/db", "192.168.0.2", "tcp/1", true)]);
}

#[test]
fn only_the_network_policy_tier_spares_the_own_node() {
    let isolated = || policy("shop/db", "app=db", Some(vec![]), Some(vec![]));
    let deny = || vec![ordered(Deny, &["networks 192.168.0.0/16"], &[])];
    let to_node = ("shop/db", "192.168.0.1", "tcp/1");
    for (policies, allowed) in [
        (vec![isolated()], true),
        (vec![admin(1, vec![], deny())], false),
        (vec![admin(1, vec![], deny()), isolated()], false),
        (vec![baseline(vec![], deny())], false),
        (vec![baseline(vec![], deny()), isolated()], true),
        (vec![admin(1, vec![], vec![ordered(Pass, &["nodes"], &[])]), isolated()], true),
        (vec![admin(1, vec![], vec![ordered(Pass, &["nodes"], &[])]), baseline(vec![], deny())], false),
    ] {
        let text = format!("{policies:?}");
        let mut cluster = with(policies);
        let flow = cluster.flow(to_node.0, to_node.1, to_node.2);
        assert_eq!(cluster.evaluate(&flow).is_allowed(), allowed, "{text}");
        cluster.check(&[("192.168.0.1", "shop/db", "tcp/1", true)]);
    }
}

#[test]
fn no_ingress_peer_is_a_node_and_a_pod_reaches_itself() {
    let everything = ClusterRule { is_understood: false, ..ordered(Deny, &[], &[]) };
    let deny = vec![ordered(Deny, EVERY_POD, &[]), everything];
    let mut cluster =
        with([admin(1, deny.clone(), vec![ClusterRule { is_understood: false, ..ordered(Deny, &[], &[]) }])]);
    cluster.check(&[
        ("192.168.0.1", "shop/db", "tcp/1", true),
        ("192.168.0.2", "shop/db", "tcp/1", false),
        ("shop/db", "shop/db", "tcp/1", true),
        ("10.0.0.2", "10.0.0.2", "icmp", true),
        ("8.8.8.8", "shop/db", "tcp/1", false),
    ]);
}

#[test]
fn a_named_port_is_the_destination_pods_with_its_protocol() {
    let sql = ["tcp/sql", "udp/sql", "sctp/sql"];
    let mut cluster = with([
        admin(1, vec![ordered(Deny, EVERY_POD, &sql)], vec![]),
        cluster_policy("Admin 2 out", "app=web", vec![], vec![ordered(Deny, EVERY_POD, &sql)]),
    ]);
    cluster.check(&[
        ("lab/far", "shop/db", "tcp/5432", false),
        ("lab/far", "shop/db", "udp/5433", false),
        ("lab/far", "shop/db", "udp/5432", true),
        ("shop/web", "lab/far", "tcp/99", false),
        ("shop/web", "lab/far", "tcp/5432", true),
        ("shop/web", "8.8.8.8", "tcp/99", true),
    ]);
}

#[test]
fn only_a_rule_without_protocols_matches_icmp() {
    let all = ["tcp/1-65535", "udp/1-65535", "sctp/1-65535"];
    let mut cluster = with([admin(1, vec![ordered(Deny, EVERY_POD, &all)], vec![])]);
    cluster.check(&[("shop/web", "shop/db", "icmp", true), ("shop/web", "shop/db", "sctp/9", false)]);
    cluster.set(admin(1, vec![ordered(Deny, EVERY_POD, &[])], vec![]));
    cluster.check(&[("shop/web", "shop/db", "icmp", false), ("shop/web", "shop/db", "esp", false)]);
}

#[test]
fn an_unknown_pod_is_no_peer_and_an_empty_subject_has_it() {
    let mut cluster = with([admin(1, vec![ordered(Deny, EVERY_POD, &[])], vec![])]);
    cluster.set(Object::Pod(pod("new/db", "app=db", &["10.0.9.1"], &[])));
    cluster.check(&[
        ("new/db", "shop/db", "tcp/1", true),
        ("shop/web", "new/db", "tcp/1", false),
        ("8.8.8.8", "new/db", "tcp/1", true),
    ]);
    cluster.set(namespace("new", ""));
    cluster.check(&[("new/db", "shop/db", "tcp/1", false)]);
}

#[test]
fn subjects_follow_the_labels_of_namespaces_and_pods() {
    let Object::ClusterNetworkPolicy(mut guard) = admin(1, vec![ordered(Deny, EVERY_POD, &[])], vec![]) else {
        unreachable!()
    };
    guard.subject.namespaces = selector("team=lab");
    let mut cluster = with([Object::ClusterNetworkPolicy(guard)]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true)]);
    cluster.set(namespace("shop", "team=lab"));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", false)]);
    cluster.set(Object::Pod(pod("shop/db", "app=cache", &["10.0.0.2"], &[])));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true)]);
    cluster.set(Object::Pod(pod("shop/db", "app=db", &["10.0.0.2"], &[])));
    cluster.check(&[("shop/web", "shop/db", "tcp/1", false)]);
    cluster.apply(vec![ObjectChange::Delete(ObjectRef::ClusterNetworkPolicy("a1".to_owned()))]);
    cluster.check(&[("shop/web", "shop/db", "tcp/1", true)]);
}

#[test]
fn an_explanation_names_each_tier_on_the_way() {
    let named = ClusterRule { name: Some("to the team".to_owned()), ..ordered(Pass, EVERY_POD, &[]) };
    let network_policy = policy("shop/db", "app=db", Some(vec![rule(&["pods app=web"], &["tcp/1"])]), None);
    let cluster = with([admin(7, vec![ordered(Deny, EVERY_POD, &["tcp/9"]), named], vec![]), network_policy]);
    let explanation = cluster.engine.explain(&cluster.flow("lab/web", "shop/db", "tcp/1"));
    let [first, second] = explanation.ingress.tiers.try_into().expect("two tiers");
    let TierOutcome::Rule { action: Pass, rule, name: Some(name) } = first.outcome else {
        panic!("{first:?}");
    };
    assert_eq!((rule.to_string().as_str(), name.as_str()), ("Admin-ingress-a7-1-namespaces-0-0", "to the team"));
    assert_eq!((second.tier, second.outcome), (Tier::NetworkPolicy, TierOutcome::Isolated));
    assert_eq!(explanation.ingress.verdict, DirectionVerdict::Denied);
    let flow = cluster.flow("lab/web", "shop/db", "tcp/9");
    let set = cluster.engine.policy_set();
    let denied = set.evaluate(&flow).ingress.rule().expect("a rule denies");
    assert_eq!(set.rule_name(denied).expect("its name").to_string(), "Admin-ingress-a7-0");
    let flow = cluster.flow("lab/web", "shop/db", "tcp/1");
    let passed = set.passes(&flow, Direction::Ingress, set.evaluate(&flow).ingress);
    let names: Vec<String> = passed.iter().map(|rule| set.rule_name(*rule).expect("its name").to_string()).collect();
    assert_eq!(names, ["Admin-ingress-a7-1"]);
}

#[test]
fn cluster_wide_overrules_isolation_but_no_deny_rule() {
    let objects = |policies: Vec<Object>| with([]).objects.objects().into_iter().chain(policies).collect::<Vec<_>>();
    let send = policy("shop/web", "app=web", None, Some(vec![rule(&["pods app=db"], &[])]));
    let closed = policy("shop/db", "app=db", Some(vec![]), None);
    let probe = with([]).flow("shop/web", "shop/db", "tcp/1");
    let deny = admin(1, vec![ordered(Deny, EVERY_POD, &[])], vec![]);
    let accept = cluster_policy("Admin 1 out", "app=web", vec![], vec![ordered(Accept, EVERY_POD, &[])]);
    assert!(cluster_wide(objects(vec![send.clone(), closed.clone()])).evaluate(&probe).is_allowed());
    assert!(!cluster_wide(objects(vec![send, deny])).evaluate(&probe).is_allowed());
    assert!(!cluster_wide(objects(vec![accept, closed])).evaluate(&probe).is_allowed());
}
