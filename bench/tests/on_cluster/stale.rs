//! The daemon is killed and started again while the API server is away: what was last in effect is in effect, marked as stale,
//! until the server is back.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use penstock_bench::testbed::api_server::FakeServer;
use penstock_bench::testbed::{Namespace, penstock_binary};

use crate::on_cluster::fixture::{Fixture, pod, policy};
use crate::on_cluster::stream::Stream;

const LIMIT: Duration = Duration::from_secs(20);
/// Longer than until the objects are on disk.
const RECORDED: Duration = Duration::from_secs(4);

/// A node with three pods, of which only `web` may reach `db`; then the server goes and the daemon is killed.
fn killed_without_a_server() -> Option<Fixture> {
    let fixture = Fixture::with_three_pods();
    if fixture.server.fake().is_none() {
        eprintln!("SKIPPED: nobody can change the objects of a real API server while it is away");
        return None;
    }
    until("the policy is in effect", || passes(&fixture, "web") && !passes(&fixture, "lab"));
    std::thread::sleep(RECORDED);
    fixture.server.stop();
    fixture.kill();
    assert!(!passes(&fixture, "web"), "without a daemon nothing passes");
    Some(fixture)
}

#[test]
fn the_last_objects_count_after_a_restart_without_the_server() {
    let Some(mut fixture) = killed_without_a_server() else { return };
    // The first as the DaemonSet's init container does.
    for options in [&["--or-last-good", "--offline"][..], &[]] {
        let mut check = fixture.node.namespace().command(penstock_binary().unwrap());
        check.arg("check").args(options).arg("--config").arg(fixture.daemon.config());
        let checked = check.output().unwrap();
        assert!(checked.status.success(), "{options:?}: {checked:?}");
        let said = String::from_utf8(checked.stdout).unwrap();
        let would_start = said.contains("warning  source: a start would take the ");
        assert_eq!(would_start, options.is_empty(), "{options:?}: {said}");
    }

    let began = Instant::now();
    fixture.restart();
    until("what was allowed is", || passes(&fixture, "web"));
    println!("in effect {:.2?} after the start, without an API server", began.elapsed());
    assert!(!passes(&fixture, "lab"), "what was denied is");
    assert!(page(&fixture, "/metrics").contains("\npenstock_objects_stale 1"));
    assert!(page(&fixture, "/metrics").contains("\npenstock_objects_recorded_timestamp_seconds "));
    let ready = page(&fixture, "/readyz");
    assert!(ready.contains(" 503 ") && ready.contains("the API server has not been read yet"), "{ready}");
    assert!(page(&fixture, "/healthz").contains(" 200 "), "that is no reason to restart it");

    // Meanwhile `web` is deleted and `lab` is allowed: both come into effect at once.
    let server: &FakeServer = fixture.server.fake().unwrap();
    [pod("web", "10.244.1.10"), policy("db", "web")].iter().for_each(|gone| server.delete_elsewhere(gone).unwrap());
    server.create_elsewhere(&policy("db", "lab")).unwrap();
    let seen = fixture.daemon.log().len();
    fixture.server.resume().unwrap();
    until("the server's objects are in effect", || passes(&fixture, "lab") && !passes(&fixture, "web"));
    let lines = fixture.daemon.log().lines().split_off(seen);
    let published = lines.iter().filter(|line| line.contains("published: ")).count();
    assert!((1..=2).contains(&published), "one snapshot with all, one without the pod's port: {lines:#?}");
    assert!(page(&fixture, "/metrics").contains("\npenstock_objects_stale 0"));
    assert!(!page(&fixture, "/metrics").contains("\npenstock_objects_recorded_timestamp_seconds "));
    until("ready", || page(&fixture, "/readyz").contains(" 200 "));

    // The server's objects are the recorded ones now.
    std::thread::sleep(RECORDED);
    fixture.server.stop();
    fixture.kill();
    fixture.restart();
    until("the new policy is", || passes(&fixture, "lab"));
    assert!(!passes(&fixture, "web"));
    fixture.server.resume().unwrap();
}

#[test]
fn damaged_or_other_versions_objects_leave_pods_closed() {
    let Some(mut fixture) = killed_without_a_server() else { return };
    let file = fixture.state("conntrack.objects");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    fs::write(&file, bytes).unwrap();
    fixture.restart_without_waiting();
    fixture.daemon.log().wait_for_after(0, "not used, because it is damaged", LIMIT).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert!(!passes(&fixture, "web") && !passes(&fixture, "lab"), "closed until the server is back");
    fixture.server.resume().unwrap();
    until("the policy is in effect again", || passes(&fixture, "web"));
    assert!(!passes(&fixture, "lab"));
}

#[test]
fn a_moved_address_is_closed_until_the_server_is_back() {
    let Some(mut fixture) = killed_without_a_server() else { return };
    // Another pod gets the address of `web`, and would be taken for it.
    fixture.node.remove_pod("test/web").unwrap();
    fixture.wire_pod("heir", "10.244.1.10");
    fixture.restart();
    fixture.daemon.log().wait_for_after(0, "behind another interface than in the last run", LIMIT).unwrap();
    assert!(!passes(&fixture, "heir"), "it is not the pod that was allowed");
    let server: &FakeServer = fixture.server.fake().unwrap();
    server.delete_elsewhere(&pod("web", "10.244.1.10")).unwrap();
    server.create_elsewhere(&pod("heir", "10.244.1.10")).unwrap();
    server.delete_elsewhere(&policy("db", "web")).unwrap();
    fixture.server.resume().unwrap();
    until("the new pod is served", || passes(&fixture, "heir"));
}

/// Whether datagrams of this pod arrive at `db`.
fn passes(fixture: &Fixture, name: &str) -> bool {
    let namespace =
        |name: &str| -> Namespace { fixture.node.pod(&format!("test/{name}")).unwrap().namespace().clone() };
    Stream::start(&namespace(name), &namespace("db"), "10.244.1.11").passes()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
    }
}

/// A page of the daemon's HTTP server, with its status line.
fn page(fixture: &Fixture, path: &str) -> String {
    fixture.node.namespace().run(|| {
        let mut stream = TcpStream::connect("127.0.0.1:9469").unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    })
}
