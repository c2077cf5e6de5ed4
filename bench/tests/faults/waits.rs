//! Policy changes do not wait for port operations.

use std::net::IpAddr;
use std::time::Duration;

use penstock_bench::probe::{self, Outcome, Patience, Protocol, Site};
use penstock_bench::testbed::Namespace;
use penstock_dataplane::conntrack;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::worker::{Config, Dataplane, PortRequest};

use crate::fixture::{World, pod, pods, policy};

/// Timeout of a step on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const LATE: &str = "test/late";

/// A socket that occupies an interface's queue, as one that is not yet fully closed does.
struct Holder {
    dataplane: Dataplane,
    port: PortId,
}

impl Holder {
    fn of(namespace: &Namespace, interface: &str) -> Self {
        namespace.run(|| {
            let connections = conntrack::Config { entries: 1024, ..Default::default() };
            let config = Config { frames: 4096, ring_size: 512, connections, ..Config::default() };
            let dataplane = Dataplane::start(config).unwrap();
            let port = dataplane.open_port(&PortRequest::new(interface)).unwrap();
            Self { dataplane, port }
        })
    }

    fn release(self) {
        self.dataplane.close_port(self.port).unwrap();
    }
}

fn ping(world: &World, to: (u32, IpAddr)) -> Outcome {
    probe::run_one(world.site("test/pod-0"), to, Protocol::Icmp, Patience::default()).unwrap()
}

#[test]
fn a_change_of_policy_is_in_force_before_the_port_is_open_for_which_the_daemon_has_to_wait() {
    let mut world = World::of(&pods(2), |_, _| {});
    let pod_1 = world.target("test/pod-1", false);
    let addresses: [IpAddr; 2] = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    let seen = world.daemon.log().len();
    world.cluster.node.add_pod(LATE, &addresses).unwrap();
    world.cluster.node.settle().unwrap();
    let interface = world.cluster.node.pod(LATE).unwrap().interface().to_owned();
    world.daemon.log().wait_for_after(seen, "closed until its pod is known", PATIENCE).unwrap();
    let holder = Holder::of(world.cluster.node.namespace(), &interface);
    assert_eq!(ping(&world, pod_1), Outcome::Reached);

    // The pod whose port has to wait is in the same save as the policy; then only policy changes.
    let seen = world.daemon.log().len();
    let closed = policy("only", "pod-1", "  ingress: []\n");
    world.save("late.yaml", (late.clone() + &closed).trim_start_matches("---\n"));
    world.daemon.log().wait_for_after(seen, "NetworkPolicy test/only", PATIENCE).unwrap();
    assert_eq!(ping(&world, pod_1), Outcome::Silent);
    for (open, expected) in [("  ingress: [{}]\n", Outcome::Reached), ("  ingress: []\n", Outcome::Silent)] {
        let seen = world.daemon.log().len();
        world.save("late.yaml", (late.clone() + &policy("only", "pod-1", open)).trim_start_matches("---\n"));
        world.daemon.log().wait_for_after(seen, "published: NetworkPolicy test/only", PATIENCE).unwrap();
        assert_eq!(ping(&world, pod_1), expected);
    }
    let lines = world.daemon.log().lines().split_off(seen);
    let place = |text: &str| lines.iter().position(|line| line.contains(text));
    let (published, given_up) = (place("NetworkPolicy test/only").unwrap(), place("could not be attached"));
    assert!(given_up.is_none_or(|given_up| published < given_up), "policy waited:\n{}", lines.join("\n"));
    assert_eq!(place("pod=test/late"), None, "the port cannot be open yet:\n{}", lines.join("\n"));

    // The port is opened once the queue is free.
    let seen = world.daemon.log().len();
    holder.release();
    world.daemon.log().wait_for_after(seen, "pod=test/late", PATIENCE).unwrap();
    world.daemon.log().wait_for_after(seen, "published", PATIENCE).unwrap();
    let it = Site::from(world.cluster.node.pod(LATE).unwrap());
    let outcome = probe::run_one(&it, world.target("test/pod-0", false), Protocol::Icmp, Patience::default());
    assert_eq!(outcome.unwrap(), Outcome::Reached);
}
