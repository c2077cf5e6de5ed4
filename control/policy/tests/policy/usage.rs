//! Each rule's hits: those of its tables, whatever becomes of them.

use std::collections::BTreeMap;

use penstock_dataplane::packet::Flow;
use penstock_policy::compile::Provenance;
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::agreement::{queries, without_conflict};
use super::build::*;
use super::naive::ClusterObjects;
use super::random::history;

const WORKERS: usize = 3;

fn counting() -> Engine {
    let mut engine = Engine::new(EngineSettings::for_all_pods());
    engine.count_use(WORKERS);
    engine
}

/// Hits by the rule's name.
fn taken(engine: &mut Engine, into: &mut BTreeMap<String, u64>) {
    for used in engine.take_use() {
        *into.entry(used.source.name().to_string()).or_default() += used.hits;
    }
}

/// A rule's name, without the peer and the port through which it matched.
fn rule_of(provenance: &Provenance) -> String {
    let direction = match provenance.direction {
        penstock_dataplane::policy::Direction::Egress => "egress",
        penstock_dataplane::policy::Direction::Ingress => "ingress",
    };
    match &provenance.policy {
        penstock_policy::compile::PolicyName::Cluster { tier, name } => {
            format!("{tier}-{direction}-{name}-{}", provenance.rule)
        }
        penstock_policy::compile::PolicyName::Network(key) => {
            format!("{}-{direction}-{}-{}", key.namespace, key.name, provenance.rule)
        }
    }
}

#[test]
fn hits_are_those_of_the_deciding_rules_on_random_histories() {
    let mut runner = TestRunner::new(Config { cases: 40, failure_persistence: None, ..Config::default() });
    let result = runner.run(&(history(), 1..4usize), |((start, batches), between)| {
        let (mut objects, mut engine) = (ClusterObjects::default(), counting());
        let (mut expected, mut found) = (BTreeMap::new(), BTreeMap::new());
        // A worker goes on with the set before for a while.
        let mut before = engine.policy_set().clone();
        let batches = std::iter::once(start.into_iter().map(ObjectChange::Set).collect()).chain(batches);
        for (number, batch) in batches.enumerate() {
            let mut changes: Vec<ObjectChange> = Vec::new();
            for change in batch {
                let change = without_conflict(&objects, change);
                objects.apply(&change);
                changes.push(change);
            }
            let flows: Vec<Flow> = queries(number).step_by(7).collect();
            // The names of the rules as they are before the change.
            for (place, flow) in flows.iter().enumerate() {
                let explained = engine.explain(flow);
                let rules = [explained.egress.rule, explained.ingress.rule];
                rules.iter().flatten().for_each(|rule| *expected.entry(rule_of(rule)).or_insert(0) += 1);
                let set = engine.policy_set();
                set.count(place % WORKERS, &set.evaluate(flow));
            }
            let late = flows.first().copied();
            before = engine.policy_set().clone();
            engine.apply(changes);
            if let Some(flow) = late {
                let verdict = before.evaluate(&flow);
                before.count(0, &verdict);
                let rules = [verdict.egress.rule(), verdict.ingress.rule()].into_iter().flatten();
                rules.for_each(|rule| {
                    let name = before.rule_name(rule).expect("the set has its rules").to_string();
                    *expected.entry(name).or_insert(0) += 1;
                });
            }
            if number % between == 0 {
                taken(&mut engine, &mut found);
            }
        }
        drop(before);
        taken(&mut engine, &mut found);
        taken(&mut engine, &mut found);
        prop_assert_eq!(found, expected);
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn rules_that_pass_flows_on_do_not_decide() {
    let mut engine = counting();
    let rules = |engine: &Engine| {
        let mut rules: Vec<_> = engine.deciding_rules().map(|rule| (rule.name().to_string(), rule.content())).collect();
        rules.sort();
        rules
    };
    let ordered = |action| vec![ordered(action, &["pods app=web"], &["tcp/1"])];
    engine.apply([
        ObjectChange::Set(policy("shop/db", "app=db", Some(vec![rule(&[], &["tcp/1"])]), Some(vec![]))),
        ObjectChange::Set(cluster_policy("Admin 1 first", "", ordered(RuleAction::Pass), ordered(RuleAction::Deny))),
    ]);
    let before = rules(&engine);
    assert_eq!(
        before.iter().map(|rule| rule.0.as_str()).collect::<Vec<_>>(),
        ["Admin-egress-first-0", "shop-ingress-db-0"]
    );
    engine.apply([ObjectChange::Set(policy("shop/db", "app=db", Some(vec![rule(&[], &["tcp/2"])]), None))]);
    let after = rules(&engine);
    assert_eq!((after[0].clone(), after[1].0.as_str()), (before[0].clone(), "shop-ingress-db-0"));
    assert_ne!(after[1].1, before[1].1);
}
