//! Namespaces that no manifest defines.
//!
//! In a cluster every object's namespace exists, and carries its name as a label. Manifests often leave the Namespace
//! out; it is then taken to be there, with that one label.

use std::collections::BTreeSet;

use penstock_policy::model::{Namespace, Object};

use crate::convert::NAME_LABEL;

/// The namespaces that are used by pods or policies and not defined among these objects.
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
