//! Workloads as the pods that they make: a folder that a cluster is deployed from has their templates, and no pods.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use penstock_policy::model::{Controller, Object, ObjectKey, Pod};
use serde_json::{Value, json};

use super::tree::YamlNode;
use super::{Document, Manifests};

/// Labels of pods that have a number of their own.
const NUMBER_LABELS: [&str; 3] =
    ["statefulset.kubernetes.io/pod-name", "apps.kubernetes.io/pod-index", "batch.kubernetes.io/job-completion-index"];
/// At most so many pods of one workload are told apart.
const MAX_NUMBERED: u64 = 64;

/// Where the template of an object's pods is; `None` if it makes none. Workloads of kinds that are not known have it at the same place.
pub(super) fn template_of(tree: &YamlNode, kind: &str, version: &str) -> Option<&'static [&'static str]> {
    let group = version.split_once('/').map_or("", |(group, _)| group);
    let below = |path: &[&str]| path.iter().try_fold(tree, |node, field| node.get(field)).is_some();
    match (group, kind) {
        ("batch", "CronJob") => Some(&["spec", "jobTemplate", "spec", "template"]),
        ("apps" | "extensions", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job")
        | ("", "ReplicationController") => Some(&["spec", "template"]),
        _ if below(&["spec", "template", "spec", "containers"]) => Some(&["spec", "template"]),
        _ => None,
    }
}

/// The pods that the workload makes, with the workload's name; none if something else makes the workload. They are one, unless the
/// controller numbers them.
pub(super) fn pods_of(workload: &Value, kind: &str, template: &[&str]) -> Vec<Value> {
    let metadata = &workload["metadata"];
    let owners = metadata["ownerReferences"].as_array();
    if owners.is_some_and(|owners| owners.iter().any(|owner| owner["controller"] == true)) {
        return Vec::new();
    }
    let spec = &workload["spec"];
    let numbers = match kind {
        "StatefulSet" => {
            let start = spec["ordinals"]["start"].as_u64().unwrap_or(0);
            start..start + spec["replicas"].as_u64().unwrap_or(1).clamp(1, MAX_NUMBERED)
        }
        "Job" if spec["completionMode"] == "Indexed" => {
            0..spec["completions"].as_u64().unwrap_or(1).clamp(1, MAX_NUMBERED)
        }
        _ => 0..1,
    };
    let template = template.iter().fold(workload, |value, field| &value[*field]);
    let name = metadata["name"].as_str().unwrap_or_default();
    let pod = |number: u64| {
        let mut labels = template["metadata"]["labels"].as_object().cloned().unwrap_or_default();
        let own = match kind {
            "StatefulSet" => {
                vec![(NUMBER_LABELS[0], format!("{name}-{number}")), (NUMBER_LABELS[1], number.to_string())]
            }
            "Job" => {
                let names = ["batch.kubernetes.io/job-name", "job-name"].map(|label| (label, name.to_owned()));
                let index = (spec["completionMode"] == "Indexed").then(|| (NUMBER_LABELS[2], number.to_string()));
                names.into_iter().chain(index).collect()
            }
            _ => Vec::new(),
        };
        labels.extend(own.into_iter().map(|(label, value)| (label.to_owned(), value.into())));
        let metadata = json!({ "name": name, "namespace": metadata["namespace"], "labels": labels });
        json!({ "metadata": metadata, "spec": template["spec"] })
    };
    numbers.map(pod).collect()
}

/// Adds the workloads whose pods are not among the objects, and gives them, and pods without a status, addresses that no machine has: of
/// benchmarks (RFC 2544, RFC 5180). Of numbered pods only the first is added, which stands for all, unless a selector tells them apart.
pub(super) fn stand_in(manifests: &mut Manifests) {
    let pods = || manifests.documents.iter().filter_map(Document::pod);
    let made: BTreeSet<(String, Controller)> =
        pods().filter_map(|pod| Some((pod.key.namespace.clone(), pod.controller.clone()?))).collect();
    let has_selectors = |document: &&Document| document.pod().is_none();
    let mut selecting = manifests.documents.iter().filter(has_selectors);
    let tells_apart = selecting.any(|document| NUMBER_LABELS.iter().any(|label| document.tree.mentions(label)));
    // A name that pods of two kinds would share gets the kind.
    let kind_of = |pod: &Pod| pod.controller.as_ref().map_or(String::new(), |it| it.kind.to_lowercase());
    let mut kinds: BTreeMap<ObjectKey, BTreeSet<String>> =
        pods().map(|pod| (pod.key.clone(), BTreeSet::from(["pod".to_owned()]))).collect();
    for pod in manifests.workloads.iter().filter_map(|(document, _)| document.pod()) {
        kinds.entry(pod.key.clone()).or_default().insert(kind_of(pod));
    }
    let mut seen = BTreeSet::new();
    for (mut document, place) in mem::take(&mut manifests.workloads) {
        let Object::Pod(pod) = &mut document.object else { continue };
        let is_made = pod.controller.as_ref().is_some_and(|it| made.contains(&(pod.key.namespace.clone(), it.clone())));
        if is_made || place > 0 && !tells_apart {
            continue;
        }
        let kind = kind_of(pod);
        if !seen.insert((pod.key.clone(), kind.clone(), place)) {
            manifests.passed_over.push(document.origin);
            continue;
        }
        if kinds.get(&pod.key).is_some_and(|kinds| kinds.len() > 1) {
            pod.key.name += &format!("-{kind}");
        }
        if place > 0 {
            pod.key.name += &format!("-{place}");
        }
        manifests.documents.push(document);
    }
    for (number, document) in (1..).zip(manifests.documents.iter_mut().filter(|document| document.stands_in)) {
        if let Object::Pod(pod) = &mut document.object {
            pod.addresses = addresses(number);
        }
    }
}

fn addresses(number: u32) -> Vec<IpAddr> {
    let v4 = Ipv4Addr::from_bits(Ipv4Addr::new(198, 18, 0, 0).to_bits() + number % (1 << 17));
    let v6 = Ipv6Addr::from_bits(Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, 0).to_bits() + u128::from(number));
    vec![v4.into(), v6.into()]
}
