//! Policies that this version does not fully understand: from a newer API, or with a fault that the server accepted.
//!
//! Manifests fall back to a file's previous content. Here that would make policy depend on when the daemon started, and a
//! restart would lose it silently. So the same text always has the same, most restrictive meaning: the policy isolates the
//! pods it selects (all of its namespace, if the selector is not understood) in the directions it names (both, if those are
//! not understood), and only its fully understood rules allow. Rules only add, so a rule left out never allows more.

use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use penstock_policy::model::{self, Object, PolicyNotes, Rule, Selector, Staging};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::convert::{self, FieldPath, PathElement};
use crate::typed;

/// An object, as far as this version understands it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Interpretation {
    Full(Object),
    /// Partly understood. The rest of a policy allows nothing; the rest of a Service or EndpointSlice is left out.
    Restricted {
        /// The object without the rest.
        object: Object,
        /// The part that is not understood, and the consequence.
        problem: String,
    },
    /// Not usable, and no reading would be safe: the last version that was understood stays.
    Kept {
        /// The part that is not understood, and the consequence.
        problem: String,
    },
    /// Not usable: treated as absent.
    Unusable {
        /// The part that is not understood, and the consequence.
        problem: String,
    },
}

pub(super) type UnsupportedField = (FieldPath, String);

pub(super) const UNKNOWN: &str = "is not a field that this version knows";

/// Interprets a policy from its metadata and spec. One whose annotations are not understood is in effect: that is what the API
/// says of every policy, and only what is spelt as we define it says otherwise.
pub(super) fn policy(metadata: &ObjectMeta, spec: Option<&Value>) -> Interpretation {
    staged(metadata, spec_of_policy(metadata, spec))
}

/// Sets what the annotations of a policy say.
pub(super) fn staged(metadata: &ObjectMeta, interpretation: Interpretation) -> Interpretation {
    let (staging, wrong) = match convert::staging(metadata) {
        Ok(staging) => (staging, None),
        Err(wrong) => (Staging::InForce, Some(format!("{wrong}; until this is fixed the policy is in effect"))),
    };
    let (notes, wrong_notes) = match convert::notes(metadata) {
        Ok(notes) => (notes, None),
        Err(wrong) => (PolicyNotes::default(), Some(format!("{wrong}; until this is fixed none of these counts"))),
    };
    let wrong: Vec<String> = wrong.into_iter().chain(wrong_notes).collect();
    let set = |mut object: Object| {
        match &mut object {
            Object::NetworkPolicy(policy) => (policy.staging, policy.notes) = (staging, notes),
            Object::ClusterNetworkPolicy(policy) => (policy.staging, policy.notes) = (staging, notes),
            _ => {}
        }
        object
    };
    match interpretation {
        Interpretation::Full(object) if wrong.is_empty() => Interpretation::Full(set(object)),
        Interpretation::Full(object) => Interpretation::Restricted { object: set(object), problem: wrong.join("; ") },
        Interpretation::Restricted { object, problem } => {
            let problems: Vec<String> = wrong.into_iter().chain([problem]).collect();
            Interpretation::Restricted { object: set(object), problem: problems.join("; ") }
        }
        unread @ (Interpretation::Kept { .. } | Interpretation::Unusable { .. }) => unread,
    }
}

fn spec_of_policy(metadata: &ObjectMeta, spec: Option<&Value>) -> Interpretation {
    let empty = Value::Object(Default::default());
    let spec = spec.unwrap_or(&empty);
    let trouble = match strict::<NetworkPolicySpec>(spec).and_then(|spec| convert(metadata, spec)) {
        Ok(policy) => return Interpretation::Full(Object::NetworkPolicy(policy)),
        Err(trouble) => trouble,
    };
    let (mut field, problem) = trouble;
    if field.elements().first() != Some(&PathElement::Field("metadata".to_owned())) {
        field = field.inside("spec");
    }
    match restricted(metadata, spec) {
        Ok((policy, kept, left_out)) => {
            let problem = format!(
                "{field}: {problem}; until this is fixed it isolates its pods, and {kept} of its {} rules allow",
                kept + left_out
            );
            Interpretation::Restricted { object: Object::NetworkPolicy(policy), problem }
        }
        // Even its name is invalid.
        Err(_) => Interpretation::Unusable { problem: format!("{field}: {problem}; it selects nothing") },
    }
}

/// The most restrictive interpretation, with the numbers of rules kept and left out.
fn restricted(metadata: &ObjectMeta, spec: &Value) -> Result<(model::NetworkPolicy, usize, usize), UnsupportedField> {
    let mut policy = convert(metadata, NetworkPolicySpec::default())?;
    let selector = spec.get("podSelector").map(|selector| pod_selector(metadata, selector));
    policy.pod_selector = selector.and_then(Result::ok).unwrap_or_default();
    let (isolates_ingress, isolates_egress) = directions(metadata, spec);
    // An unknown field beside the rules may change the meaning of any of them.
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

fn pod_selector(metadata: &ObjectMeta, selector: &Value) -> Result<Selector, UnsupportedField> {
    let selector = strict::<LabelSelector>(selector)?;
    let spec = NetworkPolicySpec { pod_selector: Some(selector), ..NetworkPolicySpec::default() };
    convert(metadata, spec).map(|policy| policy.pod_selector)
}

/// The directions it isolates: ingress, egress.
fn directions(metadata: &ObjectMeta, spec: &Value) -> (bool, bool) {
    let (types, egress) = (spec.get("policyTypes"), spec.get("egress"));
    if types.is_none_or(Value::is_null) {
        // The default without the field: egress if there are egress rules, understood or not.
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

fn convert(metadata: &ObjectMeta, spec: NetworkPolicySpec) -> Result<model::NetworkPolicy, UnsupportedField> {
    // Only the names of the metadata matter.
    let names =
        ObjectMeta { name: metadata.name.clone(), namespace: metadata.namespace.clone(), ..ObjectMeta::default() };
    convert::network_policy(&NetworkPolicy { metadata: names, spec: Some(spec) })
        .map_err(|invalid| (invalid.field.without("spec"), invalid.problem.to_string()))
}

/// Deserializes a value as an API type; an unknown field is an error.
pub(super) fn strict<T: DeserializeOwned>(value: &Value) -> Result<T, UnsupportedField> {
    let (read, unknown) = typed::read_whole(value.clone())?;
    match unknown.into_iter().next() {
        Some(field) => Err((field, UNKNOWN.to_owned())),
        None => Ok(read),
    }
}

/// Fails if the spec has a field that this version does not know.
fn known_fields_only(spec: &Value) -> bool {
    let known = ["podSelector", "policyTypes", "ingress", "egress"];
    spec.as_object().is_some_and(|fields| fields.keys().all(|name| known.contains(&name.as_str())))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use penstock_policy::model::{Peers, PolicyPorts};

    fn read(spec: Value) -> (model::NetworkPolicy, Option<String>) {
        let metadata = ObjectMeta {
            name: Some("only-web".to_owned()),
            namespace: Some("shop".to_owned()),
            ..ObjectMeta::default()
        };
        match policy(&metadata, Some(&spec)) {
            Interpretation::Full(Object::NetworkPolicy(policy)) => (policy, None),
            Interpretation::Restricted { object: Object::NetworkPolicy(policy), problem } => (policy, Some(problem)),
            other => panic!("{other:?}"),
        }
    }

    /// Rules for ingress and egress, `-` where the direction is open, and whether all pods are selected.
    fn shape(policy: &model::NetworkPolicy) -> (String, bool) {
        let rules = |rules: &Option<Vec<Rule>>| rules.as_ref().map_or("-".to_owned(), |rules| rules.len().to_string());
        (format!("{} {}", rules(&policy.ingress), rules(&policy.egress)), policy.pod_selector == Selector::default())
    }

    #[test]
    fn a_policy_with_unknown_annotations_counts_and_is_reported() {
        let annotated = |name: &str, value: &str| ObjectMeta {
            name: Some("only-web".to_owned()),
            annotations: Some([(format!("policy.penstock.dev/{name}"), value.to_owned())].into()),
            ..ObjectMeta::default()
        };
        let rules = json!({ "podSelector": {}, "ingress": [{}] });
        let with_wrong_field = json!({ "podSelector": {}, "ingress": [{ "form": [] }] });
        let ordered = json!({ "tier": "Admin", "priority": 1, "subject": { "namespaces": {} } });
        for (name, value, spec, staging, problem) in [
            ("staged", "true", &rules, Staging::New, None),
            ("staged-for", "old", &rules, Staging::Replaces("old".to_owned()), None),
            ("staged-delete", "true", &rules, Staging::Deleted, None),
            ("staged", "yes", &rules, Staging::InForce, Some("\"yes\"")),
            ("staging", "true", &rules, Staging::InForce, Some("staging]: is not an annotation")),
            ("staged", "true", &with_wrong_field, Staging::New, Some("spec.ingress[0].form")),
            ("staged", "yes", &with_wrong_field, Staging::InForce, Some("is in effect; spec.ingress[0].form")),
            ("staged", "true", &ordered, Staging::New, None),
            ("log", "denied", &ordered, Staging::InForce, None),
            ("log", "dropped", &ordered, Staging::InForce, Some("use denied, allowed or all")),
            ("deny-answer", "rst", &rules, Staging::InForce, Some("use none or reject; until this is fixed")),
            ("staged", "1", &ordered, Staging::InForce, Some("until this is fixed the policy is in effect")),
        ] {
            let metadata = annotated(name, value);
            let read = match spec.get("tier") {
                None => policy(&metadata, Some(spec)),
                Some(_) => super::super::cluster_policy::policy(&metadata, Some(spec), Default::default()),
            };
            let (object, reported) = match read {
                Interpretation::Full(object) => (object, None),
                Interpretation::Restricted { object, problem } => (object, Some(problem)),
                other => panic!("{other:?}"),
            };
            assert_eq!(object.staging(), Some(&staging), "{name}={value}: {reported:?}");
            assert_eq!(reported.is_some(), problem.is_some(), "{name}={value}: {reported:?}");
            let reported = reported.unwrap_or_default();
            assert!(reported.contains(problem.unwrap_or_default()), "{name}={value}: {reported}");
        }
    }

    #[test]
    fn an_unsupported_field_allows_nothing_and_is_reported() {
        let web = json!({ "matchLabels": { "app": "web" } });
        let good = json!({ "from": [{ "podSelector": {} }] });
        let cases = [
            // A field inside a rule: the rule is left out, the others stay.
            (
                json!({ "podSelector": web, "ingress": [good, { "form": [] }] }),
                ("1 -", false),
                "spec.ingress[1].form: is not a field that this version knows; until this is fixed it isolates its \
                 pods, and 1 of its 2 rules allow",
            ),
            (
                json!({ "podSelector": web, "ingress": [{ "ports": [{ "endport": 9, "port": 1 }] }] }),
                ("0 -", false),
                "spec.ingress[0].ports[0].endport: is not",
            ),
            (
                json!({ "podSelector": web, "ingress": [{ "from": [{ "ipBlock": { "cidr": "10.0.0.0/8", "excpet": [] } }] }] }),
                ("0 -", false),
                "spec.ingress[0].from[0].ipBlock.excpet: is not",
            ),
            // A value.
            (
                json!({ "podSelector": web, "ingress": [good, { "ports": [{ "protocol": "QUIC" }] }], "egress": [{}] }),
                ("1 1", false),
                "spec.ingress[1].ports[0].protocol: \"QUIC\" is not a port protocol",
            ),
            (json!({ "podSelector": web, "ingress": "all" }), ("0 -", false), "spec.ingress: invalid type"),
            // The selector: every pod of the namespace.
            (
                json!({ "podSelector": { "matchNames": ["web"] }, "ingress": [good] }),
                ("1 -", true),
                "spec.podSelector.matchNames: is not",
            ),
            // The directions: both.
            (
                json!({ "podSelector": web, "policyTypes": ["Ingress", "Sideways"], "ingress": [good] }),
                ("1 0", false),
                "spec.policyTypes[1]: \"Sideways\" is not a policy type",
            ),
            (
                json!({ "podSelector": web, "policyTypes": ["Egress"], "egress": [good] }),
                ("- 0", false),
                "spec.egress[0].from: is not",
            ),
            (json!({ "podSelector": web, "egress": [7] }), ("0 0", false), "spec.egress[0]: invalid type"),
            // A field beside all of them might say anything about the rules.
            (
                json!({ "podSelector": web, "ingress": [good], "egress": [{}], "unless": { "weekday": "Sunday" } }),
                ("0 0", false),
                "spec.unless: is not a field that this version knows; until this is fixed it isolates its pods, and \
                 0 of its 2 rules allow",
            ),
        ];
        for (spec, expected, message) in cases {
            let (policy, problem) = read(spec.clone());
            let problem = problem.unwrap_or_else(|| panic!("{spec} is understood"));
            assert!(problem.starts_with(message), "{spec}: {problem}");
            let (rules, selects_all) = shape(&policy);
            assert_eq!((rules.as_str(), selects_all, policy.isolates), (expected.0, expected.1, true), "{spec}");
        }
    }

    #[test]
    fn api_objects_convert_like_manifests() {
        let spec = json!({ "podSelector": {}, "ingress": [{ "from": [], "ports": null }], "policyTypes": null });
        let (policy, problem) = read(spec);
        assert_eq!((shape(&policy), problem), (("1 -".to_owned(), true), None));
        let rule = &policy.ingress.unwrap()[0];
        assert_eq!((&rule.peers, &rule.ports), (&Peers::Every, &PolicyPorts::Every));
    }

    #[test]
    fn a_policy_with_an_invalid_name_selects_nothing() {
        let metadata = ObjectMeta { name: Some("Not A Name".to_owned()), ..ObjectMeta::default() };
        assert!(
            matches!(policy(&metadata, None), Interpretation::Unusable { problem } if problem.starts_with("metadata.name: "))
        );
    }
}
