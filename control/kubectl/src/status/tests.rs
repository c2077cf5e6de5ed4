use penstock_admin::types::{NotEnforced, PodStatus, SourceStatus};
use penstock_text::number::json;

use super::*;
use crate::ask::problem;
use crate::cluster::Problem;
use crate::fake::{ASKING, FakeCluster, Reply, missing};

/// As a daemon of the first version sends it: without what was added since.
pub(crate) const STATUS: &str = r#"{
    "version": "0.1.0", "node": "n", "process": 7, "uptime_seconds": 90.5, "policies": 2, "published": 4, "in_force": true,
    "workers": [], "pods": [], "drops": {"ingress_denied": 3}, "ports": [],
    "frames": {"total": 0, "free": 0, "fill": 0, "in_flight": 0},
    "connections": {"entries": 5, "capacity": 9, "events": {}}}"#;

pub(crate) fn status(change: impl FnOnce(&mut Status)) -> Status {
    let mut status = serde_json::from_str(STATUS).unwrap();
    change(&mut status);
    status
}

pub(crate) fn pod(name: &str, enforced: bool) -> PodStatus {
    PodStatus {
        pod: name.to_owned(),
        addresses: Vec::new(),
        interface: Some("veth".to_owned()),
        port: Some(1),
        changed: Some(1),
        published: Some(4),
        enforced,
        building: false,
        waiting: None,
        filtered: None,
        limits: Vec::new(),
        connections: 0,
    }
}

fn reply(status: &Status) -> Vec<Reply> {
    vec![Reply::ok(json(status))]
}

#[tokio::test]
async fn every_node_has_a_line_and_one_that_does_not_answer_is_named() {
    let newer = STATUS.replacen('{', r#"{"later": {"unknown": 1}, "#, 1).replace("0.1.0", "9.0.0");
    let unready = status(|it| {
        it.pods = vec![pod("shop/a", true), pod("shop/b", false)];
        it.in_force = false;
        it.source.insert("pods".to_owned(), SourceStatus::default());
        let reason = "no interface is known for it".to_owned();
        it.not_enforced = vec![NotEnforced { pod: Some("shop/c".to_owned()), reason }];
    });
    let mut cluster = FakeCluster::new([
        ("a", reply(&unready)),
        ("b", vec![Reply::ok(newer)]),
        ("c", vec![Reply::ok("not JSON")]),
        ("d", vec![Reply::Hangs]),
        ("e", vec![Reply::error(2, "penstock: /run/penstock/admin.sock: no daemon listens there (No such file)\n")]),
        ("f", vec![Reply::Fails(Problem::Forbidden("needs create and get on pods/exec in kube-system".to_owned()))]),
        ("g", vec![Reply::error(1, "")]),
        (
            "h",
            vec![Reply::error(2, "error: unexpected argument '--json' found\n\nFor more information, try '--help'.\n")],
        ),
    ]);
    cluster.missing = vec![missing("aa", &Problem::NotRunning("pod penstock-x does not run (Pending)".to_owned()))];
    let answers = ask(&cluster, ASKING, cluster.daemons().await.unwrap()).await;
    let text = text(&answers);
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()).collect();
    assert_eq!(
        lines[1],
        ["a", "0.1.0", "90 s", "2", "4", "not yet", "2", "1", "5", "3", "does not follow pods; 1 pods not enforced"]
    );
    assert_eq!(lines[2], ["aa", "not running"]);
    assert_eq!(lines[3], ["b", "9.0.0", "90 s", "2", "4", "yes", "0", "0", "5", "3", "ok"]);
    let names = ["invalid answer", "timed out", "no daemon", "forbidden", "failed", "old version"];
    for (line, (node, name)) in lines[4..].iter().zip(["c", "d", "e", "f", "g", "h"].into_iter().zip(names)) {
        assert_eq!(line[..], [node, name]);
    }
    assert!(text.ends_with("\nenforced on 1 of 9 nodes, 2 pods\n"), "{text}");
    let Err(Failure::Partial(lines)) = answers.completeness() else { panic!("{answers:?}") };
    for start in [
        "node aa: pod penstock-x does not run",
        "node d: no answer within 2 s; allow more",
        "node e: /run/penstock/admin.sock: no daemon listens there (No such file); see the log of its pod",
        "node g: penstock ended with exit code 1",
    ] {
        assert!(lines.iter().any(|line| line.starts_with(start)), "{start}: {lines:?}");
    }
    let value: serde_json::Value = serde_json::from_str(&as_json(&answers)).unwrap();
    assert_eq!(value["enforced"], false);
    assert_eq!(
        (value["nodes"][1]["node"].as_str(), value["nodes"][1]["status"]["version"].as_str()),
        (Some("b"), Some("9.0.0"))
    );
    let problems: Vec<&str> =
        value["missing"].as_array().unwrap().iter().map(|it| it["problem"].as_str().unwrap()).collect();
    assert_eq!(
        problems,
        ["not_running", "invalid_answer", "timed_out", "no_daemon", "forbidden", "failed", "old_version"]
    );
}

#[tokio::test]
async fn what_all_nodes_refuse_is_said_once_and_is_bad_input() {
    let refused = || vec![Reply::error(2, "penstock: --state X: no such state; use ESTABLISHED\n")];
    let cluster = FakeCluster::new([("a", refused()), ("b", refused())]);
    let answers = ask(&cluster, ASKING, cluster.daemons().await.unwrap()).await;
    let Err(Failure::BadInput(lines)) = answers.completeness() else { panic!("{answers:?}") };
    assert_eq!(lines, ["nodes a, b: --state X: no such state; use ESTABLISHED"]);
    let cluster = FakeCluster::new([("a", refused()), ("b", vec![Reply::Hangs])]);
    let answers = ask(&cluster, ASKING, cluster.daemons().await.unwrap()).await;
    assert!(matches!(answers.some(), Err(Failure::Failed(_))), "one of them may answer later");
}

#[tokio::test]
async fn only_so_many_nodes_are_asked_at_a_time() {
    let nodes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"];
    let cluster = FakeCluster::new(nodes.map(|node| (node, vec![Reply::ok(STATUS)])));
    let answers = ask(&cluster, ASKING, cluster.daemons().await.unwrap()).await;
    assert_eq!(answers.answers.len(), nodes.len());
    let most = cluster.most.load(std::sync::atomic::Ordering::SeqCst);
    assert!((2..=ASKING.parallel).contains(&most), "{most}");
}

#[test]
fn an_exit_code_and_its_message_say_what_is_wrong() {
    let clap = |first: &str| format!("error: {first}\n\nFor more information, try '--help'.\n");
    for (code, stderr, name) in [
        (2, "penstock: x: no daemon listens there (gone); start one\n".to_owned(), "no_daemon"),
        (2, clap("unexpected argument '--x' found"), "old_version"),
        (2, clap("unrecognized subcommand 'x'"), "old_version"),
        (2, clap("invalid value 'x' for '--verdict <VERDICT>'"), "refused"),
        (2, "penstock: pod shop/web: unknown\n".to_owned(), "refused"),
        (1, "penstock: x: no answer within 30 s\n".to_owned(), "failed"),
        (137, String::new(), "failed"),
    ] {
        assert_eq!(problem(code, &stderr).name(), name, "{stderr}");
    }
}
