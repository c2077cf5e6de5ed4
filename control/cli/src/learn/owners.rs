//! Workloads that share their labels: no policy can tell them apart.

use std::collections::{BTreeMap, BTreeSet};

use penstock_policy::describe;
use penstock_policy::learn::{Workload, Workloads};
use penstock_policy::model::{Object, ObjectKey, Pod};
use penstock_policy::state::ClusterState;
use penstock_sources::convert::{FieldPath, PathElement};
use penstock_sources::manifest::Manifests;
use serde_json::Value;

/// One line for each workload whose pods belong to several owners.
pub(super) fn notes(manifests: &Manifests, state: &ClusterState, workloads: &Workloads) -> Vec<String> {
    let owners = owners(manifests);
    workloads.iter().filter_map(|(_, workload)| note(&owners, state, workload)).collect()
}

fn note(owners: &BTreeMap<ObjectKey, String>, state: &ClusterState, workload: &Workload) -> Option<String> {
    let pods = workload.pods.iter().filter_map(|pod| state.pod(*pod));
    let found: BTreeSet<String> =
        pods.map(|pod| owners.get(&pod.key).cloned().unwrap_or_else(|| by_ports(pod))).collect();
    if found.len() < 2 {
        return None;
    }
    let labels = match describe::selector(&workload.selector) {
        none if none.is_empty() => "no labels that stay".to_owned(),
        labels => format!("the same labels {labels}"),
    };
    let found = Vec::from_iter(found).join(", ");
    Some(format!(
        "namespace {}: {found} have {labels}: one policy selects all of them; give them different labels to tell them apart",
        workload.namespace
    ))
}

/// The mark by which a pod without an owner is known.
fn by_ports(pod: &Pod) -> String {
    let mut ports: Vec<String> =
        pod.ports.iter().map(|port| format!("{}/{}", port.number, describe::protocol(port.protocol))).collect();
    ports.sort();
    if ports.is_empty() {
        "pods without named ports".to_owned()
    } else {
        format!("pods with ports {}", ports.join(" "))
    }
}

/// The owners of pods by their manifests, as what stays when a controller makes new ones.
fn owners(manifests: &Manifests) -> BTreeMap<ObjectKey, String> {
    let at = ["metadata", "ownerReferences"].map(|name| PathElement::Field(name.to_owned()));
    let at: FieldPath = at.into_iter().collect();
    let pods = manifests.documents.iter().filter_map(|document| match &document.object {
        Object::Pod(pod) => Some((pod, document.value(&at)?)),
        _ => None,
    });
    pods.filter_map(|(pod, owners)| Some((pod.key.clone(), owner(pod, &owners)?))).collect()
}

fn owner(pod: &Pod, references: &Value) -> Option<String> {
    let references = references.as_array()?;
    let controls = |reference: &&Value| reference["controller"] == Value::Bool(true);
    let reference = references.iter().find(controls).or(references.first())?;
    let (kind, name) = (reference["kind"].as_str()?, reference["name"].as_str()?);
    // A ReplicaSet's name ends with the hash of its Deployment's template, a CronJob's Job with its time in minutes.
    let last = name.rsplit_once('-').map(|(_, last)| last).unwrap_or_default();
    let is_hash = pod.labels.get("pod-template-hash").is_some_and(|hash| hash == last);
    let is_time = kind == "Job" && last.len() >= 8 && last.bytes().all(|c| c.is_ascii_digit());
    let stays = if is_hash || is_time { &name[..name.len() - last.len() - 1] } else { name };
    Some(format!("{kind} {stays}"))
}
