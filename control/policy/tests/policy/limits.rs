//! A pod's policies may be so long, and no longer.

use penstock_policy::compile::MOST_ENTRIES;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{
    LabelOperator, NetworkPolicy, Object, ObjectChange, Peer, Peers, PolicyPorts, Requirement, Rule, Selector,
};
use penstock_policy::state::{MOST_ENTRIES_IN_NAMESPACE, MOST_REACHED_FROM_NAMESPACE};

use super::build::*;

/// Whether the engine allows each of these, from an address outside to a port of a pod.
fn allows(engine: &Engine, queries: &[(&str, u16)]) -> Vec<bool> {
    let flow = |to: &str, port| {
        let (src, dst) = ("10.9.9.9".parse::<std::net::IpAddr>().unwrap(), to.parse::<std::net::IpAddr>().unwrap());
        penstock_dataplane::packet::Flow {
            src: src.into(),
            dst: dst.into(),
            protocol: penstock_dataplane::packet::Protocol::TCP,
            src_port: 40000,
            dst_port: port,
        }
    };
    queries.iter().map(|(to, port)| engine.evaluate(&flow(to, *port)).is_allowed()).collect()
}

#[test]
fn a_pod_with_too_many_entries_is_closed_and_no_other_is() {
    // A rule, its peer, and its ports.
    let long =
        |ports: usize| policy("shop/long", "app=db", Some(vec![rule(&["10.0.0.0/8"], &vec!["tcp/80"; ports])]), None);
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    let base = [
        namespace("shop", ""),
        Object::Pod(pod("shop/db", "app=db", &["10.0.1.2"], &[])),
        Object::Pod(pod("shop/web", "app=web", &["10.0.1.1"], &[])),
        policy("shop/web", "app=web", Some(vec![rule(&[], &["tcp/80"])]), None),
        long(MOST_ENTRIES - 2),
    ];
    engine.apply(base.into_iter().map(ObjectChange::Set));
    let queries = [("10.0.1.2", 80), ("10.0.1.2", 5432), ("10.0.1.1", 80)];
    assert_eq!((allows(&engine, &queries), engine.closed_pods().len()), (vec![true, false, true], 0));
    // With what another policy allows, too, there is more than there may be.
    let another = policy("shop/another", "app=db", Some(vec![rule(&[], &["tcp/5432"])]), None);
    engine.apply([ObjectChange::Set(another)]);
    let closed: Vec<String> = engine.closed_pods().into_iter().map(|(pod, why)| format!("{pod}: {why}")).collect();
    assert_eq!((allows(&engine, &queries), closed.len()), (vec![false, false, true], 1));
    assert!(closed[0].starts_with("shop/db: its NetworkPolicies have 262146 rules,"), "{closed:?}");
    engine.apply([ObjectChange::Set(long(1))]);
    assert_eq!((allows(&engine, &queries), engine.closed_pods().len()), (vec![true, true, true], 0));
}

#[test]
fn a_namespace_with_too_many_entries_closes_its_own_pods() {
    let long = |name: &str, ports: usize| {
        // They select no pod, and count all the same.
        policy(name, "app=none", Some(vec![rule(&[], &vec!["tcp/80"; ports])]), None)
    };
    let of_web =
        |namespace: &str| policy(&format!("{namespace}/web"), "app=web", Some(vec![rule(&[], &["tcp/80"])]), None);
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    let objects = [
        namespace("shop", ""),
        namespace("bank", ""),
        Object::Pod(pod("shop/web", "app=web", &["10.0.1.1"], &[])),
        Object::Pod(pod("shop/open", "app=open", &["10.0.1.2"], &[])),
        Object::Pod(pod("bank/web", "app=web", &["10.0.2.1"], &[])),
        of_web("shop"),
        of_web("bank"),
        // Two entries are those of `web`, and one is this rule's own.
        long("shop/long", MOST_ENTRIES_IN_NAMESPACE - 3),
    ];
    engine.apply(objects.into_iter().map(ObjectChange::Set));
    let queries = [("10.0.1.1", 80), ("10.0.1.2", 80), ("10.0.2.1", 80)];
    assert_eq!((allows(&engine, &queries), engine.closed_pods().len()), (vec![true, true, true], 0));
    engine.apply([ObjectChange::Set(long("shop/more", 0))]);
    let closed: Vec<String> = engine.closed_pods().into_iter().map(|(pod, why)| format!("{pod}: {why}")).collect();
    assert_eq!((allows(&engine, &queries), closed.len()), (vec![false, true, true], 1), "{closed:?}");
    assert!(closed[0].starts_with("shop/web: the NetworkPolicies of its namespace have 524289 rules,"), "{closed:?}");
    engine.apply([ObjectChange::Delete(long("shop/more", 0).reference())]);
    assert_eq!((allows(&engine, &queries), engine.closed_pods().len()), (vec![true, true, true], 0));
}

#[test]
fn rules_beyond_the_limit_of_a_namespace_are_not_kept() {
    const PEERS: usize = 1 << 17;
    // Of blocks, of selectors, and of one selector's values.
    let values = LabelOperator::In((0..PEERS).map(|number| format!("v{number}")).collect());
    let of_values = Peer::Pods(Selector { requirements: vec![Requirement { key: "k".to_owned(), operator: values }] });
    let long = |name: &str, peers: Vec<Peer>| {
        policy(name, "app=web", Some(vec![Rule { peers: Peers::AnyOf(peers), ports: PolicyPorts::Every }]), None)
    };
    for peers in [vec![peer("10.0.0.0/8"); PEERS], vec![peer("pods app=db"); PEERS], vec![of_values]] {
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        let base = [namespace("shop", ""), Object::Pod(pod("shop/web", "app=web", &["10.0.1.1"], &[]))];
        let names: Vec<String> = (0..10).map(|number| format!("shop/long-{number}")).collect();
        let all = names.iter().map(|name| long(name, peers.clone()));
        engine.apply(base.into_iter().chain(all).map(ObjectChange::Set));
        let kept = |engine: &Engine| {
            let rules = |policy: &NetworkPolicy| policy.ingress.iter().flatten().count();
            engine.state().policies().filter(|(policy, selected)| rules(policy) > 0 && *selected == 1).count()
        };
        assert_eq!((kept(&engine), engine.state().policies().count()), (3, 10), "three have fewer than the most");
        let closed = || engine.closed_pods().into_iter().map(|(_, why)| why).collect::<Vec<_>>();
        assert!(closed()[0].contains("shop/long-3 and 6 more, whose rules were not kept"), "{:?}", closed());
        // Without most of them there is room, but not for what is not known any more.
        engine.apply(names[1..9].iter().map(|name| ObjectChange::Delete(long(name, Vec::new()).reference())));
        let closed = engine.closed_pods().into_iter().map(|(_, why)| why).collect::<Vec<_>>();
        assert!(closed[0].ends_with("then change or delete shop/long-9, whose rules were not kept"), "{closed:?}");
        engine.apply([ObjectChange::Set(long("shop/long-9", vec![peer("10.0.0.0/8")]))]);
        assert_eq!((kept(&engine), engine.closed_pods().len()), (2, 0));
    }
}

/// So many rules, each with a selector of its own for pods of every namespace, numbered from the first; every pod has to be tried.
fn reaching(first: usize, rules: usize) -> Object {
    let rule = |number: usize| {
        let has = Requirement { key: format!("key-{number}"), operator: LabelOperator::Exists };
        let pods = Selector { requirements: vec![has] };
        let peer = Peer::PodsInNamespaces { namespaces: Selector::default(), pods };
        Rule { peers: Peers::AnyOf(vec![peer]), ports: PolicyPorts::Every }
    };
    policy("shop/far", "app=web", Some((first..first + rules).map(rule).collect()), None)
}

#[test]
fn a_namespace_whose_selectors_reach_too_far_is_closed() {
    const PODS: usize = 4096;
    let others = (0..PODS - 2).map(|number| {
        let [a, b] = (number as u16).to_be_bytes();
        Object::Pod(pod(&format!("many/pod-{number}"), "", &[format!("10.1.{a}.{b}").as_str()], &[]))
    });
    let of_web =
        |namespace: &str| policy(&format!("{namespace}/web"), "app=web", Some(vec![rule(&[], &["tcp/80"])]), None);
    let objects = [
        namespace("shop", ""),
        namespace("bank", ""),
        namespace("many", ""),
        Object::Pod(pod("shop/web", "app=web", &["10.0.1.1"], &[])),
        Object::Pod(pod("bank/web", "app=web", &["10.0.2.1"], &[])),
        of_web("shop"),
        of_web("bank"),
    ];
    let start: Vec<Object> = objects.into_iter().chain(others).collect();
    let queries = [("10.0.1.1", 80), ("10.0.2.1", 80)];
    let most = MOST_REACHED_FROM_NAMESPACE / PODS;
    for at_once in [None, Some(10)] {
        let mut engine = Engine::new(EngineSettings::for_node("node"));
        if let Some(at_once) = at_once {
            engine.build_aside(at_once);
        }
        engine.apply(start.iter().cloned().map(|object| ObjectChange::Set(on_node(object))));
        // The last has no selector in common with what is in effect until then, which does not count.
        for (first, rules, is_open) in
            [(0, most - 1, true), (1, most + 1, false), (0, most - 1, true), (most, most - 1, true)]
        {
            engine.apply([ObjectChange::Set(reaching(first, rules))]);
            super::aside::finish(&mut engine);
            let closed: Vec<String> =
                engine.closed_pods().into_iter().map(|(pod, why)| format!("{pod}: {why}")).collect();
            assert_eq!(
                (allows(&engine, &queries), closed.is_empty()),
                (vec![is_open, true], is_open),
                "{rules} {closed:?}"
            );
            assert!(closed.iter().all(|closed| closed.starts_with("shop/web: the selectors")), "{closed:?}");
        }
        engine.apply([ObjectChange::Delete(reaching(0, 0).reference())]);
        super::aside::finish(&mut engine);
        assert_eq!((allows(&engine, &queries), engine.closed_pods().len()), (vec![true, true], 0));
        assert_eq!(engine.statistics().0.peer_sets, 0, "all is released");
    }
}

/// A pod of the node `node`, if it is one.
fn on_node(object: Object) -> Object {
    match object {
        Object::Pod(pod) => Object::Pod(penstock_policy::model::Pod { node: Some("node".to_owned()), ..pod }),
        other => other,
    }
}

#[test]
fn each_number_of_a_ports_name_counts() {
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    // A rule and its peer for each number, beside the rules, peers and ports as they are written.
    let rules = MOST_ENTRIES / 16;
    let long = policy("shop/web", "app=web", None, Some(vec![rule(&["10.0.0.0/8"], &["tcp/http"]); rules]));
    let pod = |number: u8| {
        let port = format!("http:tcp/{}", 8000 + u16::from(number));
        ObjectChange::Set(Object::Pod(pod(
            &format!("shop/web-{number}"),
            if number == 0 { "app=web" } else { "app=db" },
            &[format!("10.0.1.{number}").as_str()],
            &[port.as_str()],
        )))
    };
    let of_namespace = [ObjectChange::Set(namespace("shop", "")), ObjectChange::Set(long)];
    engine.apply(of_namespace.into_iter().chain((0..7).map(pod)));
    let closed: Vec<String> = engine.closed_pods().into_iter().map(|(pod, why)| format!("{pod}: {why}")).collect();
    assert_eq!(closed.len(), 1, "{closed:?}");
    assert!(closed[0].starts_with("shop/web-0: its NetworkPolicies have 278528 rules,"), "{closed:?}");
    assert!(closed[0].contains("egress"), "{closed:?}");
}
