//! Policy changes do not wait for port operations.

use std::net::IpAddr;
use std::time::Duration;

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{Attach, Namespace};
use penstock_dataplane::conntrack;
use penstock_dataplane::forward::PortId;
use penstock_dataplane::worker::{Config, Dataplane, PortRequest};

use crate::fixture::{Fixture, pod, pods, policy};

/// Timeout of a step on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(30);
const LATE: &str = "test/late";

/// A socket that occupies an interface's queue, as one that is not yet fully closed does.
struct QueueOccupier {
    dataplane: Dataplane,
    port: PortId,
}

impl QueueOccupier {
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

fn ping(fixture: &Fixture, to: (u32, IpAddr)) -> ProbeOutcome {
    probe::run_one(fixture.site("test/pod-0"), to, Protocol::Icmp, RetryPolicy::default()).unwrap()
}

#[test]
fn a_policy_change_does_not_wait_for_a_port_to_open() {
    let mut fixture = Fixture::of(&pods(2), |_, config| config.attach = Attach::Xdp);
    let pod_1 = fixture.target("test/pod-1", false);
    let addresses: [IpAddr; 2] = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    let seen = fixture.daemon.log().len();
    fixture.cluster.node.add_pod(LATE, &addresses).unwrap();
    fixture.cluster.node.settle().unwrap();
    let interface = fixture.cluster.node.pod(LATE).unwrap().interface().to_owned();
    fixture.daemon.log().wait_for_after(seen, "closed until its pod is known", TIMEOUT).unwrap();
    let occupier = QueueOccupier::of(fixture.cluster.node.namespace(), &interface);
    assert_eq!(ping(&fixture, pod_1), ProbeOutcome::Reached);

    // The pod whose port has to wait is in the same save as the policy; then only policy changes.
    let seen = fixture.daemon.log().len();
    let closed = policy("only", "pod-1", "  ingress: []\n");
    fixture.save("late.yaml", (late.clone() + &closed).trim_start_matches("---\n"));
    fixture.daemon.log().wait_for_after(seen, "NetworkPolicy test/only", TIMEOUT).unwrap();
    assert_eq!(ping(&fixture, pod_1), ProbeOutcome::Silent);
    for (open, expected) in [("  ingress: [{}]\n", ProbeOutcome::Reached), ("  ingress: []\n", ProbeOutcome::Silent)] {
        let seen = fixture.daemon.log().len();
        fixture.save("late.yaml", (late.clone() + &policy("only", "pod-1", open)).trim_start_matches("---\n"));
        fixture.daemon.log().wait_for_after(seen, "published: NetworkPolicy test/only", TIMEOUT).unwrap();
        assert_eq!(ping(&fixture, pod_1), expected);
    }
    let lines = fixture.daemon.log().lines().split_off(seen);
    let place = |text: &str| lines.iter().position(|line| line.contains(text));
    let (published, given_up) = (place("NetworkPolicy test/only").unwrap(), place("cannot attach the interface"));
    assert!(given_up.is_none_or(|given_up| published < given_up), "policy waited:\n{}", lines.join("\n"));
    assert_eq!(place("pod=test/late"), None, "the port cannot be open yet:\n{}", lines.join("\n"));

    // The port is opened once the queue is free.
    let seen = fixture.daemon.log().len();
    occupier.release();
    fixture.daemon.log().wait_for_after(seen, "pod=test/late", TIMEOUT).unwrap();
    fixture.daemon.log().wait_for_after(seen, "published", TIMEOUT).unwrap();
    let it = Site::from(fixture.cluster.node.pod(LATE).unwrap());
    let outcome = probe::run_one(&it, fixture.target("test/pod-0", false), Protocol::Icmp, RetryPolicy::default());
    assert_eq!(outcome.unwrap(), ProbeOutcome::Reached);
}
