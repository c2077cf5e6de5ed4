//! A pod's policies may be so long, and no longer.

use penstock_policy::compile::MOST_ENTRIES;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange};

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
