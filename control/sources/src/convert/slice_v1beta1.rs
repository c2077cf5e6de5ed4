//! EndpointSlice of `discovery.k8s.io/v1beta1`, which Kubernetes 1.19 and 1.20 serve alone.
//!
//! It differs from the stable API in where an endpoint says its node: `nodeName` came late and behind a feature gate
//! (EndpointSliceNodeName), before it the node's name is in `topology` under `kubernetes.io/hostname`. The zone in `topology`
//! has no part in the choice of a backend; hints, which do, have the same form in both versions. Source:
//! `staging/src/k8s.io/api/discovery/v1beta1/types.go` of Kubernetes 1.20.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use penstock_policy::model;
use serde::Deserialize;

use super::FieldError;
use super::service::{Partly, endpoint_slice};

/// The key of the node's name in an endpoint's topology.
const HOSTNAME: &str = "kubernetes.io/hostname";

/// An EndpointSlice of `discovery.k8s.io/v1beta1`. It can also hold what is read here of a stable one.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct V1Beta1EndpointSlice {
    #[serde(default)]
    pub(crate) metadata: ObjectMeta,
    address_type: Option<String>,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<discovery::EndpointPort>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Option<Vec<String>>,
    conditions: Option<discovery::EndpointConditions>,
    hints: Option<discovery::EndpointHints>,
    hostname: Option<String>,
    node_name: Option<String>,
    target_ref: Option<ObjectReference>,
    topology: Option<BTreeMap<String, String>>,
}

/// Converts an EndpointSlice of `discovery.k8s.io/v1beta1`.
pub fn v1beta1_endpoint_slice(slice: V1Beta1EndpointSlice) -> Result<Partly<model::EndpointSlice>, FieldError> {
    endpoint_slice(&discovery::EndpointSlice {
        metadata: slice.metadata,
        address_type: slice.address_type.unwrap_or_default(),
        endpoints: slice.endpoints.map(|endpoints| endpoints.into_iter().map(stable).collect()),
        ports: slice.ports,
    })
}

/// The endpoint as the stable API has it. That version's `nodeName` goes before the topology, as in the API server.
fn stable(endpoint: Endpoint) -> discovery::Endpoint {
    let of_topology = endpoint.topology.as_ref().and_then(|topology| topology.get(HOSTNAME)).cloned();
    discovery::Endpoint {
        addresses: endpoint.addresses.unwrap_or_default(),
        conditions: endpoint.conditions,
        hints: endpoint.hints,
        hostname: endpoint.hostname,
        node_name: endpoint.node_name.or(of_topology),
        target_ref: endpoint.target_ref,
        ..discovery::Endpoint::default()
    }
}
