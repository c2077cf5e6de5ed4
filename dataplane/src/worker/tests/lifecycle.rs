//! Ports are opened and closed, workers sleep, and errors are reported.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use super::net::{frame, in_namespace, ip, veth};
use super::*;
use crate::io::PortError;

pub(super) fn start(config: Config) -> Dataplane {
    let dataplane = Dataplane::start_with(config, |_, _| Wires::new()).unwrap();
    // Workers take nothing before.
    dataplane.publish(Snapshot { epoch: crate::Epoch(1), ..Snapshot::default() });
    dataplane
}

#[test]
fn opening_and_closing_ports_under_traffic_leaks_no_frame() {
    in_namespace(|| {
        let pair = Pair::with(config(&[0]));
        let [a, b] = pair.ports;
        veth("c");
        let frames = pair.frames(0, 64);
        let mut arrived = 0;
        for round in 0..100 {
            let request = PortRequest::new("c", PortPath::Pod);
            let c = pair.dataplane.open_port(&request).unwrap();
            pair.wires.connect(a, c);
            pair.near.arrived();
            pair.near.send_all(&frames);
            if round % 2 == 0 {
                arrived += pair.near.count(64);
            }
            // Closed while packets are in every ring.
            pair.dataplane.close_port(c).unwrap();
            pair.wires.cut(a);
        }
        assert_eq!(arrived, 50 * 64, "every port forwarded");
        pair.wires.connect(a, b);
        wait_until("nothing moves", || pair.dataplane.frames().unwrap().in_flight == 0);
        let account = pair.account();
        assert_eq!((account.free + account.fill, account.fill), (account.total, 512));
        let Pair { dataplane, attached, .. } = pair;
        drop(attached);
        let stopped = dataplane.stop().unwrap();
        assert_eq!(stopped.free, stopped.total);
    });
}

#[test]
fn a_removed_pair_frees_its_frames_and_its_worker_sleeps() {
    in_namespace(|| {
        let pair = Pair::wired(config(&[0]));
        pair.near.send_all(&pair.frames(0, 100));
        assert_eq!(pair.near.count(100), 100);
        ip("link del dev x");
        let rounds = || pair.dataplane.statistics().workers.iter().map(|worker| worker.rounds).sum::<u64>();
        thread::sleep(Duration::from_millis(50));
        let before = rounds();
        thread::sleep(Duration::from_millis(100));
        assert!(rounds() - before < 100, "it sleeps in spite of it: {} rounds", rounds() - before);
        pair.dataplane.close_port(pair.pair).unwrap();
        assert!(matches!(pair.dataplane.close_port(pair.pair), Err(PortError::NotOpen(port)) if port == pair.pair));
        let account = pair.account();
        assert_eq!((account.fill, account.in_flight), (0, 0), "{account:?}");
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
        let mut quiet = config(&[0, 1]);
        quiet.thread_name = "idle".to_owned();
        let pair = Pair::with(quiet);
        thread::sleep(Duration::from_millis(100));
        let before = ticks_of_workers("idle", &[]);
        assert_eq!(before.len(), 2);
        thread::sleep(WATCHED);
        let used = ticks_of_workers("idle", &before);
        let total: u64 = used.iter().map(|(_, ticks)| ticks).sum();
        assert!(total <= 6, "3% of a core are 6 ticks in 2 s: {used:?}");
        let statistics = pair.dataplane.statistics();
        assert!(
            statistics.workers.iter().all(|worker| worker.asleep > WATCHED / 2 && worker.sleeps > 0),
            "{statistics:?}"
        );
        drop(pair);

        let dataplane = start(Config { spin: NEVER_SLEEPS, ..config(&[0]) });
        thread::sleep(Duration::from_millis(50));
        let statistics = dataplane.statistics();
        assert_eq!(statistics.workers[0].sleeps, 0);
        assert!(statistics.workers[0].rounds > 1000, "{statistics:?}");
    });
}

#[test]
fn a_busy_realtime_worker_shares_its_core() {
    in_namespace(|| {
        for (priority, leaves) in [(Priority::RealTime, true), (Priority::Nice, false)] {
            let dataplane = start(Config { spin: NEVER_SLEEPS, priority, ..config(&[0]) });
            assert_eq!(dataplane.priority(), priority);
            wait_until("it has run for some periods", || {
                let worker = dataplane.statistics().workers[0].clone();
                worker.rounds > 1000 && worker.running > Duration::from_millis(100) && (worker.sleeps > 10 || !leaves)
            });
            assert_eq!(dataplane.statistics().workers[0].asleep > Duration::ZERO, leaves, "{priority:?}");
        }
    });
}

#[test]
fn a_dead_worker_is_reported() {
    in_namespace(|| {
        let pair = Pair::with(config(&[0]));
        assert_eq!(pair.dataplane.failed(), None);
        let mut deadly = frame(0, 60);
        deadly[0] = 0xde;
        pair.near.send_all(&[deadly]);
        wait_until("the death is noticed", || pair.dataplane.failed().is_some());
        let died = pair.dataplane.failed().unwrap();
        assert!(
            died.to_string().contains("worker 0 on core 0 died") && died.reason.contains("a deadly packet"),
            "{died}"
        );
        veth("c");
        let request = PortRequest::new("c", PortPath::Pod);
        assert!(matches!(pair.dataplane.open_port(&request), Err(PortError::WorkerDied(0))));
        assert_eq!(pair.dataplane.stop(), Err(died));
    });
}

#[test]
fn closing_a_dead_workers_pair_closes_it_and_frees_its_frames() {
    in_namespace(|| {
        let Pair { dataplane, pair, attached, .. } = Pair::with(config(&[0, 1]));
        let filled = dataplane.census().fill;
        dataplane.kill_worker(0);
        wait_until("its death is noticed", || dataplane.failed().is_some());
        drop(attached);
        dataplane.close_port(pair).unwrap_or_else(|error| panic!("{error}"));
        let census = dataplane.census();
        assert_eq!((census.fill, census.in_flight), (0, 0), "of {filled}: {census:?}");
        assert!(matches!(dataplane.close_port(pair), Err(PortError::NotOpen(_))));
        // No descriptor of this process refers to the queue any more; the kernel's own work is waited for.
        open_pair(&start(config(&[1])));
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
        veth("x");
        let ended = Arc::new(AtomicBool::new(false));
        let dataplane =
            Dataplane::start_with(config(&[0]), |_, _| SlowToEnd(Wires::new(), Arc::clone(&ended))).unwrap();
        let (port, _attached) = open_pair(&dataplane);
        dataplane.kill_worker(0);
        dataplane.close_port(port).unwrap_or_else(|error| panic!("{error}"));
        assert!(ended.load(Ordering::SeqCst), "the thread still ends, with the port's sockets");
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

        let dataplane = start(Config { frames: 128, ring_size: 64, ..config(&[0]) });
        let open = |interface: &str| {
            let request = PortRequest::new(interface, PortPath::PairOf(0));
            dataplane.open_port(&request)
        };
        let rejected = |interface: &str, parts: &[&str]| {
            let error = open(interface).unwrap_err().to_string();
            assert!(!error.contains('\n') && parts.iter().all(|part| error.contains(part)), "{error}");
            assert_eq!(dataplane.census().free, 128, "nothing is held after {error}");
        };
        rejected("none", &["interface none", "does not exist"]);
        rejected("a-name-that-is-too-long", &["does not exist"]);
        ip("link add name x type veth peer name xp");
        rejected("x", &["interface x is down", "ip link set dev x up"]);
        ip("link set dev x up");
        let other = start(config(&[1]));
        let (held, attached) = open_pair(&other);
        rejected("x", &["interface x is bound", "another AF_XDP socket"]);
        drop(attached);
        other.close_port(held).unwrap();
        open("x").unwrap();
        veth("c");
        let error = open("c").unwrap_err().to_string();
        assert!(error.contains("worker 0 has a pair"), "{error}");
    });
}
