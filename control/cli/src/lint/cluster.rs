//! The objects that policies refer to, and those that are missing.

use std::collections::{BTreeMap, BTreeSet};

use penstock_policy::model::{ClusterNetworkPolicy, Labels, Namespace, Object, Pod, Selector};
use penstock_sources::convert::{FieldPath, ISOLATION_ANNOTATION, PathElement};
use penstock_sources::manifest::Manifests;

use super::service_ports::Services;
use super::{Finding, FindingKind};

/// Pods and namespaces, as selectors find them, and Services.
pub(super) struct LintObjects {
    pods: Vec<Pod>,
    namespaces: BTreeMap<String, Labels>,
    services: Services,
}

impl LintObjects {
    pub(super) fn new(manifests: &Manifests) -> Self {
        let (mut pods, mut namespaces) = (Vec::new(), BTreeMap::new());
        let objects: Vec<Object> = manifests.objects().collect();
        let services = Services::new(&objects);
        for object in objects {
            match object {
                Object::Pod(pod) if !pod.host_network && !pod.finished => pods.push(pod),
                Object::Namespace(Namespace { name, labels, .. }) => drop(namespaces.insert(name, labels)),
                _ => {}
            }
        }
        Self { pods, namespaces, services }
    }

    pub(super) fn services(&self) -> &Services {
        &self.services
    }

    /// Whether a ClusterNetworkPolicy applies to a pod.
    pub(super) fn is_subject(&self, policy: &ClusterNetworkPolicy, pod: &Pod) -> bool {
        let labels = self.namespaces.get(&pod.key.namespace);
        labels.is_some_and(|labels| policy.subject.namespaces.matches(labels))
            && policy.subject.pods.matches(&pod.labels)
    }

    pub(super) fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.pods.iter()
    }

    pub(super) fn pods_in<'a>(&'a self, namespace: &'a str, pods: &'a Selector) -> impl Iterator<Item = &'a Pod> {
        self.pods.iter().filter(move |pod| pod.key.namespace == namespace && pods.matches(&pod.labels))
    }

    pub(super) fn pods_of<'a>(&'a self, namespaces: &'a Selector, pods: &'a Selector) -> impl Iterator<Item = &'a Pod> {
        let found = |namespace: &str| self.namespaces.get(namespace).is_some_and(|labels| namespaces.matches(labels));
        self.pods.iter().filter(move |pod| pods.matches(&pod.labels) && found(&pod.key.namespace))
    }

    pub(super) fn finds_namespace(&self, namespaces: &Selector) -> bool {
        self.namespaces.values().any(|labels| namespaces.matches(labels))
    }
}

pub(super) fn check(manifests: &Manifests, v1beta1: bool, findings: &mut Vec<Finding>) {
    for ignored in manifests.ignored.iter().filter(|ignored| ignored.is_policy) {
        findings.push(Finding {
            origin: ignored.origin.clone(),
            object: ignored.object.clone(),
            field: FieldPath::default(),
            kind: FindingKind::NotRead,
            message: "is a policy of a kind that is not understood: every other command refuses it".to_owned(),
        });
    }
    for document in &manifests.documents {
        for field in &document.unknown_fields {
            let message = match document.object {
                Object::NetworkPolicy(_) | Object::ClusterNetworkPolicy(_)
                    if field.elements().first() == Some(&PathElement::Field("spec".to_owned())) =>
                {
                    "is not a field that this version knows: every other command rejects the policy"
                }
                _ => "is not a field that this version knows",
            };
            findings.push(Finding::new(document, field.clone(), FindingKind::UnknownField, message));
        }
    }
    undefined(manifests, findings);
    for document in &manifests.documents {
        let annotation =
            ["metadata", "annotations", ISOLATION_ANNOTATION].map(|name| PathElement::Field(name.to_owned()));
        let annotation: FieldPath = annotation.into_iter().collect();
        match &document.object {
            Object::Namespace(_) if !v1beta1 && document.value(&annotation).is_some() => {
                findings.push(Finding::new(
                    document,
                    annotation,
                    FindingKind::NoEffect,
                    "has no effect without --v1beta1",
                ));
            }
            Object::Pod(pod) if pod.addresses.is_empty() && !pod.finished && !pod.host_network => {
                let message = "has no address: nothing matches it, and no policy is enforced for it";
                findings.push(Finding::new(document, FieldPath::default(), FindingKind::NoAddress, message));
            }
            _ => {}
        }
    }
}

/// Namespaces and nodes that are used and not defined, each at its first use.
fn undefined(manifests: &Manifests, findings: &mut Vec<Finding>) {
    let objects = || manifests.documents.iter().map(|document| &document.object);
    let namespaces: BTreeSet<&str> = objects()
        .filter_map(|object| match object {
            Object::Namespace(namespace) => Some(namespace.name.as_str()),
            _ => None,
        })
        .collect();
    let nodes: BTreeSet<&str> = objects()
        .filter_map(|object| match object {
            Object::Node(node) => Some(node.name.as_str()),
            _ => None,
        })
        .collect();
    let (mut told_namespaces, mut told_nodes) = (BTreeSet::new(), BTreeSet::new());
    for document in &manifests.documents {
        let (key, node) = match &document.object {
            Object::Pod(pod) => (&pod.key, pod.node.as_deref()),
            Object::NetworkPolicy(policy) => (&policy.key, None),
            Object::Service(service) => (&service.key, None),
            Object::EndpointSlice(slice) => (&slice.key, None),
            Object::Namespace(_) | Object::Node(_) | Object::ClusterNetworkPolicy(_) => continue,
        };
        let namespace = key.namespace.as_str();
        if !namespaces.contains(namespace) && told_namespaces.insert(namespace) {
            let message =
                format!("namespace {namespace} has no Namespace object: it is taken to have no label but its name");
            findings.push(Finding::new(document, FieldPath::default(), FindingKind::NoNamespace, message));
        }
        if let Some(node) = node.filter(|node| !nodes.contains(node) && told_nodes.insert(*node)) {
            let message =
                format!("node {node} has no Node object: its addresses are not known, and its probes not allowed");
            let field = ["spec", "nodeName"].map(|name| PathElement::Field(name.to_owned())).into_iter().collect();
            findings.push(Finding::new(document, field, FindingKind::NoNode, message));
        }
    }
}
