//! Pods and policies change quickly under traffic.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};

use crate::faults::traffic::{ALLOWED, DENIED, Sniffer, Stream};
use crate::fixture::{Fixture, pod, pods, policy};

#[test]
fn a_recreated_pod_inherits_no_verdict_of_its_address() {
    remake_pods(20);
}

#[test]
#[ignore = "takes minutes; make test-long runs it"]
fn a_pod_recreated_a_thousand_times_leaks_nothing() {
    remake_pods(1000);
}

/// A pod comes and goes under the same address, alternately allowed and denied, while another keeps sending to it.
fn remake_pods(times: u32) {
    let only_a = "  ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]\n";
    let mut fixture = Fixture::of(&(pods(2) + &policy("only", "pod-1", only_a)), |_, _| {});
    let epoch = Instant::now();
    let (v4, v6) = ("10.244.1.77", "fd00:10:244:1::77");
    let to_it = SocketAddr::new(v4.parse().unwrap(), 7000);
    let traffic = Stream::start(fixture.site("test/pod-0"), ALLOWED, to_it, epoch);
    let descriptors =
        |fixture: &Fixture| std::fs::read_dir(format!("/proc/{}/fd", fixture.daemon.id())).unwrap().count();
    let mut before = None;
    for turn in 0..times {
        let label = if turn % 2 == 0 { "a" } else { "b" };
        let seen = fixture.daemon.log().len();
        fixture.save("turning.yaml", &pod("turning", v4, v6).replace("app: turning", &format!("app: {label}")));
        fixture.daemon.log().wait_for_after(seen, "published: Pod test/turning", Duration::from_secs(5)).unwrap();
        let addresses = [v4.parse().unwrap(), v6.parse().unwrap()];
        fixture.cluster.node.add_pod("test/turning", &addresses).unwrap();
        fixture.cluster.node.settle().unwrap();
        fixture.daemon.log().wait_for_after(seen, "attached", Duration::from_secs(5)).unwrap();
        let attached = fixture.daemon.log().len();
        fixture.daemon.log().wait_for_after(attached.saturating_sub(1), "published", Duration::from_secs(5)).unwrap();
        let it = Site::from(fixture.cluster.node.pod("test/turning").unwrap());
        let patience = RetryPolicy { timeout: Duration::from_millis(100), attempts: if label == "a" { 20 } else { 2 } };
        let outcome = probe::run_one(&it, fixture.target("test/pod-1", turn % 4 < 2), Protocol::Tcp(8080), patience);
        let expected = if label == "a" { ProbeOutcome::Reached } else { ProbeOutcome::Silent };
        assert_eq!(outcome.unwrap(), expected, "turn {turn}");
        fixture.cluster.node.remove_pod("test/turning").unwrap();
        fixture.daemon.log().wait_for_after(attached, "closed", Duration::from_secs(5)).unwrap();
        if turn == 3 {
            before = Some(descriptors(&fixture));
        }
    }
    assert!(traffic.stop() > 0);
    // Some descriptors are open only for a moment.
    let before = before.expect("counted once");
    let deadline = Instant::now() + Duration::from_secs(30);
    while descriptors(&fixture) > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let after = descriptors(&fixture);
    assert!(after <= before, "descriptors are leaked: {before} after four turns, {after} after {times}");
    let account = fixture.statistics().pop().unwrap();
    assert!(account.ends_with(": balanced"), "{account}");
}

#[test]
fn a_pod_is_served_beside_its_addresss_previous_owner() {
    const TIMEOUT: Duration = Duration::from_secs(30);
    let only_heir = "  ingress: [{from: [{podSelector: {matchLabels: {app: heir}}}]}]\n";
    let mut fixture = Fixture::of(&(pods(2) + &policy("only", "pod-1", only_heir)), |_, _| {});
    let (v4, v6) = ("10.244.1.77", "fd00:10:244:1::77");
    let being_deleted = "namespace: test, name: old, deletionTimestamp: \"2026-01-01T00:00:00Z\"";
    let old = pod("old", v4, v6).replace("namespace: test, name: old", being_deleted);
    fixture.save("old.yaml", old.trim_start_matches("---\n"));
    fixture.save("heir.yaml", pod("heir", v4, v6).trim_start_matches("---\n"));
    let addresses = [v4.parse().unwrap(), v6.parse().unwrap()];
    fixture.cluster.node.add_pod("test/heir", &addresses).unwrap();
    fixture.cluster.node.settle().unwrap();
    let status = |name: &str| fixture.status().pods.into_iter().find(|pod| pod.pod == name);
    let deadline = Instant::now() + TIMEOUT;
    while !status("test/heir").is_some_and(|heir| heir.enforced) {
        assert!(Instant::now() < deadline, "not served:\n{}", fixture.daemon.log().lines().join("\n"));
        std::thread::sleep(Duration::from_millis(20));
    }
    let it = Site::from(fixture.cluster.node.pod("test/heir").unwrap());
    for v6 in [false, true] {
        let to = fixture.target("test/pod-1", v6);
        let outcome = probe::run_one(&it, to, Protocol::Tcp(8080), RetryPolicy::default()).unwrap();
        assert_eq!(outcome, ProbeOutcome::Reached, "by the policy that names it (IPv6: {v6})");
    }
    let old = status("test/old").expect("it is known");
    assert!(old.interface.is_none() && old.waiting.is_some_and(|why| why.contains("both have")), "and it is reported");
    fixture.daemon.log().wait_for_after(0, "pods test/heir and test/old: both have", TIMEOUT).unwrap();
}

#[test]
fn rapid_policy_changes_lose_none_allowed_and_pass_none_denied() {
    storm(Duration::from_secs(2), Duration::from_millis(10));
}

#[test]
#[ignore = "takes ten seconds of a machine that is quiet; make test-long runs it"]
fn a_thousand_policy_changes_lose_no_allowed_packet() {
    storm(Duration::from_secs(10), Duration::from_millis(10));
}

fn storm(length: Duration, every: Duration) {
    let only_pod_0 = |port: u16| {
        format!(
            "  ingress: [{{from: [{{podSelector: {{matchLabels: {{app: pod-0}}}}}}], \
             ports: [{{port: 7000, protocol: UDP}}, {{port: {port}, protocol: UDP}}]}}]\n"
        )
    };
    let fixture = Fixture::of(&pods(3), |_, _| {});
    fixture.save("policy.yaml", &policy("only", "pod-1", &only_pod_0(1)));
    fixture.daemon.log().wait_for_after(0, "published: NetworkPolicy test/only", Duration::from_secs(5)).unwrap();
    let epoch = Instant::now();
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let streams = [("test/pod-0", ALLOWED), ("test/pod-2", DENIED)];
    let streams = streams.map(|(from, port)| Stream::start(fixture.site(from), port, to, epoch));
    let seen = fixture.daemon.log().len();
    let mut changes = 0u16;
    while epoch.elapsed() < length {
        changes += 1;
        fixture.save("policy.yaml", &policy("only", "pod-1", &only_pod_0(changes)));
        std::thread::sleep((every * u32::from(changes)).saturating_sub(epoch.elapsed()));
    }
    let sent = streams.map(Stream::stop);
    let arrived = sniffer.stop();
    let lines = fixture.daemon.log().lines();
    let published = lines[seen..].iter().filter(|line| line.contains("published")).count();
    println!("{changes} changes saved, {published} snapshots published, {} packets sent", sent[0]);
    assert!(published > usize::from(changes) / 10, "the storm arrived: {published} of {changes}");
    assert_eq!(arrived.get(&DENIED), None);
    let numbers: Vec<u64> = arrived[&ALLOWED].iter().map(|&(number, _)| number).collect();
    assert_eq!(numbers, (0..sent[0]).collect::<Vec<_>>(), "all, once and in order");
}
