//! How policies ask for records of their decisions.

use penstock_dataplane::policy::RuleAction;
use penstock_policy::model::{Object, PolicyLog, PolicyNotes};

use super::build::*;

fn noted(mut object: Object, log: PolicyLog) -> Object {
    let wanted = PolicyNotes { log, deny_answer: None };
    match &mut object {
        Object::NetworkPolicy(policy) => policy.notes = wanted,
        Object::ClusterNetworkPolicy(policy) => policy.notes = wanted,
        other => panic!("{other:?}"),
    }
    object
}

#[test]
fn a_connection_is_recorded_for_the_policies_that_decide_it() {
    use PolicyLog::{All, Allowed, Denied, Off};
    let objects = |network: PolicyLog, other: PolicyLog, cluster: PolicyLog| {
        let rules = vec![
            ordered(RuleAction::Deny, &[], &["tcp/22"]),
            ordered(RuleAction::Pass, &[], &["tcp/80"]),
            ordered(RuleAction::Accept, &[], &["tcp/9090"]),
        ];
        [
            namespace("shop", ""),
            Object::Pod(pod("shop/db", "app=db", &["10.0.1.2"], &[])),
            Object::Pod(pod("shop/web", "app=web", &["10.0.1.1"], &[])),
            noted(policy("shop/db", "app=db", Some(vec![rule(&[], &["tcp/80"])]), None), network),
            noted(policy("shop/other", "app=db", Some(vec![]), None), other),
            noted(cluster_policy("Admin 10 first", "app=db", rules, vec![]), cluster),
        ]
    };
    let (of_db, of_other, of_first) = ("shop/db", "shop/other", "Admin/first");
    for (logs, expected) in [
        ((Off, Off, Off), [&[][..], &[], &[], &[]]),
        // In the order of the ports: allowed by a rule, by none, denied and accepted by a ClusterNetworkPolicy.
        ((All, All, All), [&[of_db], &[of_db, of_other], &[of_first], &[of_first]]),
        ((Allowed, Allowed, Allowed), [&[of_db], &[], &[], &[of_first]]),
        ((Denied, Off, Denied), [&[], &[of_db], &[of_first], &[]]),
        ((Off, Denied, Off), [&[], &[of_other], &[], &[]]),
    ] {
        let (network, other, cluster) = logs;
        let all = Cluster::new(objects(network, other, cluster));
        for (port, expected) in ["tcp/80", "tcp/5432", "tcp/22", "tcp/9090"].into_iter().zip(expected) {
            let flow = all.flow("shop/web", "shop/db", port);
            let verdict = all.engine.evaluate(&flow);
            let found = all.engine.policy_set().recorded_for(&flow, &verdict);
            let found: Vec<&str> = found.iter().map(|policy| &**policy).collect();
            assert_eq!(found, expected, "{logs:?}, {port}");
        }
    }
}
