//! Domain names of ClusterNetworkPolicies: whose answers count for which rule.

use std::sync::Arc;
use std::time::Duration;

use penstock_dataplane::names::{Answer, DomainName, Moment, NameTable, NameTime, NamedPod};
use penstock_dataplane::policy::{Direction, DirectionVerdict};
use penstock_policy::engine::{Engine, EngineSettings};
use penstock_policy::explain::{PlainText, text, text_at};
use penstock_policy::model::RuleAction::{Accept, Deny, Pass};
use penstock_policy::model::*;

use super::build::*;

const SITE: &str = "203.0.113.7";

/// `web` may reach two names over TCP, on another port what is below one of them; nobody else is subject.
fn objects() -> Vec<Object> {
    let rules = vec![
        ordered(Accept, &["networks 192.0.2.53/32"], &["udp/53"]),
        ordered(Accept, &["names www.example.org *.example.net", "networks 198.51.100.0/24"], &["tcp/443"]),
        ordered(Pass, &["networks 203.0.113.0/24"], &["tcp/9"]),
        ordered(Accept, &["names *.example.org"], &["tcp/9", "tcp/80-90"]),
        ordered(Deny, &["networks 0.0.0.0/0 ::/0"], &[]),
    ];
    vec![
        namespace("shop", "team=shop"),
        Object::Pod(pod("shop/web", "app=web", &["10.0.0.1", "fd00::1"], &[])),
        Object::Pod(pod("shop/db", "app=web", &["10.0.0.2"], &[])),
        Object::Pod(pod("shop/free", "app=free", &["10.0.0.3"], &[])),
        cluster_policy("Admin 1 names", "app=web", vec![], rules),
    ]
}

struct Learning {
    cluster: Cluster,
    table: Arc<NameTable>,
}

impl Learning {
    fn new() -> Self {
        let mut cluster = Cluster::new([]);
        let table = Arc::new(NameTable::default());
        cluster.engine = Engine::new(EngineSettings::for_all_pods());
        cluster.engine.learn_names(Arc::clone(&table));
        cluster.apply(objects().into_iter().map(ObjectChange::Set).collect());
        Self { cluster, table }
    }

    /// A pod gets an answer that holds for a minute.
    fn hear(&self, pod: &str, addresses: &[&str], name: &str, address: &str) {
        let addresses = addresses.iter().map(|text| text.parse().unwrap()).collect();
        let names = self.table.of(NamedPod { name: pod.to_owned(), created: None, addresses });
        let minute = Duration::from_secs(60);
        let site = self.cluster.address(address).into();
        names.learn(
            &Answer { names: vec![(DomainName::new(name).unwrap(), minute)], addresses: vec![(site, minute)] },
            Moment(0),
        );
    }

    fn web_hears(&self, name: &str) {
        self.hear("shop/web", &["10.0.0.1", "fd00::1"], name, SITE);
    }

    fn egress(&self, from: &str, port: &str, seconds: u64) -> DirectionVerdict {
        let flow = self.cluster.flow(from, SITE, port);
        self.cluster.engine.policy_set().evaluate_named(&flow, NameTime::At(Moment(seconds * 1000))).egress
    }
}

#[test]
fn a_rule_with_names_matches_answers_until_they_expire() {
    let learning = Learning::new();
    assert!(!learning.egress("shop/web", "tcp/443", 0).is_allowed());
    learning.web_hears("www.example.org");
    let set = learning.cluster.engine.policy_set();
    for (from, port, seconds, expected) in [
        ("shop/web", "tcp/443", 59, Some("Admin-egress-names-1")),
        ("shop/web", "tcp/443", 60, None),
        ("shop/web", "udp/443", 0, None),
        ("shop/web", "tcp/85", 0, Some("Admin-egress-names-3")),
        ("shop/db", "tcp/443", 0, None),
    ] {
        let verdict = learning.egress(from, port, seconds);
        let name = verdict.rule().filter(|_| verdict.is_allowed()).and_then(|rule| set.rule_name(rule));
        assert_eq!(name.map(ToString::to_string).as_deref(), expected, "{from} {port} after {seconds} s");
    }
    // The Pass stands before the second rule with names.
    assert_eq!(learning.egress("shop/web", "tcp/9", 0), DirectionVerdict::Default);
    // Without the pods' knowledge, names match nothing: all evaluators agree.
    let flow = learning.cluster.flow("shop/web", SITE, "tcp/443");
    assert!(!learning.cluster.engine.evaluate(&flow).is_allowed());
}

#[test]
fn a_destination_name_is_explained_by_rules_and_addresses() {
    let learning = Learning::new();
    let engine = &learning.cluster.engine;
    let explained = |to: &str, port: &str, now| {
        let (to, port) = (to.parse().unwrap(), port.parse().unwrap());
        text_at(engine, &PlainText, &"shop/web".parse().unwrap(), &to, &port, now).unwrap()
    };
    let now = Some(Moment(30_000));
    for (name, port, now, expected) in [
        (
            "www.example.org",
            "443/TCP",
            None,
            "unknown: shop/web -> www.example.org, 443/TCP: an answer of DNS decides\n",
        ),
        ("WWW.example.org.", "443/TCP", now, "denied: shop/web -> www.example.org, 443/TCP: no answer of DNS"),
        ("www.example.com", "443/TCP", now, "denied: shop/web -> www.example.com, 443/TCP: no rule accepts this name"),
        ("www.example.org", "22/TCP", now, "denied: shop/web -> www.example.org, 22/TCP: no rule accepts this name"),
    ] {
        let (is_allowed, text) = explained(name, port, now);
        assert!(!is_allowed && text.starts_with(expected), "{text}");
        assert_eq!(
            text.contains("by name  Admin-egress-names-1-domainNames-0-0"),
            !expected.contains("no rule"),
            "{text}"
        );
    }
    learning.hear("shop/web", &["10.0.0.1", "fd00::1"], "www.example.org", SITE);
    let (is_allowed, text) = explained("www.example.org", "443/TCP", now);
    assert!(
        is_allowed && text.starts_with("allowed: shop/web -> www.example.org, 443/TCP: 1 address learnt\n"),
        "{text}"
    );
    for part in ["203.0.113.7 is www.example.org for 30 s more\n", "tier     Admin: rule 1 of names accepts\n"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (is_allowed, text) = explained("www.example.org", "443/TCP", Some(Moment(60_000)));
    assert!(!is_allowed && text.contains("that still holds"), "expired: {text}");
}

#[test]
fn a_verdict_by_name_is_explained_by_the_rule_and_its_peer() {
    let learning = Learning::new();
    learning.web_hears("a.example.net");
    let (engine, flow) = (&learning.cluster.engine, learning.cluster.flow("shop/web", SITE, "tcp/443"));
    let verdict = engine.policy_set().evaluate_named(&flow, NameTime::Ever).egress;
    let provenance = engine.provenance(verdict.rule().unwrap(), &flow).unwrap();
    assert_eq!(provenance.to_string(), "Admin-egress-names-1-domainNames-0-0");
    let by_name = |port| -> Vec<String> {
        let explanation = engine.explain(&learning.cluster.flow("shop/web", SITE, port));
        explanation.egress.by_name.iter().map(ToString::to_string).collect()
    };
    assert_eq!(by_name("tcp/443"), ["Admin-egress-names-1-domainNames-0-0"]);
    assert_eq!(by_name("tcp/9"), [""; 0], "a Pass decides before");
    assert_eq!(by_name("tcp/90"), ["Admin-egress-names-3-domainNames-0-1"]);
    assert_eq!(by_name("udp/90"), [""; 0]);
    let (_, shown) =
        text(engine, &PlainText, &"shop/web".parse().unwrap(), &SITE.parse().unwrap(), &"443/TCP".parse().unwrap())
            .unwrap();
    assert!(shown.contains("by name  Admin-egress-names-1-domainNames-0-0"), "{shown}");
    assert!(shown.contains("www.example.org, *.example.net; 198.51.100.0/24"), "{shown}");
    assert_eq!(engine.rules_by_name(), 2);
}

#[test]
fn what_a_pod_has_learnt_is_its_own_and_ends_with_it() {
    let mut learning = Learning::new();
    learning.web_hears("www.example.org");
    // A policy without names, and then with them again: the pod has not forgotten.
    let none = cluster_policy("Admin 1 names", "app=web", vec![], vec![ordered(Deny, &["networks 0.0.0.0/0"], &[])]);
    learning.cluster.apply(vec![ObjectChange::Set(none)]);
    assert!(!learning.cluster.engine.policy_set().has_names());
    assert!(!learning.egress("shop/web", "tcp/443", 0).is_allowed());
    learning.cluster.apply(objects().into_iter().map(ObjectChange::Set).collect());
    assert!(learning.egress("shop/web", "tcp/443", 0).is_allowed());
    // Another pod of its name, and one that is gone.
    let created = PodLifetime { created: Some(9), ..PodLifetime::default() };
    let next = Pod { lifetime: created, ..pod("shop/web", "app=web", &["10.0.0.1", "fd00::1"], &[]) };
    learning.cluster.set(Object::Pod(next));
    assert!(!learning.egress("shop/web", "tcp/443", 0).is_allowed());
    learning.cluster.apply(vec![ObjectChange::Delete(ObjectRef::Pod(key("shop/web")))]);
    learning.cluster.apply(vec![ObjectChange::Delete(ObjectRef::Pod(key("shop/db")))]);
    assert!(!learning.cluster.engine.policy_set().has_names());
}

#[test]
fn without_learning_no_name_is_accepted_in_any_form() {
    let mut cluster = Cluster::new(objects());
    cluster.check(&[
        ("shop/web", SITE, "tcp/443", false),
        ("shop/web", "198.51.100.1", "tcp/443", true),
        ("shop/web", "192.0.2.53", "udp/53", true),
        ("shop/web", SITE, "tcp/9", true),
        ("shop/free", SITE, "tcp/443", true),
    ]);
    assert!(!cluster.engine.policy_set().has_names());
    let rule = cluster.rule("shop/web", SITE, "tcp/443", Direction::Egress);
    assert_eq!(rule, "Admin-egress-names-4-networks-0-0");
}

#[test]
fn names_are_written_as_in_the_api_and_may_cover_others() {
    for (wide, narrow, covers) in [
        ("example.org", "EXAMPLE.org.", true),
        ("*.example.org", "a.b.example.org", true),
        ("*.example.org", "*.a.example.org", true),
        ("*.example.org", "example.org", false),
        ("*.example.org", "aexample.org", false),
        ("a.example.org", "*.example.org", false),
    ] {
        let [wide, narrow] = [wide, narrow].map(|text| DomainPattern::new(text).unwrap());
        assert_eq!(wide.covers(&narrow), covers, "{wide} and {narrow}");
        assert_eq!(DomainPattern::try_from(String::from(wide.clone())), Ok(wide));
    }
    assert!(DomainPattern::try_from("a..b".to_owned()).is_err());
}
