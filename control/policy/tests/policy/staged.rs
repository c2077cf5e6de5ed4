//! Staged policies: the verdicts before promotion are those without them, the verdicts as promoted those after it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use penstock_policy::staging::{PolicyReading, StagedProblem};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

use super::agreement::{queries, without_conflict};
use super::build::*;
use super::naive::{ClusterObjects, NaiveVerdict};
use super::random::history;

/// A cluster once everything that is staged is promoted, by one pass over its objects.
fn promoted(objects: &ClusterObjects) -> ClusterObjects {
    let mut after = objects.clone();
    after.policies.clear();
    after.cluster_policies.clear();
    // Edits last, and the first of two by name at the very end: so it is what stays.
    for (key, policy) in &objects.policies {
        if matches!(policy.staging, Staging::InForce | Staging::New) {
            after.policies.insert(key.clone(), policy.clone());
        }
    }
    for (key, policy) in objects.policies.iter().rev() {
        if let Staging::Replaces(name) = &policy.staging {
            let target = ObjectKey { namespace: key.namespace.clone(), name: name.clone() };
            after.policies.insert(target.clone(), NetworkPolicy { key: target, ..policy.clone() });
        }
    }
    for (name, policy) in &objects.cluster_policies {
        if matches!(policy.staging, Staging::InForce | Staging::New) {
            after.cluster_policies.insert(name.clone(), policy.clone());
        }
    }
    for policy in objects.cluster_policies.values().rev() {
        if let Staging::Replaces(name) = &policy.staging {
            after.cluster_policies.insert(name.clone(), ClusterNetworkPolicy { name: name.clone(), ..policy.clone() });
        }
    }
    after
}

/// The same cluster as it is in effect.
fn in_force(objects: &ClusterObjects) -> ClusterObjects {
    let mut now = objects.clone();
    now.policies.retain(|_, policy| matches!(policy.staging, Staging::InForce | Staging::Deleted));
    now.cluster_policies.retain(|_, policy| matches!(policy.staging, Staging::InForce | Staging::Deleted));
    now
}

/// The objects without their annotations, as a user would apply them.
fn plain(objects: &ClusterObjects) -> Vec<ObjectChange> {
    let mut objects = objects.clone();
    objects.policies.values_mut().for_each(|policy| policy.staging = Staging::InForce);
    objects.cluster_policies.values_mut().for_each(|policy| policy.staging = Staging::InForce);
    objects.objects().into_iter().map(ObjectChange::Set).collect()
}

fn some_staging() -> impl Strategy<Value = Staging> {
    prop_oneof![
        4 => Just(Staging::InForce),
        3 => Just(Staging::New),
        3 => select(&["s", "t", "a", "b", "c", "nobody"][..]).prop_map(|name| Staging::Replaces(name.to_owned())),
        2 => Just(Staging::Deleted),
    ]
}

/// Gives the policies of a history these annotations, one after the other.
struct Annotations {
    stagings: Vec<Staging>,
    next: usize,
}

impl Annotations {
    fn annotate(&mut self, change: ObjectChange) -> ObjectChange {
        let ObjectChange::Set(mut object) = change else { return change };
        let (own, staging) = match &mut object {
            Object::NetworkPolicy(policy) => (policy.key.name.clone(), &mut policy.staging),
            Object::ClusterNetworkPolicy(policy) => (policy.name.clone(), &mut policy.staging),
            _ => return ObjectChange::Set(object),
        };
        let next = self.stagings[self.next % self.stagings.len()].clone();
        self.next += 1;
        // The annotation of a policy that names itself is refused before it gets here.
        *staging = if next == Staging::Replaces(own) { Staging::New } else { next };
        ObjectChange::Set(object)
    }
}

fn naive(objects: &ClusterObjects, flow: &penstock_dataplane::packet::Flow) -> (NaiveVerdict, NaiveVerdict) {
    objects.evaluate(flow, &mut BTreeSet::new())
}

#[test]
fn shadow_verdicts_are_those_after_promotion() {
    let differing = RefCell::new(BTreeMap::new());
    let mut runner = TestRunner::new(Config { cases: 60, failure_persistence: None, ..Config::default() });
    let histories = (history(), prop::collection::vec(some_staging(), 1..40));
    let result = runner.run(&histories, |((start, batches), stagings)| {
        let mut annotations = Annotations { stagings, next: 0 };
        let mut objects = ClusterObjects::default();
        let mut now = Engine::new(EngineSettings::for_all_pods());
        let mut shadow = Engine::reading(EngineSettings::for_all_pods(), PolicyReading::Promoted);
        for batch in std::iter::once(start.into_iter().map(ObjectChange::Set).collect()).chain(batches) {
            let mut changes = Vec::new();
            for change in batch {
                let change = annotations.annotate(without_conflict(&objects, change));
                objects.apply(&change);
                changes.push(change);
            }
            now.apply(changes.clone());
            shadow.apply(changes);
            let (before, after) = (in_force(&objects), promoted(&objects));
            let mut applied = Engine::new(EngineSettings::for_all_pods());
            applied.apply(plain(&after));
            for flow in queries(objects.pods.len()).step_by(3) {
                let verdicts = [now.evaluate(&flow), shadow.evaluate(&flow)];
                let seen = verdicts.map(|verdict| (side(verdict.egress), side(verdict.ingress)));
                prop_assert_eq!(seen, [naive(&before, &flow), naive(&after, &flow)], "{:?}", flow);
                let (shadowed, applied) = (shadow.explain(&flow), applied.explain(&flow));
                prop_assert!(shadowed.is_same(&applied), "{:?}: {:?} {:?}", flow, shadowed, applied);
                let kind = verdicts.map(|verdict| verdict.is_allowed());
                *differing.borrow_mut().entry(kind).or_insert(0u64) += 1;
            }
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    let differing = differing.into_inner();
    for kind in [[true, true], [true, false], [false, true], [false, false]] {
        assert!(differing.contains_key(&kind), "no flow went from {} to {}: {differing:?}", kind[0], kind[1]);
    }
}

#[test]
fn an_engine_from_the_objects_of_another_is_equal_to_it() {
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    let histories = (history(), prop::collection::vec(some_staging(), 1..40));
    let result = runner.run(&histories, |((start, batches), stagings)| {
        let mut annotations = Annotations { stagings, next: 0 };
        let mut objects = ClusterObjects::default();
        let mut now = Engine::new(EngineSettings::for_all_pods());
        let mut followed = Engine::reading(EngineSettings::for_all_pods(), PolicyReading::Promoted);
        let changes = start.into_iter().map(ObjectChange::Set).chain(batches.into_iter().flatten());
        for change in changes {
            let change = annotations.annotate(without_conflict(&objects, change));
            objects.apply(&change);
            now.apply([change.clone()]);
            followed.apply([change]);
        }
        let mut read = Engine::reading(EngineSettings::for_all_pods(), PolicyReading::Promoted);
        let mut give = |objects: Vec<Object>| read.apply(objects.into_iter().map(ObjectChange::Set));
        give(now.state().objects_without_pods());
        give(now.staged().cloned().collect());
        let mut next = Some(0);
        while let Some(first) = next {
            let (pods, rest) = now.state().pods_from(first, 2);
            prop_assert!(pods.len() <= 2);
            give(pods);
            next = rest;
        }
        for flow in queries(objects.pods.len()).step_by(5) {
            prop_assert!(read.explain(&flow).is_same(&followed.explain(&flow)), "{:?}", flow);
        }
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

fn cluster() -> Vec<Object> {
    vec![
        namespace("shop", ""),
        Object::Pod(pod("shop/db", "app=db", &["10.0.0.1"], &[])),
        Object::Pod(pod("shop/web", "app=web", &["10.0.0.2"], &[])),
        policy("shop/db", "app=db", Some(vec![rule(&["pods app=web"], &["tcp/1"])]), None),
    ]
}

fn staged(policy: Object, staging: Staging) -> Object {
    match policy {
        Object::NetworkPolicy(policy) => Object::NetworkPolicy(NetworkPolicy { staging, ..policy }),
        other => other,
    }
}

fn engines(objects: &[Object]) -> [Engine; 2] {
    [PolicyReading::InForce, PolicyReading::Promoted].map(|reading| {
        let mut engine = Engine::reading(EngineSettings::for_all_pods(), reading);
        engine.apply(objects.iter().cloned().map(ObjectChange::Set));
        engine
    })
}

/// Whether web reaches these ports of db, before and after promotion.
fn reaches(engines: &[Engine; 2], ports: [u16; 2]) -> [[bool; 2]; 2] {
    let flow = |dst_port| penstock_dataplane::packet::Flow {
        src: "10.0.0.2".parse::<std::net::IpAddr>().unwrap().into(),
        dst: "10.0.0.1".parse::<std::net::IpAddr>().unwrap().into(),
        protocol: penstock_dataplane::packet::Protocol::TCP,
        src_port: 9,
        dst_port,
    };
    engines.each_ref().map(|engine| ports.map(|port| engine.evaluate(&flow(port)).is_allowed()))
}

#[test]
fn a_staged_change_does_not_touch_the_tables_in_force() {
    let edit = policy("shop/edit", "app=db", Some(vec![rule(&[], &["tcp/2"])]), None);
    let deny = policy("shop/deny", "", Some(vec![]), Some(vec![]));
    let [mut now, _] = engines(&cluster());
    for change in [
        staged(edit.clone(), Staging::Replaces("db".into())),
        staged(deny, Staging::New),
        staged(cluster().pop().unwrap(), Staging::Deleted),
    ] {
        assert!(!now.apply([ObjectChange::Set(change.clone())]), "{change:?} would publish an epoch");
    }
    assert!(!now.apply([ObjectChange::Delete(edit.reference())]));
    assert!(!now.set_trial(&[edit]), "a trial is for the engine as promoted");
    assert_eq!(now.staged().count(), 2);
}

#[test]
fn each_annotation_and_each_file_of_a_trial_has_its_meaning() {
    let edit = policy("shop/edit", "app=db", Some(vec![rule(&[], &["tcp/2"])]), None);
    let with = |more: Object| engines(&[cluster(), vec![more]].concat());
    let as_before = [true, false];
    assert_eq!(reaches(&with(edit.clone()), [1, 2]), [[true, true]; 2], "in effect, it adds to the other");
    let new = with(staged(edit.clone(), Staging::New));
    assert_eq!(reaches(&new, [1, 2]), [as_before, [true, true]]);
    let replaced = with(staged(edit.clone(), Staging::Replaces("db".into())));
    assert_eq!(reaches(&replaced, [1, 2]), [as_before, [false, true]]);
    let deleted = with(staged(cluster().pop().unwrap(), Staging::Deleted));
    assert_eq!(reaches(&deleted, [1, 2]), [as_before, [true, true]]);

    let mut engines = engines(&cluster());
    let named_db = policy("shop/db", "app=db", Some(vec![rule(&[], &["tcp/2"])]), None);
    for (files, after) in [
        (vec![named_db], [false, true]),
        (vec![staged(edit.clone(), Staging::Replaces("db".into()))], [false, true]),
        (vec![edit], [true, true]),
        (vec![staged(cluster().pop().unwrap(), Staging::Deleted)], [true, true]),
        (vec![], as_before),
    ] {
        for engine in &mut engines {
            engine.set_trial(&files);
        }
        assert_eq!(reaches(&engines, [1, 2]), [as_before, after], "{files:?}");
    }
}

#[test]
fn staged_policies_for_none_or_the_same_are_problems() {
    let edit = |name: &str, target: &str| {
        let edit = policy(&format!("shop/{name}"), "app=db", Some(vec![]), None);
        staged(edit, Staging::Replaces(target.into()))
    };
    let [_, mut shadow] = engines(&[cluster(), vec![edit("b", "db"), edit("a", "db"), edit("c", "gone")]].concat());
    let problems = shadow.staged_problems();
    let [StagedProblem::SameTarget { .. }, StagedProblem::NoTarget { .. }] = &problems[..] else {
        panic!("{problems:?}");
    };
    let texts: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert!(texts[0].contains("shop/b") && texts[0].contains("shop/a, which counts"), "{texts:?}");
    assert!(texts[1].contains("shop/gone, which does not exist"), "{texts:?}");
    shadow.apply(["a", "c"].map(|name| ObjectChange::Delete(edit(name, "db").reference())));
    assert_eq!(shadow.staged_problems(), []);
}
