//! Which changes of objects take a new epoch. It has each connection evaluated again, and ends what the programs repeat, so
//! a change of which workers read nothing takes none.

use std::thread::sleep;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::Resource;
use serde_json::{Value, json};

use crate::on_cluster::fixture::{Fixture, node_object, own_pod, pod, policy};

const LIMIT: Duration = Duration::from_secs(20);
/// Longer than a daemon takes to gather changes and to publish them.
const SETTLE: Duration = Duration::from_millis(250);

type Change = fn(&Fixture);

/// Changes of one kind of objects, which come to the daemon in order.
struct Group {
    kind: &'static str,
    without_epoch: Vec<(&'static str, Change)>,
    /// These take one each.
    with_epoch: Vec<(&'static str, Change)>,
}

/// Edits an object as the server has it.
fn edit(fixture: &Fixture, object: &Value, change: impl FnOnce(&mut Value)) {
    let (admin, resource) = (fixture.server.admin(), Resource::of(object).unwrap());
    let name = |object: &Value| object["metadata"]["name"].clone();
    let mut found = admin.list(resource).unwrap().into_iter().find(|known| name(known) == name(object)).unwrap();
    (found["apiVersion"], found["kind"]) = (object["apiVersion"].clone(), object["kind"].clone());
    change(&mut found);
    admin.replace(&found).unwrap();
    if found["status"].is_object() {
        found["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        admin.set_status(&found).unwrap();
    }
}

fn annotate(fixture: &Fixture, object: &Value) {
    edit(fixture, object, |object| object["metadata"]["annotations"] = json!({ "example.com/note": "changed" }));
}

fn label(fixture: &Fixture, object: &Value, key: &str, value: &str) {
    edit(fixture, object, |object| object["metadata"]["labels"][key] = json!(value));
}

/// What a kubelet reports every few seconds or minutes.
fn beat(fixture: &Fixture, object: &Value) {
    edit(fixture, object, |object| {
        object["status"]["conditions"] =
            json!([{ "type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z" }]);
    });
}

fn published(fixture: &Fixture) -> usize {
    fixture.daemon.log().lines().iter().filter(|line| line.contains("published: ")).count()
}

fn namespace() -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "test" } })
}

fn web() -> Value {
    pod("web", "10.244.1.10")
}

fn other_node() -> Value {
    let mut node = node_object();
    node["metadata"]["name"] = json!("other");
    node["status"]["addresses"][0]["address"] = json!("172.18.0.3");
    node
}

/// A pod of the other node.
fn far() -> Value {
    let mut far = pod("far", "10.244.2.5");
    far["spec"]["nodeName"] = json!("other");
    far
}

/// A pod in the network of this node, such as kube-proxy.
fn in_host_network() -> Value {
    let mut pod = own_pod(true);
    pod["metadata"]["name"] = json!("kube-proxy");
    pod
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "test", "name": "db" },
        "spec": {
            "clusterIP": "10.96.0.20", "clusterIPs": ["10.96.0.20"], "selector": { "app": "db" },
            "ports": [{ "port": 80, "targetPort": 8080, "protocol": "TCP" }],
        },
    })
}

fn staged(mut policy: Value) -> Value {
    policy["metadata"]["name"] = json!("staged");
    policy["metadata"]["annotations"] = json!({ "policy.penstock.dev/staged": "true" });
    policy
}

/// Admits pods of namespaces labelled `team: ops` to `lab`.
fn by_namespace() -> Value {
    let mut policy = policy("lab", "nobody");
    policy["metadata"]["name"] = json!("by-namespace");
    policy["spec"]["ingress"][0]["from"] = json!([{ "namespaceSelector": { "matchLabels": { "team": "ops" } } }]);
    policy
}

#[test]
fn a_change_of_which_workers_read_nothing_takes_no_epoch() {
    let fixture = Fixture::with_three_pods();
    fixture.daemon.log().wait_for_after(0, "pods=3 ", LIMIT).unwrap();
    let admin = fixture.server.admin();
    admin.create_all(&[other_node(), far(), service(), by_namespace()]).unwrap();
    sleep(8 * SETTLE);
    let groups = [
        Group {
            kind: "Pod",
            without_epoch: vec![
                ("the daemon's own pod is not ready", |it| it.server.admin().set_status(&own_pod(false)).unwrap()),
                ("the daemon's own pod is deleted", |it| it.server.admin().terminate(&own_pod(true)).unwrap()),
                ("a pod in the host network comes", |it| it.server.admin().create(&in_host_network()).unwrap()),
                ("its status changes", |it| beat(it, &in_host_network())),
                ("it goes", |it| it.server.admin().delete(&in_host_network()).unwrap()),
                ("a local pod's condition", |it| beat(it, &web())),
                ("a local pod's annotation", |it| annotate(it, &web())),
                ("a local pod's label that no selector reads", |it| label(it, &web(), "version", "2")),
                ("a remote pod's condition", |it| beat(it, &far())),
                ("a remote pod's label that no selector reads", |it| label(it, &far(), "version", "2")),
                ("a remote pod is being deleted", |it| it.server.admin().terminate(&far()).unwrap()),
            ],
            with_epoch: vec![
                ("a remote pod's label that a selector reads", |it| label(it, &far(), "app", "web")),
                ("a local pod's label that a selector reads", |it| label(it, &web(), "app", "another")),
                ("a remote pod goes", |it| it.server.admin().delete(&far()).unwrap()),
            ],
        },
        Group {
            kind: "Node",
            without_epoch: vec![
                ("this node's heartbeat", |it| beat(it, &node_object())),
                ("this node's annotation", |it| annotate(it, &node_object())),
                ("this node's label that no selector reads", |it| label(it, &node_object(), "zone", "a")),
                ("another node's heartbeat", |it| beat(it, &other_node())),
                ("another node's label that no selector reads", |it| label(it, &other_node(), "zone", "a")),
            ],
            with_epoch: vec![("another node's address", |it| {
                edit(it, &other_node(), |node| node["status"]["addresses"][0]["address"] = json!("172.18.0.4"));
            })],
        },
        Group {
            kind: "NetworkPolicy",
            without_epoch: vec![
                ("an annotation", |it| annotate(it, &policy("db", "web"))),
                ("a staged policy", |it| it.server.admin().create(&staged(policy("lab", "web"))).unwrap()),
                ("a policy for no local pod", |it| it.server.admin().create(&policy("far", "web")).unwrap()),
                ("it goes", |it| it.server.admin().delete(&policy("far", "web")).unwrap()),
            ],
            with_epoch: vec![
                ("a policy for a local pod", |it| it.server.admin().create(&policy("lab", "db")).unwrap()),
                ("its rules", |it| it.server.admin().replace(&policy("lab", "web")).unwrap()),
                ("it goes", |it| it.server.admin().delete(&policy("lab", "web")).unwrap()),
            ],
        },
        Group {
            kind: "Service",
            without_epoch: vec![
                ("an annotation", |it| annotate(it, &service())),
                ("a label", |it| label(it, &service(), "tier", "back")),
                ("its selector", |it| {
                    edit(it, &service(), |service| service["spec"]["selector"] = json!({ "app": "lab" }));
                }),
            ],
            with_epoch: vec![],
        },
        Group {
            kind: "Namespace",
            without_epoch: vec![
                ("an annotation", |it| annotate(it, &namespace())),
                ("a label that no selector reads", |it| label(it, &namespace(), "team", "shop")),
            ],
            with_epoch: vec![("a label that a selector reads", |it| label(it, &namespace(), "team", "ops"))],
        },
    ];
    for Group { kind, without_epoch, with_epoch } in groups {
        let first = published(&fixture);
        for (what, change) in without_epoch {
            change(&fixture);
            sleep(SETTLE);
            assert_eq!(published(&fixture), first, "{kind}: {what}:\n{}", log(&fixture));
        }
        for (number, (what, change)) in (1..).zip(with_epoch) {
            change(&fixture);
            let deadline = Instant::now() + LIMIT;
            while published(&fixture) < first + number {
                assert!(Instant::now() < deadline, "{kind}: {what} takes no epoch:\n{}", log(&fixture));
                sleep(Duration::from_millis(5));
            }
            sleep(SETTLE);
            assert_eq!(published(&fixture), first + number, "{kind}: {what}:\n{}", log(&fixture));
        }
    }
}

fn log(fixture: &Fixture) -> String {
    fixture.daemon.log().lines().join("\n")
}
