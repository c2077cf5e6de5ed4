//! What must hold between objects (one name, one object; one address, one pod), and what objects say of others: the
//! namespaces that no manifest defines.

use std::collections::BTreeSet;
use std::net::IpAddr;

use penstock_policy::model::{Namespace, Object, ObjectRef};
use rustc_hash::FxHashMap;

use super::error::{Fault, ManifestError, Origin};
use crate::convert::{FieldPath, NAME_LABEL};

/// Two objects that cannot both be.
#[derive(Debug)]
pub(crate) struct Conflict {
    /// Place of the earlier object in the sequence that was checked.
    pub(crate) first: usize,
    /// Place of the later one.
    pub(crate) second: usize,
    /// The error as it is told at the earlier one.
    pub(crate) at_first: ManifestError,
    /// The error as it is told at the later one.
    pub(crate) at_second: ManifestError,
}

/// An object in the sequence that is checked.
#[derive(Clone, Copy)]
struct Entry<'a> {
    place: usize,
    object: &'a Object,
    origin: &'a Origin,
}

/// Finds all objects that repeat an earlier one's name, and all pods that repeat an earlier one's address.
pub(crate) fn conflicts<'a>(objects: impl Iterator<Item = (&'a Object, &'a Origin)>) -> Vec<Conflict> {
    let mut names: FxHashMap<ObjectRef, Entry<'_>> = FxHashMap::default();
    let mut owners: FxHashMap<IpAddr, Entry<'_>> = FxHashMap::default();
    let mut conflicts = Vec::new();
    for (place, (object, origin)) in objects.enumerate() {
        let entry = Entry { place, object, origin };
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

/// The addresses that only this object may have. A finished pod's may be another's by now, and so may those of one that is
/// being deleted; a host-network pod's are its node's.
fn owned_addresses(object: &Object) -> &[IpAddr] {
    match object {
        Object::Pod(pod) if !pod.host_network && !pod.finished && !pod.lifetime.leaving => &pod.addresses,
        _ => &[],
    }
}

fn conflict(first: Entry<'_>, second: Entry<'_>, address: Option<IpAddr>) -> Conflict {
    let error_at = |entry: Entry<'_>, other: Entry<'_>| {
        let fault = match address {
            Some(address) => {
                Fault::SharedAddress { address, other: other.object.reference(), other_origin: other.origin.clone() }
            }
            None => Fault::Duplicate { other: other.origin.clone() },
        };
        let object = Some(entry.object.reference().to_string());
        ManifestError { origin: entry.origin.clone(), object, field: FieldPath::default(), fault }
    };
    let (at_first, at_second) = (error_at(first, second), error_at(second, first));
    Conflict { first: first.place, second: second.place, at_first, at_second }
}

/// The namespaces that are used by pods or policies and not defined among these objects.
///
/// In a cluster every object's namespace exists, and carries its name as a label. Manifests often leave the Namespace
/// out; it is then taken to be there, with that one label.
pub(crate) fn implied_namespaces<'a>(objects: impl Iterator<Item = &'a Object>) -> Vec<Object> {
    let (mut used, mut defined) = (BTreeSet::new(), BTreeSet::new());
    for object in objects {
        match object {
            Object::Namespace(namespace) => defined.insert(namespace.name.as_str()),
            Object::Pod(pod) => used.insert(pod.key.namespace.as_str()),
            Object::NetworkPolicy(policy) => used.insert(policy.key.namespace.as_str()),
            Object::Node(_) => continue,
        };
    }
    let namespace = |name: &&str| {
        let labels = [(NAME_LABEL.to_owned(), name.to_string())].into();
        Object::Namespace(Namespace { name: name.to_string(), labels, default_deny_ingress: false })
    };
    used.difference(&defined).map(namespace).collect()
}
