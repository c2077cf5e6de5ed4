//! The commands on the example policies: what they print is in `tests/expected`, to be read as it is.
//!
//! With `UPDATE_EXPECTED=1` in the environment the files are written anew instead of compared.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

pub(crate) const SHOP: &str = "configs/examples/shop";
const MISTAKES: &str = "configs/examples/mistakes.yaml";

pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) error: String,
}

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn penstock_with(arguments: &[&str], input: &str, environment: &[(&str, &str)]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
    command.args(arguments).current_dir(root()).env_remove("FORCE_COLOR").env_remove("NO_COLOR");
    command.envs(environment.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
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

pub(crate) fn penstock(arguments: &[&str]) -> CommandOutput {
    penstock_with(arguments, "", &[])
}

/// The output of a command that succeeds and has nothing to complain about.
pub(crate) fn output(arguments: &[&str]) -> String {
    let outcome = penstock(arguments);
    assert_eq!((outcome.code, outcome.error.as_str()), (0, ""), "{arguments:?}");
    outcome.out
}

/// The one line of a command that refuses its input.
pub(crate) fn error_line(arguments: &[&str], input: &str) -> String {
    let outcome = penstock_with(arguments, input, &[]);
    assert_eq!(outcome.code, 2, "{arguments:?}: {}", outcome.error);
    let lines: Vec<&str> = outcome.error.lines().collect();
    let [line] = lines[..] else { panic!("{arguments:?}: {}", outcome.error) };
    line.strip_prefix("penstock: ").expect("it says who complains").to_owned()
}

pub(crate) fn assert_expected(name: &str, found: &str) {
    let path = root().join("control/cli/tests/expected").join(name);
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        fs::write(&path, found).unwrap();
        return;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    for (number, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
        assert_eq!(found, expected, "{name}:{}", number + 1);
    }
    assert_eq!(found.lines().count(), expected.lines().count(), "{name}");
}

#[test]
fn evaluate_answers_the_example_queries() {
    let answers = output(&["evaluate", "--manifests", SHOP, "--queries", "configs/examples/shop-queries.jsonl"]);
    assert_expected("evaluate.jsonl", &answers);
    let queries = fs::read_to_string(root().join("configs/examples/shop-queries.jsonl")).unwrap();
    assert_eq!(queries.lines().count(), answers.lines().count());
    for (query, answer) in queries.lines().zip(answers.lines()) {
        let (query, answer): (Value, Value) =
            (serde_json::from_str(query).unwrap(), serde_json::from_str(answer).unwrap());
        for (field, value) in query.as_object().unwrap() {
            assert_eq!(&answer[field], value, "the query's fields come back");
        }
        let (egress, ingress) = (&answer["egress"], &answer["ingress"]);
        let both = if egress["verdict"] == "allow" && ingress["verdict"] == "allow" { "allow" } else { "deny" };
        assert_eq!(answer["verdict"], both);
        for side in [egress, ingress] {
            assert!(side["isolated"].is_boolean() && side["policies"].is_array() && side.get("rule").is_some());
        }
    }
}

#[test]
fn evaluate_reads_queries_or_manifests_from_standard_input() {
    let query = "{\"from\": \"web/frontend-1\", \"to\": \"shop/api-1\", \"port\": 8000}\n\n";
    let arguments = ["evaluate", "--manifests", SHOP, "--queries", "-"];
    let outcome = penstock_with(&arguments, query, &[]);
    assert_eq!((outcome.code, outcome.out.lines().count()), (0, 1), "{}", outcome.error);
    let queries = tempfile::NamedTempFile::new().unwrap();
    fs::write(&queries, "{\"from\": \"10.0.0.1\", \"to\": \"a/b\", \"port\": 1, \"protocol\": \"udp\"}").unwrap();
    let pod = "{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"namespace\":\"a\",\"name\":\"b\"},\"status\":{\"podIP\":\"10.0.0.2\"}}";
    let policy =
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: a}\nspec: {}\n";
    let path = queries.path().to_str().unwrap();
    let outcome = penstock_with(&["evaluate", "--manifests", "-", "--queries", path], &format!("{pod}\n{policy}"), &[]);
    assert_eq!(outcome.code, 0, "{}", outcome.error);
    let answer: Value = serde_json::from_str(&outcome.out).unwrap();
    assert_eq!((&answer["verdict"], &answer["ingress"]["policies"][0]), (&"deny".into(), &"a/p".into()));
}

#[test]
fn a_bad_query_is_reported_with_its_line_after_earlier_answers() {
    let good = "{\"from\": \"web/frontend-1\", \"to\": \"shop/api-1\", \"port\": 8000}";
    for (bad, message) in [
        ("{", "is not a query (EOF while parsing"),
        ("{\"from\": \"a/b\"}", "is not a query (missing field `to`"),
        ("{\"from\": \"a/b\", \"to\": \"a/b\", \"prt\": 1}", "is not a query (unknown field `prt`"),
        ("{\"from\": \"shop/nobody\", \"to\": \"shop/api-1\", \"port\": 1}", "pod shop/nobody is unknown: "),
        (
            "{\"from\": \"shop/migrate-x7k\", \"to\": \"shop/api-1\", \"port\": 1}",
            "pod shop/migrate-x7k has finished: ",
        ),
        ("{\"from\": \"shop\", \"to\": \"shop/api-1\", \"port\": 1}", "\"shop\" is not an endpoint: "),
        ("{\"from\": \"10.0.0.1\", \"to\": \"shop/api-1\"}", "TCP needs a port: "),
        ("{\"from\": \"10.0.0.1\", \"to\": \"shop/api-1\", \"port\": 0}", "\"0\" is not a port: "),
        (
            "{\"from\": \"10.0.0.1\", \"to\": \"shop/api-1\", \"port\": \"sql\"}",
            "shop/api-1 has no port named \"sql\" for TCP: ",
        ),
        (
            "{\"from\": \"10.0.0.1\", \"to\": \"shop/api-1\", \"port\": 1, \"protocol\": \"HTTP\"}",
            "\"HTTP\" is not a protocol: ",
        ),
        (
            "{\"from\": \"2001:db8::1\", \"to\": \"shop/cache-0\", \"port\": 1}",
            "2001:db8::1 and shop/cache-0 have no address family in common",
        ),
    ] {
        let outcome = penstock_with(
            &["evaluate", "--manifests", SHOP, "--queries", "-"],
            &format!("{good}\n{bad}\n{good}\n"),
            &[],
        );
        assert_eq!((outcome.code, outcome.out.lines().count()), (2, 1), "{bad}");
        let start = format!("penstock: standard input:2: {message}");
        assert!(outcome.error.starts_with(&start) && outcome.error.lines().count() == 1, "{bad}: {}", outcome.error);
    }
}

#[test]
fn explain_prints_the_reasons() {
    let mut text = String::new();
    for (from, to, port) in [
        ("shop/api-1", "shop/db-0", "sql/TCP"),
        ("web/frontend-1", "shop/db-0", "5432/TCP"),
        ("shop/api-1", "203.0.113.200", "443"),
        ("monitoring/collector-0", "shop/db-0", "9100/TCP"),
        ("shop/db-0", "8.8.8.8", "ICMP"),
        ("192.0.2.12", "shop/db-0", "1/SCTP"),
        ("web/frontend-1", "fd00:1:1::21", "http/TCP"),
    ] {
        let arguments = ["explain", "--manifests", SHOP, "--from", from, "--to", to, "--port", port];
        text += &format!("$ penstock {}\n{}\n", arguments.join(" "), output(&arguments));
    }
    assert_expected("explain.txt", &text);
}

#[test]
fn an_end_that_is_a_node_is_refused_with_an_address_of_it() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: x, namespace: a}, spec: {nodeName: bare}, status: {podIP: 10.0.0.1}}";
    let node = "{apiVersion: v1, kind: Node, metadata: {name: here}, status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}}";
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: node}}";
    let cluster = format!("{pod}\n---\n{node}\n");
    for (from, manifests, line) in [
        ("node/here", cluster.clone(), "node/here is no pod: write an address of node here, such as 192.0.2.1"),
        ("node/bare", cluster.clone(), "node/bare is no pod: write an address of node bare"),
        ("node/none", cluster.clone(), "node/none is no pod, and no node none is known: use an address"),
        (
            "node/none",
            format!("{cluster}---\n{namespace}\n"),
            "pod node/none is unknown: correct its name, or use an address",
        ),
    ] {
        let arguments = ["explain", "--manifests", "-", "--from", from, "--to", "a/x", "--port", "80"];
        assert_eq!(error_line(&arguments, &manifests), line);
    }
}

#[test]
fn render_prints_every_form() {
    for (format, name) in [("table", "render-table.txt"), ("json", "render.json")] {
        assert_expected(name, &output(&["render", "--manifests", SHOP, "--node", "node-a", "--format", format]));
    }
    let all = output(&["render", "--manifests", SHOP, "--format", "json"]);
    let all: Value = serde_json::from_str(&all).unwrap();
    assert_eq!(all["endpoints"].as_array().unwrap().len(), 6);
    let stderr = error_line(&["render", "--manifests", SHOP, "--node", "node-z", "--format", "table"], "");
    assert!(stderr.starts_with("--node node-z: "), "{stderr}");
}

#[test]
fn lint_finds_the_mistakes_and_nothing_else() {
    assert_eq!(output(&["lint", "--manifests", SHOP]), "nothing found in 18 objects\n");
    assert_expected("lint.txt", &output(&["lint", "--manifests", SHOP, MISTAKES]));
    let strict = penstock(&["lint", "--strict", "--manifests", SHOP, MISTAKES]);
    assert_eq!((strict.code, strict.error.lines().count()), (1, 1));
    assert_eq!(penstock(&["lint", "--strict", "--manifests", SHOP]).code, 0);
    let alone = output(&["lint", "--manifests", "configs/examples/shop/10-pods.yaml"]);
    for kind in ["[no-namespace]", "[no-node]"] {
        assert!(alone.contains(kind), "{alone}");
    }
    let other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\nstatus: {phase: Pending}\n---\n\
                 apiVersion: v1\nkind: Namespace\nmetadata: {name: default, annotations: {net.beta.kubernetes.io/network-policy: x}}\n";
    let found = penstock_with(&["lint", "--manifests", "-"], other, &[]).out;
    for line in [
        "standard input:5: Pod default/a: has no address: nothing matches it, and no policy is enforced for it [no-address]",
        "standard input:12: Namespace default: metadata.annotations[net.beta.kubernetes.io/network-policy]: has no effect without --v1beta1 [no-effect]",
    ] {
        assert!(found.lines().any(|found| found == line), "{line}\n{found}");
    }
    assert!(!found.contains("ConfigMap"), "what has nothing to do with policy is no finding: {found}");
}

#[test]
fn nothing_read_is_a_failure() {
    for input in ["", "# a comment\n", "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}", "values: 1\n"] {
        for command in [
            &["lint", "--strict"][..],
            &["lint"],
            &["matrix"],
            &["explain", "--from", "::1", "--to", "::2", "--port", "ICMP"],
        ] {
            let found = penstock_with(&[command, &["--manifests", "-"]].concat(), input, &[]);
            assert_eq!((found.code, found.out.as_str()), (2, ""), "{command:?} {input}");
            assert!(found.error.starts_with("penstock: -: no object that policy is about, and "), "{}", found.error);
        }
    }
}

#[test]
fn lint_finds_lists_that_became_null_and_addresses_of_load_balancers() {
    let input = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: a}\nspec:\n  podSelector: {}\n  ingress:\n  - from:\n\
                 \x20   ports:\n  egress:\n  - to: [{ipBlock: {cidr: 203.0.113.7/32}}]\n  - to: [{ipBlock: {cidr: 203.0.113.8/32}}]\n\
                 ---\n{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {externalIPs: [203.0.113.7]}, status: {loadBalancer: {ingress: [{ip: 203.0.113.8}]}}}\n";
    let found = penstock_with(&["lint", "--manifests", "-"], input, &[]).out;
    for line in [
        "input:7: NetworkPolicy default/a: spec.ingress[0].from: is empty, and so matches everything, as if it were not there [empty-list]",
        "input:8: NetworkPolicy default/a: spec.ingress[0].ports: is empty, and so matches everything, as if it were not there [empty-list]",
        "input:10: NetworkPolicy default/a: spec.egress[0].to[0].ipBlock: matches nothing: it is 203.0.113.7, of Service default/s, whose backends are evaluated instead; select them [service-address]",
        "input:11: NetworkPolicy default/a: spec.egress[1].to[0].ipBlock: matches nothing: it is 203.0.113.8, of Service default/s, whose backends are evaluated instead; select them [service-address]",
    ] {
        assert!(found.contains(line), "{line}\n{found}");
    }
}

/// As charts have them: two kinds of one name, labels that controllers add, no namespace, no status, the host network.
#[test]
fn questions_about_charts_are_answered_without_a_cluster() {
    let workload = |kind: &str, name: &str, spec: &str| {
        format!(
            "{{apiVersion: apps/v1, kind: {kind}, metadata: {{name: {name}}}, spec: {{template: {{metadata: {{labels: {{is: {kind}}}}}, spec: {{{spec}}}}}}}}}\n---\n"
        )
    };
    let input = [
        workload("StatefulSet", "log", "containers: [{volumeMounts: 5, ports: [{name: in, containerPort: 24224}]}]"),
        workload("DaemonSet", "log", "volumes: [{configMap: {defaultMode: 0644}}]"),
        workload("DaemonSet", "exporter", "hostNetwork: yes"),
        "{apiVersion: v1, kind: Pod, metadata: {name: bare, labels: {app: bare}}}\n---\n".to_owned(),
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: p}, spec: {podSelector: {matchLabels: {statefulset.kubernetes.io/pod-name: log-0}}, \
         ingress: [{from: [{podSelector: {matchLabels: {is: DaemonSet}}}], ports: [{port: in}]}]}}\n"
            .to_owned(),
    ]
    .concat();
    for (from, verdict) in [("log-daemonset", "allowed"), ("bare", "denied"), ("exporter", "denied")] {
        let ends = ["--from", &format!("mon/{from}"), "--to", "mon/log-statefulset", "--port", "24224/TCP"];
        let command = [&["explain", "--namespace", "mon", "--manifests", "-"][..], &ends].concat();
        let found = penstock_with(&command, &input, &[]);
        assert!(found.code == 0 && found.out.starts_with(verdict), "{from}: {}{}", found.out, found.error);
    }
    let matrix =
        penstock_with(&["matrix", "--default-namespace", "mon", "--namespace", "mon", "--manifests", "-"], &input, &[]);
    assert!(matrix.code == 0 && matrix.out.contains("bare"), "{}{}", matrix.out, matrix.error);
    let lint = penstock_with(&["lint", "--manifests", "-"], &input, &[]);
    assert!(lint.out.ends_with("\n1 finding in 5 objects\n") && lint.out.contains("[no-namespace]"), "{}", lint.out);
}

#[test]
fn lint_names_what_an_annotation_cannot_say() {
    let policy = |annotation: &str| {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: a\n  annotations:\n    {annotation}\n\
             spec: {{podSelector: {{}}}}\n"
        )
    };
    let pod = |annotation: &str| {
        format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: a\n  annotations:\n    {annotation}\n")
    };
    for (object, kind, name, value, remedy) in [
        (policy as fn(&str) -> String, "NetworkPolicy", "log", "everything", "use denied, allowed or all"),
        (policy, "NetworkPolicy", "deny-answer", "drop", "use none or reject"),
        (policy, "NetworkPolicy", "logs", "all", "log or deny-answer"),
        (pod, "Pod", "egress-connections-per-second", "many", "use 1 to 1000000"),
        (pod, "Pod", "ingress-open-connections", "0", "use 1 to 65536"),
        (pod, "Pod", "open-connections", "7", "ingress-open-connections"),
    ] {
        let yaml = object(&format!("policy.penstock.dev/{name}: \"{value}\""));
        let found = penstock_with(&["lint", "--manifests", "-"], &yaml, &[]);
        let start = format!("standard input:6: {kind} default/a: metadata.annotations[policy.penstock.dev/{name}]: ");
        let text = found.out + &found.error;
        assert!(text.lines().any(|line| line.contains(&start) && line.contains(remedy)), "{start}{remedy}\n{text}");
    }
}

/// One ClusterNetworkPolicy in a line; `ACTION namespace-label` each rule, ingress.
fn cluster_policy(name: &str, tier: &str, priority: u16, subject: &str, rules: &[(&str, &str)]) -> String {
    let labels =
        |team: &str| if team.is_empty() { "{}".to_owned() } else { format!("{{matchLabels: {{team: {team}}}}}") };
    let rules =
        rules.iter().map(|(action, team)| format!("{{action: {action}, from: [{{namespaces: {}}}]}}", labels(team)));
    let rules = rules.collect::<Vec<_>>().join(", ");
    format!(
        "{{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {{name: {name}}}, spec: \
         {{tier: {tier}, priority: {priority}, subject: {{namespaces: {}}}, ingress: [{rules}]}}}}\n",
        labels(subject)
    )
}

#[test]
fn lint_finds_unreached_rules_and_undefined_orders_of_tiers() {
    let namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: NAME, labels: {team: NAME}}}\n---\n\
                     {apiVersion: v1, kind: Node, metadata: {name: n}}\n---\n\
                     {apiVersion: v1, kind: Pod, metadata: {name: p, namespace: NAME}, spec: {nodeName: n}, \
                     status: {podIP: 10.0.0.1}}\n---\n"
        .replace("NAME", "shop");
    let lint = |policies: &[String]| {
        let found = penstock_with(&["lint", "--manifests", "-"], &(namespace.clone() + &policies.join("---\n")), &[]);
        assert_eq!(found.code, 0, "{}", found.error);
        let lines = found.out.lines().filter_map(|line| line.strip_prefix("standard input:"));
        lines.map(|line| line.split_once(": ").expect("a line number").1.to_owned()).collect::<Vec<_>>()
    };
    let shadowed = "is never reached: ingress";
    let nothing = "passes to nothing: no later tier has a policy for its subject, so it accepts [no-effect]";
    for (policies, expected) in [
        (vec![cluster_policy("a", "Admin", 1, "", &[("Deny", "lab"), ("Accept", "shop")])], vec![]),
        (
            vec![cluster_policy("a", "Admin", 1, "", &[("Accept", ""), ("Deny", "shop")])],
            vec![format!("ClusterNetworkPolicy a: spec.ingress[1]: {shadowed}[0] of a accepts all that it matches [shadowed]")],
        ),
        (
            vec![
                cluster_policy("a", "Admin", 1, "", &[("Deny", "shop")]),
                cluster_policy("b", "Admin", 2, "shop", &[("Accept", "shop")]),
            ],
            vec![format!("ClusterNetworkPolicy b: spec.ingress[0]: {shadowed}[0] of a denies all that it matches [shadowed]")],
        ),
        (
            vec![
                cluster_policy("a", "Admin", 1, "", &[("Deny", "shop")]),
                cluster_policy("b", "Baseline", 2, "shop", &[("Accept", "shop")]),
            ],
            vec![format!(
                "ClusterNetworkPolicy b: spec.ingress[0]: {shadowed}[0] of a of the Admin tier denies all that it matches [shadowed]"
            )],
        ),
        (
            // A flow that the Admin tier passes reaches the Baseline tier.
            vec![
                cluster_policy("a", "Admin", 1, "", &[("Pass", "shop"), ("Deny", "")]),
                cluster_policy("b", "Baseline", 2, "shop", &[("Deny", "shop")]),
            ],
            vec![],
        ),
        (
            vec![cluster_policy("a", "Admin", 1, "", &[("Pass", "shop"), ("Deny", "")])],
            vec![format!("ClusterNetworkPolicy a: spec.ingress[0]: {nothing}")],
        ),
        (
            vec![
                cluster_policy("a", "Admin", 1, "", &[("Deny", "lab")]),
                cluster_policy("b", "Admin", 1, "shop", &[("Accept", "lab2")]),
            ],
            vec![
                "ClusterNetworkPolicy b: spec.priority: equals that of a, and their subjects can meet: which comes first \
                 is not defined, here it is a [equal-priority]"
                    .to_owned(),
            ],
        ),
        (
            vec![cluster_policy("a", "Admin", 1, "none", &[("Deny", "lab")])],
            vec!["ClusterNetworkPolicy a: spec.subject: selects nothing: no pod matches [selects-nothing]".to_owned()],
        ),
    ] {
        assert_eq!(lint(&policies), expected, "{policies:?}");
    }
}

#[test]
fn bad_manifests_exit_with_2_and_name_file_and_line() {
    let bad = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p}\nspec:\n  ingress:\n  - from:\n    - {}\n";
    let message = "standard input:7: NetworkPolicy default/p: spec.ingress[0].from[0]: is an empty peer: set podSelector, namespaceSelector or ipBlock";
    for arguments in [
        &["evaluate", "--manifests", "-", "--queries", "/dev/null"][..],
        &["explain", "--manifests", "-", "--from", "10.0.0.1", "--to", "10.0.0.2", "--port", "1"],
        &["matrix", "--manifests", "-"],
        &["render", "--manifests", "-", "--format", "json"],
        &["lint", "--manifests", "-"],
    ] {
        assert_eq!(error_line(arguments, bad), message, "{arguments:?}");
    }
    assert!(error_line(&["evaluate", "--manifests", MISTAKES, "--queries", "/dev/null"], "").contains("porst"));
    let both = error_line(&["evaluate", "--manifests", "-", "--queries", "-"], "");
    assert!(both.starts_with("standard input cannot be manifests and queries"), "{both}");
    assert!(
        error_line(&["evaluate", "--manifests", SHOP, "--queries", "/nowhere"], "")
            .starts_with("/nowhere: cannot be read")
    );
}

#[test]
fn policies_of_other_engines_are_refused_and_never_ignored() {
    for (version, kind, name) in [
        ("policy.networking.k8s.io/v1alpha1", "AdminNetworkPolicy", "AdminNetworkPolicy p"),
        ("policy.networking.k8s.io/v1alpha1", "BaselineAdminNetworkPolicy", "BaselineAdminNetworkPolicy p"),
        ("policy.networking.k8s.io/v2", "SomethingNew", "SomethingNew default/p"),
        ("cilium.io/v2", "CiliumNetworkPolicy", "CiliumNetworkPolicy p"),
        ("cilium.io/v2", "CiliumClusterwideNetworkPolicy", "CiliumClusterwideNetworkPolicy p"),
        ("crd.projectcalico.org/v1", "NetworkPolicy", "NetworkPolicy default/p"),
        ("projectcalico.org/v3", "GlobalNetworkPolicy", "GlobalNetworkPolicy p"),
        ("crd.antrea.io/v1beta1", "ClusterNetworkPolicy", "ClusterNetworkPolicy p"),
        ("network.openshift.io/v1", "EgressNetworkPolicy", "EgressNetworkPolicy p"),
        ("k8s.ovn.org/v1", "EgressFirewall", "EgressFirewall default/p"),
    ] {
        let policy = format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: p}}\nspec: {{}}\n");
        for arguments in [
            &["evaluate", "--manifests", "-", "--queries", "/dev/null"][..],
            &["explain", "--manifests", "-", "--from", "10.0.0.1", "--to", "10.0.0.2", "--port", "1"],
            &["matrix", "--manifests", "-"],
            &["render", "--manifests", "-", "--format", "json"],
        ] {
            let line = error_line(arguments, &policy);
            let start =
                format!("standard input:1: {name}: {kind} of apiVersion {version} is a kind of policy that is not");
            assert!(
                line.starts_with(&start) && line.contains("keep it out of these manifests"),
                "{arguments:?}: {line}"
            );
        }
        let found = penstock_with(&["lint", "--manifests", "-"], &policy, &[]).out;
        assert!(
            found.contains("is a policy of a kind that is not understood: every other command refuses it"),
            "{found}"
        );
    }
}

/// Two dual-stack pods, and a policy that admits the first by its IPv4 address alone.
const DUAL_STACK: &str = "
{apiVersion: v1, kind: Pod, metadata: {name: x, namespace: a}, status: {podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}]}}
---
{apiVersion: v1, kind: Pod, metadata: {name: y, namespace: a, labels: {app: y}}, status: {podIPs: [{ip: 'fd00::2'}, {ip: 10.0.0.2}]}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: in, namespace: a}, spec: {podSelector: {matchLabels: {app: y}}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/24}}]}]}}
";

#[test]
fn every_address_of_both_ends_is_judged() {
    let manifests = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    fs::write(&manifests, DUAL_STACK).unwrap();
    let manifests = manifests.path().to_str().unwrap();
    let answer = |from: &str, to: &str| -> Value {
        let query = format!("{{\"from\": \"{from}\", \"to\": \"{to}\", \"port\": 80}}\n");
        let outcome = penstock_with(&["evaluate", "--manifests", manifests, "--queries", "-"], &query, &[]);
        assert_eq!(outcome.out.lines().count(), 1, "one line a query: {} {}", outcome.out, outcome.error);
        serde_json::from_str(&outcome.out).unwrap()
    };
    let both = answer("a/x", "a/y");
    assert_eq!((&both["verdict"], &both["ingress"]["verdict"]), (&"partial".into(), &"deny".into()), "{both}");
    let families: Vec<String> = both["families"]
        .as_array()
        .unwrap()
        .iter()
        .map(|family| {
            let text = |field: &str| family[field].as_str().unwrap().to_owned();
            [text("family"), text("from"), text("to"), text("verdict")].join(" ")
        })
        .collect();
    assert_eq!(families, ["IPv4 10.0.0.1 10.0.0.2 allow", "IPv6 fd00::1 fd00::2 deny"]);
    for (from, to, verdict) in [("a/y", "a/x", "allow"), ("10.0.0.1", "a/y", "allow"), ("fd00::1", "a/y", "deny")] {
        let same = answer(from, to);
        assert_eq!((&same["verdict"], same.get("families")), (&verdict.into(), None), "{from} to {to}");
    }
    let explained = output(&["explain", "--manifests", manifests, "--from", "a/x", "--to", "a/y", "--port", "80/TCP"]);
    for line in ["allowed: a/x (10.0.0.1) -> a/y (10.0.0.2), 80/TCP", "denied: a/x (fd00::1) -> a/y (fd00::2), 80/TCP"]
    {
        assert!(explained.lines().any(|explained| explained == line), "{line}: {explained}");
    }
    let once = output(&["explain", "--manifests", manifests, "--from", "a/y", "--to", "a/x", "--port", "80/TCP"]);
    assert_eq!(once.matches(" -> ").count(), 1, "{once}");
    let matrix = output(&["matrix", "--manifests", manifests, "--port", "80/TCP"]);
    assert!(matrix.contains(" in one address family "), "{matrix}");
}

#[test]
fn v1beta1_and_cluster_wide_are_opt_in() {
    let manifests = "
{apiVersion: v1, kind: Namespace, metadata: {name: a, annotations: {net.beta.kubernetes.io/network-policy: '{\"ingress\": {\"isolation\": \"DefaultDeny\"}}'}}}
---
{apiVersion: v1, kind: Pod, metadata: {name: x, namespace: a}, status: {podIP: 10.0.0.1}}
---
{apiVersion: v1, kind: Pod, metadata: {name: y, namespace: b}, status: {podIP: 10.0.0.2}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: out, namespace: b}, spec: {policyTypes: [Egress], egress: [{ports: [{port: 5}]}]}}
";
    let queries = tempfile::NamedTempFile::new().unwrap();
    fs::write(&queries, "{\"from\": \"b/y\", \"to\": \"a/x\", \"port\": 5}").unwrap();
    let path = queries.path().to_str().unwrap();
    for (settings, verdict) in
        [(&[][..], "allow"), (&["--v1beta1"], "deny"), (&["--v1beta1", "--cluster-wide"], "allow")]
    {
        let arguments = [&["evaluate", "--manifests", "-", "--queries", path], settings].concat();
        let outcome = penstock_with(&arguments, manifests, &[]);
        let answer: Value = serde_json::from_str(&outcome.out).unwrap_or_else(|_| panic!("{}", outcome.error));
        assert_eq!(answer["verdict"], verdict, "{settings:?}");
    }
}

#[test]
fn colour_only_on_terminals_that_support_it() {
    let arguments = ["matrix", "--manifests", SHOP];
    let has_colour = |environment: &[(&str, &str)]| penstock_with(&arguments, "", environment).out.contains('\u{1b}');
    assert!(!has_colour(&[]), "a pipe is no terminal");
    assert!(has_colour(&[("FORCE_COLOR", "1")]));
    assert!(!has_colour(&[("NO_COLOR", "1")]));
}

#[test]
fn every_command_has_help_with_examples() {
    for command in ["evaluate", "explain", "matrix", "render", "lint", "completion", "check", "run"] {
        let help = output(&[command, "--help"]);
        assert!(help.contains("Examples:") && help.contains(&format!("penstock {command}")), "{help}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(output(&["completion", shell]).contains("evaluate"), "{shell}");
    }
    assert_eq!(penstock(&["no-such-command"]).code, 2);
}
