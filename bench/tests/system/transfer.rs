//! Bulk TCP through the workers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use penstock_bench::load::{TransferReport, transfer, transfer_for};

use crate::fixture::{Fixture, pods, policy};

const POLICY: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], ports: [{port: 5201}]}]\n";

fn fixture() -> Fixture {
    Fixture::of(&(pods(2) + &policy("bulk", "pod-1", POLICY)), |_, _| {})
}

fn assert_no_storm(fixture: &Fixture, report: &TransferReport) {
    assert!(report.segments > 1000, "{report:?}");
    assert!(
        report.retransmitted_share() < 0.01,
        "more than 1 % of the segments were sent again: {report:?}\n{}",
        fixture.statistics().join("\n")
    );
}

#[test]
fn a_hundred_megabytes_arrive_unchanged_over_both_families() {
    let fixture = fixture();
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    for v6 in [false, true] {
        let report = transfer(&from.namespace, &to.namespace, to.address(v6).unwrap(), 100_000_000).unwrap();
        assert!(report.bytes >= 100_000_000, "{report:?}");
        assert_no_storm(&fixture, &report);
        let statistics = fixture.statistics();
        assert!(statistics.iter().any(|line| line.ends_with(": balanced")), "{statistics:?}");
    }
}

/// The kernel joins more segments than the length field of an IP header can count, which is 0 then (BIG TCP).
#[test]
fn streams_of_packets_longer_than_the_length_field_need_no_worker() {
    const BYTES: u64 = 100_000_000;
    let metrics = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9464);
    let fixture = Fixture::of(&(pods(2) + &policy("bulk", "pod-1", POLICY)), |_, config| {
        config.metrics = Some(metrics);
    });
    let forwarded = || -> u64 {
        let page = fixture.http(metrics, "/metrics");
        let count =
            page.lines().find_map(|it| it.strip_prefix("penstock_offloaded_packets_total{path=\"pod_to_pod\"} "));
        count.unwrap_or_else(|| panic!("no such metric: {page}")).parse().unwrap()
    };
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    for longest in [65_536, 185_000, 512_000] {
        for pod in ["test/pod-0", "test/pod-1"] {
            let pod = fixture.cluster.node.pod(pod).unwrap();
            fixture.cluster.node.netlink().set_longest_joined(pod.interface_index(), longest).unwrap();
            let inside = pod.namespace().netlink().unwrap();
            inside.set_longest_joined(inside.index("eth0").unwrap(), longest).unwrap();
        }
        for v6 in [false, true] {
            let before = forwarded();
            let report = transfer(&from.namespace, &to.namespace, to.address(v6).unwrap(), BYTES).unwrap();
            assert!(report.bytes >= BYTES, "{longest}: {report:?}");
            assert_no_storm(&fixture, &report);
            let forwarded = forwarded() - before;
            assert!(
                forwarded >= report.segments * 99 / 100,
                "{longest}, IPv6 {v6}: of {report:?} programs forwarded {forwarded} segments"
            );
        }
    }
}

#[test]
fn ten_seconds_of_bulk_tcp_see_no_retransmission_storm() {
    let fixture = fixture();
    let (from, to) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    let length = Duration::from_secs(10);
    let report = transfer_for(&from.namespace, &to.namespace, to.address(false).unwrap(), length).unwrap();
    println!(
        "{:.2} Gb/s, {} of {} segments sent again",
        report.gigabits_per_second(),
        report.retransmitted,
        report.segments
    );
    assert!(report.time >= length, "{report:?}");
    assert_no_storm(&fixture, &report);
}
