//! The replay command as its users meet it: answers, files, exit codes, and one line where the input is bad.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const CLUSTER: &str = r#"
apiVersion: v1
kind: Namespace
metadata: { name: shop }
---
apiVersion: v1
kind: Pod
metadata: { namespace: shop, name: web, labels: { app: web } }
spec: { nodeName: n1, containers: [{ name: main, image: example.invalid/web }] }
status: { phase: Running, podIP: 10.0.0.1, podIPs: [{ ip: 10.0.0.1 }] }
---
apiVersion: v1
kind: Pod
metadata: { namespace: shop, name: db, labels: { app: db } }
spec: { nodeName: n1, containers: [{ name: main, image: example.invalid/db }] }
status: { phase: Running, podIP: 10.0.0.2, podIPs: [{ ip: 10.0.0.2 }] }
"#;

const POLICY: &str = r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: { namespace: shop, name: db }
spec:
  podSelector: { matchLabels: { app: db } }
  ingress:
    - from: [{ podSelector: { matchLabels: { app: web } } }]
      ports: [{ protocol: UDP, port: 53 }]
    - from: [{ podSelector: { matchLabels: { app: cron } } }]
"#;

pub(crate) struct ReplayDirectory {
    directory: tempfile::TempDir,
}

impl ReplayDirectory {
    pub(crate) fn new() -> Self {
        let directory = Self { directory: tempfile::tempdir().unwrap() };
        directory.write("cluster/pods.yaml", CLUSTER.as_bytes());
        directory.write("cluster/policy.yaml", POLICY.as_bytes());
        directory.write("other/pods.yaml", CLUSTER.as_bytes());
        directory.write("other/policy.yaml", POLICY.replace("port: 53", "port: 54").as_bytes());
        directory.write("a.pcap", &pcap(&[(0, 40000, 53), (1, 40000, 53), (2, 40001, 54), (70, 40002, 53)]));
        directory
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), bytes).unwrap();
    }

    /// Runs the command in the directory.
    pub(crate) fn replay(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_penstock"));
        command.arg("replay").args(arguments).current_dir(self.directory.path()).output().unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// A change that makes a bundle bad.
type Damage = Box<dyn Fn(&Path)>;

/// Writes a file of a bundle anew.
fn edited(name: &'static str, edit: impl Fn(Vec<u8>) -> Vec<u8> + 'static) -> Damage {
    Box::new(move |bundle| {
        let file = bundle.join(name);
        fs::write(&file, edit(fs::read(&file).unwrap())).unwrap();
    })
}

fn replaced(name: &'static str, from: &'static str, to: &'static str) -> Damage {
    edited(name, move |content| {
        let text = String::from_utf8(content).unwrap();
        assert!(text.contains(from), "{name} has {from:?}");
        text.replacen(from, to, 1).into_bytes()
    })
}

#[test]
fn a_bad_bundle_is_refused_with_file_value_and_remedy() {
    let removed =
        |name: &'static str| -> Damage { Box::new(move |bundle| fs::remove_file(bundle.join(name)).unwrap()) };
    let cut = |name| edited(name, |content| content[..content.len() - 10].to_vec());
    let without_last_line = |name| {
        edited(name, |mut content| {
            content.pop();
            content.truncate(content.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1));
            content
        })
    };
    let cases: Vec<(Damage, &str, &str)> = vec![
        (removed("bundle.json"), "incident: is not a bundle: it has no bundle.json; give a directory", ""),
        (removed("objects.jsonl"), "objects.jsonl: cannot be read (", "copy the whole directory"),
        (removed("timeline.jsonl"), "timeline.jsonl: cannot be read (", "copy the whole directory"),
        (removed("packets.pcapng"), "packets.pcapng: cannot be read", ""),
        (
            replaced("bundle.json", "\"version\": 3", "\"version\": 4, \"more\": []"),
            "bundle.json: version = 4: this penstock reads version 3; replay it with the penstock that wrote it",
            "",
        ),
        (replaced("bundle.json", "\"node\"", "\"knot\""), "bundle.json: line ", "unknown field `knot`"),
        (cut("bundle.json"), "bundle.json: line ", "the file is damaged"),
        (cut("objects.jsonl"), "objects.jsonl: line 8: ", "the file is damaged"),
        (cut("timeline.jsonl"), "timeline.jsonl: line 1: ", "the file is damaged"),
        (without_last_line("objects.jsonl"), "objects.jsonl: has 7 objects, and bundle.json says 8", "copy the whole"),
        (
            without_last_line("timeline.jsonl"),
            "timeline.jsonl: has 0 changes, and bundle.json says 1",
            "copy the whole",
        ),
        (
            edited("packets.pcapng", |content| content[..content.len() / 2].to_vec()),
            "packets.pcapng: has ",
            "packets, and bundle.json says 7; the file is cut",
        ),
        (
            replaced("timeline.jsonl", "\"epoch\":6", "\"epoch\":4"),
            "timeline.jsonl: line 1: epoch = 4 is before the line before, 5",
            "",
        ),
        (
            replaced("bundle.json", "\"epoch\": 5", "\"epoch\": 6"),
            "packets.pcapng: packet 1: epoch 5 is outside of the bundle's epochs 6 to 6; use packets and objects of one",
            "",
        ),
        (
            replaced("bundle.json", "\"ended\": 1767225608", "\"ended\": 1667225608"),
            "packets.pcapng: packet 1: time 2026-01-01T00:00:02Z is outside of the bundle's time, ",
            "use packets and objects of one capture",
        ),
        (
            edited("packets.pcapng", |_| capture(&[(67_225_602, ([10, 0, 0, 1], 1), ([10, 0, 0, 2], 2))])),
            "packets.pcapng: packet 1: comment \"\" is not what a capture writes; use the bundle's own packets",
            "",
        ),
    ];
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples/incident");
    for (damage, begin, more) in cases {
        let directory = ReplayDirectory::new();
        for name in ["bundle.json", "objects.jsonl", "timeline.jsonl", "packets.pcapng"] {
            directory.write(&format!("incident/{name}"), &fs::read(example.join(name)).unwrap());
        }
        damage(&directory.path("incident"));
        let output = directory.replay(&["incident", "--verdicts", "v.jsonl"]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), error.lines().count()), (Some(2), 1), "{begin}: {error}");
        assert!(error.contains(begin) && error.contains(more), "{begin} … {more}: {error}");
        assert!(!directory.path("v.jsonl").exists(), "{begin}: no output is left");
    }
}

#[test]
fn a_bundle_has_what_replay_is_told_otherwise() {
    let directory = ReplayDirectory::new();
    for options in [&["--node", "n1"][..], &["--pcap", "a.pcap"], &["--manifests", "cluster"]] {
        let output = directory.replay(&[&["incident"], options].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains("cannot be used with"), "{options:?}: {error}");
    }
    let error = String::from_utf8_lossy(&directory.replay(&[]).stderr).into_owned();
    assert!(error.contains("--manifests") && error.contains("--pcap"), "{error}");
}

/// A capture of datagrams from web to db: seconds, source port, destination port.
fn pcap(datagrams: &[(u32, u16, u16)]) -> Vec<u8> {
    let between = |&(seconds, from, to)| (seconds, ([10, 0, 0, 1], from), ([10, 0, 0, 2], to));
    capture(&datagrams.iter().map(between).collect::<Vec<_>>())
}

/// An address and a port.
type End = ([u8; 4], u16);

/// A capture of datagrams: seconds, source, destination.
fn capture(datagrams: &[(u32, End, End)]) -> Vec<u8> {
    let question = |&(seconds, from, to)| (seconds, from, to, b"question".to_vec());
    capture_of(&datagrams.iter().map(question).collect::<Vec<_>>())
}

/// The same, each with its payload.
fn capture_of(datagrams: &[(u32, End, End, Vec<u8>)]) -> Vec<u8> {
    let mut file =
        [&0xa1b2_c3d4u32.to_le_bytes()[..], &[2, 0, 4, 0], &[0; 8], &[0xff, 0xff, 0, 0, 1, 0, 0, 0]].concat();
    for (seconds, from, to, payload) in datagrams {
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2([1; 6], [2; 6])
            .ipv4(from.0, to.0, 64)
            .udp(from.1, to.1)
            .write(&mut frame, payload)
            .unwrap();
        let length = frame.len() as u32;
        for word in [1_700_000_000 + seconds, 250, length, length] {
            file.extend(word.to_le_bytes());
        }
        file.extend(frame);
    }
    file
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn verdicts_captures_and_summary_agree() {
    let directory = ReplayDirectory::new();
    let output = directory.replay(&[
        "--manifests",
        "cluster",
        "--pcap",
        "a.pcap",
        "--node",
        "n1",
        "--verdicts",
        "v.jsonl",
        "--allowed",
        "yes.pcapng",
        "--denied",
        "no.pcapng",
        "--summary",
        "json",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let verdicts = fs::read_to_string(directory.path("v.jsonl")).unwrap();
    assert_eq!(
        verdicts.lines().next().unwrap(),
        r#"{"n":1,"time":"2023-11-14T22:13:20.000250000Z","src":"shop/web","dst":"shop/db","protocol":"UDP","sport":40000,"dport":53,"verdict":"allow","reason":null,"rule":"shop-ingress-db-0","conn":"new"}"#
    );
    let story: Vec<_> = verdicts
        .lines()
        .map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            format!("{} {} {}", value["verdict"], value["reason"], value["conn"])
        })
        .collect();
    assert_eq!(
        story,
        [
            r#""allow" null "new""#,
            r#""allow" null "established""#,
            r#""deny" "ingress_denied" null"#,
            r#""allow" null "new""#
        ]
    );
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["packets"], 4);
    assert_eq!(summary["verdicts"], serde_json::json!({ "allow": 3, "deny": 1, "kernel": 0 }));
    assert_eq!(summary["connections"]["opened"], 2);
    assert_eq!(summary["rules"], serde_json::json!([{ "rule": "shop-ingress-db-0", "connections": 2 }]));
    assert_eq!(summary["never_hit"], serde_json::json!(["shop-ingress-db-1"]));
    // Packets that passed pass when they are replayed; and the comment names the rule.
    let allowed = directory.replay(&["--manifests", "cluster", "--pcap", "yes.pcapng", "--summary", "json"]);
    let summary: serde_json::Value = serde_json::from_slice(&allowed.stdout).unwrap();
    assert_eq!(summary["verdicts"], serde_json::json!({ "allow": 3, "deny": 0, "kernel": 0 }));
    let bytes = fs::read(directory.path("yes.pcapng")).unwrap();
    assert_eq!(bytes.windows(17).filter(|window| window == b"shop-ingress-db-0").count(), 3);
    let bytes = fs::read(directory.path("no.pcapng")).unwrap();
    assert_eq!(bytes.windows(14).filter(|window| window == b"ingress_denied").count(), 1);
}

#[test]
fn verdicts_on_standard_output_replace_the_summary() {
    let directory = ReplayDirectory::new();
    let output = directory.replay(&["--manifests", "cluster", "--pcap", "a.pcap", "--verdicts", "-"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout).lines().filter(|line| line.starts_with("{\"n\":")).count(), 4);
    assert!(text(&output.stderr).contains("rules never hit"), "{}", text(&output.stderr));
}

#[test]
fn a_comparison_exits_with_3_if_a_verdict_changes_else_0() {
    let directory = ReplayDirectory::new();
    let same = directory.replay(&["--manifests", "cluster", "--compare", "cluster", "--pcap", "a.pcap"]);
    assert_eq!(same.status.code(), Some(0));
    assert!(text(&same.stdout).contains("no connection's verdict changes"));
    let differs =
        directory.replay(&["--manifests", "cluster", "--compare", "other", "--pcap", "a.pcap", "--summary", "json"]);
    assert_eq!((differs.status.code(), text(&differs.stderr)), (Some(3), ""));
    let summary: serde_json::Value = serde_json::from_slice(&differs.stdout).unwrap();
    let changes = summary["changes"].as_array().unwrap();
    let row = |change: &serde_json::Value| {
        let fate = |side: &str| change[side]["verdict"].as_str().unwrap().to_owned();
        let counts = (change["connections"].as_u64().unwrap(), change["packets"].as_u64().unwrap());
        (change["dport"].as_u64().unwrap(), fate("before"), fate("after"), counts, change["bytes"].as_u64().unwrap())
    };
    let rows: Vec<_> = changes.iter().map(row).collect();
    let (allow, deny) = ("allow".to_owned(), "deny".to_owned());
    assert_eq!(rows, [(53, allow.clone(), deny.clone(), (2, 3), 3 * 50), (54, deny, allow, (1, 1), 50)]);
    let table = directory.replay(&["--manifests", "cluster", "--compare", "other", "--pcap", "a.pcap"]);
    assert!(
        text(&table.stdout).contains("shop/web  shop/db      UDP/53  allow shop-ingress-db-0  deny ingress_denied")
    );
}

#[test]
fn a_cluster_policys_deny_rule_is_named_and_compared() {
    let directory = ReplayDirectory::new();
    let guard = POLICY.to_owned()
        + "---\n{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: guard}, spec: \
           {tier: Admin, priority: 1, subject: {namespaces: {}}, egress: [{action: Pass, to: [{namespaces: {}}], \
           protocols: [{udp: {destinationPort: {number: 54}}}]}, {action: Deny, to: [{namespaces: {}}]}]}}\n";
    directory.write("tiers/pods.yaml", CLUSTER.as_bytes());
    directory.write("tiers/policy.yaml", guard.as_bytes());
    let arguments = ["--manifests", "cluster", "--compare", "tiers", "--pcap", "a.pcap"];
    let table = directory.replay(&arguments);
    assert_eq!((table.status.code(), text(&table.stderr)), (Some(3), ""));
    let row = "shop/web  shop/db      UDP/53  allow shop-ingress-db-0  deny egress_denied Admin-egress-guard-1";
    assert!(text(&table.stdout).contains(row), "{}", text(&table.stdout));
    let alone = directory.replay(&["--manifests", "tiers", "--pcap", "a.pcap", "--verdicts", "-"]);
    let rules: Vec<_> = text(&alone.stdout)
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["rule"].clone())
        .collect();
    let deny = || serde_json::Value::from("Admin-egress-guard-1");
    assert_eq!(
        rules,
        [deny(), deny(), serde_json::Value::Null, deny()],
        "the third is passed, and NetworkPolicy isolates"
    );
    let summary = directory.replay(&["--manifests", "tiers", "--pcap", "a.pcap", "--summary", "json"]);
    let summary: serde_json::Value = serde_json::from_slice(&summary.stdout).unwrap();
    let hits = serde_json::json!([
        { "rule": "Admin-egress-guard-1", "connections": 3 },
        { "rule": "Admin-egress-guard-0", "connections": 1 },
    ]);
    assert_eq!(summary["rules"], hits, "{summary}");
}

const SERVICE: &str = r#"
apiVersion: v1
kind: Service
metadata: { namespace: shop, name: names }
spec:
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10]
  selector: { app: db }
  ports: [{ name: dns, protocol: UDP, port: 5353, targetPort: 53 }]
"#;

/// web asks the Service twice, each time answered by it, from the ports 40000 and 40001.
fn asks_a_service() -> Vec<u8> {
    let (service, web) = (([10, 96, 0, 10], 5353), [10, 0, 0, 1]);
    capture(&[
        (0, (web, 40000), service),
        (1, service, (web, 40000)),
        (10, (web, 40001), service),
        (11, service, (web, 40001)),
    ])
}

/// Some fields of each verdict.
fn fields(output: &Output, names: &[&str]) -> Vec<String> {
    let line = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        let field = |name: &&str| {
            value.get(*name).map_or("absent".to_owned(), |it| it.as_str().map_or(it.to_string(), str::to_owned))
        };
        names.iter().map(field).collect::<Vec<_>>().join(" ")
    };
    text(&output.stdout).lines().map(line).collect()
}

/// The node's kernel translates it: egress policy is for what answers.
#[test]
fn packets_to_a_service_are_evaluated_behind_the_kernel() {
    let directory = ReplayDirectory::new();
    directory.write("cluster/service.yaml", SERVICE.as_bytes());
    directory.write("a.pcap", &asks_a_service());
    let arguments = ["--manifests", "cluster", "--pcap", "a.pcap", "--verdicts", "-"];
    let output = directory.replay(&arguments);
    let expected = "shop/web 10.96.0.10 allow new null";
    assert_eq!(fields(&output, &["src", "dst", "verdict", "conn", "rule"])[0], expected, "{}", text(&output.stderr));

    let wrong = directory.replay(&[&arguments[..], &["--service-cidrs", "10.96.0.0/99"]].concat());
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("10.96.0.0/99"), "{}", text(&wrong.stderr));
}

#[test]
fn a_timeline_applies_to_later_packets() {
    let directory = ReplayDirectory::new();
    directory.write("closed.yaml", POLICY.split("  ingress:").next().unwrap().as_bytes());
    directory.write(
        "timeline.toml",
        b"[[step]]\nat = \"+500ms\"\napply = [\"closed.yaml\"]\n[[step]]\nat = \"2023-11-14T22:14:00Z\"\ndelete = [\"NetworkPolicy shop/db\"]\n",
    );
    let output = directory.replay(&[
        "--manifests",
        "cluster",
        "--pcap",
        "a.pcap",
        "--timeline",
        "timeline.toml",
        "--verdicts",
        "-",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let reasons: Vec<_> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["reason"].clone())
        .collect();
    assert_eq!(
        reasons,
        ["null", "\"connection_revoked\"", "\"ingress_denied\"", "null"]
            .map(|text| { serde_json::from_str::<serde_json::Value>(text).unwrap() })
    );
}

#[test]
fn bad_replay_input_is_one_line_and_leaves_no_file() {
    let directory = ReplayDirectory::new();
    directory.write("text.pcap", b"no capture at all, but a text");
    let mut bluetooth = pcap(&[]);
    bluetooth[20] = 187;
    directory.write("bluetooth.pcap", &bluetooth);
    let mut damaged = pcap(&[(0, 1, 53), (1, 1, 53)]);
    damaged[24 + 16 + 50 + 8..24 + 16 + 50 + 12].fill(0xff);
    directory.write("damaged.pcap", &damaged);
    directory.write("bad/policy.yaml", POLICY.replace("ports:", "prots:").as_bytes());
    directory.write(
        "order.toml",
        b"[[step]]\nat = \"+2s\"\ndelete = [\"Pod shop/web\"]\n[[step]]\nat = \"+1s\"\ndelete = [\"Pod shop/db\"]\n",
    );
    directory.write("nothing.toml", b"[[step]]\nat = \"+2s\"\ndelete = [\"Pod shop/nobody\"]\n");
    directory.write("form.toml", b"[[step]]\nwhen = \"+2s\"\n");
    let before = directory.names();
    for (says, arguments) in [
        ("absent.pcap: cannot be read", &["--manifests", "cluster", "--pcap", "absent.pcap"][..]),
        ("text.pcap: is not a capture", &["--manifests", "cluster", "--pcap", "text.pcap"]),
        ("link type 187", &["--manifests", "cluster", "--pcap", "bluetooth.pcap"]),
        ("byte 90 claims 4294967295", &["--manifests", "cluster", "--pcap", "damaged.pcap"]),
        ("prots", &["--manifests", "bad", "--pcap", "a.pcap"]),
        ("absent: cannot be read", &["--manifests", "absent", "--pcap", "a.pcap"]),
        ("--node n9", &["--manifests", "cluster", "--pcap", "a.pcap", "--node", "n9"]),
        ("--ports eth0", &["--manifests", "cluster", "--pcap", "a.pcap", "--ports", "eth0"]),
        ("has no pod of this name", &["--manifests", "cluster", "--pcap", "a.pcap", "--ports", "eth0=shop/nobody"]),
        ("step 2", &["--manifests", "cluster", "--pcap", "a.pcap", "--timeline", "order.toml"]),
        (
            "Pod shop/nobody does not exist",
            &["--manifests", "cluster", "--pcap", "a.pcap", "--timeline", "nothing.toml"],
        ),
        (
            "form.toml: is not a timeline: line 2",
            &["--manifests", "cluster", "--pcap", "a.pcap", "--timeline", "form.toml"],
        ),
        (
            "absent/v.jsonl: cannot be written",
            &["--manifests", "cluster", "--pcap", "a.pcap", "--verdicts", "absent/v.jsonl"],
        ),
    ] {
        let outputs: &[&str] =
            if says.contains("written") { &[] } else { &["--verdicts", "v.jsonl", "--denied", "no.pcapng"] };
        let output = directory.replay(&[arguments, outputs].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.contains(says) && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
        assert_eq!(directory.names(), before, "{arguments:?} left a file");
    }
}

#[test]
fn domain_names_match_by_the_captures_answers_until_expiry() {
    let directory = ReplayDirectory::new();
    let names = "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: names}\n\
         spec:\n  tier: Admin\n  priority: 1\n  subject: {pods: {podSelector: {matchLabels: {app: web}}}}\n  egress:\n\
         \x20 - {action: Accept, to: [{networks: [192.0.2.53/32]}], protocols: [{udp: {destinationPort: {number: 53}}}]}\n\
         \x20 - {action: Accept, to: [{domainNames: ['*.example.org']}]}\n\
         \x20 - {action: Deny, to: [{networks: [0.0.0.0/0]}]}\n";
    directory.write("cluster/names.yaml", names.as_bytes());
    let (web, resolver, site) = (|port| ([10, 0, 0, 1], port), ([192, 0, 2, 53], 53), ([203, 0, 113, 7], 4433));
    // www.example.org is 203.0.113.7 for five seconds.
    let answer = b"\0\x07\x81\x80\0\x01\0\x01\0\0\0\0\x03www\x07example\x03org\0\0\x01\0\x01\
        \xc0\x0c\0\x01\0\x01\0\0\0\x05\0\x04\xcb\0\x71\x07";
    let question = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x03www\x07example\x03org\0\0\x01\0\x01";
    let sends = |seconds, port| (seconds, web(port), site, b"hello".to_vec());
    let packets = [
        sends(0, 1),
        (1, resolver, web(4001), answer.to_vec()),
        sends(1, 2),
        (2, web(4000), resolver, question.to_vec()),
        (2, resolver, web(4000), answer.to_vec()),
        sends(3, 3),
        sends(6, 4),
        sends(8, 3),
        sends(8, 5),
    ];
    directory.write("names.pcap", &capture_of(&packets));
    let output = directory.replay(&["--manifests", "cluster", "--pcap", "names.pcap", "--verdicts", "v.jsonl"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let verdicts = fs::read_to_string(directory.path("v.jsonl")).unwrap();
    let value = |line| -> serde_json::Value { serde_json::from_str(line).unwrap() };
    let to_site = verdicts.lines().map(value).filter(|line| line["dport"] == 4433);
    let told: Vec<_> = to_site.map(|line| format!("{} {} {}", line["sport"], line["verdict"], line["rule"])).collect();
    let (by_name, denied) = ("\"allow\" \"Admin-egress-names-1\"", "\"deny\" \"Admin-egress-names-2\"");
    // An answer that nobody had asked for taught nothing; at the end, one connection lives on.
    let expected = [(1, denied), (2, denied), (3, by_name), (4, by_name), (3, by_name), (5, denied)];
    assert_eq!(told, expected.map(|(port, verdict)| format!("{port} {verdict}")), "{verdicts}");
}

#[test]
fn a_truncated_capture_is_replayed_to_its_end_and_is_bad_input() {
    let directory = ReplayDirectory::new();
    let whole = pcap(&[(0, 1, 53), (1, 1, 53)]);
    directory.write("cut.pcap", &whole[..whole.len() - 5]);
    let output = directory.replay(&["--manifests", "cluster", "--pcap", "cut.pcap", "--summary", "json"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("cut.pcap: is cut off at byte 90: replayed up to there"));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["packets"], 1);
}

/// Also between two packets, where a plain file shows nothing.
#[test]
fn a_gzip_stream_without_its_end_is_bad_input() {
    let directory = ReplayDirectory::new();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, &pcap(&[(0, 1, 53), (1, 1, 53)])).unwrap();
    let whole = encoder.finish().unwrap();
    for (end, packets) in [(whole.len(), 2), (whole.len() - 8, 2), (whole.len() - 1, 2)] {
        directory.write("cut.pcap.gz", &whole[..end]);
        let output = directory.replay(&["--manifests", "cluster", "--pcap", "cut.pcap.gz", "--summary", "json"]);
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["packets"], packets);
        assert_eq!(output.status.code(), Some(if end == whole.len() { 0 } else { 2 }), "{}", text(&output.stderr));
        assert_eq!(text(&output.stderr).contains("cut.pcap.gz: is cut off at byte "), end < whole.len());
    }
}

#[test]
fn packets_that_are_not_evaluated_are_reported_and_are_bad_input() {
    let directory = ReplayDirectory::new();
    let frame = |outer: &[u8]| {
        let captured = pcap(&[(0, 1, 53)]);
        let ip = &captured[24 + 16 + 14..];
        [&[2; 12][..], outer, ip].concat()
    };
    let block = |kind: u32, body: &[u8]| {
        let length = 12 + body.len() as u32;
        [&kind.to_le_bytes()[..], &length.to_le_bytes(), body, &length.to_le_bytes()].concat()
    };
    let section = block(0x0a0d_0d0a, &[&0x1a2b_3c4du32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat());
    let interface = block(1, &[1, 0, 0, 0, 0, 0, 0, 0]);
    let packet = |kind: u32, frame: &[u8]| {
        let length = (frame.len() as u32).to_le_bytes();
        let padded = [frame, &[0; 3][..frame.len().next_multiple_of(4) - frame.len()]].concat();
        block(kind, &[&[0; 12][..], &length, &length, &padded].concat())
    };
    let plain = frame(&[0x08, 0x00]);
    for (name, packets, expected) in [
        ("enhanced", packet(6, &plain), None),
        ("obsolete", [packet(6, &plain), packet(2, &plain)].concat(), Some("1 packets are in obsolete packet blocks")),
        (
            "mpls",
            packet(6, &frame(&[0x88, 0x47, 0, 0, 1, 64])),
            Some("1 packets from outside are behind a VLAN tag, MPLS or PPPoE"),
        ),
        (
            "pppoe",
            packet(6, &frame(&[0x88, 0x64, 0x11, 0, 0, 1, 0, 50, 0, 0x21])),
            Some("1 packets from outside are behind"),
        ),
    ] {
        directory.write("a.pcapng", &[&section[..], &interface, &packets].concat());
        let output = directory.replay(&["--manifests", "cluster", "--pcap", "a.pcapng"]);
        assert_eq!(
            output.status.code(),
            Some(if expected.is_some() { 2 } else { 0 }),
            "{name}: {}",
            text(&output.stderr)
        );
        assert!(text(&output.stderr).contains(expected.unwrap_or_default()), "{name}: {}", text(&output.stderr));
    }
}

#[test]
fn a_tagged_frame_of_a_pod_is_dropped_as_by_the_daemon() {
    let directory = ReplayDirectory::new();
    const POD: [u8; 4] = [10, 0, 0, 1];
    for (tags, source, expected) in [
        (&[0x81, 0x00, 0x00, 0x07][..], POD, "deny vlan_tag"),
        (&[0x81, 0x00, 0x00, 0x00], POD, "deny vlan_tag"),
        (&[0x88, 0xa8, 0x00, 0x07, 0x81, 0x00, 0x00, 0x09], POD, "deny vlan_tag"),
        (&[0x81, 0x00, 0x00, 0x07], [192, 0, 2, 9], "kernel not_ip"),
    ] {
        let mut file = pcap(&[(0, 1, 53)]);
        let at = 24 + 16;
        file[at + 14 + 12..at + 14 + 16].copy_from_slice(&source);
        file.splice(at + 12..at + 12, tags.iter().copied());
        for length in [at - 8, at - 4] {
            file[length] += tags.len() as u8;
        }
        directory.write("tagged.pcap", &file);
        let output = directory.replay(&["--manifests", "cluster", "--pcap", "tagged.pcap"]);
        assert!(text(&output.stdout).contains(expected), "{tags:?}: {}", text(&output.stdout));
    }
}

#[test]
fn a_verdict_file_is_replaced_only_when_complete() {
    let directory = ReplayDirectory::new();
    directory.write("v.jsonl", b"before");
    let absent = directory.replay(&["--manifests", "cluster", "--pcap", "absent.pcap", "--verdicts", "v.jsonl"]);
    assert_eq!(absent.status.code(), Some(2));
    assert_eq!(fs::read(directory.path("v.jsonl")).unwrap(), b"before");
    assert!(
        directory.replay(&["--manifests", "cluster", "--pcap", "a.pcap", "--verdicts", "v.jsonl"]).status.success()
    );
    assert!(fs::read(directory.path("v.jsonl")).unwrap().starts_with(b"{\"n\":1,"));
    assert!(Path::new(&directory.path("v.jsonl")).metadata().unwrap().len() > 100);
}
