use penstock_admin::types::{SourceStatus, StaleObjects};

use super::*;
use crate::fake::{ASKING, FakeCluster, Reply};
use crate::status::tests::{pod, status};

const POLICIES: &str = "networkpolicies";

fn knowing(version: Option<u64>, in_force: bool) -> Status {
    status(|it| {
        it.in_force = in_force;
        it.source.insert(POLICIES.to_owned(), SourceStatus { version, ..SourceStatus::default() });
    })
}

fn daemon(node: &str) -> Daemon {
    Daemon { node: node.to_owned(), pod: format!("penstock-{node}") }
}

#[test]
fn a_node_is_enforced_by_an_answer_after_the_publication() {
    let goal = Goal { versions: BTreeMap::from([(POLICIES.to_owned(), 70)]), pod: None };
    let mut seen = Seen::default();
    let restarted = |status: Status| Status { process: 8, ..status };
    let stale = |mut status: Status| {
        status.stale = Some(StaleObjects { recorded: "2026-11-22T10:00:00Z".to_owned(), objects: 3 });
        status
    };
    for (number, (status, expected)) in [
        (knowing(None, true), Some("does not say which networkpolicies")),
        (knowing(Some(69), true), Some("knows networkpolicies up to version 69, and not 70 yet")),
        (knowing(Some(70), true), Some("is not in effect on every worker yet")),
        (knowing(Some(71), false), Some("is not in effect on every worker yet")),
        (knowing(Some(71), true), None),
        (restarted(knowing(Some(90), true)), Some("is not in effect on every worker yet")),
        (restarted(stale(knowing(Some(90), true))), Some("has the objects of 2026-11-22T10:00:00Z")),
        (restarted(knowing(Some(90), true)), None),
    ]
    .into_iter()
    .enumerate()
    {
        match (seen.state(&goal, &daemon("a"), &status), expected) {
            (State::Enforced, None) => {}
            (State::NotYet(why), Some(start)) => assert!(why.starts_with(start), "{number}: {why}"),
            (state, expected) => panic!("{number}: {state:?}, and not {expected:?}"),
        }
    }
}

#[test]
fn a_pod_is_enforced_by_its_own_node_and_known_by_all() {
    let name: PodName = "shop/web".parse().unwrap();
    let goal = Goal { versions: BTreeMap::from([("pods".to_owned(), 5)]), pod: Some((name, "a".to_owned())) };
    let with = |pods: Vec<penstock_admin::types::PodStatus>| {
        status(|it| {
            it.pods = pods;
            it.source.insert("pods".to_owned(), SourceStatus { version: Some(5), ..SourceStatus::default() });
        })
    };
    let mut waiting = pod("shop/web", false);
    waiting.waiting = Some("no address".to_owned());
    let mut seen = Seen::default();
    seen.state(&goal, &daemon("a"), &with(Vec::new()));
    seen.state(&goal, &daemon("b"), &with(Vec::new()));
    for (pods, expected) in [
        (vec![], "does not have pod shop/web yet"),
        (vec![waiting], "pod shop/web is not attached: no address"),
        (vec![pod("shop/web", false)], "pod shop/web is not enforced yet"),
    ] {
        assert_eq!(seen.state(&goal, &daemon("a"), &with(pods)), State::NotYet(expected.to_owned()));
    }
    assert_eq!(seen.state(&goal, &daemon("a"), &with(vec![pod("shop/web", true)])), State::Enforced);
    assert_eq!(seen.state(&goal, &daemon("b"), &with(Vec::new())), State::Enforced);
}

fn arguments(timeout: Duration) -> Args {
    Args { target: None, condition: Condition::Enforced, timeout, json: false }
}

#[tokio::test]
async fn waiting_ends_with_the_last_node_and_names_the_missing() {
    let reply = |version, in_force| Reply::ok(json(&knowing(Some(version), in_force)));
    let cluster = |b: Vec<Reply>| {
        let mut cluster = FakeCluster::new([("a", vec![reply(9, true)]), ("b", b)]);
        cluster.versions.insert(POLICIES.to_owned(), 9);
        cluster
    };
    let late = cluster(vec![reply(8, true), reply(9, false), reply(9, true)]);
    run(&late, ASKING, arguments(Duration::from_secs(60))).await.unwrap();
    let never = cluster(vec![reply(8, true)]);
    let Err(Failure::Failed(error)) = run(&never, ASKING, arguments(Duration::from_secs(3))).await else { panic!() };
    let lines = error.to_string();
    assert!(
        lines.starts_with(
            "all policies: enforced on 1 of 2 nodes after 3 s\nnode b: knows networkpolicies up to version 8"
        ),
        "{lines}"
    );
    let away = cluster(vec![Reply::Hangs]);
    let Err(Failure::Partial(lines)) = run(&away, ASKING, arguments(Duration::from_secs(3))).await else { panic!() };
    assert!(lines[1].starts_with("node b: no answer within"), "{lines:?}");
}

#[test]
fn what_can_be_waited_for_is_named_as_kubectl_does() {
    for (text, expected) in [
        ("networkpolicy/shop/db", "networkpolicy/shop/db"),
        ("netpol/shop/db", "networkpolicy/shop/db"),
        ("pods/shop/web-1", "pod/shop/web-1"),
        ("clusternetworkpolicy/tenants", "clusternetworkpolicy/tenants"),
    ] {
        assert_eq!(text.parse::<Target>().unwrap().to_string(), expected);
    }
    for text in ["", "db", "networkpolicy/db", "service/shop/db", "pod/a/b/c", "cnp/", "pod//x"] {
        assert!(text.parse::<Target>().unwrap_err().contains("write networkpolicy/NAMESPACE/NAME"), "{text}");
    }
}
