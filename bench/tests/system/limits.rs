//! Limits of bandwidth that others have set on a pod's interface: its packets meet them, whatever way they take.

use std::time::{Duration, Instant};

use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy};

use crate::fixture::{Fixture, pods};

const LIMIT: Duration = Duration::from_secs(20);
const ROUNDS: u64 = 10;

/// Runs programs of iproute2 in the node's namespace, a line each; returns what they print.
fn on_node(fixture: &Fixture, lines: &[String]) -> String {
    let mut printed = String::new();
    for line in lines {
        let mut words = line.split_whitespace();
        let mut command = fixture.cluster.node.namespace().command(words.next().unwrap());
        let output = command.args(words).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        printed += &String::from_utf8_lossy(&output.stdout);
    }
    printed
}

/// Limits a pod in both directions as the CNI plugin `bandwidth` does: a token bucket for what it receives, and one at an
/// intermediate interface that what it sends is diverted to.
fn limit(fixture: &Fixture, interface: &str) {
    let bucket = "tbf rate 1gbit burst 1mb latency 100ms";
    on_node(
        fixture,
        &[
            format!("tc qdisc add dev {interface} root {bucket}"),
            "ip link add sent type ifb".to_owned(),
            "ip link set sent up".to_owned(),
            format!("tc qdisc add dev {interface} ingress"),
            format!(
                "tc filter add dev {interface} parent ffff: protocol all u32 match u32 0 0 \
                 action mirred egress redirect dev sent"
            ),
            format!("tc qdisc add dev sent root {bucket}"),
        ],
    );
}

/// Packets that have passed the bucket of an interface.
fn passed(fixture: &Fixture, interface: &str) -> u64 {
    let shown = on_node(fixture, &[format!("tc -s qdisc show dev {interface} root")]);
    let words: Vec<&str> = shown.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "pkt").unwrap_or_else(|| panic!("{shown}"));
    words[at - 1].parse().unwrap()
}

#[test]
fn limits_of_bandwidth_on_a_pods_interface_hold() {
    let fixture = Fixture::of(&pods(2), |_, _| {});
    let open = |from: &str, to: &str| {
        let client = fixture.site(from);
        EchoConnection::open(&client.namespace, fixture.target(to, false), 8080, LIMIT).unwrap()
    };
    // One that programs forward between the pods already.
    let older = open("test/pod-0", "test/pod-1");
    older.wait_for(100, LIMIT).unwrap();
    let interface = fixture.cluster.node.pod("test/pod-1").unwrap().interface().to_owned();
    limit(&fixture, &interface);
    let said = || fixture.status().pods.into_iter().find(|pod| pod.pod == "test/pod-1").and_then(|pod| pod.filtered);
    let deadline = Instant::now() + LIMIT;
    while said().is_none() {
        assert!(Instant::now() < deadline, "the status names the pod");
        std::thread::sleep(Duration::from_millis(10));
    }
    let said = said().unwrap();
    assert_eq!(said, "what it sends and receives; its packets take the way by these");
    let buckets = [interface.as_str(), "sent"];
    let assert_passed = |what: &str, least: u64, work: &dyn Fn()| {
        let before = buckets.map(|of| passed(&fixture, of));
        work();
        let passed = buckets.map(|of| passed(&fixture, of));
        let more = [passed[0] - before[0], passed[1] - before[1]];
        assert!(more.iter().all(|count| *count >= least), "{what}: {more:?} packets to and from the pod, not {least}");
    };
    assert_passed("an older connection", 100, &|| older.wait_for(100, LIMIT).unwrap());
    drop(older);
    for (from, to) in [("test/pod-0", "test/pod-1"), ("test/pod-1", "test/pod-0"), ("node", "test/pod-1")] {
        for (v6, protocol) in [(false, Protocol::Udp(53)), (true, Protocol::Udp(53)), (false, Protocol::Icmp)] {
            assert_passed(&format!("{from} to {to}, {protocol:?}, v6 {v6}"), ROUNDS, &|| {
                for _ in 0..ROUNDS {
                    let there = fixture.target(to, v6);
                    let outcome = probe::run_one(fixture.site(from), there, protocol, RetryPolicy::default()).unwrap();
                    assert_eq!(outcome, ProbeOutcome::Reached, "{from} to {to}");
                }
            });
        }
        assert_passed(&format!("{from} to {to}, TCP"), 100, &|| open(from, to).wait_for(100, LIMIT).unwrap());
    }
}
