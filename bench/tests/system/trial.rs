//! Staged policies on live traffic: they cut nothing, `penstock trial` says what they would cut, and promotion cuts that.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use penstock_admin::types::{StagedChange, TrialStatus};
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{CapturedFrame, PacketCapture, penstock_binary};

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(1);
/// The policy that is to be in effect for `pod-1` allows port 9090 alone.
const ONLY_9090: &str = "  ingress: [{ports: [{port: 9090}]}]\n";

/// A policy of `pod-1` with an annotation.
fn staged(annotation: &str, spec: &str) -> String {
    policy("guard", "pod-1", spec).replace("name: guard", &format!("name: guard, annotations: {{{annotation}}}"))
}

fn trial(fixture: &Fixture, arguments: &[&str]) -> Output {
    let mut command = Command::new(penstock_binary().unwrap());
    command.arg("trial").args(arguments).arg("--socket").arg(fixture.admin());
    command.output().unwrap()
}

/// The status, and the exit code.
fn status(fixture: &Fixture) -> (TrialStatus, Option<i32>) {
    let output = trial(fixture, &["status", "--json"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let status = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text} {output:?}"));
    (status, output.status.code())
}

/// Asks until the status is as wanted.
fn wait(fixture: &Fixture, wanted: impl Fn(&TrialStatus) -> bool) -> (TrialStatus, Option<i32>) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let (status, code) = self::status(fixture);
        if wanted(&status) {
            return (status, code);
        }
        let log = fixture.daemon.log().lines().join("\n");
        assert!(Instant::now() < deadline, "the status stays {status:#?}\n{log}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn change<'a>(status: &'a TrialStatus, from: &str, to: &str, port: u16) -> Option<&'a StagedChange> {
    status.changes.iter().find(|change| (change.from.as_str(), change.to.as_str(), change.port) == (from, to, port))
}

#[test]
fn a_promoted_policy_cuts_exactly_what_the_trial_named() {
    let fixture = Fixture::of(&pods(3), |_, _| {});
    let (client, other) = (fixture.site("test/pod-0"), fixture.site("test/pod-2"));
    let target = fixture.target("test/pod-1", false);
    let open = |port| EchoConnection::open(&client.namespace, target, port, SILENCE).unwrap();
    let (cut, kept) = (open(8080), open(9090));
    [&cut, &kept].iter().for_each(|flow| flow.wait_for(100, LIMIT).unwrap());
    let ended = probe::run_one(client, target, Protocol::Tcp(8080), RetryPolicy::default()).unwrap();
    assert_eq!(ended, ProbeOutcome::Reached, "a connection that ends before anything is staged");
    let (nothing, code) = status(&fixture);
    assert_eq!((nothing, code), (TrialStatus::default(), Some(0)), "nothing is staged");
    let epoch = fixture.status().published;

    let annotation = "policy.penstock.dev/staged: \"true\"";
    fixture.save("all.yaml", &(pods(3) + &staged(annotation, ONLY_9090)));
    let (found, code) = wait(&fixture, |status| status.changes.iter().any(|change| change.live > 0));
    assert_eq!(code, Some(3));
    assert_eq!(found.staged, ["NetworkPolicy test/guard"]);
    let live = change(&found, "test/pod-0", "test/pod-1", 8080).unwrap_or_else(|| panic!("{found:#?}"));
    assert_eq!((live.live, live.opened, live.present.allowed, live.promoted.allowed), (1, 0, true, false), "{live:?}");
    assert_eq!(live.isolating, ["test/guard"]);
    assert_eq!(change(&found, "test/pod-0", "test/pod-1", 9090), None, "it would stay");

    // A connection that opens is judged by the workers, and passes.
    let udp = probe::run_one(other, target, Protocol::Udp(53), RetryPolicy::default()).unwrap();
    assert_eq!(udp, ProbeOutcome::Reached);
    let is_opened =
        |status: &TrialStatus| change(status, "test/pod-2", "test/pod-1", 53).is_some_and(|it| it.opened > 0);
    let (found, code) = wait(&fixture, is_opened);
    let opened = change(&found, "test/pod-2", "test/pod-1", 53).unwrap();
    assert!(code == Some(3) && opened.packets >= 1 && opened.bytes > 40 && opened.protocol == "UDP", "{opened:?}");
    [&cut, &kept].iter().for_each(|flow| flow.wait_for(100, LIMIT).unwrap());
    assert_eq!(fixture.status().published, epoch, "a staged change publishes no epoch");
    let text = String::from_utf8(trial(&fixture, &["status"]).stdout).unwrap();
    assert!(text.contains("allowed (no policy applies)") && text.contains("no rule allows it"), "{text}");
    let logged = fixture.daemon.log().lines().join("\n");
    assert!(logged.contains("staged: test/pod-0 to test/pod-1 port 8080/TCP"), "{logged}");

    fixture.enforce(&(pods(3) + &staged("example.org/note: none", ONLY_9090)));
    assert!(cut.wait_until_blocked(LIMIT).is_some(), "what was named is cut");
    kept.wait_for(100, LIMIT).unwrap();
    let (after, code) = status(&fixture);
    assert_eq!((after, code), (TrialStatus::default(), Some(0)), "nothing is staged any more");
}

#[test]
fn a_capture_says_what_a_staged_policy_would_decide() {
    let mut offered = None;
    let fixture = Fixture::of(&pods(2), |_, config| {
        let path = config.manifests.with_file_name("capture.sock");
        config.sections += &format!("[capture]\nsocket = \"{}\"\n", path.display());
        offered = Some(path);
    });
    let socket = offered.unwrap();
    let (from, target) = (fixture.site("test/pod-0"), fixture.target("test/pod-1", false));
    let ask = |port| probe::run_one(from, target, Protocol::Tcp(port), RetryPolicy::default()).unwrap();
    let capture = |name: &str| {
        let file = fixture.scratch.path().join(name);
        let capture = PacketCapture::start(&socket, &file, &["--pod", "test/pod-1", "--protocol", "TCP"]).unwrap();
        assert_eq!([8080, 9090].map(ask), [ProbeOutcome::Reached; 2], "a staged policy cuts nothing");
        let deadline = Instant::now() + LIMIT;
        while opening(&capture.packets().unwrap(), 9090).next().is_none() {
            assert!(Instant::now() < deadline, "the second connection is not in the capture");
            std::thread::sleep(Duration::from_millis(5));
        }
        capture.end().unwrap().0
    };
    let before = capture("before.pcapng");
    assert!(before.iter().all(|packet| !packet.comment.contains("staged")), "nothing is staged: {before:?}");

    let annotation = "policy.penstock.dev/staged: \"true\"";
    fixture.save("all.yaml", &(pods(2) + &staged(annotation, ONLY_9090)));
    wait(&fixture, |status| status.since.is_some());
    let packets = capture("staged.pcapng");
    for (port, expected) in [
        (8080, " staged=deny staged_egress=open staged_ingress=denied "),
        (9090, " staged=allow staged_egress=open staged_ingress=test-ingress-guard-0 "),
    ] {
        assert!(opening(&packets, port).next().is_some(), "port {port}: {packets:?}");
        for packet in opening(&packets, port) {
            let comment = &packet.comment;
            assert!(comment.starts_with("verdict=allow ") && comment.contains(expected), "port {port}: {comment}");
        }
    }
    let mut others = packets.iter().filter(|packet| !packet.comment.ends_with(" opens"));
    assert!(others.all(|packet| !packet.comment.contains("staged")), "only what opens a connection: {packets:?}");
}

/// The packets that open a connection to this port.
fn opening(packets: &[CapturedFrame], port: u16) -> impl Iterator<Item = &CapturedFrame> {
    // Behind the headers of Ethernet and IPv4, and the source port.
    let is_to = move |packet: &&CapturedFrame| packet.bytes[36..38] == port.to_be_bytes();
    packets.iter().filter(|packet| packet.comment.ends_with(" opens")).filter(is_to)
}

#[test]
fn a_connection_that_a_staged_edit_allows_stays_denied() {
    let in_force = policy("closed", "pod-1", ONLY_9090);
    let fixture = Fixture::of(&(pods(2) + &in_force), |_, _| {});
    let edit = staged("policy.penstock.dev/staged-for: closed", "  ingress: [{ports: [{port: 8080}]}]\n");
    fixture.save("all.yaml", &(pods(2) + &in_force + &edit));
    wait(&fixture, |status| status.since.is_some());
    let (from, target) = (fixture.site("test/pod-0"), fixture.target("test/pod-1", false));
    let ask = |port| probe::run_one(from, target, Protocol::Tcp(port), RetryPolicy::default()).unwrap();
    assert_eq!([ask(8080), ask(9090)], [ProbeOutcome::Silent, ProbeOutcome::Reached]);
    let (found, code) = wait(&fixture, |status| status.changes.len() == 2);
    let verdicts = |port| {
        let change = change(&found, "test/pod-0", "test/pod-1", port).unwrap_or_else(|| panic!("{found:#?}"));
        (change.present.allowed, change.promoted.allowed)
    };
    assert_eq!((verdicts(8080), verdicts(9090), code), ((false, true), (true, false), Some(3)));
    assert_eq!(found.staged, ["NetworkPolicy test/guard for closed"]);
    let denied = change(&found, "test/pod-0", "test/pod-1", 8080).unwrap();
    assert!(denied.opened >= 1 && denied.packets >= denied.opened, "{denied:?}");
}

#[test]
fn a_trial_from_files_needs_the_setting_and_changes_no_verdict() {
    let fixture = Fixture::of(&pods(2), |_, _| {});
    let file = fixture.scratch.path().join("guard.yaml");
    std::fs::write(&file, policy("guard", "pod-1", ONLY_9090).trim_start_matches("---\n")).unwrap();
    let start = ["start", "--manifests", file.to_str().unwrap()];
    let refused = trial(&fixture, &start);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2));
    assert!(error.contains("admin.trials = false") && error.contains("SIGHUP"), "{error}");

    let fixture = Fixture::of(&pods(2), |_, config| {
        config.environment.push(("PENSTOCK_ADMIN__TRIALS".to_owned(), "true".to_owned()));
    });
    let target = fixture.target("test/pod-1", false);
    let flow = EchoConnection::open(&fixture.site("test/pod-0").namespace, target, 8080, SILENCE).unwrap();
    flow.wait_for(100, LIMIT).unwrap();
    let started = trial(&fixture, &start);
    assert!(started.status.success(), "{started:?}");
    let text = String::from_utf8_lossy(&started.stdout).into_owned();
    assert!(text.contains("NetworkPolicy test/guard"), "{text}");
    let (found, code) = wait(&fixture, |status| status.changes.iter().any(|change| change.live > 0));
    assert!(found.from_files && code == Some(3));
    assert!(change(&found, "test/pod-0", "test/pod-1", 8080).is_some_and(|change| !change.promoted.allowed));

    std::fs::write(&file, "kind: NetworkPolicy\n").unwrap();
    let bad = trial(&fixture, &start);
    let error = String::from_utf8_lossy(&bad.stderr).into_owned();
    assert!(bad.status.code() == Some(2) && error.contains("guard.yaml"), "{error}");
    assert_eq!(status(&fixture).0.staged, found.staged, "the trial before goes on");

    assert!(trial(&fixture, &["stop"]).status.success());
    assert_eq!(status(&fixture), (TrialStatus::default(), Some(0)));
    flow.wait_for(100, LIMIT).unwrap();
}

#[test]
fn a_trial_follows_the_cluster_and_its_policies() {
    let of_changed = |port: u16| {
        let spec = format!("  ingress: [{{ports: [{{port: {port}}}]}}]\n");
        staged("policy.penstock.dev/staged: \"true\"", &spec).replace("app: pod-1", "app: changed")
    };
    let fixture = Fixture::of(&(pods(2) + &of_changed(9090)), |_, _| {});
    let target = fixture.target("test/pod-1", false);
    let flow = EchoConnection::open(&fixture.site("test/pod-0").namespace, target, 8080, SILENCE).unwrap();
    flow.wait_for(100, LIMIT).unwrap();
    let (found, code) = wait(&fixture, |status| status.since.is_some() && status.live_judged > 0);
    assert_eq!((found.changes.len(), code), (0, Some(0)), "it selects no pod: {found:?}");

    // A label makes the staged policy select the pod; an edit of the policy allows the connection again.
    let relabelled = pods(2).replace("labels: {app: pod-1}", "labels: {app: changed}");
    fixture.save("all.yaml", &(relabelled.clone() + &of_changed(9090)));
    wait(&fixture, |status| {
        change(status, "test/pod-0", "test/pod-1", 8080).is_some_and(|it| it.live == 1 && !it.promoted.allowed)
    });
    fixture.save("all.yaml", &(relabelled + &of_changed(8080)));
    let (found, code) = wait(&fixture, |status| status.changes.is_empty() && status.live_judged > 0);
    assert_eq!((found.staged.len(), code), (1, Some(0)), "{found:?}");
    flow.wait_for(100, LIMIT).unwrap();
}
