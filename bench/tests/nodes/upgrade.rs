//! Upgrade of a node: the old daemon ends and leaves everything in place, the next one takes over.

use std::time::{Duration, Instant};

use penstock_bench::load::transfer_for;
use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::DaemonConfig;

use crate::nodes::fixture::{Fixture, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");
/// A TCP connection without progress for this long counts as lost.
const SILENCE: Duration = Duration::from_secs(30);

/// Configuration for an upgrade: the node stays closed, and connections outlast the process. Mid-stream pickup is off,
/// so that connections which continue were found in the file.
fn kept(config: &mut DaemonConfig) {
    let directory = config.manifests.parent().unwrap().join(&config.node);
    config.conntrack =
        format!("mapping = \"{}/conntrack\"\nentries = 4096\nmidstream_pickup = \"0s\"\n", directory.display());
    config.sections += "[fail]\non_exit = \"keep\"\n";
}

#[test]
fn an_upgrade_of_the_daemon_loses_no_established_connection() {
    let mut fixture = Fixture::start_with(CLUSTER, Wiring::routed(), &SERVICES, kept);
    // On one node, between two, from a node process and to one.
    let pairs = [("shop/web-a", "shop/db-a", 9090), ("shop/web-a", "shop/db-b", 8080), ("node-b", "shop/web-a", 8080)];
    let flows: Vec<EchoConnection> = (pairs.iter())
        .flat_map(|&(from, to, port)| [(from, to, port, false), (from, to, port, true)])
        .map(|(from, to, port, v6)| {
            EchoConnection::open(&fixture.site(from).namespace, fixture.target(to, v6), port, SILENCE).unwrap()
        })
        .collect();
    let (from, to) = (fixture.site("shop/web-a").clone(), fixture.site("ops/monitor-a").clone());
    let (denied_from, denied_to) = (fixture.site("ops/lab-b").clone(), fixture.target("shop/web-a", false));
    std::thread::scope(|scope| {
        let bulk = scope.spawn(|| {
            let address = to.address(false).unwrap();
            transfer_for(&from.namespace, &to.namespace, address, Duration::from_secs(8))
        });
        // While no daemon runs or the next one starts, nothing passes that policy denies.
        let denied = scope.spawn(|| {
            let patience = RetryPolicy { timeout: Duration::from_secs(1), attempts: 6 };
            probe::run_one(&denied_from, denied_to, Protocol::Tcp(8080), patience).unwrap()
        });
        std::thread::sleep(Duration::from_millis(500));
        for node in [0, 1] {
            replace_daemon(&mut fixture, node, &flows);
        }
        let report = bulk.join().unwrap();
        assert!(report.is_ok(), "{report:?}\n{}\n{}", fixture.statistics(0).join("\n"), fixture.logs());
        let report = report.unwrap();
        println!("meanwhile {} bytes over one connection, each as it was sent: {report:?}", report.bytes);
        assert!(report.bytes > 1_000_000, "{report:?}");
        assert_eq!(denied.join().unwrap(), ProbeOutcome::Silent);
    });
    for (flow, pair) in flows.iter().zip(pairs.iter().flat_map(|pair| [pair, pair])) {
        assert!(flow.wait_until_blocked(Duration::ZERO).is_none(), "{pair:?} was lost");
    }
    fixture.assert_as_expected(&fixture.matrix());
}

/// Replaces a node's daemon and prints how long the connections were interrupted.
fn replace_daemon(fixture: &mut Fixture, node: usize, flows: &[EchoConnection]) {
    for flow in flows {
        flow.wait_for(10, SILENCE).unwrap();
        flow.take_slowest();
    }
    let began = Instant::now();
    fixture.replace_daemon(node);
    let took = began.elapsed();
    flows.iter().for_each(|flow| flow.wait_for(10, SILENCE).unwrap());
    let gaps: Vec<Duration> = flows.iter().map(EchoConnection::take_slowest).collect();
    println!("node {node}: from SIGTERM to the next daemon in effect {took:.2?}; longest gaps {gaps:.2?}");
    let found = fixture.daemons[node].log().wait_for_after(0, "connections found", Duration::from_secs(1));
    println!("{}", found.unwrap());
}
