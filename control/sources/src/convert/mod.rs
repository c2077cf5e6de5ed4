//! Converts the API's objects to the model: validates, applies defaults, reports errors with their field path.
//!
//! No I/O: manifests and the API server both use it. The rules are those of Kubernetes' own validation
//! (`pkg/apis/networking/validation`, `pkg/apis/core/validation`): an object that Kubernetes rejects has no meaning to
//! enforce. Nothing is silently narrowed, widened or skipped: what does not convert is an [`FieldError`].

mod cluster;
mod cluster_policy;
mod distinct;
mod field_error;
mod limits;
mod names;
mod notes;
mod path;
mod policy;
mod port;
mod service;
mod staging;
mod v1beta1;

pub use cluster::ISOLATION_ANNOTATION;
pub(crate) use cluster::NAME_LABEL;
pub use cluster::{namespace, node, pod};
pub use cluster_policy::{ClusterNetworkPolicy, cluster_network_policy};
pub(crate) use cluster_policy::{
    EgressRule, IngressRule, Mapping, Strictness, SubjectFields, action, cluster_policy_name, egress_rule,
    ingress_rule, priority, subject, tier,
};
pub use field_error::{FieldError, FieldProblem};
pub(crate) use limits::{limits, without_limits};
pub use names::{is_dns_subdomain, is_label_key};
pub(crate) use notes::notes;
pub use path::{FieldPath, FieldPathRef, PathElement};
pub use policy::network_policy;
pub use service::{endpoint_slice, service};
pub use staging::POLICY_ANNOTATIONS;
pub(crate) use staging::staging;
pub use v1beta1::network_policy as v1beta1_network_policy;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use penstock_policy::model::ObjectKey;

/// Which objects to read beyond the stable API.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConversionSettings {
    /// Read `extensions/v1beta1` policies and the DefaultDeny annotation of namespaces, with the semantics of the original
    /// NetworkPolicy proposal. If off, such a policy is an error and the annotation has no effect.
    pub v1beta1: bool,
    /// Understand `domainNames` of ClusterNetworkPolicies. If off, a rule with them is not understood: nobody reads the DNS
    /// answers that it depends on.
    pub domain_names: bool,
}

fn name(meta: &ObjectMeta, valid: fn(&str) -> Result<(), FieldProblem>) -> Result<String, FieldError> {
    let at = FieldPathRef::OBJECT;
    let at = at.field("metadata");
    let name = meta.name.clone().unwrap_or_default();
    valid(&name).map_err(|problem| at.field("name").invalid(problem))?;
    Ok(name)
}

/// Namespace and name; without a namespace it is `default`, as for every API client.
fn key(meta: &ObjectMeta) -> Result<ObjectKey, FieldError> {
    let name = name(meta, names::dns_subdomain)?;
    let namespace = meta.namespace.clone().unwrap_or_else(|| "default".to_owned());
    let at = FieldPathRef::OBJECT;
    names::dns_label(&namespace).map_err(|problem| at.field("metadata").field("namespace").invalid(problem))?;
    Ok(ObjectKey { namespace, name })
}

fn labels(meta: &ObjectMeta) -> Result<penstock_policy::model::Labels, FieldError> {
    let at = FieldPathRef::OBJECT;
    let at = at.field("metadata");
    let at = at.field("labels");
    let labels = meta.labels.clone().unwrap_or_default();
    for (key, value) in &labels {
        names::label_key(key)
            .and_then(|()| names::label_value(value))
            .map_err(|problem| at.field(key).invalid(problem))?;
    }
    Ok(labels)
}
