//! Selectors that nothing can match.

use std::collections::BTreeMap;

use penstock_policy::model::{LabelOperator, Requirement, Selector};

/// The key on which a selector contradicts itself, if it does on one.
pub(super) fn contradiction(selector: &Selector) -> Option<&str> {
    let mut by_key: BTreeMap<&str, Vec<&Requirement>> = BTreeMap::new();
    for requirement in &selector.requirements {
        by_key.entry(&requirement.key).or_default().push(requirement);
    }
    by_key.into_iter().find(|(_, requirements)| !can_hold(requirements)).map(|(key, _)| key)
}

/// Whether requirements on one key can hold together: for a label that is absent, or for one of the values that they
/// name, or for any other value.
fn can_hold(requirements: &[&Requirement]) -> bool {
    let holds_absent =
        requirements.iter().all(|r| matches!(r.operator, LabelOperator::NotIn(_) | LabelOperator::DoesNotExist));
    let holds = |value: Option<&String>| {
        requirements.iter().all(|requirement| match &requirement.operator {
            LabelOperator::In(values) => value.is_some_and(|value| values.contains(value)),
            LabelOperator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            LabelOperator::Exists => true,
            LabelOperator::DoesNotExist => false,
        })
    };
    let named = requirements.iter().flat_map(|requirement| match &requirement.operator {
        LabelOperator::In(values) | LabelOperator::NotIn(values) => values.as_slice(),
        LabelOperator::Exists | LabelOperator::DoesNotExist => &[],
    });
    holds_absent || holds(None) || named.into_iter().any(|value| holds(Some(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_found_by_key() {
        let values = |values: &str| values.split(',').map(str::to_owned).collect::<Vec<_>>();
        let selector = |tests: &[LabelOperator]| Selector {
            requirements: tests
                .iter()
                .map(|test| Requirement { key: "a".to_owned(), operator: test.clone() })
                .collect(),
        };
        let (within, without) = (|v| LabelOperator::In(values(v)), |v| LabelOperator::NotIn(values(v)));
        for (tests, expected) in [
            (vec![], None),
            (vec![within("x"), within("x,y")], None),
            (vec![within("x"), within("y")], Some("a")),
            (vec![within("x,y"), without("x")], None),
            (vec![within("x,y"), without("x"), without("y")], Some("a")),
            (vec![within("x"), LabelOperator::DoesNotExist], Some("a")),
            (vec![LabelOperator::Exists, LabelOperator::DoesNotExist], Some("a")),
            (vec![LabelOperator::Exists, without("x,y")], None),
            (vec![without("x"), LabelOperator::DoesNotExist], None),
        ] {
            assert_eq!(contradiction(&selector(&tests)), expected, "{tests:?}");
        }
    }
}
