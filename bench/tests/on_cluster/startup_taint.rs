//! A taint keeps pods off a node until policy is in effect there.

use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::Resource;
use serde_json::{Value, json};

use crate::on_cluster::fixture::{Fixture, node_object};

const LIMIT: Duration = Duration::from_secs(60);
const KEY: &str = "penstock.dev/not-ready";

fn taints(fixture: &Fixture) -> Vec<Value> {
    let nodes = fixture.server.admin().list(Resource::Nodes).unwrap();
    nodes[0]["spec"]["taints"].as_array().cloned().unwrap_or_default()
}

/// Whatever its effect; those of others stay.
#[test]
fn a_ready_daemon_removes_its_startup_taint_from_its_node_alone() {
    let tainted = |name: &str| {
        let mut node = node_object();
        node["metadata"]["name"] = json!(name);
        let others = ["dedicated", "penstock.dev/other"].map(|key| json!({ "key": key, "effect": "NoSchedule" }));
        let own = ["NoSchedule", "NoExecute"].map(|effect| json!({ "key": KEY, "effect": effect }));
        node["spec"]["taints"] = json!([others, own].concat());
        node
    };
    let mut fixture = Fixture::start("");
    fixture.kill();
    let admin = fixture.server.admin();
    admin.replace(&tainted("node")).unwrap();
    admin.create(&tainted("other")).unwrap();
    // Until all objects are read, nothing is ready.
    if let Some(fake) = fixture.server.fake() {
        fake.set_readable(Resource::NetworkPolicies, false);
    }
    fixture.restart_with(&format!("startup_taint = {KEY:?}"));
    if let Some(fake) = fixture.server.fake() {
        // Longer than the daemon waits before it starts with the objects of its last run.
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(taints(&fixture).len(), 4, "nothing is in effect yet");
        fake.set_readable(Resource::NetworkPolicies, true);
    }
    let deadline = Instant::now() + LIMIT;
    while taints(&fixture).len() > 2 {
        let log = fixture.daemon.log().lines().join("\n");
        assert!(Instant::now() < deadline, "the taint stays: {:#?}\n{log}", taints(&fixture));
        std::thread::sleep(Duration::from_millis(50));
    }
    let kept: Vec<Value> = taints(&fixture).iter().map(|taint| taint["key"].clone()).collect();
    assert_eq!(kept, ["dedicated", "penstock.dev/other"]);
    let nodes = fixture.server.admin().list(Resource::Nodes).unwrap();
    // A real server adds a taint of its own to a new node.
    let of_other = nodes[1]["spec"]["taints"].as_array().into_iter().flatten();
    assert_eq!(of_other.filter(|taint| taint["key"] == KEY).count(), 2, "the other node's: {:#}", nodes[1]);
}
