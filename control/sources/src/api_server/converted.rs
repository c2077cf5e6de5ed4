//! Converts API objects to the model. Does not keep the originals.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::DynamicObject;
use penstock_policy::model::{Object, ObjectKey, ObjectRef};
use serde_json::Value;

use super::cluster_policy;
use super::fail_closed::{self, Interpretation};
use crate::ObjectKind;
use crate::convert::{self, ConversionSettings};
use crate::typed::{self, ApiType};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ConvertedObject {
    pub(super) reference: ObjectRef,
    /// Its `resourceVersion`: larger is later (KEP-5504). `None` if it is not a number; such objects are taken in order of
    /// arrival.
    pub(super) version: Option<u64>,
    pub(super) uid: String,
    pub(super) content: Interpretation,
}

pub(super) type Converter = fn(DynamicObject) -> ConvertedObject;

pub(super) fn namespace(object: DynamicObject) -> ConvertedObject {
    let reference = ObjectRef::Namespace(name(&object.metadata));
    typed(object, reference, ObjectKind::Namespace, |data, metadata| {
        let namespace = core::Namespace { metadata, ..read(data)? };
        Ok(whole(convert::namespace(&namespace, ConversionSettings::default()).map(Object::Namespace)))
    })
}

pub(super) fn node(object: DynamicObject) -> ConvertedObject {
    let reference = ObjectRef::Node(name(&object.metadata));
    typed(object, reference, ObjectKind::Node, |data, metadata| {
        let node = core::Node { metadata, ..read(data)? };
        Ok(whole(convert::node(&node).map(Object::Node)))
    })
}

pub(super) fn pod(object: DynamicObject) -> ConvertedObject {
    let reference = ObjectRef::Pod(key(&object.metadata));
    typed(object, reference, ObjectKind::Pod, |data, metadata| {
        let mut pod = core::Pod { metadata, ..read(data)? };
        // It is a pod all the same.
        let wrong: Vec<_> = convert::limits(&pod.metadata).err().into_iter().collect();
        if !wrong.is_empty() {
            pod.metadata = convert::without_limits(pod.metadata);
        }
        Ok(convert::pod(&pod).map(|pod| (Object::Pod(pod), wrong)))
    })
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

/// Parts of a Service that are not valid are left out.
pub(super) fn service(object: DynamicObject) -> ConvertedObject {
    let reference = ObjectRef::Service(key(&object.metadata));
    typed(object, reference, ObjectKind::Service, |data, metadata| {
        let service = core::Service { metadata, ..read(data)? };
        Ok(convert::service(&service).map(|(service, wrong)| (Object::Service(service), wrong)))
    })
}

/// An object and its parts that are not valid.
type PartlyConverted = Result<(Object, Vec<convert::FieldError>), convert::FieldError>;

fn whole(converted: Result<Object, convert::FieldError>) -> PartlyConverted {
    converted.map(|object| (object, Vec::new()))
}

/// Reads an object's fields as a type of the API, or says which of them has another type.
fn read<T: ApiType>(data: Value) -> Result<T, String> {
    typed::read(data).map(|(typed, _)| typed).map_err(|(field, wrong)| format!("{field}: {wrong}"))
}

fn typed(
    object: DynamicObject,
    reference: ObjectRef,
    kind: ObjectKind,
    convert: impl FnOnce(Value, ObjectMeta) -> Result<PartlyConverted, String>,
) -> ConvertedObject {
    let DynamicObject { metadata, data, .. } = object;
    let (version, uid) = (version(&metadata), uid(&metadata));
    let content = match convert(data, metadata) {
        Err(invalid) => unusable(&invalid, kind),
        Ok(Err(invalid)) => unusable(&invalid.to_string(), kind),
        Ok(Ok((object, wrong))) if wrong.is_empty() => Interpretation::Full(object),
        Ok(Ok((object, wrong))) => {
            let wrong: Vec<String> = wrong.iter().map(ToString::to_string).collect();
            Interpretation::Restricted {
                object,
                problem: format!("{}; until then it counts without", wrong.join("; ")),
            }
        }
    };
    ConvertedObject { reference, version, uid, content }
}

/// An object that counts as absent.
fn unusable(invalid: &str, kind: ObjectKind) -> Interpretation {
    let meaning = match kind {
        ObjectKind::Namespace => "no namespaceSelector matches it",
        ObjectKind::Node => "its addresses are not treated as a node's",
        ObjectKind::Pod => "no selector matches it, and its packets are dropped on its node",
        ObjectKind::NetworkPolicy | ObjectKind::ClusterNetworkPolicy => "it selects nothing",
        ObjectKind::Service => "it has no address",
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
