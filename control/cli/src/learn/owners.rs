//! Workloads that share their labels: no policy can tell them apart.

use std::collections::BTreeSet;

use penstock_policy::describe;
use penstock_policy::learn::{Workload, Workloads};
use penstock_policy::model::{Controller, Pod};
use penstock_policy::state::ClusterState;

/// One line for each workload whose pods belong to several owners.
pub(super) fn notes(state: &ClusterState, workloads: &Workloads) -> Vec<String> {
    workloads.iter().filter_map(|(_, workload)| note(state, workload)).collect()
}

fn note(state: &ClusterState, workload: &Workload) -> Option<String> {
    let pods = workload.pods.iter().filter_map(|pod| state.pod(*pod));
    let owner = |pod: &Pod| pod.controller.as_ref().map(|Controller { kind, name }| format!("{kind} {name}"));
    let found: BTreeSet<String> = pods.map(|pod| owner(pod).unwrap_or_else(|| by_ports(pod))).collect();
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
