//! Events about policies that are not understood. Only the server in this process takes a policy with an unknown field.

use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{ApiServer, Resource};
use penstock_sources::ObjectKind;
use serde_json::{Value, json};

use crate::api_server::follower::Follower;
use crate::api_server::objects::{policy, shop};

fn server() -> ApiServer {
    ApiServer::in_process(true, None).unwrap()
}

/// A policy with a peer that no version of the API has.
fn unknown(field: &str) -> Value {
    let mut policy = policy("shop", "db", "job");
    policy["spec"]["ingress"][0]["from"][0] = json!({ field: {} });
    policy
}

/// Waits until there are so many Events; returns them by their messages.
fn events(server: &ApiServer, followers: &mut [Follower], count: usize) -> Vec<Value> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        followers.iter_mut().for_each(|follower| follower.listen(Duration::from_millis(50)));
        let mut events = server.admin().list(Resource::Events).unwrap();
        if events.len() >= count {
            events.sort_by_key(|event| event["message"].to_string());
            return events;
        }
        assert!(Instant::now() < deadline, "{} events: {events:#?}", events.len());
    }
}

#[test]
fn all_nodes_write_one_event_at_a_policy_that_is_not_understood() {
    let server = server();
    shop(&server);
    let mut followers = ["a", "b", "c"].map(|node| Follower::reporting(&server, Some(node)));
    server.admin().replace(&unknown("firstSelector")).unwrap();
    let first = events(&server, &mut followers, 1);
    server.admin().replace(&unknown("secondSelector")).unwrap();
    events(&server, &mut followers, 2);
    // Longer than any of them waits before it writes.
    followers.iter_mut().for_each(|follower| follower.listen(Duration::from_secs(2)));
    let both = events(&server, &mut followers, 2);
    assert_eq!(both.len(), 2, "{both:#?}");
    let db = server.admin().list(Resource::NetworkPolicies).unwrap();
    let db = db.iter().find(|policy| policy["metadata"]["name"] == both[0]["involvedObject"]["name"]).unwrap();
    for (event, field) in both.iter().zip(["firstSelector", "secondSelector"]) {
        assert!(event["message"].as_str().unwrap().contains(field), "{event:#}");
        assert_eq!(event["involvedObject"]["uid"], db["metadata"]["uid"]);
        assert_eq!(event["involvedObject"]["kind"], "NetworkPolicy");
        assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("NotUnderstood")));
        assert_eq!(event["metadata"]["namespace"], "shop");
    }
    // One that starts later finds what is said.
    let mut late = [Follower::reporting(&server, Some("d"))];
    late[0].listen(Duration::from_secs(6));
    assert_eq!(events(&server, &mut late, 2).len(), 2);
    assert_eq!(first[0]["metadata"]["name"], both[0]["metadata"]["name"]);
}

#[test]
fn a_daemon_without_rights_to_events_follows_all_the_same() {
    let server = server();
    shop(&server);
    server.fake().unwrap().set_readable(Resource::Events, false);
    let mut follower = Follower::reporting(&server, Some("a"));
    let mut command = Follower::start(&server);
    server.admin().replace(&unknown("firstSelector")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while follower.health(ObjectKind::NetworkPolicy).invalid == 0 {
        assert!(Instant::now() < deadline, "{:?}", follower.health(ObjectKind::NetworkPolicy));
        follower.listen(Duration::from_millis(20));
    }
    // Longer than it waits before it writes.
    follower.listen(Duration::from_secs(6));
    command.listen(Duration::from_millis(10));
    assert_eq!(server.admin().list(Resource::Events).unwrap(), Vec::<Value>::new());
    server.admin().replace(&policy("shop", "db", "job")).unwrap();
    follower.catch_up(&server);
}
