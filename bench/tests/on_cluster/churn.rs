//! Many pods come and go without leaks.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::testbed::{Daemon, network_state};

use crate::on_cluster::fixture::{Fixture, pod};

/// Pods at a time, and number of rounds.
const AT_ONCE: usize = 50;
const ROUNDS: usize = 20;

/// Resources of a daemon that could leak.
#[derive(Clone, PartialEq, Eq, Debug)]
struct DaemonResources {
    /// Open files except sockets.
    files: usize,
    /// BPF programs and maps.
    bpf: usize,
    threads: usize,
    /// The frame account of its statistics. How many of the free ones the kernel has for what comes next may differ.
    frames: Vec<String>,
    links_and_routes: Vec<String>,
}

impl DaemonResources {
    fn by(fixture: &Fixture) -> Self {
        let process = format!("/proc/{}", fixture.daemon.id());
        let targets = open_files(&fixture.daemon);
        Self {
            files: targets.iter().filter(|target| !target.starts_with("socket:")).count(),
            bpf: targets.iter().filter(|target| target.contains("bpf")).count(),
            threads: fs::read_dir(format!("{process}/task")).unwrap().count(),
            frames: frames(&fixture.daemon),
            links_and_routes: network_state(fixture.node.netlink()).unwrap(),
        }
    }
}

impl DaemonResources {
    /// Measured when stable: a pod's removal is logged before its last resource is released.
    fn at_rest(fixture: &Fixture) -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut held = Self::by(fixture);
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let now = Self::by(fixture);
            if now == held {
                return now;
            }
            assert!(Instant::now() < deadline, "it does not come to rest: {now:?}");
            held = now;
        }
    }
}

/// Targets of its file descriptors.
fn open_files(daemon: &Daemon) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{}/fd", daemon.id())).unwrap().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.map(|target| target.to_string_lossy().into_owned()).collect()
}

fn sockets(daemon: &Daemon) -> usize {
    open_files(daemon).iter().filter(|target| target.starts_with("socket:")).count()
}

fn frames(daemon: &Daemon) -> Vec<String> {
    let seen = daemon.log().len();
    daemon.signal(Signal::SIGUSR1).unwrap();
    let line = daemon.log().wait_for_after(seen, "frames: ", Duration::from_secs(10)).unwrap();
    let account = line.split("frames: ").nth(1).unwrap_or_default().split(", ");
    account.filter(|part| !part.starts_with("free ") && !part.starts_with("fill ")).map(str::to_owned).collect()
}

/// Its private memory in KiB.
fn resident(daemon: &Daemon) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "minutes: make test-long"]
fn a_thousand_created_and_deleted_pods_leak_nothing() {
    let mut fixture = Fixture::start("");
    // One round first, so that allocations of the first use are done.
    round(&mut fixture, 0);
    let (before, sockets_before) = (DaemonResources::at_rest(&fixture), sockets(&fixture.daemon));
    let (memory, started) = (resident(&fixture.daemon), Instant::now());
    let mut slowest = Duration::ZERO;
    for number in 1..=ROUNDS {
        slowest = slowest.max(round(&mut fixture, number));
    }
    let (after, grown) = (DaemonResources::at_rest(&fixture), resident(&fixture.daemon).saturating_sub(memory));
    println!(
        "{} pods in {:.1?}; at worst {slowest:.1?} for {AT_ONCE} pods to be served; memory grew by {grown} KiB",
        AT_ONCE * ROUNDS,
        started.elapsed()
    );
    let DaemonResources { files, bpf, threads, frames, .. } = &after;
    println!("{files} files, {bpf} of them BPF, {threads} threads; frames {frames:?}");
    assert_eq!(after, before);
    // Connections to the API server vary; a leak of one per pod would be a thousand.
    let more = sockets(&fixture.daemon).saturating_sub(sockets_before);
    assert!(more <= 8, "{more} sockets more than before");
    assert!(grown < 8 * 1024, "memory grew by {grown} KiB");
}

/// Pods at a time, and rounds, of the test that reads the log.
const FEW: usize = 8;
const FEW_ROUNDS: usize = 4;

#[test]
fn pods_that_come_and_go_cause_no_warning() {
    let mut fixture = Fixture::start("");
    let seen = fixture.daemon.log().len();
    for number in 0..FEW_ROUNDS {
        let begun = fixture.daemon.log().len();
        let pods: Vec<_> = (0..FEW)
            .map(|place| {
                let (name, address) = (format!("pod-{number}-{place}"), format!("10.244.1.{}", 10 + place));
                // The object of some comes first, the interface of others.
                if place % 2 == 0 {
                    fixture.add_pod(&name, &address);
                } else {
                    fixture.server.admin().create(&pod(&name, &address)).unwrap();
                    fixture.wire_pod(&name, &address);
                }
                (name.clone(), pod(&name, &address))
            })
            .collect();
        fixture.daemon.log().wait_for_after(begun, "pods=8 ", Duration::from_secs(30)).unwrap();
        // As kubelet does, and as a forced deletion does.
        for (place, (name, object)) in pods.iter().enumerate() {
            if place % 2 == 0 {
                fixture.node.remove_pod(&format!("test/{name}")).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                fixture.server.admin().delete(object).unwrap();
            } else {
                fixture.server.admin().delete(object).unwrap();
                fixture.node.remove_pod(&format!("test/{name}")).unwrap();
            }
        }
        wait(&fixture, begun, FEW, "ports to be closed", |fixture| {
            fixture.daemon.log().lines()[begun..].iter().filter(|line| line.contains("closed interface=")).count()
        });
    }
    let lines = fixture.daemon.log().lines().split_off(seen);
    let loud: Vec<&String> = lines.iter().filter(|line| line.contains(" WARN ") || line.contains("ERROR ")).collect();
    assert!(loud.is_empty(), "{loud:#?}");
    assert!(lines.len() < FEW_ROUNDS * FEW * 12, "{} lines:\n{}", lines.len(), lines.join("\n"));
}

/// Creates pods, waits until they are served, and deletes them. Returns how long it took until all were served.
fn round(fixture: &mut Fixture, number: usize) -> Duration {
    let names: Vec<String> = (0..AT_ONCE).map(|pod| format!("pod-{number}-{pod}")).collect();
    let address = |place: usize| format!("10.244.{}.{}", 1 + number % 8, 10 + place);
    for (place, name) in names.iter().enumerate() {
        fixture.wire_pod(name, &address(place));
    }
    let pods: Vec<_> = names.iter().enumerate().map(|(place, name)| pod(name, &address(place))).collect();
    let (seen, begun) = (fixture.daemon.log().len(), Instant::now());
    fixture.server.admin().create_all(&pods).unwrap();
    let count = |fixture: &Fixture, text: &str| {
        fixture.daemon.log().lines()[seen..].iter().filter(|line| line.contains(text)).count()
    };
    wait(fixture, seen, 1, "snapshots with all pods", |fixture| count(fixture, "pods=50 "));
    let took = begun.elapsed();
    fixture.server.admin().delete_all(&pods).unwrap();
    for name in &names {
        fixture.node.remove_pod(&format!("test/{name}")).unwrap();
    }
    wait(fixture, seen, AT_ONCE, "ports to be closed", |fixture| count(fixture, "closed"));
    took
}

fn wait(fixture: &Fixture, seen: usize, least: usize, what: &str, count: impl Fn(&Fixture) -> usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while count(fixture) < least {
        let lines = fixture.daemon.log().lines().split_off(seen);
        assert!(Instant::now() < deadline, "waiting for {least} {what}:\n{}", lines.join("\n"));
        std::thread::sleep(Duration::from_millis(20));
    }
}
