//! Rules and their hits.

use penstock_admin::table::align_columns;
use penstock_admin::types::{RuleUsage, Rules};

use crate::number::moment;

/// The rules, of so many in all; `unknown` rules are not listed because they are not known for long enough.
pub fn text(rules: &Rules, all: usize, unknown: usize) -> String {
    align_columns(&table(&rules.rules)) + &summary(rules, all, unknown)
}

pub fn table(rules: &[RuleUsage]) -> Vec<Vec<String>> {
    let heading = ["RULE", "POLICY", "ACTION", "HITS", "LAST HIT", "KNOWN SINCE"];
    std::iter::once(heading.map(str::to_owned).to_vec()).chain(rules.iter().map(row)).collect()
}

pub fn summary(rules: &Rules, all: usize, unknown: usize) -> String {
    let mut text = String::new();
    text += &match (rules.rules.len(), all) {
        (1, 1) => "1 rule\n".to_owned(),
        (listed, all) if listed == all => format!("{all} rules\n"),
        (listed, all) => format!("{listed} of {all} rules\n"),
    };
    if unknown > 0 {
        text += &format!("not listed: {unknown} rules without a hit that are not known for that long\n");
    }
    if rules.left_out > 0 {
        text += &format!("not counted: {} rules beyond the number that a node keeps\n", rules.left_out);
    }
    text
}

fn row(rule: &RuleUsage) -> Vec<String> {
    vec![
        rule.rule.clone(),
        rule.policy.clone(),
        rule.action.clone(),
        rule.hits.to_string(),
        rule.last_hit.map_or_else(|| "never".to_owned(), moment),
        moment(rule.since),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(name: &str, hits: u64, last_hit: Option<i64>, since: i64) -> RuleUsage {
        RuleUsage {
            rule: format!("shop-ingress-{name}-0"),
            policy: format!("shop/{name}"),
            direction: "ingress".to_owned(),
            index: 0,
            content: String::new(),
            action: "allow".to_owned(),
            hits,
            last_hit,
            since,
        }
    }

    #[test]
    fn rules_are_listed_with_times_and_what_is_missing_is_said() {
        let rules = vec![rule("db", 0, None, 0), rule("web", 12, Some(86_400), 60)];
        let listed = text(&Rules { now: 100_000, left_out: 2, rules }, 5, 1);
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(lines[1], "shop-ingress-db-0   shop/db   allow      0  never                 1970-01-01T00:00:00Z");
        assert_eq!(lines[2], "shop-ingress-web-0  shop/web  allow     12  1970-01-02T00:00:00Z  1970-01-01T00:01:00Z");
        let rest = ["2 of 5 rules", "not listed: 1 rules", "not counted: 2 rules"];
        assert!(rest.iter().zip(&lines[3..]).all(|(start, line)| line.starts_with(start)), "{listed}");
    }
}
