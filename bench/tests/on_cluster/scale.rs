//! A large cluster with constant changes: the cost of following it, and the delay until the tables are in effect.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::{Account, ApiServer};
use penstock_bench::testbed::{Daemon, Node, Privileges};
use serde_json::{Value, json};

use crate::on_cluster::fixture::{configuration, namespace, pod};

const PODS: usize = 100_000;
const NAMESPACES: usize = 200;
const POLICIES: usize = 1_000;
/// Pods of the node itself: they have no interface here, but their policies are compiled.
const LOCAL: usize = 100;
const EVENTS_A_SECOND: usize = 1_000;
const SECONDS: usize = 20;

/// Limits. The test is ignored by default, since other load on the machine would be measured too.
const P99: Duration = Duration::from_millis(50);
const OF_A_CORE: f64 = 0.3;

fn namespace_of(number: usize) -> String {
    format!("ns-{}", number % NAMESPACES)
}

/// A pod anywhere in the cluster; `turn` changes a label that policies select.
fn any_pod(number: usize, turn: usize) -> Value {
    let address = format!("10.{}.{}.{}", 64 + (number >> 16), number >> 8 & 255, number & 255);
    let mut pod = pod(&format!("pod-{number}"), &address);
    pod["metadata"]["namespace"] = json!(namespace_of(number));
    pod["metadata"]["labels"] = json!({ "app": format!("app-{}", number % 50), "turn": (turn % 2).to_string() });
    pod["spec"]["nodeName"] = json!(if number < LOCAL { "node".to_owned() } else { format!("node-{}", number / 100) });
    pod
}

/// A policy that admits some pods of its namespace and of another one by labels.
fn policy(number: usize) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": namespace_of(number), "name": format!("policy-{number}") },
        "spec": {
            "podSelector": { "matchLabels": { "app": format!("app-{}", number % 50) } },
            "ingress": [{
                "from": [
                    { "podSelector": { "matchLabels": { "turn": "1" } } },
                    {
                        "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace_of(number + 7) } },
                        "podSelector": { "matchLabels": { "turn": "0" } },
                    },
                ],
                "ports": [{ "port": 8000 + number % 20 }],
            }],
        },
    })
}

fn cluster() -> impl Iterator<Item = Value> {
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node" }, "status": {} });
    let namespaces = (0..NAMESPACES).map(|number| {
        let mut namespace = namespace(&namespace_of(number));
        namespace["metadata"]["labels"] = json!({ "kubernetes.io/metadata.name": namespace_of(number) });
        namespace
    });
    std::iter::once(node).chain(namespaces).chain((0..POLICIES).map(policy)).chain((0..PODS).map(|n| any_pod(n, 0)))
}

/// The daemon's metrics page.
fn metrics(node: &Node) -> String {
    node.namespace().run(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9469").unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    })
}

/// The value of a sample.
fn sample(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    line.unwrap_or_else(|| panic!("no {name} in:\n{text}"))
}

/// Upper bounds of a histogram's buckets in seconds, and the cumulative number of samples.
fn buckets(text: &str, name: &str) -> Vec<(f64, f64)> {
    let prefix = format!("{name}_bucket{{le=\"");
    let lines = text.lines().filter_map(|line| line.strip_prefix(&prefix)?.split_once("\"} "));
    lines.map(|(bound, count)| (bound.parse().unwrap_or(f64::INFINITY), count.parse().unwrap())).collect()
}

/// Upper bound of the 99th percentile of the samples between two readings.
fn p99(before: &str, after: &str, name: &str) -> Duration {
    let (before, after) = (buckets(before, name), buckets(after, name));
    let counts: Vec<_> = after.iter().zip(&before).map(|(after, before)| (after.0, after.1 - before.1)).collect();
    let all = counts.last().unwrap().1;
    assert!(all > 100.0, "{all} snapshots are too few to say something");
    Duration::from_secs_f64(counts.iter().find(|(_, count)| *count >= 0.99 * all).unwrap().0)
}

#[test]
#[ignore = "a minute of a machine that is quiet: make test-long"]
fn a_thousand_events_a_second_among_100000_pods_are_followed() {
    let node = Node::new("node", &["172.18.0.2".parse().unwrap()]).unwrap();
    let server = ApiServer::in_process(true, Some(node.namespace())).unwrap();
    let fake = server.fake().expect("it is the one in this process");
    fake.put(cluster()).unwrap();
    fake.compact();
    let started = Instant::now();
    let toml = configuration(&server.kubeconfig(Account::Penstock), "off", "");
    let daemon = Daemon::launch(node.namespace(), &toml, Privileges::All).unwrap();
    daemon.log().wait_for_after(0, "ready: ", Duration::from_secs(120)).unwrap();
    println!("{PODS} pods and {POLICIES} policies read and in effect after {:.1?}", started.elapsed());

    let (before, time) = (metrics(&node), daemon.processor_time().unwrap());
    let (begun, total) = (Instant::now(), EVENTS_A_SECOND * SECONDS);
    let mut lag = Duration::ZERO;
    for event in 0..total {
        // Includes local pods; consecutive events are for different pods.
        let number = event * 7919 % PODS;
        fake.put([any_pod(number, event / PODS + 1)]).unwrap();
        let due = Duration::from_secs_f64((event + 1) as f64 / EVENTS_A_SECOND as f64);
        lag = lag.max(begun.elapsed().saturating_sub(due));
        std::thread::sleep(due.saturating_sub(begun.elapsed()));
    }
    let (sent, wall) = (Instant::now(), begun.elapsed());
    let changes = |text: &str| sample(text, "penstock_changes_total ");
    let after = loop {
        let text = metrics(&node);
        if changes(&text) - changes(&before) >= total as f64 {
            break text;
        }
        assert!(sent.elapsed() < Duration::from_secs(30), "{} of {total} events taken in", changes(&text));
    };
    let behind = sent.elapsed();
    let used = (daemon.processor_time().unwrap() - time).as_secs_f64() / wall.as_secs_f64();
    let p99 = p99(&before, &after, "penstock_enforced_seconds");
    println!(
        "{total} events in {wall:.1?} (at worst {lag:.1?} late): {:.0} snapshots, event to in effect p99 below {p99:.1?}, \
         all taken in {behind:.1?} after the last, {:.1} % of a core",
        sample(&after, "penstock_epoch ") - sample(&before, "penstock_epoch "),
        used * 100.0
    );
    assert!(p99 <= P99, "event to in effect: p99 {p99:?}");
    assert!(behind <= P99 + Duration::from_millis(50), "{behind:?} behind the last event");
    assert!(used < OF_A_CORE, "{used:.2} of a core");
}
