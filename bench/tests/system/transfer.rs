//! Bulk TCP through the workers.

use std::time::Duration;

use penstock_bench::load::{Receipt, transfer, transfer_for};

use crate::fixture::{World, pods, policy};

const POLICY: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], ports: [{port: 5201}]}]\n";

fn world(gso: bool) -> World {
    World::of(&(pods(2) + &policy("bulk", "pod-1", POLICY)), |_, config| {
        config.sections += &format!("[workers]\ngso = {gso}\n");
    })
}

/// Segments that were sent joined with others: the fourth figure of a worker's row.
fn joined(world: &World) -> u64 {
    let statistics = world.statistics();
    assert!(statistics.iter().any(|line| line.ends_with(": balanced")), "{statistics:?}");
    let rows = statistics.iter().skip_while(|line| !line.starts_with("WORKER")).skip(1);
    let figures = rows.take_while(|line| !line.starts_with("frames")).filter_map(|row| row.split_whitespace().nth(3));
    figures.map(|figure| figure.parse::<u64>().unwrap()).sum()
}

fn assert_no_storm(world: &World, receipt: &Receipt) {
    assert!(receipt.segments > 1000, "{receipt:?}");
    assert!(
        receipt.retransmitted_share() < 0.01,
        "more than 1 % of the segments were sent again: {receipt:?}\n{}",
        world.statistics().join("\n")
    );
}

#[test]
fn a_hundred_megabytes_arrive_octet_for_octet_over_both_families() {
    for gso in [true, false] {
        let world = world(gso);
        let (from, to) = (world.site("test/pod-0"), world.site("test/pod-1"));
        for v6 in [false, true] {
            let before = joined(&world);
            let receipt = transfer(&from.namespace, &to.namespace, to.address(v6).unwrap(), 100_000_000).unwrap();
            assert!(receipt.octets >= 100_000_000, "{receipt:?}");
            assert_no_storm(&world, &receipt);
            let joined = joined(&world) - before;
            assert!(
                if gso { joined > receipt.segments / 10 } else { joined == 0 },
                "{joined} left joined: {receipt:?}"
            );
        }
    }
}

#[test]
fn ten_seconds_of_bulk_tcp_see_no_retransmission_storm() {
    let world = world(true);
    let (from, to) = (world.site("test/pod-0"), world.site("test/pod-1"));
    let length = Duration::from_secs(10);
    let receipt = transfer_for(&from.namespace, &to.namespace, to.address(false).unwrap(), length).unwrap();
    println!(
        "{:.2} Gb/s, {} of {} segments sent again",
        receipt.gigabits_per_second(),
        receipt.retransmitted,
        receipt.segments
    );
    assert!(receipt.time >= length, "{receipt:?}");
    assert_no_storm(&world, &receipt);
}
