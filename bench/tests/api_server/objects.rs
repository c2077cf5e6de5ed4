//! Objects for an API server.

use penstock_bench::testbed::api_server::ApiServer;
use serde_json::{Value, json};

pub(crate) fn namespace(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "labels": { "team": name } } })
}

pub(crate) fn node(name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
        "status": { "addresses": [{ "type": "InternalIP", "address": address }] },
    })
}

/// A running pod, labelled `app: NAME`.
pub(crate) fn pod(namespace: &str, name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "namespace": namespace, "name": name, "labels": { "app": name } },
        "spec": {
            "nodeName": "here",
            "containers": [{ "name": "main", "image": "example.invalid/test", "ports": [{ "name": "http", "containerPort": 80 }] }],
        },
        "status": { "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }] },
    })
}

/// Pod `number` of many, each with a different address.
pub(crate) fn numbered_pod(namespace: &str, number: usize) -> Value {
    pod(namespace, &format!("pod-{number}"), &format!("10.64.{}.{}", number / 250, number % 250 + 1))
}

/// A policy that admits only pods labelled `app: FROM` to pods labelled `app: TO`.
pub(crate) fn policy(namespace: &str, to: &str, from: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": namespace, "name": format!("only-to-{to}") },
        "spec": {
            "podSelector": { "matchLabels": { "app": to } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "app": from } } }] }],
        },
    })
}

/// A ClusterNetworkPolicy of the Admin tier with one ingress rule about all pods.
pub(crate) fn cluster_policy(name: &str, action: &str) -> Value {
    json!({
        "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
        "metadata": { "name": name },
        "spec": {
            "tier": "Admin", "priority": 10, "subject": { "namespaces": {} },
            "ingress": [{ "action": action, "from": [{ "namespaces": {} }] }],
        },
    })
}

/// A Service of the pods labelled `app: NAME`, at port 80.
pub(crate) fn service(namespace: &str, name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "namespace": namespace, "name": name },
        "spec": {
            "clusterIP": address, "selector": { "app": name }, "ports": [{ "port": 80, "targetPort": 80 }],
        },
    })
}

/// A small cluster: namespace `shop`, node `here`, pods `web`, `db` and `job`; only `web` may reach `db`.
pub(crate) fn shop(server: &ApiServer) {
    let objects = [
        namespace("shop"),
        node("here", "192.0.2.1"),
        pod("shop", "web", "10.1.0.1"),
        pod("shop", "db", "10.1.0.2"),
        pod("shop", "job", "10.1.0.3"),
        policy("shop", "db", "web"),
    ];
    objects.iter().for_each(|object| server.admin().create(object).unwrap());
}
