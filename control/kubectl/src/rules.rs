//! `kubectl penstock rules`: how often each rule decided, on all nodes together.

use std::collections::BTreeMap;
use std::time::Duration;

use penstock_admin::table::align_columns;
use penstock_admin::types::{RuleUsage, Rules};
use penstock_text::flows::insert;
use penstock_text::number::json;
use penstock_text::rules::{summary, table};
use serde::Serialize;

use super::Failure;
use super::ask::{Answers, Asking, ask_all, parsed, print, whole, words};
use super::cluster::{Cluster, Daemon};

/// List the rules in effect with how often each decided a connection, summed over all nodes
///
/// A connection between pods of two nodes has a hit for the rule of each side, on its own node. KNOWN SINCE is the latest time of
/// all nodes that have the rule: since then none of them has missed a hit. A rule is listed as unused only if it is unused on
/// each of them; what nodes that have not answered know is missing.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit codes:
  0  all nodes have answered
  1  no node has answered, or the API server is away
  2  bad input: arguments, the kubeconfig, or rights that the user lacks
  4  some nodes have not answered; their hits are not in the sums, and they are named

Examples:
  kubectl penstock rules
  kubectl penstock rules --unused 7d
  kubectl penstock rules --json | jq '.rules[] | select(.hits == 0) | .rule'")]
pub(super) struct Args {
    /// Only rules that are known for this long and had no hit in it: a number and s, m, h or d
    #[arg(long, value_name = "TIME", value_parser = super::time)]
    unused: Option<Duration>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct ClusterRule {
    nodes: usize,
    #[serde(flatten)]
    usage: RuleUsage,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Merged {
    /// The earliest of the nodes' times.
    now: i64,
    /// Rules that nodes do not keep, on all of them together.
    left_out: usize,
    rules: Vec<ClusterRule>,
}

pub(super) async fn run<C: Cluster>(cluster: &C, asking: Asking, args: Args) -> Result<(), Failure> {
    let fleet = cluster.daemons().await?;
    super::tell(fleet.note.as_deref());
    let command = |_: &Daemon| words(&["penstock", "rules", "--json"]);
    let answers: Answers<Rules> = ask_all(cluster, asking, fleet, command, None, parsed).await;
    let answers = answers.some()?;
    let mut merged = merge(&answers.answers);
    let all = merged.rules.len();
    let unknown = args.unused.map_or(0, |time| merged.retain_unused(time));
    let text = match args.json {
        true => json(&whole(&merged, &answers.missing)),
        false => text(&merged, all, unknown),
    };
    print(&text, &answers)
}

/// The key by which a rule is the same on two nodes.
type Identity = (String, String, usize, String, String, String);

fn identity(rule: &RuleUsage) -> Identity {
    let RuleUsage { rule, policy, direction, index, content, action, .. } = rule;
    (policy.clone(), direction.clone(), *index, rule.clone(), content.clone(), action.clone())
}

fn merge(answers: &[(Daemon, Rules)]) -> Merged {
    let mut merged = BTreeMap::<Identity, ClusterRule>::new();
    for rule in answers.iter().flat_map(|(_, rules)| &rules.rules) {
        let known = merged
            .entry(identity(rule))
            .or_insert_with(|| ClusterRule { nodes: 0, usage: RuleUsage { hits: 0, last_hit: None, ..rule.clone() } });
        known.nodes += 1;
        known.usage.hits = known.usage.hits.saturating_add(rule.hits);
        known.usage.last_hit = known.usage.last_hit.max(rule.last_hit);
        known.usage.since = known.usage.since.max(rule.since);
    }
    let mut rules: Vec<ClusterRule> = merged.into_values().collect();
    // As on one node: those without a hit first, then by the time of the last.
    rules.sort_by_key(|rule| rule.usage.last_hit);
    Merged {
        now: answers.iter().map(|(_, rules)| rules.now).min().unwrap_or_default(),
        left_out: answers.iter().map(|(_, rules)| rules.left_out).sum(),
        rules,
    }
}

impl Merged {
    /// Keeps what is unused for this long. Returns how many rules without a hit are not known for that long everywhere.
    fn retain_unused(&mut self, time: Duration) -> usize {
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let (now, from) = (self.now, self.now.saturating_sub(seconds));
        let unknown = |rule: &&ClusterRule| rule.usage.since > from && rule.usage.last_hit.is_none();
        let count = self.rules.iter().filter(unknown).count();
        self.rules.retain(|rule| rule.usage.is_unused(now, seconds));
        count
    }
}

fn text(merged: &Merged, all: usize, unknown: usize) -> String {
    let rules: Vec<RuleUsage> = merged.rules.iter().map(|rule| rule.usage.clone()).collect();
    let mut rows = table(&rules);
    insert(&mut rows, 3, "NODES", merged.rules.iter().map(|rule| rule.nodes.to_string()));
    align_columns(&rows) + &summary(&Rules { now: merged.now, left_out: merged.left_out, rules }, all, unknown)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rule(name: &str, content: &str, hits: u64, last_hit: Option<i64>, since: i64) -> RuleUsage {
        RuleUsage {
            rule: format!("shop-ingress-{name}-0"),
            policy: format!("shop/{name}"),
            direction: "ingress".to_owned(),
            index: 0,
            content: content.to_owned(),
            action: "allow".to_owned(),
            hits,
            last_hit,
            since,
        }
    }

    fn answer(node: usize, now: i64, rules: Vec<RuleUsage>) -> (Daemon, Rules) {
        (Daemon { node: format!("n{node}"), pod: String::new() }, Rules { now, left_out: 1, rules })
    }

    #[test]
    fn hits_are_summed_and_an_unused_rule_is_so_on_every_node() {
        let answers = [
            answer(
                0,
                1_000,
                vec![rule("db", "x", 0, None, 0), rule("web", "x", 2, Some(10), 0), rule("new", "x", 0, None, 0)],
            ),
            answer(
                1,
                1_005,
                vec![rule("db", "x", 0, None, 10), rule("web", "x", 3, Some(990), 0), rule("new", "x", 0, None, 950)],
            ),
            answer(2, 1_001, vec![rule("web", "edited", 1, Some(995), 900)]),
        ];
        let mut merged = merge(&answers);
        let listed = text(&merged, merged.rules.len(), 0);
        let line = |start: &str| {
            listed.lines().find(|line| line.contains(start)).unwrap().split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(line("ingress-web")[..5], ["shop-ingress-web-0", "shop/web", "allow", "2", "5"]);
        assert_eq!(
            listed.lines().filter(|line| line.contains("ingress-web")).count(),
            2,
            "an edited rule is another\n{listed}"
        );
        assert!(listed.contains("not counted: 3 rules"), "{listed}");
        assert_eq!(merged.retain_unused(Duration::from_secs(100)), 1, "one is not known for that long on n1");
        let names: Vec<&str> = merged.rules.iter().map(|rule| rule.usage.policy.as_str()).collect();
        assert_eq!(names, ["shop/db"]);
    }

    proptest! {
        #[test]
        fn sums_equal_their_parts_in_any_order(
            parts in prop::collection::vec(
                prop::collection::vec((0usize..3, 0usize..2, 0u64..100, prop::option::of(0i64..50), 0i64..50), 0..6), 1..5),
            turn in 0usize..5,
        ) {
            let rules = |part: &Vec<(usize, usize, u64, Option<i64>, i64)>| part.iter().map(|&(name, content, hits, last, since)| {
                rule(["db", "web", "api"][name], ["x", "y"][content], hits, last, since)
            }).collect::<Vec<_>>();
            let mut answers: Vec<_> = parts.iter().enumerate().map(|(node, part)| answer(node, 100, rules(part))).collect();
            let merged = merge(&answers);
            let count = answers.len();
            answers.rotate_left(turn % count);
            answers.iter_mut().for_each(|(_, rules)| rules.rules.reverse());
            prop_assert_eq!(&merge(&answers), &merged);
            // The oracle asks for each rule anew.
            let all: Vec<RuleUsage> = parts.iter().flat_map(rules).collect();
            for ClusterRule { nodes, usage } in &merged.rules {
                let same = all.iter().filter(|rule| rule.policy == usage.policy && rule.content == usage.content);
                prop_assert_eq!(usage.hits, same.clone().map(|rule| rule.hits).sum::<u64>());
                prop_assert_eq!(usage.last_hit, same.clone().filter_map(|rule| rule.last_hit).max());
                prop_assert_eq!(Some(usage.since), same.clone().map(|rule| rule.since).max());
                prop_assert_eq!(*nodes, same.count());
            }
            prop_assert_eq!(merged.rules.iter().map(|rule| rule.usage.hits).sum::<u64>(), all.iter().map(|rule| rule.hits).sum::<u64>());
        }
    }
}
