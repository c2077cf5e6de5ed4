//! Rings that are full or empty, and no frames left: that port loses, by cause, and the others nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use penstock_bench::load::Generator;
use penstock_bench::probe::{self, Outcome, Patience, Protocol, Site};

use crate::fixture::{World, pod, pods};
use crate::forger::{Forger, kernel_lost};
use crate::restarts::thread_named;
use crate::stopped::Stopped;
use crate::traffic::{ALLOWED, Sniffer, Stream};

/// Entries of a ring, as the daemon has them by default: more frames a port never has.
const RING: u64 = 1024;

/// A datagram from `pod-2` to `pod-1`, ready to be sent many times.
fn flood_frame(world: &World, forger: &Forger) -> Vec<u8> {
    let address = |name: &str| world.site(name).address(false).unwrap();
    forger.udp((address("test/pod-2"), 1000), (address("test/pod-1"), 9), b"flood")
}

fn generator(world: &World, name: &str) -> Generator {
    world.site(name).namespace.run(|| Generator::open("eth0")).unwrap()
}

/// The numbers that did not arrive of so many.
fn missing(arrived: &[(u64, Duration)], sent: u64) -> Vec<u64> {
    let arrived: BTreeSet<u64> = arrived.iter().map(|&(number, _)| number).collect();
    (0..sent).filter(|number| !arrived.contains(number)).collect()
}

/// Waits until nothing is under way, and checks the account.
fn assert_at_rest(world: &World) {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let frames = world.status().frames;
        if frames.in_flight == 0 && frames.free + frames.fill == frames.total {
            return;
        }
        assert!(Instant::now() < deadline, "frames are stuck: {frames:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_port_whose_fill_ring_runs_empty_loses_by_cause_and_others_lose_nothing() {
    let world = World::of(&pods(3), |_, _| {});
    let to = SocketAddr::new(world.site("test/pod-1").address(false).unwrap(), 7000);
    let epoch = Instant::now();
    let sniffer = Sniffer::start(world.site("test/pod-1"), to);
    let stream = Stream::start(world.site("test/pod-0"), ALLOWED, to, epoch);
    let forger = Forger::of(&world, "test/pod-2");
    let (frame, flooder) = (flood_frame(&world, &forger), generator(&world, "test/pod-2"));
    std::thread::sleep(Duration::from_millis(100));
    let before = world.port("test/pod-2");
    // While the worker stands still, what it has put into a port's fill ring is all that the port can take.
    let stopped = Stopped::new(thread_named(world.daemon.id(), "worker-0"));
    let sent = flooder.send(&frame, 4 * RING, Duration::ZERO).unwrap();
    drop(stopped);
    std::thread::sleep(Duration::from_millis(200));
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0], "another pod's datagrams");
    let after = world.port("test/pod-2");
    let received = after.total.rx_packets - before.total.rx_packets;
    let lost = kernel_lost(&after) - kernel_lost(&before);
    // What it had, and a little that came in while the worker was stopped and let go.
    let had = u64::from(before.queue.receiving);
    assert!((64..=RING).contains(&had), "{had} frames for receiving");
    assert!((had..had + had / 2).contains(&received), "{received} of {sent} received, with {had} frames");
    let told = received + lost;
    assert!((sent..sent + 8).contains(&told), "{told}: each is received, or lost by cause: {:?}", after.kernel_drops);
    assert!(after.kernel_drops.contains_key("fill_ring_empty"), "{:?}", after.kernel_drops);
    for name in ["test/pod-0", "test/pod-1"] {
        assert!(world.port(name).kernel_drops.values().all(|&count| count == 0), "{name}");
    }
    assert_at_rest(&world);
}

#[test]
fn a_tx_ring_that_is_full_costs_those_who_fill_it_by_cause_and_others_nothing() {
    // With the smallest rings, a batch of each of three pods is more than the ring of the fourth takes.
    let world = World::of(&pods(5), |_, config| config.sections += "ring_size = 64\n");
    let to = SocketAddr::new(world.site("node").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(world.site("node"), to);
    let stream = Stream::start(world.site("test/pod-0"), ALLOWED, to, Instant::now());
    let flooders = ["test/pod-2", "test/pod-3", "test/pod-4"];
    let victim = world.site("test/pod-1").address(false).unwrap();
    let frames = flooders.map(|name| {
        let own = world.site(name).address(false).unwrap();
        (Forger::of(&world, name).udp((own, 1000), (victim, 9), b"flood"), generator(&world, name))
    });
    let full = || -> u64 {
        let of = |name: &str| world.port(name).drops.get("tx_ring_full").copied().unwrap_or(0);
        flooders.into_iter().map(of).sum()
    };
    // Each puts a full ring before the worker while that stands still.
    let deadline = Instant::now() + Duration::from_secs(20);
    while full() < 100 {
        assert!(Instant::now() < deadline, "{:?}", flooders.map(|name| world.port(name).drops));
        let stopped = Stopped::new(thread_named(world.daemon.id(), "worker-0"));
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
        let drops = world.port(name).drops;
        assert_eq!(drops.get("tx_ring_full"), None, "it is not the loss of {name}: {drops:?}");
    }
    assert_at_rest(&world);
}

#[test]
fn a_receiver_that_does_not_read_costs_nobody_else_a_packet() {
    let world = World::of(&pods(3), |_, _| {});
    let slow = SocketAddr::new(world.site("test/pod-1").address(false).unwrap(), 9);
    // Nobody reads it, and it is soon full.
    let _full = world.site("test/pod-1").namespace.run(|| std::net::UdpSocket::bind(slow)).unwrap();
    let to = SocketAddr::new(world.site("node").address(false).unwrap(), 7000);
    let epoch = Instant::now();
    let sniffer = Sniffer::start(world.site("node"), to);
    let stream = Stream::start(world.site("test/pod-0"), ALLOWED, to, epoch);
    let forger = Forger::of(&world, "test/pod-2");
    let (frame, flooder) = (flood_frame(&world, &forger), generator(&world, "test/pod-2"));
    flooder.send(&frame, 200_000, Duration::from_micros(200)).unwrap();
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0]);
    let outcome = probe::run_one(
        world.site("test/pod-0"),
        world.target("test/pod-1", false),
        Protocol::Tcp(8080),
        Patience::default(),
    );
    assert_eq!(outcome.unwrap(), Outcome::Reached, "the slow pod's other sockets");
    assert_at_rest(&world);
}

#[test]
fn a_pod_for_which_there_are_no_frames_is_told_of_and_stays_closed_and_others_go_on() {
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    // Frames for five ports: the host port and four pods', the late one among them.
    let mut world = World::of(&(pods(3) + &late), |_, config| {
        config.sections = "[umem]\nframes = 330\nring_size = 64\n".into();
    });
    let to = SocketAddr::new(world.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(world.site("test/pod-1"), to);
    let stream = Stream::start(world.site("test/pod-0"), ALLOWED, to, Instant::now());
    world.cluster.node.remove_pod("test/late").unwrap();
    world.daemon.log().wait_for_after(0, "closed", Duration::from_secs(5)).unwrap();
    let addresses = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let extra = pod("extra", "10.244.1.78", "fd00:10:244:1::78");
    world.save("extra.yaml", extra.trim_start_matches("---\n"));
    let extra = ["10.244.1.78".parse().unwrap(), "fd00:10:244:1::78".parse().unwrap()];
    let seen = world.daemon.log().len();
    world.cluster.node.add_pod("test/extra", &extra).unwrap();
    world.daemon.log().wait_for_after(seen, "attached", Duration::from_secs(5)).unwrap();
    world.cluster.node.add_pod("test/late", &addresses).unwrap();
    world.cluster.node.settle().unwrap();
    let told = world.daemon.log().wait_for_after(seen, "cannot attach the interface", Duration::from_secs(5)).unwrap();
    assert!(told.contains("needs 64 frames") && told.contains("its packets are dropped"), "{told}");
    let reaches = |world: &World| {
        let late = Site::from(world.cluster.node.pod("test/late").unwrap());
        probe::run_one(&late, world.target("test/pod-1", false), Protocol::Tcp(8080), Patience::default()).unwrap()
    };
    assert_eq!(reaches(&world), Outcome::Silent);
    // Another pod goes, and there is room.
    world.cluster.node.remove_pod("test/extra").unwrap();
    world.daemon.log().wait_for_after(seen, "pod=test/late", Duration::from_secs(10)).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while reaches(&world) != Outcome::Reached {
        assert!(Instant::now() < deadline, "{}", world.daemon.log().lines().join("\n"));
    }
    let numbers = stream.stop();
    let arrived = sniffer.stop();
    assert_eq!(missing(&arrived[&ALLOWED], numbers), [0; 0], "the others noticed nothing");
    assert_at_rest(&world);
}
