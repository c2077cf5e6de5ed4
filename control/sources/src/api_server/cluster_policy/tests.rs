use penstock_policy::model::Peer;
use serde_json::json;

use super::*;

fn read(spec: Value) -> Interpretation {
    let metadata = ObjectMeta { name: Some("guard".to_owned()), ..ObjectMeta::default() };
    policy(&metadata, Some(&spec), ConversionSettings::default())
}

fn spec(egress: Value) -> Value {
    json!({ "tier": "Admin", "priority": 7, "subject": { "namespaces": {} }, "egress": egress })
}

/// A rule's action, `!` where it is not understood, and its peers.
fn shape(rule: &ClusterRule) -> String {
    let peers = match &rule.matches.peers {
        Peers::Every => "everything".to_owned(),
        Peers::AnyOf(peers) => peers.len().to_string(),
    };
    format!("{:?}{} {peers}", rule.action, if rule.is_understood { "" } else { "!" })
}

#[test]
fn a_rule_not_understood_keeps_its_place_and_fails_closed() {
    let good = json!({ "action": "Accept", "to": [{ "nodes": {} }] });
    for (bad, message) in [
        (json!({ "to": [{ "nodes": {} }, {}] }), "spec.egress[1].to[1]: sets 0 of"),
        (json!({ "to": [{ "clouds": {} }] }), "spec.egress[1].to[0].clouds: is not a field"),
        (json!({ "to": [{ "domainNames": ["example.org"] }] }), "spec.egress[1].to[0].domainNames: is"),
        (json!({ "to": [{ "nodes": {} }], "protocols": [{ "icmp": {} }] }), "spec.egress[1].protocols[0].icmp: is not"),
        (json!({ "to": [{ "nodes": {} }], "protocols": [] }), "spec.egress[1].protocols: has 0 entries"),
        (
            json!({ "to": [{ "nodes": { "matchExpressions": [{ "key": "a", "operator": "Near" }] } }] }),
            "spec.egress[1].to[0].nodes.matchExpressions[0].operator: \"Near\" is not an operator",
        ),
        (json!({ "to": [{ "nodes": {} }], "ports": [] }), "spec.egress[1].ports: is not a field"),
        (json!({ "to": 7 }), "spec.egress[1].to: invalid type"),
    ] {
        for (action, expected) in [("Accept", "Accept! 0"), ("Deny", "Deny! everything"), ("Pass", "Deny! everything")]
        {
            let mut bad = bad.clone();
            bad["action"] = json!(action);
            let Interpretation::Restricted { object: Object::ClusterNetworkPolicy(policy), problem } =
                read(spec(json!([good, bad, good])))
            else {
                panic!("{bad} is understood");
            };
            assert!(problem.starts_with(message), "{bad}: {problem}");
            assert!(problem.contains("1 of its 3 rules are not understood"), "{problem}");
            let shapes: Vec<String> = policy.egress.iter().map(shape).collect();
            assert_eq!(shapes, ["Accept 1", expected, "Accept 1"], "{bad}");
        }
    }
}

#[test]
fn domain_names_are_understood_if_followed_only_to_accept() {
    let followed = ConversionSettings { domain_names: true, ..ConversionSettings::default() };
    let names = json!(["example.org", "*.Example.ORG."]);
    for (action, expected) in [("Accept", None), ("Deny", Some("Deny! everything")), ("Pass", Some("Deny! everything"))]
    {
        let metadata = ObjectMeta { name: Some("guard".to_owned()), ..ObjectMeta::default() };
        let spec = spec(json!([{ "action": action, "to": [{ "domainNames": names }] }]));
        match (policy(&metadata, Some(&spec), followed), expected) {
            (Interpretation::Full(Object::ClusterNetworkPolicy(policy)), None) => {
                let Peers::AnyOf(peers) = &policy.egress[0].matches.peers else { panic!("{policy:?}") };
                let [Peer::DomainNames(names)] = &peers[..] else { panic!("{peers:?}") };
                let names: Vec<String> = names.iter().map(ToString::to_string).collect();
                assert_eq!(names, ["example.org", "*.example.org"]);
            }
            (Interpretation::Restricted { object: Object::ClusterNetworkPolicy(policy), problem }, Some(expected)) => {
                assert!(problem.contains("is for rules with action Accept only"), "{problem}");
                assert_eq!(shape(&policy.egress[0]), expected);
            }
            (other, _) => panic!("{action}: {other:?}"),
        }
    }
}

#[test]
fn an_unknown_field_of_the_spec_may_change_every_rule() {
    let mut spec = spec(json!([{ "action": "Accept", "to": [{ "nodes": {} }] }]));
    spec["unless"] = json!({ "weekday": "Sunday" });
    let Interpretation::Restricted { object: Object::ClusterNetworkPolicy(policy), problem } = read(spec) else {
        panic!("it is not understood");
    };
    assert!(problem.starts_with("spec.unless: is not a field that this version knows"), "{problem}");
    assert_eq!(shape(&policy.egress[0]), "Accept! 0");
}

#[test]
fn objects_that_only_a_server_accepts_are_understood() {
    let many: Vec<Value> = (0..30).map(|_| json!({ "nodes": {} })).collect();
    for egress in [
        json!([{ "action": "Accept", "to": many }]),
        json!([{ "action": "Deny", "to": [{ "networks": ["10.0.0.0/8", "10.0.0.0/8"] }],
                 "protocols": [{ "destinationNamedPort": "http" }] }]),
    ] {
        assert!(matches!(read(spec(egress.clone())), Interpretation::Full(_)), "{egress}");
    }
}

#[test]
fn without_tier_priority_or_action_the_last_version_stays() {
    let valid = spec(json!([{ "action": "Accept", "to": [{ "nodes": {} }] }]));
    for (field, value) in
        [("tier", json!("Middle")), ("priority", json!(-1)), ("priority", Value::Null), ("egress", json!({}))]
    {
        let mut spec = valid.clone();
        spec[field] = value;
        assert!(matches!(read(spec.clone()), Interpretation::Kept { .. }), "{spec}");
    }
    let unknown_action = spec(json!([{ "action": "Log", "to": [{ "nodes": {} }] }]));
    assert!(matches!(read(unknown_action), Interpretation::Kept { .. }));
    for subject in [json!({}), json!({ "nodes": {} }), json!({ "namespaces": { "matchNames": [] } }), Value::Null] {
        let mut spec = valid.clone();
        spec["subject"] = subject;
        let Interpretation::Unusable { problem } = read(spec.clone()) else { panic!("{spec} selects pods") };
        assert!(problem.starts_with("spec.subject"), "{problem}");
    }
}

/// The conformance cases of ClusterNetworkPolicy.
fn conformance() -> Value {
    let path = std::path::Path::new(env!("CONFORMANCE_DATA")).join("cnp-cases.json.gz");
    let file = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).expect("the data has the form that it documents")
}

/// The objects of a state, as the API server gives them.
fn objects(state: &Value) -> Vec<Object> {
    let typed = |value: Value| serde_json::from_value(value).expect("an object of its type");
    let list = |name: &str| state[name].as_array().cloned().unwrap_or_default();
    let namespaces = list("namespaces").into_iter().map(|it| {
        let namespace = json!({ "metadata": { "name": it["name"], "labels": it["labels"] } });
        let read = serde_json::from_value(namespace).expect("a namespace");
        convert::namespace(&read, convert::ConversionSettings::default()).map(Object::Namespace).expect("valid")
    });
    let pods = list("pods").into_iter().map(|it| {
        let ips: Vec<Value> = it["ips"].as_array().into_iter().flatten().map(|ip| json!({ "ip": ip })).collect();
        let metadata = json!({ "namespace": it["namespace"], "name": it["name"], "labels": it["labels"] });
        let spec = json!({ "nodeName": it["node"], "hostNetwork": it["hostNetwork"], "containers": [] });
        let pod = json!({ "metadata": metadata, "spec": spec, "status": { "podIPs": ips } });
        convert::pod(&typed(pod)).map(Object::Pod).expect("valid")
    });
    let policies = list("cluster_policies").into_iter().filter_map(|it| {
        let metadata = serde_json::from_value(it["metadata"].clone()).expect("metadata");
        match policy(&metadata, it.get("spec"), ConversionSettings::default()) {
            Interpretation::Full(object) | Interpretation::Restricted { object, .. } => Some(object),
            Interpretation::Kept { .. } | Interpretation::Unusable { .. } => None,
        }
    });
    assert!(list("policies").is_empty(), "these cases have no NetworkPolicy");
    namespaces.chain(pods).chain(policies).collect()
}

#[test]
#[cfg_attr(not(conformance_data), ignore = "needs the conformance cases, see docs/promises.md")]
fn conformance_cases_that_manifests_refuse_hold_for_a_server() {
    use penstock_policy::engine::{Engine, EngineSettings};
    use penstock_policy::flow::{FlowEndpoint, flows};
    use penstock_policy::model::ObjectChange;
    let suite = conformance();
    let mut checked = 0;
    for case in suite["cases"].as_array().expect("cases").iter().filter(|case| case["may_refuse"] == true) {
        for step in case["steps"].as_array().expect("steps") {
            let mut engine = Engine::new(EngineSettings::for_all_pods());
            engine.apply(objects(&step["state"]).into_iter().map(ObjectChange::Set));
            for row in step["expected"].as_array().expect("expectations") {
                let end = |name: &str| row[name].as_str().expect("an end").parse::<FlowEndpoint>().expect("an end");
                let protocol = row["protocol"].as_str().expect("a protocol");
                let port = row["port"].as_u64().map_or(protocol.to_owned(), |port| format!("{port}/{protocol}"));
                let port = port.parse().expect("a port");
                for flow in flows(engine.state(), &end("from"), &end("to"), &port).expect("a flow") {
                    let verdict = engine.evaluate(&flow);
                    assert_eq!(verdict.is_allowed(), row["allowed"] == true, "{}: {row}: {verdict:?}", case["id"]);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 10, "{checked} checked");
}
