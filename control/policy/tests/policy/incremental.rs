//! A history of changes gives the same result as a fresh start from its last state.

use penstock_dataplane::policy::Direction;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::state::PodId;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::agreement::{queries, without_conflict};
use super::build::*;
use super::naive::ClusterObjects;
use super::random::history;

/// The result of an engine, without the numbers that depend on its history.
pub(super) fn outcome(engine: &Engine) -> impl PartialEq + std::fmt::Debug + use<> {
    let (state, tables) = engine.statistics();
    let set = engine.policy_set().statistics();
    let mut rules: Vec<_> = engine
        .tables()
        .pods()
        .flat_map(|pod| [(pod, Direction::Egress), (pod, Direction::Ingress)])
        .map(|(pod, direction)| {
            let name = |pod: PodId| engine.state().pod(pod).map(|pod| pod.key.clone());
            (name(pod), direction, engine.tables().rules(pod, direction).map(<[_]>::to_vec))
        })
        .collect();
    rules.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
    (state, tables, (set.addresses, set.endpoints, set.tables, set.rules), rules)
}

fn run(settings: fn() -> EngineSettings, cases: u32) {
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let result = runner.run(&history(), |(start, batches)| {
        let mut objects = ClusterObjects::default();
        let mut engine = Engine::new(settings());
        for batch in std::iter::once(start.into_iter().map(ObjectChange::Set).collect()).chain(batches) {
            let mut changes = Vec::new();
            for change in batch {
                let change = without_conflict(&objects, change);
                objects.apply(&change);
                changes.push(change);
            }
            engine.apply(changes);
            let mut fresh = Engine::new(settings());
            fresh.apply(objects.objects().into_iter().map(ObjectChange::Set));
            prop_assert_eq!(outcome(&engine), outcome(&fresh));
            for flow in queries(objects.pods.len()) {
                let (ours, fresh) = (engine.explain(&flow), fresh.explain(&flow));
                let sides = |it: &penstock_policy::engine::Explanation| {
                    let of = |side: &penstock_policy::engine::DirectionExplanation| {
                        (std::mem::discriminant(&side.verdict), side.rule.clone(), side.nearest.clone())
                    };
                    (of(&it.egress), of(&it.ingress))
                };
                prop_assert_eq!(sides(&ours), sides(&fresh), "{:?}", flow);
                prop_assert_eq!(ours.egress.verdict.rule().is_some(), ours.egress.rule.is_some(), "{:?}", flow);
            }
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn incremental_updates_and_a_fresh_start_give_equal_tables() {
    run(EngineSettings::for_all_pods, 64);
}

#[test]
fn updates_and_a_fresh_start_give_one_node_equal_tables() {
    run(|| EngineSettings::for_node("n1"), 64);
}

#[test]
fn deleting_all_objects_leaves_empty_tables() {
    let mut runner = TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
    let result = runner.run(&history(), |(start, _)| {
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(start.iter().cloned().map(ObjectChange::Set));
        engine.apply(start.iter().map(|object| ObjectChange::Delete(object.reference())));
        prop_assert_eq!(outcome(&engine), outcome(&Engine::new(EngineSettings::for_all_pods())));
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_pods_new_labels_rebuild_only_affected_tables() {
    let db = policy("shop/db", "app=db", Some(vec![rule(&["pods app=web"], &["tcp/1"])]), None);
    let mut cluster = Cluster::new([
        namespace("shop", ""),
        Object::Pod(pod("shop/db", "app=db", &["10.0.0.1"], &[])),
        Object::Pod(pod("shop/web", "app=web", &["10.0.0.2"], &[])),
        Object::Pod(pod("shop/job", "app=job", &["10.0.0.3"], &[])),
        db,
    ]);
    let before = cluster.engine.policy_set().clone();
    cluster.set(Object::Pod(pod("shop/job", "app=web", &["10.0.0.3"], &[])));
    cluster.check(&[("shop/job", "shop/db", "tcp/1", true)]);
    let probe = cluster.flow("shop/job", "shop/db", "tcp/1");
    assert!(!before.evaluate(&probe).is_allowed(), "the set before stays as it was");
    let (_, tables) = cluster.engine.statistics();
    assert_eq!((tables.tables, tables.identities), (1, 2), "the pod has an identity that was there");
    assert!(!cluster.engine.apply([ObjectChange::Set(Object::Pod(pod("shop/job", "app=web", &["10.0.0.3"], &[])))]));
}
