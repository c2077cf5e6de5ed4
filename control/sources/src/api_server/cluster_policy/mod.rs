//! ClusterNetworkPolicies that this version does not fully understand: the server may have a newer definition.
//!
//! Here rules deny as well as allow, so leaving one out could allow more. A rule that is not understood keeps its place:
//! an Accept matches nothing, not even through its other peers, and a Deny or Pass denies everything in its direction.
//! Where tier, priority or an action are not understood, no reading is the most restrictive one: the last version that
//! was understood stays in effect. A subject that cannot be evaluated selects no pod.

use kube::core::ObjectMeta;
use penstock_policy::model::{
    ClusterNetworkPolicy, ClusterRule, Object, Peers, PolicyPorts, Rule, RuleAction, Staging, Subject,
};
use serde_json::Value;

use super::fail_closed::{Interpretation, UNKNOWN, UnsupportedField, staged, strict};
use crate::convert::{
    self, ConversionSettings, EgressRule, FieldError, FieldPathRef, IngressRule, Mapping, Strictness, SubjectFields,
};

const KNOWN: [&str; 5] = ["tier", "priority", "subject", "ingress", "egress"];

pub(super) fn policy(metadata: &ObjectMeta, spec: Option<&Value>, settings: ConversionSettings) -> Interpretation {
    staged(metadata, spec_of_policy(metadata, spec, settings))
}

fn spec_of_policy(metadata: &ObjectMeta, spec: Option<&Value>, settings: ConversionSettings) -> Interpretation {
    let mut reader = Reader { problem: None, narrowed: 0, rules: 0, fields_known: true, settings };
    let empty = Value::Object(Default::default());
    match reader.policy(metadata, spec.unwrap_or(&empty)) {
        Err(NotRead::Kept(problem)) => Interpretation::Kept { problem },
        Err(NotRead::Unusable(problem)) => Interpretation::Unusable { problem },
        Ok(policy) => {
            let Reader { problem, narrowed, rules, .. } = reader;
            let object = Object::ClusterNetworkPolicy(policy);
            match problem {
                None => Interpretation::Full(object),
                Some(problem) => Interpretation::Restricted {
                    object,
                    problem: format!(
                        "{problem}; until this is fixed {narrowed} of its {rules} rules are not understood: of these an \
                         Accept matches nothing, and a Deny or Pass denies everything"
                    ),
                },
            }
        }
    }
}

/// Why a policy has no reading at all, with the consequence.
enum NotRead {
    /// The last version that was understood stays.
    Kept(String),
    /// It selects nothing.
    Unusable(String),
}

struct Reader {
    /// The first part that was not understood.
    problem: Option<String>,
    /// Rules that are not understood.
    narrowed: usize,
    rules: usize,
    /// Whether the spec has only fields that this version knows. Another may change the meaning of any rule.
    fields_known: bool,
    settings: ConversionSettings,
}

impl Reader {
    fn policy(&mut self, metadata: &ObjectMeta, spec: &Value) -> Result<ClusterNetworkPolicy, NotRead> {
        let at = FieldPathRef::OBJECT;
        let spec_at = at.field("spec");
        let name = convert::cluster_policy_name(metadata).map_err(unusable)?;
        let text = |field: &str| spec.get(field).and_then(Value::as_str);
        let tier = convert::tier(text("tier"), &spec_at.field("tier")).map_err(kept)?;
        let priority = spec.get("priority").and_then(Value::as_i64);
        let priority = convert::priority(priority, &spec_at.field("priority")).map_err(kept)?;
        let subject = subject(spec.get("subject"))?;
        let unknown = spec.as_object().and_then(|fields| fields.keys().find(|name| !KNOWN.contains(&name.as_str())));
        if let Some(field) = unknown {
            self.fields_known = false;
            self.problem = Some(format!("{}: {UNKNOWN}", spec_at.field(field).path()));
        }
        let settings = self.settings;
        let ingress = self.rules(spec, "ingress", ingress_rule)?;
        let egress = self.rules(spec, "egress", |rule| egress_rule(rule, settings))?;
        Ok(ClusterNetworkPolicy {
            name,
            tier,
            priority,
            subject,
            ingress,
            egress,
            staging: Staging::InForce,
            notes: Default::default(),
        })
    }

    fn rules(
        &mut self,
        spec: &Value,
        direction: &str,
        read: impl Fn(&Value) -> Result<ClusterRule, UnsupportedField>,
    ) -> Result<Vec<ClusterRule>, NotRead> {
        let written = match spec.get(direction) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(rules)) => rules,
            Some(_) => {
                return Err(NotRead::Kept(format!("spec.{direction}: is not a list of rules; {KEPT}")));
            }
        };
        let at = FieldPathRef::OBJECT;
        let spec_at = at.field("spec");
        let rules_at = spec_at.field(direction);
        let mut rules = Vec::with_capacity(written.len());
        for (i, value) in written.iter().enumerate() {
            let rule_at = rules_at.index(i);
            let text = value.get("action").and_then(Value::as_str);
            let action = convert::action(text, &rule_at.field("action")).map_err(kept)?;
            self.rules += 1;
            rules.push(match read(value) {
                Ok(rule) if self.fields_known => rule,
                Ok(rule) => self.narrowed(rule.name, action),
                Err((field, problem)) => {
                    let field = if field.is_empty() { String::new() } else { format!(".{field}") };
                    self.problem.get_or_insert_with(|| format!("{}{field}: {problem}", rule_at.path()));
                    let name = value.get("name").and_then(Value::as_str).map(str::to_owned);
                    self.narrowed(name, action)
                }
            });
        }
        Ok(rules)
    }

    fn narrowed(&mut self, name: Option<String>, action: RuleAction) -> ClusterRule {
        self.narrowed += 1;
        let (action, peers) = match action {
            RuleAction::Accept => (RuleAction::Accept, Peers::AnyOf(Vec::new())),
            RuleAction::Deny | RuleAction::Pass => (RuleAction::Deny, Peers::Every),
        };
        ClusterRule { name, action, matches: Rule { peers, ports: PolicyPorts::Every }, is_understood: false }
    }
}

const KEPT: &str = "until this is fixed, the last version that was understood stays in effect, if there was one";

fn kept(error: FieldError) -> NotRead {
    NotRead::Kept(format!("{error}; {KEPT}"))
}

fn unusable(error: FieldError) -> NotRead {
    NotRead::Unusable(format!("{error}; it selects nothing"))
}

fn subject(value: Option<&Value>) -> Result<Subject, NotRead> {
    let at = FieldPathRef::OBJECT;
    let spec_at = at.field("spec");
    let subject_at = spec_at.field("subject");
    let read = value.filter(|value| !value.is_null()).map(strict::<Mapping<SubjectFields>>).transpose();
    let read = read.map_err(|(field, problem)| {
        let inside = if field.is_empty() { String::new() } else { format!(".{field}") };
        NotRead::Unusable(format!("spec.subject{inside}: {problem}; it selects nothing"))
    })?;
    convert::subject(read.as_ref().map(|Mapping(subject)| subject), &subject_at).map_err(unusable)
}

fn ingress_rule(value: &Value) -> Result<ClusterRule, UnsupportedField> {
    let Mapping(rule) = strict::<Mapping<IngressRule>>(value)?;
    convert::ingress_rule(&rule, Strictness::Server, &FieldPathRef::OBJECT).map_err(field)
}

fn egress_rule(value: &Value, settings: ConversionSettings) -> Result<ClusterRule, UnsupportedField> {
    let Mapping(rule) = strict::<Mapping<EgressRule>>(value)?;
    convert::egress_rule(&rule, Strictness::Server, settings, &FieldPathRef::OBJECT).map_err(field)
}

fn field(error: FieldError) -> UnsupportedField {
    (error.field, error.problem.to_string())
}

#[cfg(test)]
mod tests;
