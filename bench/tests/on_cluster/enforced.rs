//! Objects written to the API server are enforced on packets without a restart.

use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{ApiServer, Who};
use penstock_bench::testbed::{Daemon, Node, Privileges};

use crate::stream::Stream;
use crate::world::{World, configuration, namespace, pod, policy};

/// Time limit for a change to be in force on a busy machine.
const SOON: Duration = Duration::from_secs(2);

#[test]
fn pods_and_policies_written_by_api_calls_are_enforced_and_the_times_are_told() {
    let mut world = World::start("");
    world.add_pod("db", "10.244.1.11");
    world.wire_pod("web", "10.244.1.10");
    let namespace = |world: &World, name: &str| world.node.pod(name).unwrap().namespace().clone();
    let stream = Stream::start(&namespace(&world, "test/web"), &namespace(&world, "test/db"), "10.244.1.11");
    let admin = world.server.admin();
    // Packets from an interface without a known pod are dropped.
    let times = [
        ("pod created", stream.time_until_passing(|| admin.create(&pod("web", "10.244.1.10")).unwrap())),
        ("policy created", stream.time_until_denied(|| admin.create(&policy("db", "nobody")).unwrap())),
        ("policy replaced", stream.time_until_passing(|| admin.replace(&policy("db", "web")).unwrap())),
        ("policy replaced", stream.time_until_denied(|| admin.replace(&policy("db", "nobody")).unwrap())),
        ("policy deleted", stream.time_until_passing(|| admin.delete(&policy("db", "nobody")).unwrap())),
    ];
    for (what, time) in times {
        println!("{what}: from the API call to the first packet judged by it: {:.1} ms", time.as_secs_f64() * 1e3);
        assert!(time < SOON, "{what}: {time:?}");
    }
}

#[test]
fn while_the_api_server_is_away_policies_stay_in_force_and_it_is_told_once() {
    let mut world = World::start("");
    world.add_pod("web", "10.244.1.10");
    world.add_pod("db", "10.244.1.11");
    world.add_pod("lab", "10.244.1.12");
    world.server.admin().create(&policy("db", "web")).unwrap();
    let namespace = |name: &str| world.node.pod(name).unwrap().namespace().clone();
    let allowed = Stream::start(&namespace("test/web"), &namespace("test/db"), "10.244.1.11");
    let denied = Stream::start(&namespace("test/lab"), &namespace("test/db"), "10.244.1.11");
    let deadline = Instant::now() + SOON;
    while !allowed.passes() || denied.passes() {
        assert!(Instant::now() < deadline, "the policy is in force");
    }
    world.server.stop();
    world.daemon.log().wait_for_after(0, "stays in force", Duration::from_secs(10)).unwrap();
    for _ in 0..5 {
        assert!(allowed.passes() && !denied.passes(), "nothing changes while it is away");
    }
    world.server.resume().unwrap();
    world.daemon.log().wait_for_after(0, "followed again after", Duration::from_secs(60)).unwrap();
    world.server.admin().replace(&policy("db", "lab")).unwrap();
    let deadline = Instant::now() + SOON;
    while allowed.passes() || !denied.passes() {
        assert!(Instant::now() < deadline, "changes are followed again");
    }
    let told = world.daemon.log().lines().iter().filter(|line| line.contains("stays in force")).count();
    assert_eq!(told, 1, "{}", world.daemon.log().lines().join("\n"));
}

#[test]
fn without_the_rights_it_waits_says_what_it_lacks_and_still_ends_when_asked() {
    let node = Node::new("node", &["172.18.0.2".parse().unwrap()]).unwrap();
    let server = ApiServer::start(Some(node.namespace())).unwrap();
    server.admin().create(&namespace("test")).unwrap();
    let toml = configuration(&server.kubeconfig(Who::Nobody), "off", "");
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
