//! `penstock learn`: every kind of input, the proof, and input that cannot be used.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

const SHOP: &str = "configs/examples/shop";
const FLOWS: &str = "configs/examples/shop-flows.jsonl";
const NO_POLICIES: [&str; 2] = ["configs/examples/shop/00-cluster.yaml", "configs/examples/shop/10-pods.yaml"];

struct CommandOutput {
    code: i32,
    out: String,
    error: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn penstock(arguments: &[&str], input: &str) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command.args(arguments).current_dir(root()).env_remove("FORCE_COLOR").env("NO_COLOR", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that does not read its input may be gone by now.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    CommandOutput {
        code: output.status.code().expect("it is not killed"),
        out: String::from_utf8(output.stdout).unwrap(),
        error: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Learns from flows on standard input, and manifests.
fn learn(flows: &str, manifests: &[&str], more: &[&str]) -> CommandOutput {
    let arguments = [&["learn", "--from", "-", "--manifests"], manifests, more].concat();
    penstock(&arguments, flows)
}

/// The policies that a flow on standard input gives, without their comments.
fn policies(flows: &str) -> String {
    let outcome = learn(flows, &NO_POLICIES, &[]);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    let is_comment = |line: &&str| line.trim_start().starts_with('#');
    outcome.out.lines().filter(|line| !is_comment(line)).collect::<Vec<_>>().join("\n")
}

fn file(directory: &TempDir, name: &str, text: &str) -> String {
    let path = directory.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn opened(from: &str, to: &str, port: u16) -> String {
    let end = |text: &str, port: u16| json!({ "address": text, "port": port });
    let line = json!({ "time": "2026-01-01T00:00:00Z", "outcome": "opened", "protocol": "TCP",
        "src": end(from, 40000), "dst": end(to, port) });
    format!("{line}\n")
}

/// Whether a flow is allowed under manifests.
fn is_allowed(manifests: &[&str], from: &str, to: &str, port: u16) -> bool {
    let query = json!({ "from": from, "to": to, "port": port }).to_string();
    let arguments = [&["evaluate", "--manifests"], manifests, &["--queries", "-"]].concat();
    let outcome = penstock(&arguments, &query);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    serde_json::from_str::<Value>(&outcome.out).unwrap()["verdict"] == "allow"
}

#[test]
fn what_is_printed_allows_what_was_seen_and_denies_what_was_not() {
    let outcome = learn(&fs::read_to_string(root().join(FLOWS)).unwrap(), &NO_POLICIES, &[]);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    let directory = TempDir::new().unwrap();
    let learnt = file(&directory, "learned.yaml", &outcome.out);
    let manifests = [NO_POLICIES[0], NO_POLICIES[1], learnt.as_str()];
    for (from, to, port, expected) in [
        ("web/frontend-2", "shop/api-1", 8000, true),
        ("shop/api-1", "shop/db-0", 5432, true),
        ("monitoring/collector-0", "shop/cache-0", 9121, true),
        ("198.51.101.8", "web/frontend-1", 8080, true),
        ("198.51.101.200", "web/frontend-1", 8080, false),
        ("web/frontend-1", "shop/db-0", 5432, false),
        ("shop/api-1", "web/frontend-1", 8080, false),
        ("web/frontend-1", "10.96.0.10", 443, false),
    ] {
        assert_eq!(is_allowed(&manifests, from, to, port), expected, "{from} {to} {port}\n{}", outcome.out);
    }
    let lint = penstock(&["lint", "--strict", "--manifests", manifests[0], manifests[1], manifests[2]], "");
    assert_eq!(lint.code, 0, "{}{}", lint.out, lint.error);
    let again = learn(&fs::read_to_string(root().join(FLOWS)).unwrap(), &NO_POLICIES, &[]);
    assert_eq!(again.out, outcome.out, "the same input gives the same text");
}

#[test]
fn every_kind_of_input_gives_the_same_policies() {
    let (from, to) = ("10.1.1.11", "10.1.1.21");
    let log = opened(from, to, 8000);
    let expected = policies(&log);
    assert!(expected.contains("name: learned-api") && expected.contains("port: http"), "{expected}");
    let end = |address: &str, port: u16, name: &str| json!({ "address": address, "port": port, "name": name });
    let connection = json!({ "connection": "00c0ffee00c0ffee", "protocol": "TCP", "state": "ESTABLISHED",
        "from": end(from, 40000, "web/frontend-1"), "to": end(to, 8000, "shop/api-1"),
        "egress": "open", "ingress": "open", "idle_seconds": 1, "expires_seconds": 2 });
    let list = json!({ "matching": 1, "flows": [connection] });
    let pretty = serde_json::to_string_pretty(&list).unwrap();
    let replay = json!({ "n": 1, "time": "2026-01-01T00:00:00.000000000Z", "src": "web/frontend-1", "dst": "shop/api-1",
        "protocol": "TCP", "sport": 40000, "dport": 8000, "verdict": "allow", "reason": null, "rule": null, "conn": "new" });
    let record = json!({ "time": "2026-01-01T00:00:10.000Z", "event": "end", "node": "n", "connection": "00c0ffee00c0ffee",
        "protocol": "TCP", "from": end(from, 40000, "web/frontend-1"), "to": end(to, 8000, "shop/api-1"),
        "verdict": "allowed", "egress": "open", "ingress": "open", "state": "TIME_WAIT", "ended": "closed" });
    assert_eq!(policies(&record.to_string()), expected, "a flow record");
    let denied = json!({ "time": "2026-01-01T00:00:10.000Z", "event": "denied", "node": "n", "protocol": "TCP",
        "from": end(from, 0, "web/frontend-1"), "to": end(to, 9999, "shop/api-1"), "verdict": "denied",
        "reason": "ingress_denied", "packets": 3 });
    assert_eq!(
        policies(&format!("{record}\n{denied}\n")),
        expected,
        "what was denied is not allowed by what is learnt"
    );
    for form in [connection.to_string(), pretty, format!("{list}\n{list}\n"), replay.to_string()] {
        assert_eq!(policies(&form), expected, "{form}");
    }
    let twice = learn(&format!("{list}\n{list}\n"), &NO_POLICIES, &[]);
    assert!(twice.out.starts_with("# Learnt from 1 connection.\n"), "a connection listed twice is one: {}", twice.out);
}

#[test]
fn captures_are_learnt_by_their_opening_packets() {
    let manifests = "pcap-tests/clusters/shop";
    let capture = "pcap-tests/real/curl-http.pcap";
    let outcome = penstock(&["learn", "--from", capture, "--manifests", manifests], "");
    assert_eq!(outcome.code, 0, "{}{}", outcome.out, outcome.error);
    assert!(outcome.out.contains("kind: NetworkPolicy"), "{}", outcome.out);
    assert!(
        !outcome.out.contains("port: 4") && !outcome.out.contains("port: 5"),
        "no port of a client: {}",
        outcome.out
    );
}

#[test]
fn captures_without_opening_packets_or_answers_are_not_learnt() {
    for (capture, reason) in [
        ("mid-stream-from-server", "1 flow without an opening packet: who opened them is unknown"),
        ("refused", "1 flow TCP without an answer, or refused"),
    ] {
        let path = format!("pcap-tests/cases/tcp/{capture}.pcapng");
        let outcome = penstock(&["learn", "--from", &path, "--manifests", "pcap-tests/clusters/shop"], "");
        assert_eq!((outcome.code, outcome.out.as_str()), (2, ""), "{capture}: {}", outcome.error);
        assert!(outcome.error.contains(reason), "{capture}: {}", outcome.error);
    }
}

#[test]
fn a_policy_not_overruled_fails_the_proof_and_prints_nothing() {
    let directory = TempDir::new().unwrap();
    let deny = json!({ "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
        "metadata": { "name": "no-web" }, "spec": { "tier": "Admin", "priority": 1, "subject": { "namespaces": {} },
        "ingress": [{ "action": "Deny", "from": [{ "namespaces": { "matchLabels": { "tier": "front" } } }] }] } });
    let deny = file(&directory, "deny.yaml", &deny.to_string());
    let manifests = [NO_POLICIES[0], NO_POLICIES[1], deny.as_str()];
    let flows = opened("10.1.1.11", "10.1.1.21", 8000);
    let outcome = learn(&flows, &manifests, &[]);
    assert_eq!((outcome.code, outcome.out.as_str()), (1, ""), "{}", outcome.error);
    let expected = "web/frontend-1 (10.1.1.11) -> shop/api-1 (10.1.1.21), 8000/TCP: ingress denied by ";
    assert!(outcome.error.contains(expected) && outcome.error.contains("no-web"), "{}", outcome.error);
}

#[test]
fn what_cannot_be_learnt_is_said_and_the_rest_is_learnt() {
    let good = opened("10.1.1.11", "10.1.1.21", 8000);
    let unknown = good.replace("\"port\":40000", "\"port\":40001,\"name\":\"web/gone\"");
    let picked_up = json!({ "protocol": "TCP", "state": "PICKED_UP", "from": { "address": "10.1.1.21", "port": 8000 },
        "to": { "address": "10.1.1.11", "port": 40000 } });
    let denied = good.replace("opened", "ingress_denied");
    let outcome = learn(&format!("{good}{unknown}{picked_up}\n{denied}"), &NO_POLICIES, &[]);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    for line in [
        "1 flow of pod web/gone, which the manifests do not have as running",
        "1 flow without an opening packet",
        "1 flow denied by policy when seen",
        "proven: all 1 that were learnt, of 4 flows, are allowed",
    ] {
        assert!(outcome.error.contains(line), "{line}\n{}", outcome.error);
    }
}

#[test]
fn workloads_with_the_same_labels_are_said() {
    let directory = TempDir::new().unwrap();
    let pod = |name: &str, address: &str, owner: &str, labels: Value| {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "namespace": "shop", "name": name, "labels": labels,
            "ownerReferences": [{ "kind": "ReplicaSet", "name": owner, "controller": true }] },
            "spec": {}, "status": { "podIP": address } })
    };
    let (one, other) =
        (json!({ "app": "a", "pod-template-hash": "x1" }), json!({ "app": "a", "pod-template-hash": "x2" }));
    for (owner, is_said) in [("a-x2", false), ("b-x2", true)] {
        let pods = [pod("a", "10.2.0.1", "a-x1", one.clone()), pod("b", "10.2.0.2", owner, other.clone())];
        let pods =
            file(&directory, "pods.json", &json!({ "apiVersion": "v1", "kind": "List", "items": pods }).to_string());
        let outcome = learn(&opened("198.51.100.1", "10.2.0.1", 80), &[&pods], &[]);
        assert_eq!(outcome.code, 0, "{}", outcome.error);
        let line = "namespace shop: Deployment a, Deployment b have the same labels app=a";
        assert_eq!(outcome.error.contains(line), is_said, "{}", outcome.error);
    }
}

#[test]
fn a_tightened_policy_isolates_as_before() {
    let directory = TempDir::new().unwrap();
    // Without policyTypes: isolates for egress since it has an egress rule.
    let policy = json!({ "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "namespace": "shop", "name": "p", "uid": "1", "labels": { "team": "a" } },
        "spec": { "podSelector": { "matchLabels": { "app": "api" } },
            "ingress": [{ "from": [{ "namespaceSelector": {} }, { "podSelector": {} }] }],
            "egress": [{ "to": [{ "podSelector": {} }] }] } });
    let policy = file(&directory, "policy.json", &policy.to_string());
    let manifests = [NO_POLICIES[0], NO_POLICIES[1], policy.as_str()];
    let outcome = learn(&opened("10.1.1.11", "10.1.1.21", 8000), &manifests, &["--tighten"]);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    let tightened = file(&directory, "tightened.yaml", &outcome.out);
    let manifests = [NO_POLICIES[0], NO_POLICIES[1], tightened.as_str()];
    assert!(is_allowed(&manifests, "web/frontend-1", "shop/api-1", 8000), "{}", outcome.out);
    assert!(!is_allowed(&manifests, "shop/api-1", "shop/db-0", 5432), "{}", outcome.out);
    for part in ["team: a", "# never used, left out: ingress[0].from[1]", "# never used, left out: egress[0]"] {
        assert!(outcome.out.contains(part), "{part}\n{}", outcome.out);
    }
    assert!(!outcome.out.contains("uid"), "{}", outcome.out);
}

#[test]
fn what_is_held_out_and_would_be_denied_gives_exit_code_3() {
    let flows: String = (1..=20).map(|port| opened("10.1.1.11", "10.1.1.21", port)).collect();
    let outcome = learn(&flows, &NO_POLICIES, &["--holdout", "0.3"]);
    assert_eq!(outcome.code, 3, "{}", outcome.error);
    assert!(outcome.out.contains("kind: NetworkPolicy"), "{}", outcome.out);
    let outcome = learn(&flows, &NO_POLICIES, &["--holdout", "0.3", "--output", "json"]);
    let report: Value = serde_json::from_str(&outcome.out).unwrap();
    let (held_out, denied) = (&report["held_out"]["flows"], report["held_out"]["denied"].as_array().unwrap());
    assert_eq!(held_out.as_u64().unwrap() as usize, denied.len(), "every port occurs once");
    assert_eq!(report["learnt"].as_u64().unwrap() + held_out.as_u64().unwrap(), 20);
    assert_eq!(report["policies"].as_array().unwrap().len(), 2);
    let repeated: String = (0..20).map(|_| opened("10.1.1.11", "10.1.1.21", 8000)).collect();
    let repeated = repeated + &opened("10.1.2.12", "10.1.1.21", 8000);
    let outcome = learn(&repeated, &NO_POLICIES, &["--holdout", "0.5", "--seed", "7"]);
    assert_ne!(outcome.code, 1, "{}", outcome.error);
}

#[test]
fn bad_input_is_refused_with_a_remedy() {
    let good = opened("10.1.1.11", "10.1.1.21", 8000);
    for (flows, more, expected) in [
        ("{", &[][..], "standard input: entry 1 is not JSON of a flow"),
        ("{\"a\": 1}", &[], "standard input: entry 1 is no flow: give what "),
        (&good.replace("TCP", "HTTP"), &[], "entry 1 \"HTTP\" is not a protocol"),
        (&good.replace("2026-01-01T00:00:00Z", "noon"), &[], "entry 1 has the time \"noon\", which is not RFC 3339"),
        (&opened("192.0.2.77", "192.0.2.78", 80), &[], "none of the 1 flows can be learnt"),
        ("", &[], "none of the 0 flows can be learnt"),
        (&good, &["--namespace", "nowhere"], "--namespace nowhere: no manifest has it"),
        (&good, &["--holdout", "1.5"], "write a number between 0 and 1"),
        (&good, &["--from", "/nonexistent"], "/nonexistent: cannot be read"),
        (&good, &["--from", "-"], "standard input is named more than once"),
    ] {
        let outcome = learn(flows, &NO_POLICIES, more);
        assert_eq!((outcome.code, outcome.out.as_str()), (2, ""), "{expected}: {}", outcome.error);
        assert!(outcome.error.contains(expected), "{expected}\n{}", outcome.error);
    }
    let live = ["learn", "--live", "/nonexistent/socket", "--manifests", SHOP];
    let outcome = penstock(&live, "");
    assert_eq!(outcome.code, 2);
    assert!(outcome.error.contains("/nonexistent/socket: no daemon listens there"), "{}", outcome.error);
}
