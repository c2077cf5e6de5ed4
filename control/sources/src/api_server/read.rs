//! From what the API server sends to the objects of the model. What was sent is not kept.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DynamicObject;
use penstock_policy::model::{Object, ObjectKey, ObjectRef};

use super::narrow::{self, Content};
use crate::Kind;
use crate::convert::{self, Settings};

/// An object as it was sent, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Read {
    /// Which object.
    pub(super) reference: ObjectRef,
    /// Its `resourceVersion`: larger is later (KEP-5504). `None` where it is no number; such objects are taken as
    /// they come.
    pub(super) version: Option<u64>,
    /// What it says.
    pub(super) content: Content,
}

/// Reads an object of one kind.
pub(super) type Reader<K> = fn(K) -> Read;

pub(super) fn namespace(object: core::Namespace) -> Read {
    let content = content(convert::namespace(&object, Settings::default()).map(Object::Namespace), Kind::Namespace);
    Read { reference: ObjectRef::Namespace(name(&object.metadata)), version: version(&object.metadata), content }
}

pub(super) fn node(object: core::Node) -> Read {
    let content = content(convert::node(&object).map(Object::Node), Kind::Node);
    Read { reference: ObjectRef::Node(name(&object.metadata)), version: version(&object.metadata), content }
}

pub(super) fn pod(object: core::Pod) -> Read {
    let content = content(convert::pod(&object).map(Object::Pod), Kind::Pod);
    Read { reference: ObjectRef::Pod(key(&object.metadata)), version: version(&object.metadata), content }
}

/// A policy is read from its own text rather than from the client's type: that would pass over a field that this
/// version does not know, and with it over what the field restricts.
pub(super) fn network_policy(object: DynamicObject) -> Read {
    let content = narrow::policy(&object.metadata, object.data.get("spec"));
    Read { reference: ObjectRef::NetworkPolicy(key(&object.metadata)), version: version(&object.metadata), content }
}

fn content(converted: Result<Object, convert::Invalid>, kind: Kind) -> Content {
    converted.map_or_else(
        |invalid| {
            let meaning = match kind {
                Kind::Namespace => "no namespaceSelector finds it",
                Kind::Node => "its addresses are not known to be a node's",
                Kind::Pod => "no selector finds it, and where it runs its packets are dropped",
                Kind::NetworkPolicy => "it selects nothing",
            };
            Content::Nothing { problem: format!("{invalid}; until then {meaning}") }
        },
        Content::Whole,
    )
}

fn name(meta: &ObjectMeta) -> String {
    meta.name.clone().unwrap_or_default()
}

fn key(meta: &ObjectMeta) -> ObjectKey {
    ObjectKey { namespace: meta.namespace.clone().unwrap_or_default(), name: name(meta) }
}

fn version(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_deref()?.parse().ok()
}
