//! Ports are opened and closed, workers sleep, and errors are reported.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use super::net::{Raw, frame, in_namespace, ip, veth, veths};
use super::*;
use crate::io::PortError;

#[test]
fn opening_and_closing_ports_under_traffic_leaks_no_frame() {
    in_namespace(|| {
        veth("a");
        veth("b");
        let bench = Bench::start(config(&[0, 1]));
        let (a, _a) = bench.open("a");
        let (at_a, at_b) = (Raw::open("ap"), Raw::open("bp"));
        let frames: Vec<_> = (0..64).map(|index| frame(index, 60)).collect();
        let mut arrived = 0;
        for round in 0..100 {
            let (b, attached) = bench.open("b");
            bench.wires.connect(a, b);
            bench.wires.connect(b, a);
            at_b.arrived();
            at_a.send_all(&frames);
            if round % 2 == 0 {
                arrived += at_b.count(64);
            }
            at_b.send_all(&frames);
            // Closed while packets are in every ring and in transit between the workers.
            drop(attached);
            bench.dataplane.close_port(b).unwrap();
            bench.wires.cut(a);
        }
        assert_eq!(arrived, 50 * 64, "every port forwarded");
        let account = bench.account();
        assert_eq!(account.free + account.fill, account.total);
        assert_eq!(account.fill, 512, "those of port a alone");
        let stopped = bench.dataplane.stop().unwrap();
        assert_eq!(stopped.free, stopped.total);
    });
}

#[test]
fn a_removed_interface_frees_its_frames_and_others_continue() {
    in_namespace(|| {
        for name in ["a", "b", "c"] {
            veth(name);
        }
        let bench = Bench::start(config(&[0, 1]));
        let (a, attached_a) = bench.open("a");
        let (b, _b) = bench.open("b");
        // The first port is closed first: later ones must not depend on it.
        ip("link del dev a");
        drop(attached_a);
        bench.dataplane.close_port(a).unwrap();
        assert!(matches!(bench.dataplane.close_port(a), Err(PortError::NotOpen(port)) if port == a));
        let (c, _c) = bench.open("c");
        bench.wires.connect(b, c);
        let (at_b, at_c) = (Raw::open("bp"), Raw::open("cp"));
        at_b.send_all(&(0..100).map(|index| frame(index, 60)).collect::<Vec<_>>());
        assert_eq!(at_c.count(100), 100);
        // One whose interface disappears under traffic, before it is closed.
        ip("link del dev c");
        at_b.send_all(&(0..100).map(|index| frame(index, 60)).collect::<Vec<_>>());
        let rounds = || bench.dataplane.statistics().workers.iter().map(|worker| worker.rounds).sum::<u64>();
        thread::sleep(Duration::from_millis(50));
        let before = rounds();
        thread::sleep(Duration::from_millis(100));
        assert!(rounds() - before < 100, "the workers sleep in spite of it: {} rounds", rounds() - before);
        bench.dataplane.close_port(c).unwrap();
        let account = bench.account();
        assert_eq!((account.fill, account.in_flight), (512, 0), "{account:?}");
    });
}

/// Clock ticks (100 a second) used by the worker threads with this name of this namespace's dataplane.
fn ticks_of_workers(prefix: &str, before: &[(String, u64)]) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        let (head, tail) = stat.rsplit_once(") ").unwrap();
        let (id, name) = head.split_once(" (").unwrap();
        let fields: Vec<&str> = tail.split(' ').collect();
        let used: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let start = before.iter().find(|(known, _)| known == id).map_or(0, |(_, ticks)| *ticks);
        if name.rsplit_once('-').is_some_and(|(name, _)| name == prefix) {
            all.push((id.to_owned(), used - start));
        }
    }
    all
}

#[test]
fn idle_workers_sleep_and_busy_ones_do_not() {
    const WATCHED: Duration = Duration::from_secs(2);
    in_namespace(|| {
        for name in ["a", "b", "c", "d"] {
            veth(name);
        }
        let mut quiet = config(&[0, 1]);
        quiet.thread_name = "idle".to_owned();
        let bench = Bench::start(quiet);
        let _ports: Vec<_> = ["a", "b", "c", "d"].map(|name| bench.open(name)).into();
        thread::sleep(Duration::from_millis(100));
        let before = ticks_of_workers("idle", &[]);
        assert_eq!(before.len(), 2);
        thread::sleep(WATCHED);
        let used = ticks_of_workers("idle", &before);
        let total: u64 = used.iter().map(|(_, ticks)| ticks).sum();
        assert!(total <= 6, "3% of a core are 6 ticks in 2 s: {used:?}");
        let statistics = bench.dataplane.statistics();
        assert!(
            statistics.workers.iter().all(|worker| worker.awake_share() < 0.1 && worker.sleeps > 0),
            "{statistics:?}"
        );
        drop(bench);

        let bench = Bench::start(Config { polling: Polling::Busy, ..config(&[0]) });
        thread::sleep(Duration::from_millis(50));
        let statistics = bench.dataplane.statistics();
        assert_eq!(statistics.workers[0].sleeps, 0);
        assert!(statistics.workers[0].rounds > 1000, "{statistics:?}");
    });
}

#[test]
fn a_busy_realtime_worker_shares_its_core() {
    in_namespace(|| {
        for (priority, leaves) in [(Priority::RealTime, true), (Priority::Nice, false)] {
            let bench = Bench::start(Config { polling: Polling::Busy, priority, ..config(&[0]) });
            assert_eq!(bench.dataplane.priority(), priority);
            wait_until("it has run for some periods", || {
                let worker = bench.dataplane.statistics().workers[0].clone();
                worker.rounds > 1000 && worker.running > Duration::from_millis(100) && (worker.sleeps > 10 || !leaves)
            });
            assert_eq!(bench.dataplane.statistics().workers[0].asleep > Duration::ZERO, leaves, "{priority:?}");
        }
    });
}

#[test]
fn a_dead_worker_is_reported() {
    in_namespace(|| {
        veth("a");
        let bench = Bench::start(config(&[0]));
        let (_, _a) = bench.open("a");
        assert_eq!(bench.dataplane.failed(), None);
        let mut deadly = frame(0, 60);
        deadly[0] = 0xde;
        Raw::open("ap").send_all(&[deadly]);
        let deadline = Instant::now() + Duration::from_secs(2);
        while bench.dataplane.failed().is_none() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        let died = bench.dataplane.failed().expect("the death is noticed");
        assert!(
            died.to_string().contains("worker 0 on core 0 died") && died.reason.contains("a deadly packet"),
            "{died}"
        );
        veth("b");
        assert!(matches!(bench.dataplane.open_port(&PortRequest::new("b")), Err(PortError::WorkerDied(0))));
        assert_eq!(bench.dataplane.stop(), Err(died));
    });
}

#[test]
fn closing_a_dead_workers_port_closes_it_and_frees_its_frames() {
    in_namespace(|| {
        ip("link add name a numtxqueues 2 numrxqueues 2 type veth peer name ap numtxqueues 2 numrxqueues 2");
        ip("link set dev a up");
        ip("link set dev ap up");
        veth("b");
        let bench = Bench::start(config(&[0, 1]));
        // A queue on each worker, and a port on the one that survives.
        let (a, attached_a) = bench.open("a");
        let (b, attached_b) = bench.open("b");
        let filled = bench.account().fill;
        bench.dataplane.kill_worker(0);
        wait_until("its death is noticed", || bench.dataplane.failed().is_some());
        drop((attached_a, attached_b));
        for port in [a, b] {
            bench.dataplane.close_port(port).unwrap_or_else(|error| panic!("{error}"));
        }
        let census = bench.dataplane.census();
        assert_eq!((census.fill, census.in_flight), (0, 0), "of {filled}: {census:?}");
        assert!(matches!(bench.dataplane.close_port(a), Err(PortError::NotOpen(_))));
        // No descriptor of this process refers to the queues any more; the kernel's own work is waited for.
        let other = Bench::start(config(&[1]));
        other.open("a");
        other.open("b");
    });
}

/// Takes a while to be dropped, and then says so: the thread that drops it ends later than it dies.
struct SlowToEnd(Wires, Arc<AtomicBool>);

impl Drop for SlowToEnd {
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(300));
        self.1.store(true, Ordering::SeqCst);
    }
}

impl Processor for SlowToEnd {
    fn process(
        &mut self,
        snapshot: &Snapshot,
        now: Instant,
        ingress: PortId,
        frames: &mut RxBatch<'_>,
        verdicts: &mut [Verdict; BATCH],
    ) {
        self.0.process(snapshot, now, ingress, frames, verdicts);
    }

    fn housekeeping(&mut self, _: &Snapshot, _: Instant, _: bool) {}
}

#[test]
fn closing_a_dead_workers_port_waits_for_its_thread() {
    in_namespace(|| {
        veth("a");
        let ended = Arc::new(AtomicBool::new(false));
        let dataplane =
            Dataplane::start_with(config(&[0]), |_, _| SlowToEnd(Wires::new(), Arc::clone(&ended))).unwrap();
        let port = dataplane.open_port(&PortRequest::new("a")).unwrap();
        dataplane.kill_worker(0);
        dataplane.close_port(port).unwrap_or_else(|error| panic!("{error}"));
        assert!(ended.load(Ordering::SeqCst), "the thread still ends, with the port's sockets");
    });
}

#[test]
fn a_busy_queue_is_waited_for_until_the_timeout() {
    in_namespace(|| {
        veth("a");
        let (bench, other) = (Bench::start(config(&[0])), Bench::start(config(&[1])));
        let held = other.dataplane.open_port(&PortRequest::new("a")).unwrap();
        let at_once = PortRequest { patience: Duration::ZERO, ..PortRequest::new("a") };
        assert!(matches!(bench.dataplane.open_port(&at_once), Err(PortError::QueueBusy { .. })));
        let patient = PortRequest { patience: Duration::from_secs(60), ..PortRequest::new("a") };
        thread::scope(|scope| {
            let opened = scope.spawn(|| bench.dataplane.open_port(&patient));
            other.dataplane.close_port(held).unwrap();
            opened.join().unwrap().unwrap();
        });
    });
}

#[test]
fn invalid_requests_are_rejected_in_one_line_with_the_remedy() {
    in_namespace(|| {
        let rejected = |config: Config, parts: &[&str]| {
            let error = Dataplane::start(config).map(|_| ()).unwrap_err().to_string();
            assert!(!error.contains('\n') && parts.iter().all(|part| error.contains(part)), "{error}");
        };
        rejected(config(&[]), &["no core"]);
        rejected(config(&[4711]), &["core 4711", "choose from 0"]);
        rejected(config(&[0, 0]), &["core 0", "twice"]);
        rejected(Config { frame_size: 1000, ..config(&[0]) }, &["frame_size = 1000", "2048 or 4096"]);
        rejected(Config { ring_size: 1000, ..config(&[0]) }, &["ring_size = 1000", "power of two"]);
        rejected(Config { frames: 100, ..config(&[0]) }, &["frames = 100", "1024"]);

        let bench = Bench::start(Config { frames: 128, ring_size: 64, ..config(&[0]) });
        let rejected = |interface: &str, parts: &[&str]| {
            let error = bench.dataplane.open_port(&PortRequest::new(interface)).unwrap_err().to_string();
            assert!(!error.contains('\n') && parts.iter().all(|part| error.contains(part)), "{error}");
            assert_eq!(bench.account().free, 128, "nothing is held after {error}");
        };
        rejected("none", &["interface none", "does not exist"]);
        rejected("a-name-that-is-too-long", &["does not exist"]);
        ip("link add name a type veth peer name ap");
        rejected("a", &["interface a is down", "ip link set dev a up"]);
        ip("link set dev a up");
        let other = Bench::start(config(&[1]));
        let held = other.dataplane.open_port(&PortRequest::new("a")).unwrap();
        rejected("a", &["queue 0 of interface a", "another AF_XDP socket"]);
        other.dataplane.close_port(held).unwrap();
        for name in ["b", "c"] {
            veth(name);
        }
        bench.open("a");
        bench.open("b");
        let error = bench.dataplane.open_port(&PortRequest::new("c")).unwrap_err().to_string();
        assert!(error.contains("interface c needs 64 frames") && error.contains("of 128"), "{error}");
    });
}

#[test]
fn the_default_memory_suffices_for_110_pods() {
    const PODS: usize = 110;
    in_namespace(|| {
        let name = |pod: usize| format!("pod{pod}");
        veths(&(0..PODS).map(name).collect::<Vec<_>>());
        let bench = Bench::start(Config { thread_name: "many".to_owned(), ..Config::default() });
        let ports: Vec<_> = (0..PODS).map(|pod| bench.open(&name(pod))).collect();
        let account = bench.account();
        assert_eq!(account.total, 16_384);
        // The first ports have more, and the last one still a batch; the rest is available for bursts.
        assert!(account.fill > 110 * 64 && account.free > 2048, "{account:?}");
        // Each sends to the next one.
        for pod in 0..PODS {
            bench.wires.connect(ports[pod].0, ports[(pod + 1) % PODS].0);
        }
        let raw: Vec<Raw> = (0..PODS).map(|pod| Raw::open(&format!("{}p", name(pod)))).collect();
        let frames: Vec<_> = (0..20).map(|index| frame(index, 60)).collect();
        raw.iter().for_each(|raw| raw.send_all(&frames));
        assert!(raw.iter().all(|raw| raw.count(20) == 20), "all packets arrive at each");
        let before = ticks_of_workers("many", &[]);
        thread::sleep(Duration::from_secs(1));
        let used = ticks_of_workers("many", &before);
        assert!(used.iter().map(|(_, ticks)| ticks).sum::<u64>() <= 3, "3% of a core are 3 ticks in 1 s: {used:?}");
        assert_eq!(bench.account().in_flight, 0);
    });
}
