//! The daemon is killed under traffic and restarted, on a node that follows an API server.

use std::time::{Duration, Instant};

use penstock_bench::probe::{Flow, Servers, Service, Site};

use crate::stream::Stream;
use crate::world::{World, policy};

const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn a_daemon_is_killed_under_traffic_and_the_next_goes_on_without_an_unjudged_packet() {
    let mut world = World::start("");
    for (name, address) in [("web", "10.244.1.10"), ("db", "10.244.1.11"), ("lab", "10.244.1.12")] {
        world.add_pod(name, address);
    }
    world.server.admin().create(&policy("db", "web")).unwrap();
    let site = |world: &World, name: &str| Site::from(world.node.pod(name).unwrap());
    let [web, db, lab] = ["test/web", "test/db", "test/lab"].map(|name| site(&world, name));
    let allowed = Stream::start(&web.namespace, &db.namespace, "10.244.1.11");
    let deadline = Instant::now() + LIMIT;
    while !allowed.passes() {
        assert!(Instant::now() < deadline, "the policy is in force");
    }
    let denied = Stream::start(&lab.namespace, &db.namespace, "10.244.1.11");
    let _servers = Servers::start(&db, 7, &[Service::Tcp(8080)]).unwrap();
    let target = (7, "10.244.1.11".parse().unwrap());
    // Its sender doubles the retransmission timeout each time, so the pause may last as long again after the next
    // daemon is in force.
    let flow = Flow::open(&web.namespace, target, 8080, 6 * LIMIT).unwrap();
    flow.wait_for(100, LIMIT).unwrap();

    world.kill();
    // The receiver's threads may still process one.
    std::thread::sleep(Duration::from_millis(50));
    let arrived = allowed.count();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(allowed.count(), arrived, "while nobody judges, nothing passes");

    let began = Instant::now();
    world.restart();
    while allowed.count() == arrived {
        assert!(began.elapsed() < LIMIT, "nothing passes after the start");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("in force {:.2?} after the start", began.elapsed());
    flow.wait_for(100, 6 * LIMIT).unwrap();
    assert_eq!(flow.wait_until_blocked(Duration::from_millis(1)), None, "the connection goes on");
    assert_eq!(denied.count(), 0, "never what policy denies");
}
