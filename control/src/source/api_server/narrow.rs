//! Policies that are not wholly understood: of a newer API, or with a fault that the server let pass.
//!
//! Manifests keep what a file said before; here that would make a node's policy depend on when it was started, and a
//! restart would lose it in silence. So the same text always has the same meaning, the narrowest: the policy isolates
//! the pods that it selects (all of its namespace's, if its selector is not understood) in the directions it
//! names (both, if those are not understood), and of its rules those allow that are understood to the last field.
//! Policies only add, so whatever was left out could only have allowed more.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::read::Content;
use crate::model::{self, Object, Rule, Selector};
use crate::source::convert::{self, FieldPath, Step};
use crate::source::typed;

/// What is wrong, and where.
type Trouble = (FieldPath, String);

const UNKNOWN: &str = "is not a field that this version knows";

/// Reads a policy from its metadata and its spec.
pub(super) fn policy(metadata: &ObjectMeta, spec: Option<&Value>) -> Content {
    let empty = Value::Object(Default::default());
    let spec = spec.unwrap_or(&empty);
    let trouble = match strict::<NetworkPolicySpec>(spec).and_then(|spec| convert(metadata, spec)) {
        Ok(policy) => return Content::Whole(Object::NetworkPolicy(policy)),
        Err(trouble) => trouble,
    };
    let (mut field, problem) = trouble;
    if field.steps().first() != Some(&Step::Field("metadata".to_owned())) {
        field = field.inside("spec");
    }
    match narrowed(metadata, spec) {
        Ok((policy, kept, left_out)) => {
            let problem = format!(
                "{field}: {problem}; until it is understood it isolates its pods, and {kept} of its {} rules allow",
                kept + left_out
            );
            Content::Part { object: Object::NetworkPolicy(policy), problem }
        }
        // Not even its name is one.
        Err(_) => Content::Nothing { problem: format!("{field}: {problem}; it selects nothing") },
    }
}

/// The narrowest reading, with the numbers of rules kept and left out.
fn narrowed(metadata: &ObjectMeta, spec: &Value) -> Result<(model::NetworkPolicy, usize, usize), Trouble> {
    let mut policy = convert(metadata, NetworkPolicySpec::default())?;
    let selector = spec.get("podSelector").map(|selector| pod_selector(metadata, selector));
    policy.pod_selector = selector.and_then(Result::ok).unwrap_or_default();
    let (isolates_ingress, isolates_egress) = directions(metadata, spec);
    // A field beside the rules may say anything about them.
    let rules_count = known_fields_only(spec);
    let (mut kept, mut left_out) = (0, 0);
    let mut rules = |name: &str, read: fn(&ObjectMeta, &Value) -> Option<Rule>| -> Vec<Rule> {
        let written = spec.get(name).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let read = written.iter().filter(|_| rules_count).filter_map(|rule| read(metadata, rule));
        let rules: Vec<Rule> = read.collect();
        kept += rules.len();
        left_out += written.len() - rules.len();
        rules
    };
    let (ingress, egress) = (rules("ingress", ingress_rule), rules("egress", egress_rule));
    policy.ingress = isolates_ingress.then_some(ingress);
    policy.egress = isolates_egress.then_some(egress);
    Ok((policy, kept, left_out))
}

fn pod_selector(metadata: &ObjectMeta, selector: &Value) -> Result<Selector, Trouble> {
    let selector = strict::<LabelSelector>(selector)?;
    let spec = NetworkPolicySpec { pod_selector: Some(selector), ..NetworkPolicySpec::default() };
    convert(metadata, spec).map(|policy| policy.pod_selector)
}

/// In which directions it isolates: ingress and egress.
fn directions(metadata: &ObjectMeta, spec: &Value) -> (bool, bool) {
    let (types, egress) = (spec.get("policyTypes"), spec.get("egress"));
    if types.is_none_or(Value::is_null) {
        // As without the field: egress if there are egress rules, understood or not.
        let some = egress.is_some_and(|rules| rules.as_array().is_none_or(|rules| !rules.is_empty()));
        return (true, some && !egress.is_some_and(Value::is_null));
    }
    let types = types.map_or(Ok(Vec::new()), strict::<Vec<String>>);
    let read = types.and_then(|types| {
        convert(metadata, NetworkPolicySpec { policy_types: Some(types), ..NetworkPolicySpec::default() })
    });
    read.map_or((true, true), |policy| (policy.ingress.is_some(), policy.egress.is_some()))
}

fn ingress_rule(metadata: &ObjectMeta, rule: &Value) -> Option<Rule> {
    let rule = strict::<NetworkPolicyIngressRule>(rule).ok()?;
    let spec = NetworkPolicySpec { ingress: Some(vec![rule]), ..NetworkPolicySpec::default() };
    convert(metadata, spec).ok()?.ingress?.pop()
}

fn egress_rule(metadata: &ObjectMeta, rule: &Value) -> Option<Rule> {
    let rule = strict::<NetworkPolicyEgressRule>(rule).ok()?;
    let spec = NetworkPolicySpec { egress: Some(vec![rule]), ..NetworkPolicySpec::default() };
    convert(metadata, spec).ok()?.egress?.pop()
}

fn convert(metadata: &ObjectMeta, spec: NetworkPolicySpec) -> Result<model::NetworkPolicy, Trouble> {
    // Of the metadata the names alone are of interest.
    let names =
        ObjectMeta { name: metadata.name.clone(), namespace: metadata.namespace.clone(), ..ObjectMeta::default() };
    convert::network_policy(&NetworkPolicy { metadata: names, spec: Some(spec) })
        .map_err(|invalid| (invalid.field.without("spec"), invalid.problem.to_string()))
}

/// Reads a value as a type of the API; a field that the type does not know is an error.
fn strict<T: DeserializeOwned>(value: &Value) -> Result<T, Trouble> {
    let (read, unknown) = typed::read(value.clone())?;
    match unknown.into_iter().next() {
        Some(field) => Err((field, UNKNOWN.to_owned())),
        None => Ok(read),
    }
}

/// Whether the spec has no field that this version does not know.
fn known_fields_only(spec: &Value) -> bool {
    let known = ["podSelector", "policyTypes", "ingress", "egress"];
    spec.as_object().is_some_and(|fields| fields.keys().all(|name| known.contains(&name.as_str())))
}
