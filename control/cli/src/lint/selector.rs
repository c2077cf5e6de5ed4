//! Selectors that nothing can match.

use std::collections::BTreeMap;

use penstock_policy::model::{Requirement, Selector, Test};

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
    let holds_absent = requirements.iter().all(|r| matches!(r.test, Test::NotIn(_) | Test::DoesNotExist));
    let holds = |value: Option<&String>| {
        requirements.iter().all(|requirement| match &requirement.test {
            Test::In(values) => value.is_some_and(|value| values.contains(value)),
            Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            Test::Exists => true,
            Test::DoesNotExist => false,
        })
    };
    let named = requirements.iter().flat_map(|requirement| match &requirement.test {
        Test::In(values) | Test::NotIn(values) => values.as_slice(),
        Test::Exists | Test::DoesNotExist => &[],
    });
    holds_absent || holds(None) || named.into_iter().any(|value| holds(Some(value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_found_by_key() {
        let values = |values: &str| values.split(',').map(str::to_owned).collect::<Vec<_>>();
        let selector = |tests: &[Test]| Selector {
            requirements: tests.iter().map(|test| Requirement { key: "a".to_owned(), test: test.clone() }).collect(),
        };
        let (within, without) = (|v| Test::In(values(v)), |v| Test::NotIn(values(v)));
        for (tests, expected) in [
            (vec![], None),
            (vec![within("x"), within("x,y")], None),
            (vec![within("x"), within("y")], Some("a")),
            (vec![within("x,y"), without("x")], None),
            (vec![within("x,y"), without("x"), without("y")], Some("a")),
            (vec![within("x"), Test::DoesNotExist], Some("a")),
            (vec![Test::Exists, Test::DoesNotExist], Some("a")),
            (vec![Test::Exists, without("x,y")], None),
            (vec![without("x"), Test::DoesNotExist], None),
        ] {
            assert_eq!(contradiction(&selector(&tests)), expected, "{tests:?}");
        }
    }
}
