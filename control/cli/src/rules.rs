//! `penstock rules`: how often each rule of a running daemon decided.

use penstock_admin::types::Rules;
use penstock_agent::config::TimeSpan;
use penstock_text::number::json;
use penstock_text::rules::text;

use super::Failure;
use super::daemon::DaemonArgs;

/// List the rules in effect on a node, with how often each decided a connection
///
/// A rule has a hit when it decides a connection that is opened on this node; a Deny, for each packet that it denies. A
/// connection between two pods of a node is decided by a rule for each side. Hits are kept over restarts of the daemon.
/// An edited rule is a new one. Rules that pass a flow on to the next tier are not listed: another rule decides.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Columns:
  HITS         connections that it decided since the time under KNOWN SINCE
  LAST HIT     when the last was, to within some seconds
  KNOWN SINCE  when the node first saw the rule as it is

Exit codes:
  0  printed
  1  the daemon sent no valid answer
  2  bad input: arguments, or no daemon listens at the socket

Examples:
  penstock rules
  penstock rules --unused 7d
  penstock rules --json | jq '.rules[] | select(.hits == 0) | .rule'")]
pub(super) struct Args {
    #[command(flatten)]
    daemon: DaemonArgs,
    /// Only rules that are known for this long and had no hit in it: a number and s, m, h or d
    #[arg(long, value_name = "TIME", value_parser = time)]
    unused: Option<TimeSpan>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn time(text: &str) -> Result<TimeSpan, String> {
    TimeSpan::try_from(text.to_owned()).map_err(|error| error.to_string())
}

pub(super) fn seconds(time: TimeSpan) -> i64 {
    i64::try_from(time.duration().as_secs()).unwrap_or(i64::MAX)
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    let mut rules: Rules = args.daemon.get("/v1/rules", &())?;
    let all = rules.rules.len();
    let mut unknown = 0;
    if let Some(time) = args.unused.map(seconds) {
        let from = rules.now.saturating_sub(time);
        unknown = rules.rules.iter().filter(|rule| rule.since > from && rule.last_hit.is_none()).count();
        let now = rules.now;
        rules.rules.retain(|rule| rule.is_unused(now, time));
    }
    let text = if args.json { json(&rules) } else { text(&rules, all, unknown) };
    Failure::print(text)
}

#[cfg(test)]
mod tests {
    use penstock_admin::types::RuleUsage;

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
    fn a_rule_is_unused_only_if_it_is_known_for_that_long() {
        for (last_hit, since, expected) in
            [(None, 0, true), (None, 901, false), (Some(899), 0, true), (Some(900), 0, false), (Some(950), 940, false)]
        {
            assert_eq!(rule("db", 0, last_hit, since).is_unused(1_000, 100), expected, "{last_hit:?} {since}");
        }
        assert_eq!(seconds(time("7d").unwrap()), 7 * 86_400);
        assert!(time("a week").unwrap_err().contains("such as 30s"));
    }
}
