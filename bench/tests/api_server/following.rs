//! Behaviour required with every API server.

use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{ApiServer, Resource};
use penstock_sources::ObjectKind;

use serde_json::json;

use crate::api_server::follower::Follower;
use crate::api_server::objects::{namespace, numbered_pod, pod, policy, shop};

const WEB: &str = "10.1.0.1";
const DB: &str = "10.1.0.2";
const JOB: &str = "10.1.0.3";

#[test]
fn the_shipped_role_suffices_to_follow_policies_into_the_tables() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    let reached = |follower: &Follower| [(WEB, DB), (JOB, DB), (DB, JOB)].map(|(from, to)| follower.reaches(from, to));
    assert_eq!(reached(&follower), [true, false, true]);
    // Updated: another pod is admitted.
    server.admin().replace(&policy("shop", "db", "job")).unwrap();
    follower.catch_up(&server);
    assert_eq!(reached(&follower), [false, true, true]);
    // Created: one more policy that isolates.
    server.admin().create(&policy("shop", "job", "web")).unwrap();
    follower.catch_up(&server);
    assert_eq!(reached(&follower), [false, true, false]);
    // Deleted: both pods are open again.
    for to in ["db", "job"] {
        server.admin().delete(&policy("shop", to, "web")).unwrap();
    }
    follower.catch_up(&server);
    assert_eq!(reached(&follower), [true; 3]);
    // A label makes a policy select a pod, or no longer select it.
    server.admin().create(&policy("shop", "db", "web")).unwrap();
    let mut job = pod("shop", "job", JOB);
    job["metadata"]["labels"] = json!({ "app": "web" });
    server.admin().replace(&job).unwrap();
    follower.catch_up(&server);
    assert_eq!(reached(&follower), [true, true, true]);
    assert_eq!(follower.health(ObjectKind::Pod).outages, 0);
}

#[test]
fn a_staged_policy_counts_only_without_its_annotation() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    assert!(!follower.reaches(JOB, DB));
    for (annotations, is_enforced) in [
        (json!({ "policy.penstock.dev/staged": "true" }), false),
        (json!({ "policy.penstock.dev/staged": "false" }), true),
        (json!({ "policy.penstock.dev/staged-for": "other" }), false),
        (json!({ "policy.penstock.dev/staged-delete": "true" }), true),
        (json!({}), true),
    ] {
        let mut annotated = policy("shop", "db", "web");
        annotated["metadata"]["annotations"] = annotations.clone();
        server.admin().replace(&annotated).unwrap();
        follower.catch_up(&server);
        assert_eq!(!follower.reaches(JOB, DB), is_enforced, "{annotations}");
    }
}

#[test]
fn a_version_is_known_once_its_changes_are_worked_on() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    let version_of = |resource: Resource, name: &str| -> u64 {
        let found = server.admin().list(resource).unwrap();
        let found = found.iter().find(|object| object["metadata"]["name"] == name).unwrap();
        found["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
    };
    server.admin().replace(&policy("shop", "db", "job")).unwrap();
    let changed = version_of(Resource::NetworkPolicies, "only-to-db");
    let known = |follower: &Follower, kind| follower.health(kind).version.unwrap();
    // The batch is taken; that it is worked on is said by asking for the next.
    follower.catch_up(&server);
    assert!(known(&follower, ObjectKind::NetworkPolicy) < changed);
    follower.listen(Duration::from_millis(50));
    assert!(known(&follower, ObjectKind::NetworkPolicy) >= changed);
    // A version that changes nothing counts, too.
    let mut web = pod("shop", "web", WEB);
    web["status"]["message"] = json!("ready");
    server.admin().set_status(&web).unwrap();
    let unchanged = version_of(Resource::Pods, "web");
    follower.until("the version of its status", |health| health.version.is_some_and(|known| known >= unchanged));
}

#[test]
fn changes_without_effect_on_policy_are_not_reported() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    let (batches, events) = (follower.batches, follower.health(ObjectKind::Pod).events);
    for message in ["a", "b", "c"] {
        let mut web = pod("shop", "web", WEB);
        web["status"]["message"] = json!(message);
        server.admin().set_status(&web).unwrap();
    }
    follower.until("three events more", |health| health.events >= events + 3);
    follower.listen(Duration::from_millis(100));
    assert_eq!(follower.batches, batches);
}

#[test]
fn after_a_server_restart_following_resumes_without_loss() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    let (batches, known) = (follower.batches, follower.objects().clone());
    server.stop();
    follower.until("lost", |health| !health.connected);
    follower.listen(Duration::from_millis(500));
    assert_eq!((follower.batches, follower.objects()), (batches, &known), "what is known stays");
    assert!(follower.health(ObjectKind::Pod).synced);
    server.resume().unwrap();
    server.admin().delete(&pod("shop", "web", WEB)).unwrap();
    server.admin().create(&pod("shop", "new", "10.1.0.9")).unwrap();
    server.admin().create(&policy("shop", "new", "job")).unwrap();
    follower.catch_up(&server);
    follower.until("followed again", |health| health.connected);
    assert_eq!(follower.health(ObjectKind::Pod).outages, 1, "one outage, however many tries it took");
}

#[test]
fn after_a_compaction_all_is_listed_and_what_is_gone_removed() {
    let server = ApiServer::start(None).unwrap();
    shop(&server);
    let mut follower = Follower::start(&server);
    follower.catch_up(&server);
    let lists = follower.health(ObjectKind::Pod).lists;
    server.stop();
    follower.until("lost", |health| !health.connected);
    // While the server is unreachable, the cluster changes and its history is compacted.
    server.resume().unwrap();
    server.admin().delete(&pod("shop", "web", WEB)).unwrap();
    server.admin().replace(&policy("shop", "db", "job")).unwrap();
    server.compact().unwrap();
    server.stop();
    server.resume().unwrap();
    server.admin().create(&pod("shop", "late", "10.1.0.8")).unwrap();
    follower.catch_up(&server);
    follower.until("followed again", |health| health.connected);
    assert!(!follower.reaches(WEB, DB) && follower.reaches(JOB, DB));
    eprintln!("pods were listed {} times after the first", follower.health(ObjectKind::Pod).lists - lists);
}

#[test]
fn two_thousand_simultaneous_pods_arrive_in_few_batches() {
    let server = ApiServer::start(None).unwrap();
    server.admin().create(&namespace("many")).unwrap();
    let mut follower = Follower::start(&server);
    let pods: Vec<_> = (0..2_000).map(|number| numbered_pod("many", number)).collect();
    let started = Instant::now();
    let creating = {
        let admin = server.admin().clone();
        let pods = pods.clone();
        std::thread::spawn(move || admin.create_all(&pods))
    };
    follower.until("2,000 pods", |health| health.objects >= 2_000);
    creating.join().unwrap().unwrap();
    let created = started.elapsed();
    let batches = follower.batches + follower.catch_up(&server);
    eprintln!(
        "2,000 pods created in {created:.1?}, known {:.1?} later, {batches} batches, {} events",
        started.elapsed() - created,
        follower.health(ObjectKind::Pod).events
    );
    server.admin().delete_all(&pods).unwrap();
    follower.catch_up(&server);
    assert_eq!(follower.health(ObjectKind::Pod).objects, 0);
}
