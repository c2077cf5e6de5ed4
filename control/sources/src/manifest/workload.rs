//! Workloads as the pods that they make: a folder that a cluster is deployed from has their templates, and no pods.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use penstock_policy::model::{Controller, Object, ObjectKey};
use serde_json::{Value, json};

use super::Manifests;
use super::tree::YamlNode;

/// Where the template of such an object's pods is; `None` for other kinds.
pub(super) fn template_of(kind: &str, version: &str) -> Option<&'static [&'static str]> {
    match (version, kind) {
        ("apps/v1", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("batch/v1", "Job")
        | ("v1", "ReplicationController") => Some(&["spec", "template"]),
        ("batch/v1", "CronJob") => Some(&["spec", "jobTemplate", "spec", "template"]),
        _ => None,
    }
}

/// A pod as the workload makes it, with the workload's name; `None` if something else makes the workload.
pub(super) fn pod_of(tree: &YamlNode, template: &[&str]) -> Option<Value> {
    let value = tree.to_value();
    let metadata = &value["metadata"];
    let owners = metadata["ownerReferences"].as_array();
    if owners.is_some_and(|owners| owners.iter().any(|owner| owner["controller"] == true)) {
        return None;
    }
    let template = template.iter().fold(&value, |value, field| &value[*field]);
    let mut own = json!({ "name": metadata["name"], "labels": template["metadata"]["labels"] });
    if let Some(namespace) = metadata.get("namespace") {
        own["namespace"] = namespace.clone();
    }
    Some(json!({ "metadata": own, "spec": template["spec"] }))
}

/// Adds the workloads whose pods are not among the objects, at addresses that no machine has: of benchmarks (RFC 2544, RFC 5180).
pub(super) fn stand_in(manifests: &mut Manifests) {
    let pods = || {
        manifests.documents.iter().filter_map(|document| match &document.object {
            Object::Pod(pod) => Some(pod),
            _ => None,
        })
    };
    let mut names: BTreeSet<ObjectKey> = pods().map(|pod| pod.key.clone()).collect();
    let made: BTreeSet<(String, Controller)> =
        pods().filter_map(|pod| Some((pod.key.namespace.clone(), pod.controller.clone()?))).collect();
    let mut number = 0;
    for mut document in std::mem::take(&mut manifests.workloads) {
        let Object::Pod(pod) = &mut document.object else { continue };
        let is_made = pod.controller.as_ref().is_some_and(|it| made.contains(&(pod.key.namespace.clone(), it.clone())));
        if is_made || !names.insert(pod.key.clone()) {
            continue;
        }
        number += 1;
        pod.addresses = if pod.host_network { Vec::new() } else { addresses(number) };
        manifests.documents.push(document);
    }
}

fn addresses(number: u32) -> Vec<IpAddr> {
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number % (1 << 17));
    let v6 = Ipv6Addr::from_bits(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0).to_bits() + u128::from(number));
    vec![v4.into(), v6.into()]
}
