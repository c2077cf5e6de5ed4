//! Converts API objects to the model. Does not keep the originals.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DynamicObject;
use penstock_policy::model::{Object, ObjectKey, ObjectRef};

use super::cluster_policy;
use super::fail_closed::{self, Interpretation};
use crate::ObjectKind;
use crate::convert::{self, ConversionSettings, V1Beta1EndpointSlice};
use crate::typed;

/// A converted object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ConvertedObject {
    /// Its reference.
    pub(super) reference: ObjectRef,
    /// Its `resourceVersion`: larger is later (KEP-5504). `None` if it is not a number; such objects are taken in order of
    /// arrival.
    pub(super) version: Option<u64>,
    /// Its `uid`.
    pub(super) uid: String,
    /// Its content.
    pub(super) content: Interpretation,
}

/// Converts an object of one kind.
pub(super) type Converter<K> = fn(K) -> ConvertedObject;

pub(super) fn namespace(object: core::Namespace) -> ConvertedObject {
    let content = content(
        convert::namespace(&object, ConversionSettings::default()).map(Object::Namespace),
        ObjectKind::Namespace,
    );
    ConvertedObject {
        reference: ObjectRef::Namespace(name(&object.metadata)),
        version: version(&object.metadata),
        uid: uid(&object.metadata),
        content,
    }
}

pub(super) fn node(object: core::Node) -> ConvertedObject {
    let content = content(convert::node(&object).map(Object::Node), ObjectKind::Node);
    let reference = ObjectRef::Node(name(&object.metadata));
    ConvertedObject { reference, version: version(&object.metadata), uid: uid(&object.metadata), content }
}

pub(super) fn pod(object: core::Pod) -> ConvertedObject {
    let content = content(convert::pod(&object).map(Object::Pod), ObjectKind::Pod);
    let reference = ObjectRef::Pod(key(&object.metadata));
    ConvertedObject { reference, version: version(&object.metadata), uid: uid(&object.metadata), content }
}

/// Policies are read from JSON, not the client's type: that type would silently drop an unknown field, and with it a
/// restriction.
pub(super) fn network_policy(object: DynamicObject) -> ConvertedObject {
    let content = fail_closed::policy(&object.metadata, object.data.get("spec"));
    ConvertedObject {
        reference: ObjectRef::NetworkPolicy(key(&object.metadata)),
        version: version(&object.metadata),
        uid: uid(&object.metadata),
        content,
    }
}

/// ClusterNetworkPolicies are read from JSON: they have no type in the client, and an unknown field must be noticed.
pub(super) fn cluster_network_policy(object: DynamicObject) -> ConvertedObject {
    cluster_policy(object, ConversionSettings::default())
}

/// The same, where their domain names are followed.
pub(super) fn cluster_network_policy_with_names(object: DynamicObject) -> ConvertedObject {
    cluster_policy(object, ConversionSettings { domain_names: true, ..ConversionSettings::default() })
}

fn cluster_policy(object: DynamicObject, settings: ConversionSettings) -> ConvertedObject {
    ConvertedObject {
        reference: ObjectRef::ClusterNetworkPolicy(name(&object.metadata)),
        version: version(&object.metadata),
        uid: uid(&object.metadata),
        content: cluster_policy::policy(&object.metadata, object.data.get("spec"), settings),
    }
}

/// What of a Service is not valid is left out.
pub(super) fn service(object: core::Service) -> ConvertedObject {
    let converted = convert::service(&object).map(|(service, wrong)| (Object::Service(service), wrong));
    ConvertedObject {
        reference: ObjectRef::Service(key(&object.metadata)),
        version: version(&object.metadata),
        uid: uid(&object.metadata),
        content: partly(converted, ObjectKind::Service),
    }
}

/// What of an EndpointSlice is not valid is left out. It is of either version: the items of a list do not say which. All that
/// counts of a stable one is also in the older form.
pub(super) fn endpoint_slice(object: DynamicObject) -> ConvertedObject {
    let (reference, version) = (ObjectRef::EndpointSlice(key(&object.metadata)), version(&object.metadata));
    let uid = uid(&object.metadata);
    let content = match typed::read::<V1Beta1EndpointSlice>(object.data) {
        Ok((mut slice, _)) => {
            slice.metadata = object.metadata;
            let converted = convert::v1beta1_endpoint_slice(slice);
            partly(converted.map(|(slice, wrong)| (Object::EndpointSlice(slice), wrong)), ObjectKind::EndpointSlice)
        }
        Err((field, wrong)) => unusable(&format!("{field}: {wrong}"), ObjectKind::EndpointSlice),
    };
    ConvertedObject { reference, version, uid, content }
}

type PartlyConverted = Result<(Object, Vec<convert::FieldError>), convert::FieldError>;

fn partly(converted: PartlyConverted, kind: ObjectKind) -> Interpretation {
    match converted {
        Ok((object, wrong)) if !wrong.is_empty() => {
            let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
            Interpretation::Restricted {
                object,
                problem: format!("{}; until then it counts without", wrong.join("; ")),
            }
        }
        converted => content(converted.map(|(object, _)| object), kind),
    }
}

fn content(converted: Result<Object, convert::FieldError>, kind: ObjectKind) -> Interpretation {
    converted.map_or_else(|invalid| unusable(&invalid.to_string(), kind), Interpretation::Full)
}

/// An object that counts as absent.
fn unusable(invalid: &str, kind: ObjectKind) -> Interpretation {
    let meaning = match kind {
        ObjectKind::Namespace => "no namespaceSelector matches it",
        ObjectKind::Node => "its addresses are not treated as a node's",
        ObjectKind::Pod => "no selector matches it, and its packets are dropped on its node",
        ObjectKind::NetworkPolicy | ObjectKind::ClusterNetworkPolicy => "it selects nothing",
        ObjectKind::Service => "it has no address",
        ObjectKind::EndpointSlice => "it has no endpoints",
    };
    Interpretation::Unusable { problem: format!("{invalid}; until then {meaning}") }
}

fn name(meta: &ObjectMeta) -> String {
    meta.name.clone().unwrap_or_default()
}

fn key(meta: &ObjectMeta) -> ObjectKey {
    ObjectKey { namespace: meta.namespace.clone().unwrap_or_default(), name: name(meta) }
}

fn uid(meta: &ObjectMeta) -> String {
    meta.uid.clone().unwrap_or_default()
}

fn version(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_deref()?.parse().ok()
}
