//! Whoever writes an object chooses how long its lists are: reading and applying one takes time in proportion to its length, so that
//! nobody's object delays another's for long.

use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::model::{Object, ObjectChange};
use penstock_sources::convert;
use serde_json::{Value, json};

/// Entries of the shorter list; the longer has so many times more.
const ENTRIES: usize = 2_000;
const TIMES: usize = 8;
/// A quadratic step takes 64 times as long for a list that is 8 times as long.
const MOST: f64 = 32.0;

/// Nanoseconds that this thread has had of a processor.
fn processor_time() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

fn address(number: usize) -> String {
    std::net::Ipv4Addr::from(0x0b00_0000 + number as u32).to_string()
}

fn object(kind: &str, rest: Value) -> Object {
    let mut value = json!({"metadata": {"namespace": "shop", "name": "long"}});
    value.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    match kind {
        "Service" => Object::Service(convert::service(&serde_json::from_value(value).unwrap()).unwrap().0),
        "EndpointSlice" => {
            value["metadata"]["labels"] = json!({"kubernetes.io/service-name": "api"});
            Object::EndpointSlice(convert::endpoint_slice(&serde_json::from_value(value).unwrap()).unwrap().0)
        }
        "Pod" => Object::Pod(convert::pod(&serde_json::from_value(value).unwrap()).unwrap()),
        "Node" => Object::Node(convert::node(&serde_json::from_value(value).unwrap()).unwrap()),
        "NetworkPolicy" => {
            Object::NetworkPolicy(convert::network_policy(&serde_json::from_value(value).unwrap()).unwrap())
        }
        other => unreachable!("{other}"),
    }
}

fn policy(ingress: Value) -> Object {
    object("NetworkPolicy", json!({"spec": {"podSelector": {}, "ingress": ingress}}))
}

/// An object with a list of so many entries.
type Long = fn(usize) -> Object;

const LISTS: &[(&str, Long)] = &[
    ("Service externalIPs", |n| {
        let all: Vec<String> = (0..n).map(address).collect();
        object("Service", json!({"spec": {"externalIPs": all, "ports": [{"port": 80}]}}))
    }),
    ("Service load balancer", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"ip": address(k)})).collect();
        object("Service", json!({"spec": {}, "status": {"loadBalancer": {"ingress": all}}}))
    }),
    ("Service ports", |n| {
        let all: Vec<Value> = (1..=n).map(|k| json!({"name": format!("p{k}"), "port": k})).collect();
        object("Service", json!({"spec": {"ports": all}}))
    }),
    ("EndpointSlice endpoints", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"addresses": [address(k)]})).collect();
        object("EndpointSlice", json!({"addressType": "IPv4", "endpoints": all, "ports": [{"name": "", "port": 80}]}))
    }),
    ("EndpointSlice ports", |n| {
        let all: Vec<Value> = (1..=n).map(|k| json!({"name": format!("p{k}"), "port": k})).collect();
        object("EndpointSlice", json!({"addressType": "IPv4", "endpoints": [], "ports": all}))
    }),
    ("Pod podIPs", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"ip": address(k)})).collect();
        object(
            "Pod",
            json!({"spec": {"nodeName": "there", "containers": []}, "status": {"phase": "Running", "podIPs": all}}),
        )
    }),
    ("Pod ports", |n| {
        let all: Vec<Value> = (1..=n).map(|k| json!({"name": format!("p{k}"), "containerPort": k})).collect();
        let spec = json!({"nodeName": "here", "containers": [{"name": "c", "ports": all}]});
        object("Pod", json!({"spec": spec, "status": {"phase": "Running", "podIPs": [{"ip": "10.1.1.9"}]}}))
    }),
    ("Node addresses", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"type": "InternalIP", "address": address(k)})).collect();
        object("Node", json!({"status": {"addresses": all}}))
    }),
    ("policy rules", |n| policy((1..=n).map(|k| json!({"ports": [{"port": k}]})).collect())),
    ("policy ports", |n| {
        let all: Vec<Value> = (1..=n).map(|k| json!({"port": k})).collect();
        policy(json!([{"ports": all}]))
    }),
    ("policy named ports", |n| {
        let all: Vec<Value> = (1..=n).map(|k| json!({"port": format!("p{k}")})).collect();
        policy(json!([{"ports": all}]))
    }),
    ("policy blocks", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"ipBlock": {"cidr": format!("{}/32", address(k))}})).collect();
        policy(json!([{"from": all}]))
    }),
    ("policy excepts", |n| {
        let all: Vec<String> = (0..n).map(|k| format!("{}/32", address(2 * k))).collect();
        policy(json!([{"from": [{"ipBlock": {"cidr": "11.0.0.0/8", "except": all}}]}]))
    }),
    ("policy selectors", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"podSelector": {"matchLabels": {format!("k{k}"): "v"}}})).collect();
        policy(json!([{"from": all}]))
    }),
    ("policy label values", |n| {
        let all: Vec<String> = (0..n).map(|k| format!("v{k}")).collect();
        let selector = json!({"matchExpressions": [{"key": "k", "operator": "In", "values": all}]});
        policy(json!([{"from": [{"podSelector": selector}]}]))
    }),
    ("policy requirements", |n| {
        let all: Vec<Value> = (0..n).map(|k| json!({"key": format!("k{k}"), "operator": "Exists"})).collect();
        policy(json!([{"from": [{"podSelector": {"matchExpressions": all}}]}]))
    }),
];

/// The processor time that it takes to read an object with a list of this length, to apply it, and to apply its end.
fn cost(long: Long, entries: usize) -> u64 {
    let mut engine = Engine::new(EngineSettings::for_node("here"));
    let spec = json!({"nodeName": "here", "containers": []});
    let value = json!({"metadata": {"namespace": "shop", "name": "web"}, "spec": spec,
                       "status": {"phase": "Running", "podIPs": [{"ip": "10.1.1.1"}]}});
    engine.apply([ObjectChange::Set(Object::Pod(convert::pod(&serde_json::from_value(value).unwrap()).unwrap()))]);
    let before = processor_time();
    let object = long(entries);
    let reference = object.reference();
    engine.apply([ObjectChange::Set(object)]);
    engine.take_service_addresses();
    engine.apply([ObjectChange::Delete(reference)]);
    processor_time() - before
}

#[test]
fn every_list_takes_time_in_proportion_to_its_length() {
    let mut slow = Vec::new();
    for (list, long) in LISTS {
        // The least of some: others use the processor, too.
        let least = |entries| (0..3).map(|_| cost(*long, entries)).min().unwrap() as f64;
        // The kernel counts in steps of up to some milliseconds.
        let (short, all) = (least(ENTRIES).max(4e6), least(ENTRIES * TIMES));
        if all > short * MOST {
            slow.push(format!(
                "{list}: {:.1} ms for {ENTRIES} entries, {:.1} for {TIMES} times as many",
                short / 1e6,
                all / 1e6
            ));
        }
    }
    assert!(slow.is_empty(), "{slow:#?}");
}
