//! Each rule's hits, by `penstock rules` and `penstock lint --live`, also after a restart.

use std::process::{Command, Output};

use penstock_admin::types::{RuleUsage, Rules};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::penstock_binary;

use crate::fixture::{Fixture, pods, policy};

/// Two rules of `pod-1`: one for each port.
const SPEC: &str = "  ingress: [{ports: [{port: 8080}]}, {ports: [{port: 9090}]}]\n";

fn penstock(fixture: &Fixture, arguments: &[&str]) -> Output {
    let mut command = Command::new(penstock_binary().unwrap());
    command.args(arguments).arg("--socket").arg(fixture.admin()).env("NO_COLOR", "1").output().unwrap()
}

/// The usage of the two rules.
fn rules(fixture: &Fixture) -> [RuleUsage; 2] {
    let output = penstock(fixture, &["rules", "--json"]);
    let rules: Rules = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let mut rules = rules.rules;
    rules.sort_by_key(|rule| rule.index);
    rules.try_into().unwrap_or_else(|rules| panic!("two rules, not {rules:?}"))
}

/// The rules once the first one has so many hits: workers hear a moment later of what programs have opened.
fn rules_after(fixture: &Fixture, hits: u64) -> [RuleUsage; 2] {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let now = rules(fixture);
        if now[0].hits >= hits || std::time::Instant::now() > deadline {
            return now;
        }
    }
}

#[test]
fn hits_count_opened_connections_by_rule_and_outlast_a_restart() {
    let mut fixture = Fixture::of(&(pods(2) + &policy("served", "pod-1", SPEC)), |_, config| {
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\n");
    });
    let reach = |fixture: &Fixture| {
        let (from, to) = (fixture.site("test/pod-0"), fixture.target("test/pod-1", false));
        probe::run_one(from, to, Protocol::Tcp(8080), RetryPolicy::default()).unwrap()
    };
    assert_eq!(rules(&fixture).map(|rule| rule.hits), [0, 0]);
    assert_eq!([reach(&fixture), reach(&fixture)], [ProbeOutcome::Reached; 2]);
    let [used, unused] = rules_after(&fixture, 2);
    assert_eq!((used.hits, unused.hits, unused.last_hit), (2, 0, None), "one a connection: {used:?}");
    assert!(used.last_hit.is_some_and(|last| last >= used.since), "{used:?}");
    assert_eq!((used.rule.as_str(), used.policy.as_str()), ("test-ingress-served-0", "test/served"));

    // A daemon that ends writes what it knows.
    let text = String::from_utf8(penstock(&fixture, &["rules", "--unused", "1d"]).stdout).unwrap();
    assert!(text.contains("0 of 2 rules") && text.contains("not listed: 1 rules"), "{text}");
    fixture.daemon.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
    fixture.daemon.wait_until_ended(std::time::Duration::from_secs(30)).unwrap();
    fixture.restart();
    let [again, _] = rules(&fixture);
    assert_eq!((again.hits, again.last_hit, again.since), (used.hits, used.last_hit, used.since));
    assert_eq!(reach(&fixture), ProbeOutcome::Reached);
    assert_eq!(rules_after(&fixture, 3).map(|rule| rule.hits), [3, 0]);

    std::thread::sleep(std::time::Duration::from_millis(1_100));
    let manifests = fixture.manifests.display().to_string();
    let linted = penstock(&fixture, &["lint", "--manifests", &manifests, "--live", "0s"]);
    let text = String::from_utf8_lossy(&linted.stdout).into_owned();
    assert!(text.contains("spec.ingress[1]: has decided no connection of the node since"), "{text} {linted:?}");
    assert_eq!(text.matches("never-used").count(), 2, "{text}");

    // An edit of the second rule leaves the first one's hits.
    let edited = SPEC.replace("port: 9090", "port: 53");
    fixture.enforce(&(pods(2) + &policy("served", "pod-1", &edited)));
    let [kept, new] = rules(&fixture);
    assert_eq!((kept.hits, kept.since, new.hits), (3, used.since, 0));
    assert_ne!(new.content, unused.content);
}
