//! Tables that are built aside: nobody waits for another's, and in the end all are what they would have been at once.

use std::collections::VecDeque;

use penstock_dataplane::packet::Flow;
use penstock_dataplane::policy::PolicyVerdict;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::render::tables::{BuiltTables, TableJob};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::agreement::{queries, without_conflict};
use super::build::*;
use super::incremental::outcome;
use super::naive::ClusterObjects;
use super::random::history;

/// An engine that builds at once what has few entries.
fn aside(at_once: usize) -> Engine {
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    engine.build_aside(at_once);
    engine
}

/// Builds all that was left aside.
pub(super) fn finish(engine: &mut Engine) {
    while engine.has_tables_to_prepare() {
        if let Some(job) = engine.prepare_tables(3) {
            engine.finish_tables(job.build());
        }
    }
}

/// Allows TCP to the ports from 1 to this one, by a rule for each.
fn long(name: &str, rules: u16) -> Object {
    let rules = (1..=rules).map(|number| rule(&["10.0.0.0/8"], &[format!("tcp/{number}").as_str()])).collect();
    policy(name, "", Some(rules), None)
}

fn cluster() -> Vec<Object> {
    vec![
        namespace("big", ""),
        namespace("small", ""),
        Object::Pod(pod("big/a", "", &["10.0.0.1"], &[])),
        Object::Pod(pod("small/a", "", &["10.0.1.1"], &[])),
        long("big/long", 50),
        long("small/short", 1),
    ]
}

fn allows(engine: &Engine, to: &str, port: u16) -> bool {
    let (src, dst): (std::net::IpAddr, std::net::IpAddr) = ("10.9.9.9".parse().unwrap(), to.parse().unwrap());
    let protocol = penstock_dataplane::packet::Protocol::TCP;
    engine.evaluate(&Flow { src: src.into(), dst: dst.into(), protocol, src_port: 40000, dst_port: port }).is_allowed()
}

const BIG: &str = "10.0.0.1";
const SMALL: &str = "10.0.1.1";

#[test]
fn a_small_change_takes_effect_before_a_big_one_is_built() {
    // Before the big one's turn, while its rules are compiled, while another thread builds it.
    for steps in 0..4 {
        let mut engine = aside(10);
        engine.apply(cluster().into_iter().map(ObjectChange::Set));
        finish(&mut engine);
        assert!(allows(&engine, BIG, 50) && !allows(&engine, BIG, 60));
        engine.apply([ObjectChange::Set(long("big/long", 60))]);
        let mut job = None;
        for _ in 0..steps {
            job = job.or(engine.prepare_tables(25));
        }
        assert_eq!(job.is_some(), steps == 3, "60 rules are compiled in three steps");
        engine.apply([ObjectChange::Set(long("small/short", 2))]);
        assert!(allows(&engine, SMALL, 2), "in effect at once");
        assert!(allows(&engine, BIG, 50) && !allows(&engine, BIG, 60), "what was in effect for the others stays");
        assert_eq!((engine.is_waiting(&key("big/a")), engine.is_waiting(&key("small/a"))), (true, false));
        if let Some(job) = job {
            engine.finish_tables(job.build());
        }
        finish(&mut engine);
        assert!(allows(&engine, BIG, 60) && engine.waiting_pods() == 0);
    }
}

#[test]
fn a_new_pod_is_closed_until_its_tables_are_built() {
    let mut engine = aside(10);
    engine.apply(cluster().into_iter().map(ObjectChange::Set));
    assert!(!allows(&engine, BIG, 1) && engine.is_waiting(&key("big/a")), "no table has been built for it");
    finish(&mut engine);
    assert!(allows(&engine, BIG, 1));
    // Another pod of the same table is served at once; one of the same name is another pod.
    engine.apply([ObjectChange::Set(Object::Pod(pod("big/b", "", &["10.0.0.2"], &[])))]);
    assert!(allows(&engine, "10.0.0.2", 1));
    engine.apply([ObjectChange::Set(long("big/long", 51))]);
    assert!(allows(&engine, BIG, 1) && engine.is_waiting(&key("big/a")));
    let mut another = pod("big/a", "", &["10.0.0.1"], &[]);
    another.lifetime.created = Some(7);
    engine.apply([ObjectChange::Set(Object::Pod(another))]);
    assert!(!allows(&engine, BIG, 1), "what another pod of this name had is not its own");
    finish(&mut engine);
    assert!(allows(&engine, BIG, 51) && allows(&engine, "10.0.0.2", 51));
}

#[test]
fn a_policy_that_changes_without_end_still_comes_into_effect() {
    let mut engine = aside(10);
    engine.apply(cluster().into_iter().map(ObjectChange::Set));
    finish(&mut engine);
    let mut job: Option<TableJob> = None;
    let mut newest = 0;
    for version in 60..100 {
        // Each change comes before the tables of the one before are built.
        engine.apply([ObjectChange::Set(long("big/long", version))]);
        if let Some(job) = job.take() {
            engine.finish_tables(job.build());
        }
        let in_effect = (51..=version).filter(|port| allows(&engine, BIG, *port)).max().unwrap_or(0);
        assert!(in_effect >= newest, "never an older one: {in_effect} after {newest}");
        newest = in_effect;
        while job.is_none() {
            job = engine.prepare_tables(25);
        }
    }
    assert!(newest >= 90, "{newest}");
}

#[test]
fn namespaces_take_turns() {
    let mut engine = aside(10);
    let others = ["c", "d"].map(|name| [namespace(name, ""), long(&format!("{name}/long"), 50)]);
    engine.apply(cluster().into_iter().chain(others.into_iter().flatten()).map(ObjectChange::Set));
    let pods = [("c/a", "10.0.2.1"), ("d/a", "10.0.3.1")];
    engine.apply(pods.map(|(name, address)| ObjectChange::Set(Object::Pod(pod(name, "", &[address], &[])))));
    let mut order = Vec::new();
    for version in 51..60 {
        // The first namespace is never done.
        engine.apply([ObjectChange::Set(long("big/long", version))]);
        let job = std::iter::from_fn(|| Some(engine.prepare_tables(100))).flatten().next().expect("there is work");
        let waiting = |engine: &Engine| ["big/a", "c/a", "d/a"].map(|pod| engine.is_waiting(&key(pod)));
        let before = waiting(&engine);
        engine.apply([ObjectChange::Set(long("big/long", version + 100))]);
        engine.finish_tables(job.build());
        let after = waiting(&engine);
        order.extend([1, 2].into_iter().filter(|pod| before[*pod] && !after[*pod]));
    }
    assert_eq!(order, [1, 2], "both had their turns");
}

/// The verdicts on all queries.
fn verdicts(engine: &Engine, objects: &ClusterObjects) -> Vec<(Flow, PolicyVerdict)> {
    queries(objects.pods.len()).map(|flow| (flow, engine.evaluate(&flow))).collect()
}

/// On random histories with tables built aside in random steps: pods that do not wait have what they would have at once; those that do
/// are closed or have what was in effect; in the end all are as in a fresh start.
#[test]
fn tables_built_aside_are_those_built_at_once() {
    let mut runner = TestRunner::new(Config { cases: 96, failure_persistence: None, ..Config::default() });
    let steps = prop::collection::vec(0..6usize, 64);
    let result = runner.run(&(history(), 0..8usize, steps), |((start, batches), at_once, steps)| {
        let (mut objects, mut engine) = (ClusterObjects::default(), aside(at_once));
        let (mut steps, mut job): (_, Option<TableJob>) = (VecDeque::from(steps), None);
        for batch in std::iter::once(start.into_iter().map(ObjectChange::Set).collect()).chain(batches) {
            let mut changes = Vec::new();
            for change in batch {
                let change = without_conflict(&objects, change);
                objects.apply(&change);
                changes.push(change);
            }
            engine.apply(changes);
            for _ in 0..steps.pop_front().unwrap_or(0) {
                match job.take() {
                    Some(job) => {
                        let built: BuiltTables = job.build();
                        engine.finish_tables(built);
                    }
                    None => job = engine.prepare_tables(2),
                }
            }
            let mut fresh = Engine::new(EngineSettings::for_all_pods());
            fresh.apply(objects.objects().into_iter().map(ObjectChange::Set));
            let waits = |address: &std::net::IpAddr| {
                objects.pods.values().any(|pod| pod.addresses.contains(address) && engine.is_waiting(&pod.key))
            };
            for ((flow, ours), (_, theirs)) in verdicts(&engine, &objects).into_iter().zip(verdicts(&fresh, &objects)) {
                let kind = |side| std::mem::discriminant(&side);
                if !waits(&flow.src.into()) {
                    prop_assert_eq!(kind(ours.egress), kind(theirs.egress), "{:?}", flow);
                }
                if !waits(&flow.dst.into()) {
                    prop_assert_eq!(kind(ours.ingress), kind(theirs.ingress), "{:?}", flow);
                }
            }
        }
        if let Some(job) = job {
            engine.finish_tables(job.build());
        }
        finish(&mut engine);
        let mut fresh = Engine::new(EngineSettings::for_all_pods());
        fresh.apply(objects.objects().into_iter().map(ObjectChange::Set));
        prop_assert_eq!(outcome(&engine), outcome(&fresh));
        prop_assert_eq!(engine.waiting_pods(), 0);
        for flow in queries(objects.pods.len()) {
            let kinds =
                |verdict: PolicyVerdict| [verdict.egress, verdict.ingress].map(|side| std::mem::discriminant(&side));
            prop_assert_eq!(kinds(engine.evaluate(&flow)), kinds(fresh.evaluate(&flow)), "{:?}", flow);
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}
