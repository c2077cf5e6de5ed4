//! EndpointSlices derived from selectors and pods, for manifests that have none.

use penstock_policy::derived_slices::derived_slices;
use penstock_policy::model::{EndpointSlice, Object};

use super::tree::YamlNode;

/// An object, and whether it is a pod that is ready.
type ObjectReadiness<'a> = (&'a Object, bool);

/// If none of these objects is an EndpointSlice: those that the cluster's controller would make of them, and of how many
/// Services. Of each pod it must be known whether it is ready ([`Document::is_ready`](super::Document::is_ready)).
pub fn derive_endpoint_slices(objects: &[ObjectReadiness<'_>]) -> (Vec<EndpointSlice>, usize) {
    if objects.iter().any(|(object, _)| matches!(object, Object::EndpointSlice(_))) {
        return (Vec::new(), 0);
    }
    let services = objects.iter().filter_map(|(object, _)| match object {
        Object::Service(service) if service.selector.is_some() => Some(service),
        _ => None,
    });
    let pods = || {
        objects.iter().filter_map(|(object, is_ready)| match object {
            Object::Pod(pod) => Some((pod, *is_ready)),
            _ => None,
        })
    };
    let (mut slices, mut derived) = (Vec::new(), 0);
    for service in services {
        let before = slices.len();
        slices.extend(derived_slices(service, pods()));
        derived += usize::from(slices.len() > before);
    }
    (slices, derived)
}

/// Whether the pod's status says that it is ready, or nothing about it: manifests are often written without a status.
pub(super) fn is_ready(pod: &YamlNode) -> bool {
    let value = pod.get("status").map(YamlNode::to_value).unwrap_or_default();
    let mut conditions = value["conditions"].as_array().into_iter().flatten();
    conditions.find(|condition| condition["type"] == "Ready").is_none_or(|ready| ready["status"] == "True")
}
