//! Checks across objects: one object for a name, one pod for an address; and namespaces that objects use but no manifest
//! defines.

use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_policy::model::{Namespace, Object, ObjectRef};
use rustc_hash::FxHashMap;

use super::error::{ManifestError, ManifestProblem, Origin, Scope};
use crate::convert::{FieldPath, NAME_LABEL};

/// Two objects that cannot coexist.
#[derive(Debug)]
pub(crate) struct Conflict {
    /// Index of the earlier object in the checked sequence.
    pub(crate) first: usize,
    /// Index of the later one.
    pub(crate) second: usize,
    pub(crate) at_first: ManifestError,
    pub(crate) at_second: ManifestError,
}

#[derive(Clone, Copy)]
struct CheckedObject<'a> {
    place: usize,
    object: &'a Object,
    origin: &'a Origin,
}

/// Finds objects that repeat an earlier one's name, and pods that repeat an earlier one's address.
pub(crate) fn conflicts<'a>(objects: impl Iterator<Item = (&'a Object, &'a Origin)>) -> Vec<Conflict> {
    let mut names: FxHashMap<ObjectRef, CheckedObject<'_>> = FxHashMap::default();
    let mut owners: FxHashMap<IpAddr, CheckedObject<'_>> = FxHashMap::default();
    let mut conflicts = Vec::new();
    for (place, (object, origin)) in objects.enumerate() {
        let entry = CheckedObject { place, object, origin };
        if let Some(&first) = names.get(&object.reference()) {
            conflicts.push(conflict(first, entry, None));
            continue;
        }
        names.insert(object.reference(), entry);
        for &address in owned_addresses(object) {
            match owners.get(&address) {
                Some(&first) => conflicts.push(conflict(first, entry, Some(address))),
                None => {
                    owners.insert(address, entry);
                }
            }
        }
    }
    conflicts
}

/// The addresses that only this object may have. Those of a finished or terminating pod may already be another's; those of
/// a host-network pod are its node's.
pub(crate) fn owned_addresses(object: &Object) -> &[IpAddr] {
    match object {
        Object::Pod(pod) if !pod.host_network && !pod.finished && !pod.lifetime.leaving => &pod.addresses,
        _ => &[],
    }
}

fn conflict(first: CheckedObject<'_>, second: CheckedObject<'_>, address: Option<IpAddr>) -> Conflict {
    let error_at = |entry: CheckedObject<'_>, other: CheckedObject<'_>| {
        let problem = match address {
            Some(address) => ManifestProblem::SharedAddress {
                address,
                other: other.object.reference(),
                other_origin: other.origin.clone(),
            },
            None => ManifestProblem::Duplicate { other: other.origin.clone() },
        };
        let object = Some(entry.object.reference().to_string());
        let scope = match entry.object {
            Object::NetworkPolicy(policy) => Scope::Namespace(policy.key.namespace.clone()),
            Object::Pod(_) | Object::Service(_) | Object::EndpointSlice(_) => Scope::Nothing,
            Object::Namespace(_) | Object::Node(_) | Object::ClusterNetworkPolicy(_) => Scope::Everything,
        };
        ManifestError { origin: entry.origin.clone(), object, field: FieldPath::default(), problem, scope }
    };
    let (at_first, at_second) = (error_at(first, second), error_at(second, first));
    Conflict { first: first.place, second: second.place, at_first, at_second }
}

/// The namespaces that pods or policies use and no object here defines.
///
/// In a cluster every namespace exists and has its name as a label. Manifests often omit the Namespace; it then counts as
/// present, with that one label.
pub(crate) fn implied_namespaces<'a>(objects: impl Iterator<Item = &'a Object>) -> Vec<Object> {
    let (mut used, mut defined) = (BTreeSet::new(), BTreeSet::new());
    for object in objects {
        match object {
            Object::Namespace(namespace) => defined.insert(namespace.name.as_str()),
            Object::Pod(pod) => used.insert(pod.key.namespace.as_str()),
            Object::NetworkPolicy(policy) => used.insert(policy.key.namespace.as_str()),
            Object::Service(service) => used.insert(service.key.namespace.as_str()),
            Object::EndpointSlice(slice) => used.insert(slice.key.namespace.as_str()),
            Object::Node(_) | Object::ClusterNetworkPolicy(_) => continue,
        };
    }
    let namespace = |name: &&str| {
        let labels = [(NAME_LABEL.to_owned(), name.to_string())].into();
        Object::Namespace(Namespace { name: name.to_string(), labels, default_deny_ingress: false, terminating: false })
    };
    used.difference(&defined).map(namespace).collect()
}
