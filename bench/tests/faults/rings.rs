//! Full or empty rings, and no free frames: the port's losses are counted by reason, and other ports lose nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::load::Generator;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::Attach;

use crate::faults::restarts::thread_named;
use crate::faults::stopped::StoppedThread;
use crate::faults::traffic::{ALLOWED, Sniffer, Stream};
use crate::fixture::{Fixture, pod, pods};
use crate::forger::{Forger, kernel_lost};

/// Default ring size: the maximum number of frames of a port.
const RING: u64 = 1024;

/// A datagram from `pod-2` to `pod-1`, prepared for repeated sending.
fn flood_frame(fixture: &Fixture, forger: &Forger) -> Vec<u8> {
    let address = |name: &str| fixture.site(name).address(false).unwrap();
    forger.udp((address("test/pod-2"), 1000), (address("test/pod-1"), 9), b"flood")
}

fn generator(fixture: &Fixture, name: &str) -> Generator {
    fixture.site(name).namespace.run(|| Generator::open("eth0")).unwrap()
}

/// Numbers below `count` that did not arrive.
fn missing(arrived: &[(u64, Duration)], sent: u64) -> Vec<u64> {
    let arrived: BTreeSet<u64> = arrived.iter().map(|&(number, _)| number).collect();
    (0..sent).filter(|number| !arrived.contains(number)).collect()
}

/// Waits until no frame is in flight and checks the frame account.
fn assert_at_rest(fixture: &Fixture) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let frames = fixture.status().frames;
        if frames.in_flight == 0 && frames.free + frames.fill == frames.total {
            return;
        }
        assert!(Instant::now() < deadline, "frames are stuck: {frames:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_empty_fill_ring_costs_no_other_port_a_packet() {
    let fixture = Fixture::of(&pods(3), |_, config| config.attach = Attach::Xdp);
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let epoch = Instant::now();
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, epoch);
    let forger = Forger::of(&fixture, "test/pod-2");
    let (frame, flooder) = (flood_frame(&fixture, &forger), generator(&fixture, "test/pod-2"));
    std::thread::sleep(Duration::from_millis(100));
    let before = fixture.port("test/pod-2");
    // While the worker is stopped, a port can only receive into the frames already in its fill ring.
    let stopped = StoppedThread::new(thread_named(fixture.daemon.id(), "worker-0"));
    let sent = flooder.send(&frame, 4 * RING, Duration::ZERO).unwrap();
    drop(stopped);
    std::thread::sleep(Duration::from_millis(200));
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0], "another pod's datagrams");
    let after = fixture.port("test/pod-2");
    let received = after.total.rx_packets - before.total.rx_packets;
    let lost = kernel_lost(&after) - kernel_lost(&before);
    // Those frames, and a few that arrived while the worker was being stopped and resumed; or a few less, if packets of the pod's own arrived between
    // the two counters.
    let had = u64::from(before.queue.receiving);
    assert!((64..=RING).contains(&had), "{had} frames for receiving");
    assert!((had - 4..had + had / 2).contains(&received), "{received} of {sent} received, with {had} frames");
    let logged = received + lost;
    assert!(
        (sent..sent + 8).contains(&logged),
        "{logged}: each is received, or dropped with a reason: {:?}",
        after.kernel_drops
    );
    assert!(after.kernel_drops.contains_key("fill_ring_empty"), "{:?}", after.kernel_drops);
    let status = fixture.status();
    assert_eq!(
        status.kernel_drops.get("fill_ring_empty"),
        after.kernel_drops.get("fill_ring_empty"),
        "in the node's total"
    );
    for name in ["test/pod-0", "test/pod-1"] {
        assert!(fixture.port(name).kernel_drops.values().all(|&count| count == 0), "{name}");
    }
    assert_at_rest(&fixture);
}

#[test]
fn a_full_tx_ring_drops_by_reason_and_other_ports_lose_nothing() {
    // With the smallest rings, one batch from each of three pods exceeds the fourth pod's ring.
    let fixture = Fixture::of(&pods(5), |_, config| {
        config.attach = Attach::Xdp;
        config.sections += "ring_size = 64\n";
    });
    let to = SocketAddr::new(fixture.site("node").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("node"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, Instant::now());
    let flooders = ["test/pod-2", "test/pod-3", "test/pod-4"];
    let victim = fixture.site("test/pod-1").address(false).unwrap();
    let frames = flooders.map(|name| {
        let own = fixture.site(name).address(false).unwrap();
        (Forger::of(&fixture, name).udp((own, 1000), (victim, 9), b"flood"), generator(&fixture, name))
    });
    let full = || -> u64 {
        let of = |name: &str| fixture.port(name).drops.get("tx_ring_full").copied().unwrap_or(0);
        flooders.into_iter().map(of).sum()
    };
    // Each sends a full ring while the worker is stopped.
    let deadline = Instant::now() + Duration::from_secs(20);
    while full() < 100 {
        assert!(Instant::now() < deadline, "{:?}", flooders.map(|name| fixture.port(name).drops));
        let stopped = StoppedThread::new(thread_named(fixture.daemon.id(), "worker-0"));
        for (frame, generator) in &frames {
            generator.send(frame, 128, Duration::ZERO).unwrap();
        }
        drop(stopped);
        std::thread::sleep(Duration::from_millis(5));
    }
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0], "another pod's datagrams");
    for name in ["test/pod-0", "test/pod-1"] {
        let drops = fixture.port(name).drops;
        assert_eq!(drops.get("tx_ring_full"), None, "not a drop of {name}: {drops:?}");
    }
    assert_at_rest(&fixture);
}

#[test]
fn a_receiver_that_does_not_read_causes_no_loss_for_others() {
    let fixture = Fixture::of(&pods(3), |_, config| config.attach = Attach::Xdp);
    let slow = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 9);
    // It is not read and fills up quickly.
    let _full = fixture.site("test/pod-1").namespace.udp(slow).unwrap();
    let to = SocketAddr::new(fixture.site("node").address(false).unwrap(), 7000);
    let epoch = Instant::now();
    let sniffer = Sniffer::start(fixture.site("node"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, epoch);
    let forger = Forger::of(&fixture, "test/pod-2");
    let (frame, flooder) = (flood_frame(&fixture, &forger), generator(&fixture, "test/pod-2"));
    flooder.send(&frame, 200_000, Duration::from_micros(200)).unwrap();
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0]);
    let outcome = probe::run_one(
        fixture.site("test/pod-0"),
        fixture.target("test/pod-1", false),
        Protocol::Tcp(8080),
        RetryPolicy::default(),
    );
    assert_eq!(outcome.unwrap(), ProbeOutcome::Reached, "the slow pod's other sockets");
    assert_at_rest(&fixture);
}

#[test]
fn a_pod_without_frames_is_reported_and_stays_closed() {
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    // Frames for five ports: the host port and those of four pods, the late one included.
    let mut fixture = Fixture::of(&(pods(3) + &late), |_, config| {
        config.attach = Attach::Xdp;
        config.sections = "[umem]\nframes = 330\nring_size = 64\n".into();
    });
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, Instant::now());
    fixture.cluster.node.remove_pod("test/late").unwrap();
    fixture.daemon.log().wait_for_after(0, "closed", Duration::from_secs(5)).unwrap();
    let addresses = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let extra = pod("extra", "10.244.1.78", "fd00:10:244:1::78");
    fixture.save("extra.yaml", extra.trim_start_matches("---\n"));
    let extra = ["10.244.1.78".parse().unwrap(), "fd00:10:244:1::78".parse().unwrap()];
    let seen = fixture.daemon.log().len();
    fixture.cluster.node.add_pod("test/extra", &extra).unwrap();
    fixture.daemon.log().wait_for_after(seen, "attached", Duration::from_secs(5)).unwrap();
    fixture.cluster.node.add_pod("test/late", &addresses).unwrap();
    fixture.cluster.node.settle().unwrap();
    let logged =
        fixture.daemon.log().wait_for_after(seen, "cannot attach the interface", Duration::from_secs(5)).unwrap();
    assert!(logged.contains("needs 64 frames") && logged.contains("its packets are dropped"), "{logged}");
    let reaches = |fixture: &Fixture| {
        let late = Site::from(fixture.cluster.node.pod("test/late").unwrap());
        probe::run_one(&late, fixture.target("test/pod-1", false), Protocol::Tcp(8080), RetryPolicy::default()).unwrap()
    };
    assert_eq!(reaches(&fixture), ProbeOutcome::Silent);
    // Another pod goes, and frames become free.
    fixture.cluster.node.remove_pod("test/extra").unwrap();
    fixture.daemon.log().wait_for_after(seen, "pod=test/late", Duration::from_secs(10)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while reaches(&fixture) != ProbeOutcome::Reached {
        assert!(Instant::now() < deadline, "{}", fixture.daemon.log().lines().join("\n"));
    }
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0], "the others noticed nothing");
    assert_at_rest(&fixture);
}
