//! Objects written to the API server are enforced on packets without a restart.

use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer};
use penstock_bench::testbed::{Daemon, Node, Privileges};

use crate::on_cluster::fixture::{Fixture, configuration, namespace, pod, policy};
use crate::on_cluster::stream::Stream;

/// Time limit for a change to be in effect on a busy machine.
const SOON: Duration = Duration::from_secs(2);

#[test]
fn pods_and_policies_created_through_the_api_are_enforced() {
    let mut fixture = Fixture::start("");
    fixture.add_pod("db", "10.244.1.11");
    fixture.wire_pod("web", "10.244.1.10");
    let namespace = |fixture: &Fixture, name: &str| fixture.node.pod(name).unwrap().namespace().clone();
    let stream = Stream::start(&namespace(&fixture, "test/web"), &namespace(&fixture, "test/db"), "10.244.1.11");
    let admin = fixture.server.admin();
    // Packets from an interface without a known pod are dropped.
    let times = [
        ("pod created", stream.time_until_passing(|| admin.create(&pod("web", "10.244.1.10")).unwrap())),
        ("policy created", stream.time_until_denied(|| admin.create(&policy("db", "nobody")).unwrap())),
        ("policy replaced", stream.time_until_passing(|| admin.replace(&policy("db", "web")).unwrap())),
        ("policy replaced", stream.time_until_denied(|| admin.replace(&policy("db", "nobody")).unwrap())),
        ("policy deleted", stream.time_until_passing(|| admin.delete(&policy("db", "nobody")).unwrap())),
    ];
    for (what, time) in times {
        println!("{what}: from the API call to the first packet evaluated by it: {:.1} ms", time.as_secs_f64() * 1e3);
        assert!(time < SOON, "{what}: {time:?}");
    }
}

#[test]
fn policies_stay_during_an_outage_which_is_logged_once() {
    let mut fixture = Fixture::start("");
    fixture.add_pod("web", "10.244.1.10");
    fixture.add_pod("db", "10.244.1.11");
    fixture.add_pod("lab", "10.244.1.12");
    fixture.server.admin().create(&policy("db", "web")).unwrap();
    let namespace = |name: &str| fixture.node.pod(name).unwrap().namespace().clone();
    let allowed = Stream::start(&namespace("test/web"), &namespace("test/db"), "10.244.1.11");
    let denied = Stream::start(&namespace("test/lab"), &namespace("test/db"), "10.244.1.11");
    let deadline = Instant::now() + SOON;
    while !allowed.passes() || denied.passes() {
        assert!(Instant::now() < deadline, "the policy is in effect");
    }
    // A real server that has just started may refuse its users before it knows their rights.
    let before = fixture.daemon.log().lines().len();
    fixture.server.stop();
    fixture.daemon.log().wait_for_after(before, "stay in effect", Duration::from_secs(30)).unwrap();
    for _ in 0..5 {
        assert!(allowed.passes() && !denied.passes(), "nothing changes while it is away");
    }
    fixture.server.resume().unwrap();
    fixture.daemon.log().wait_for_after(before, "followed again after", Duration::from_secs(60)).unwrap();
    fixture.server.admin().replace(&policy("db", "lab")).unwrap();
    let deadline = Instant::now() + SOON;
    while allowed.passes() || !denied.passes() {
        assert!(Instant::now() < deadline, "changes are followed again");
    }
    let log = fixture.daemon.log().lines();
    let logged = log.iter().skip(before).filter(|line| line.contains("stay in effect")).count();
    assert_eq!(logged, 1, "{}", fixture.daemon.log().lines().join("\n"));
}

#[test]
fn without_api_rights_the_daemon_waits_and_logs_which() {
    let node = Node::new("node", &["172.18.0.2".parse().unwrap()]).unwrap();
    let server = ApiServer::start(Some(node.namespace())).unwrap();
    server.admin().create(&namespace("test")).unwrap();
    let toml = configuration(&server.kubeconfig(Account::Nobody), "off", "");
    let daemon = Daemon::launch(node.namespace(), &toml, Privileges::All).unwrap();
    let line = daemon.log().wait_for_after(0, "403 Forbidden", Duration::from_secs(20)).unwrap();
    for part in ["get, list and watch on ", "ClusterRole penstock"] {
        assert!(line.contains(part), "{line}");
    }
    daemon
        .log()
        .wait_for_after(0, "waiting for the first list of namespaces, nodes, pods", Duration::from_secs(20))
        .unwrap();
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
    assert!(!log.iter().any(|line| line.contains("ready: ")), "{}", log.join("\n"));
}
