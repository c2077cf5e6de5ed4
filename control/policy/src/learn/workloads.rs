//! Workloads: the pods of a namespace with equal stable labels.

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use crate::model::{LabelOperator, Labels, NamedPort, PortProtocol, Requirement, Selector};
use crate::state::{ClusterState, PodId};

use super::LearnSettings;

pub type WorkloadId = usize;

/// The present pods of a namespace with equal stable labels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workload {
    pub namespace: String,
    /// The labels that they have in common and that identify them.
    pub labels: Labels,
    /// Its pods, sorted by name.
    pub pods: Vec<PodId>,
    /// Selects these pods and no other present pod of the namespace.
    pub selector: Selector,
}

/// All workloads of a cluster, sorted by namespace and labels.
#[derive(Clone, Debug)]
pub struct Workloads {
    all: Vec<Workload>,
    by_pod: FxHashMap<PodId, WorkloadId>,
}

impl Workloads {
    pub fn new(state: &ClusterState, settings: &LearnSettings) -> Self {
        let mut found: BTreeMap<(String, Labels), Vec<PodId>> = BTreeMap::new();
        for (id, pod) in state.pods().filter(|(id, _)| state.is_present(*id)) {
            let stable = pod.labels.iter().filter(|(key, _)| settings.is_stable(key));
            let labels: Labels = stable.map(|(key, value)| (key.clone(), value.clone())).collect();
            found.entry((pod.key.namespace.clone(), labels)).or_default().push(id);
        }
        let mut all: Vec<Workload> = found
            .into_iter()
            .map(|((namespace, labels), mut pods)| {
                pods.sort_by_key(|pod| state.pod(*pod).map(|pod| &pod.key));
                Workload { namespace, labels, pods, selector: Selector::default() }
            })
            .collect();
        let selectors: Vec<Selector> = all.iter().map(|workload| selector(workload, &all)).collect();
        for (workload, selector) in all.iter_mut().zip(selectors) {
            workload.selector = selector;
        }
        let members = all.iter().enumerate().flat_map(|(id, workload)| workload.pods.iter().map(move |pod| (*pod, id)));
        let by_pod = members.collect();
        Self { all, by_pod }
    }

    /// The workload of a pod; `None` if policy does not see the pod.
    pub fn of(&self, pod: PodId) -> Option<WorkloadId> {
        self.by_pod.get(&pod).copied()
    }

    pub fn get(&self, id: WorkloadId) -> &Workload {
        &self.all[id]
    }

    pub fn iter(&self) -> impl Iterator<Item = (WorkloadId, &Workload)> {
        self.all.iter().enumerate()
    }

    /// A name for a port of a workload's pod: the first that this pod gives to the number and that every pod of the
    /// workload gives to one of its own.
    pub(crate) fn port_name(
        &self,
        state: &ClusterState,
        workload: WorkloadId,
        pod: PodId,
        protocol: PortProtocol,
        number: u16,
    ) -> Option<String> {
        let own = state.pod(pod)?.ports.iter().filter(|port| (port.protocol, port.number) == (protocol, number));
        let names: BTreeSet<&str> = own.map(|port: &NamedPort| port.name.as_str()).collect();
        let has = |pod: &PodId, name: &str| {
            state
                .pod(*pod)
                .is_some_and(|pod| pod.ports.iter().any(|port| port.name == name && port.protocol == protocol))
        };
        let is_common = |name: &&str| self.all[workload].pods.iter().all(|pod| has(pod, name));
        names.into_iter().find(is_common).map(str::to_owned)
    }
}

/// Selects a workload's labels, and the absence of one label of each workload that has all of these and more.
fn selector(workload: &Workload, all: &[Workload]) -> Selector {
    let equal = workload
        .labels
        .iter()
        .map(|(key, value)| Requirement { key: key.clone(), operator: LabelOperator::In(vec![value.clone()]) });
    let mut requirements: Vec<Requirement> = equal.collect();
    let mut absent: BTreeSet<&str> = BTreeSet::new();
    for other in all.iter().filter(|other| is_larger(other, workload)) {
        let more = || other.labels.keys().map(String::as_str).filter(|key| !workload.labels.contains_key(*key));
        if !more().any(|key| absent.contains(key)) {
            absent.extend(more().next());
        }
    }
    let without = |key: &str| Requirement { key: key.to_owned(), operator: LabelOperator::DoesNotExist };
    requirements.extend(absent.into_iter().map(without));
    requirements.sort();
    Selector { requirements }
}

/// Whether a workload of the same namespace has all labels of another, and more.
fn is_larger(other: &Workload, workload: &Workload) -> bool {
    other.namespace == workload.namespace
        && other.labels.len() > workload.labels.len()
        && workload.labels.iter().all(|(key, value)| other.labels.get(key) == Some(value))
}
