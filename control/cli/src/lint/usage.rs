//! Rules that a node's daemon has not seen decide a connection.

use std::collections::BTreeMap;

use penstock_admin::types::{RuleUsage, Rules};
use penstock_agent::config::TimeSpan;
use penstock_policy::compile::SourcePolicy;
use penstock_policy::describe;
use penstock_policy::engine::Engine;
use penstock_policy::model::ObjectRef;
use penstock_sources::convert::{FieldPath, PathElement};
use penstock_sources::manifest::Manifests;
use penstock_text::number::moment;

use super::super::rules::seconds;
use super::{Finding, FindingKind};

/// Findings about rules that are in effect on the node as they are written here, and were not used for this long.
pub(super) fn check(manifests: &Manifests, engine: &Engine, live: &Rules, time: TimeSpan, findings: &mut Vec<Finding>) {
    let known: BTreeMap<(&str, &str), &RuleUsage> =
        live.rules.iter().map(|rule| ((rule.rule.as_str(), rule.content.as_str()), rule)).collect();
    for rule in engine.deciding_rules() {
        let (name, content) = (rule.name().to_string(), format!("{:016x}", rule.content()));
        let used = known.get(&(name.as_str(), content.as_str()));
        let Some(used) = used.filter(|used| used.is_unused(live.now, seconds(time))) else { continue };
        let reference = match &rule.policy {
            SourcePolicy::Network(policy) => ObjectRef::NetworkPolicy(policy.key.clone()),
            SourcePolicy::Cluster(policy) => ObjectRef::ClusterNetworkPolicy(policy.name.clone()),
        };
        let document = manifests.documents.iter().find(|document| document.object.reference() == reference);
        let field = |name: &str| PathElement::Field(name.to_owned());
        let path = [field("spec"), field(describe::direction(rule.direction)), PathElement::Index(rule.rule)];
        let message = match used.last_hit {
            None => format!("has decided no connection of the node since {}", moment(used.since)),
            Some(last) => format!("has decided no connection of the node after {}", moment(last)),
        };
        findings.extend(
            document
                .map(|document| Finding::new(document, FieldPath::from_iter(path), FindingKind::NeverUsed, message)),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use penstock_policy::engine::EngineSettings;
    use penstock_policy::model::ObjectChange;
    use penstock_sources::manifest::{Options, read_text};

    use super::*;

    const POLICY: &str = "apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: db, namespace: shop}
spec:
  podSelector: {}
  ingress:
    - ports: [{port: 1}]
    - ports: [{port: 2}]
    - ports: [{port: 3}]
";

    #[test]
    fn a_rule_that_the_node_has_not_used_is_found_where_written() {
        let manifests = read_text(Path::new("db.yaml"), POLICY, &Options::default()).unwrap();
        let mut engine = Engine::new(EngineSettings::for_all_pods());
        engine.apply(manifests.objects().map(ObjectChange::Set));
        let mut rules: Vec<RuleUsage> = engine
            .deciding_rules()
            .map(|rule| RuleUsage {
                rule: rule.name().to_string(),
                policy: rule.policy.name().to_string(),
                direction: "ingress".to_owned(),
                index: rule.rule,
                content: format!("{:016x}", rule.content()),
                action: "allow".to_owned(),
                hits: 0,
                last_hit: None,
                since: 0,
            })
            .collect();
        // The second was used, and the third is another one on the node.
        (rules[1].hits, rules[1].last_hit) = (4, Some(950));
        rules[2].content = "0".to_owned();
        let mut findings = Vec::new();
        let live = Rules { now: 1_000, left_out: 0, rules };
        check(&manifests, &engine, &live, TimeSpan::microseconds(100_000_000), &mut findings);
        let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
        assert_eq!(lines.len(), 1, "{lines:?}");
        let parts =
            ["db.yaml:7", "NetworkPolicy shop/db", "spec.ingress[0]", "since 1970-01-01T00:00:00Z", "never-used"];
        assert!(parts.iter().all(|part| lines[0].contains(part)), "{lines:?}");
        let mut none = Vec::new();
        check(&manifests, &engine, &live, TimeSpan::microseconds(2_000_000_000), &mut none);
        assert!(none.is_empty(), "the rules are not known for that long");
    }
}
