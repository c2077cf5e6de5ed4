//! Label selectors.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use penstock_policy::model::{Requirement, Selector, Test};

use super::{At, Invalid, Problem, names};

/// A selector of the model. Its requirements are sorted, so that selectors of one meaning are mostly equal.
pub(super) fn selector(selector: &LabelSelector, at: &At<'_>) -> Result<Selector, Invalid> {
    let mut requirements = Vec::new();
    let labels_at = at.field("matchLabels");
    for (key, value) in selector.match_labels.iter().flatten() {
        let valid = names::label_key(key).and_then(|()| names::label_value(value));
        valid.map_err(|problem| labels_at.field(key).invalid(problem))?;
        requirements.push(Requirement { key: key.clone(), test: Test::In(vec![value.clone()]) });
    }
    let expressions_at = at.field("matchExpressions");
    for (i, expression) in selector.match_expressions.iter().flatten().enumerate() {
        requirements.push(requirement(expression, &expressions_at.index(i))?);
    }
    requirements.sort();
    requirements.dedup();
    Ok(Selector { requirements })
}

fn requirement(expression: &LabelSelectorRequirement, at: &At<'_>) -> Result<Requirement, Invalid> {
    names::label_key(&expression.key).map_err(|problem| at.field("key").invalid(problem))?;
    let values_at = at.field("values");
    let values = || values(expression, &values_at);
    let none = |operator| match expression.values.as_deref() {
        None | Some([]) => Ok(()),
        Some(_) => Err(values_at.invalid(Problem::UnwantedValues(operator))),
    };
    let test = match expression.operator.as_str() {
        "In" => Test::In(values()?.ok_or_else(|| values_at.invalid(Problem::NoValues("In")))?),
        "NotIn" => Test::NotIn(values()?.ok_or_else(|| values_at.invalid(Problem::NoValues("NotIn")))?),
        "Exists" => none("Exists").map(|()| Test::Exists)?,
        "DoesNotExist" => none("DoesNotExist").map(|()| Test::DoesNotExist)?,
        other => return Err(at.field("operator").invalid(Problem::Operator(other.to_owned()))),
    };
    Ok(Requirement { key: expression.key.clone(), test })
}

/// The values of an expression, sorted; `None` if there are none.
fn values(expression: &LabelSelectorRequirement, at: &At<'_>) -> Result<Option<Vec<String>>, Invalid> {
    let mut values = expression.values.clone().unwrap_or_default();
    for (i, value) in values.iter().enumerate() {
        names::label_value(value).map_err(|problem| at.index(i).invalid(problem))?;
    }
    values.sort();
    values.dedup();
    Ok(if values.is_empty() { None } else { Some(values) })
}
