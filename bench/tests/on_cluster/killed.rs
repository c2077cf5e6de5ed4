//! The daemon is killed under traffic and restarted, on a node that follows an API server.

use std::time::{Duration, Instant};

use penstock_bench::probe::{EchoConnection, EchoServers, EchoService, Site};

use crate::on_cluster::fixture::Fixture;
use crate::on_cluster::stream::Stream;

const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn after_a_kill_no_packet_passes_without_a_verdict() {
    let mut fixture = Fixture::with_three_pods();
    let site = |fixture: &Fixture, name: &str| Site::from(fixture.node.pod(name).unwrap());
    // A packet to a pod that has no port yet passes the node's stack, also later, and by tcx a worker.
    fixture.daemon.log().wait_for_after(0, "pods=3 ", LIMIT).unwrap();
    let [web, db, lab] = ["test/web", "test/db", "test/lab"].map(|name| site(&fixture, name));
    let allowed = Stream::start(&web.namespace, &db.namespace, "10.244.1.11");
    let deadline = Instant::now() + LIMIT;
    while !allowed.passes() {
        assert!(Instant::now() < deadline, "the policy is in effect");
    }
    let denied = Stream::start(&lab.namespace, &db.namespace, "10.244.1.11");
    let _servers = EchoServers::start(&db, 7, &[EchoService::Tcp(8080)]).unwrap();
    let target = (7, "10.244.1.11".parse().unwrap());
    // Its sender doubles the retransmission timeout each time, so the pause may last as long again after the next
    // daemon is in effect.
    let flow = EchoConnection::open(&web.namespace, target, 8080, 6 * LIMIT).unwrap();
    flow.wait_for(100, LIMIT).unwrap();

    fixture.kill();
    // The receiver's threads may still process one.
    std::thread::sleep(Duration::from_millis(50));
    let arrived = allowed.count();
    std::thread::sleep(Duration::from_millis(500));
    assert!(allowed.count() > arrived, "without a daemon the programs forward established connections");

    let began = Instant::now();
    fixture.restart();
    while allowed.count() == arrived {
        assert!(began.elapsed() < LIMIT, "nothing passes after the start");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("in effect {:.2?} after the start", began.elapsed());
    flow.wait_for(100, 6 * LIMIT).unwrap();
    assert_eq!(flow.wait_until_blocked(Duration::from_millis(1)), None, "the connection goes on");
    assert_eq!(denied.count(), 0, "never what policy denies");
}
