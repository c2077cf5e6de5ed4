//! Faults around the daemon: a full disk, a log that is not read, many or stuck clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{CleanupGuard, Daemon, Privileges, ScratchDir, penstock_binary};

use crate::faults::traffic::{ALLOWED, Sniffer, Stream};
use crate::fixture::{Fixture, pod, pods, policy};

/// A policy that admits TCP to one port of `pod-1`.
fn only_port(port: u16) -> String {
    policy("only", "pod-1", &format!("  ingress: [{{ports: [{{port: {port}}}, {{port: 7000, protocol: UDP}}]}}]\n"))
        .trim_start_matches("---\n")
        .to_owned()
}

/// A small tmpfs, unmounted at the end.
struct SmallDisk {
    path: PathBuf,
    _guard: CleanupGuard,
}

impl SmallDisk {
    fn new(scratch: &ScratchDir, bytes: u32) -> Self {
        let path = scratch.path().join("disk");
        std::fs::create_dir(&path).unwrap();
        let size = format!("size={bytes}");
        mount(Some("penstock-test"), &path, Some("tmpfs"), MsFlags::empty(), Some(size.as_str())).unwrap();
        let _guard = CleanupGuard::new({
            let path = path.clone();
            // If unmounting fails, it is a subdirectory of the scratch directory.
            move || {
                let _ = umount2(&path, MntFlags::MNT_DETACH);
            }
        });
        Self { path, _guard }
    }

    /// Uses up all free space.
    fn fill(&self) -> PathBuf {
        let file = self.path.join("filler");
        let mut filler = std::fs::File::create(&file).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        assert!(std::fs::write(self.path.join("more"), [0; 4096]).is_err(), "it is full");
        file
    }
}

fn tcp(fixture: &Fixture, port: u16) -> ProbeOutcome {
    let target = fixture.target("test/pod-1", false);
    probe::run_one(fixture.site("test/pod-0"), target, Protocol::Tcp(port), RetryPolicy::default()).unwrap()
}

/// Checks that forwarding and policy changes go on: a saved change is in effect soon.
fn assert_unaffected(fixture: &Fixture) {
    for (open, closed) in [(8080, 9090), (9090, 8080)] {
        fixture.save("only.yaml", &only_port(open));
        let deadline = Instant::now() + Duration::from_secs(30);
        while tcp(fixture, closed) != ProbeOutcome::Silent || tcp(fixture, open) != ProbeOutcome::Reached {
            assert!(Instant::now() < deadline, "a change of policy is not in effect");
        }
    }
}

#[test]
fn a_full_disk_stops_neither_packets_nor_policy_changes() {
    let disk_of = ScratchDir::new().unwrap();
    let disk = SmallDisk::new(&disk_of, 1 << 20);
    let verdicts = disk.path.join("verdicts.jsonl");
    let mut fixture = Fixture::of(&pods(2), |_, config| {
        let directory = disk.path.display();
        config.conntrack = format!("mapping = \"{directory}/conntrack\"\nentries = 4096\n");
        config.sections +=
            &format!("[verdict_log]\noutput = \"{directory}/verdicts.jsonl\"\neach_second = 1000\nopened = true\n");
    });
    assert_unaffected(&fixture);
    let filler = disk.fill();
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, Instant::now());
    assert_unaffected(&fixture);
    // A new pod is recorded beside the connection table. That fails, and the pod is served anyway.
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    fixture.save("late.yaml", late.trim_start_matches("---\n"));
    let addresses = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let seen = fixture.daemon.log().len();
    fixture.cluster.node.add_pod("test/late", &addresses).unwrap();
    fixture.daemon.log().wait_for_after(seen, "pod=test/late", Duration::from_secs(5)).unwrap();
    let logged = fixture.daemon.log().wait_for_after(seen, "No space left", Duration::from_secs(5)).unwrap();
    println!("{logged}");
    let numbers = stream.stop();
    assert_eq!(sniffer.stop()[&ALLOWED].len() as u64, numbers, "all arrive");
    // With free space the log continues.
    let length = std::fs::metadata(&verdicts).unwrap().len();
    std::fs::remove_file(filler).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while std::fs::metadata(&verdicts).unwrap().len() <= length {
        assert!(Instant::now() < deadline, "the verdict log does not go on");
        tcp(&fixture, 1);
    }
}

#[test]
fn concurrent_scrapes_use_at_most_two_threads() {
    const SCRAPERS: usize = 64;
    let metrics: SocketAddr = "127.0.0.1:9470".parse().unwrap();
    let fixture = Fixture::of(&pods(2), |_, config| config.metrics = Some(metrics));
    std::thread::scope(|scope| {
        let scrapers: Vec<_> = (0..SCRAPERS).map(|_| scope.spawn(|| fixture.http(metrics, "/metrics"))).collect();
        // On a busy machine some may be answered with 503.
        let answers = scrapers.into_iter().map(|scraper| scraper.join().unwrap());
        assert!(answers.filter(|answer| answer.contains("penstock_connections{")).count() > 0);
    });
    // The runtime keeps each for ten seconds and has at most two.
    let tasks = std::fs::read_dir(format!("/proc/{}/task", fixture.daemon.id())).unwrap().flatten();
    let names: Vec<_> = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect();
    let helpers = names.iter().filter(|name| name.starts_with("tokio")).count();
    assert!((1..=2).contains(&helpers), "{helpers} for {SCRAPERS} scrapers: {names:?}");
}

#[test]
fn a_disk_too_small_for_the_table_is_reported_at_startup() {
    let scratch = ScratchDir::new().unwrap();
    let disk = SmallDisk::new(&scratch, 64 << 10);
    let fixture = Fixture::of(&pods(1), |_, config| config.offload = false);
    let path = disk.path.join("conntrack");
    let toml = std::fs::read_to_string(fixture.daemon.config()).unwrap();
    let toml = toml.replace("mapping = \"off\"", &format!("mapping = \"{}\"", path.display()));
    let toml = toml.replace(&fixture.admin().display().to_string(), "off");
    let other = penstock_bench::testbed::Namespace::new("other").unwrap();
    let (status, lines) =
        Daemon::launch(&other, &toml, Privileges::All).unwrap().wait(Duration::from_secs(20)).unwrap();
    assert_eq!(status.code(), Some(2), "{}", lines.join("\n"));
    let logged: Vec<_> = lines.iter().filter(|line| line.contains("conntrack")).collect();
    assert!(logged.len() == 1 && logged[0].contains("No space left"), "{}", lines.join("\n"));
}

/// A daemon whose log goes to an unread pipe of one page.
struct UnreadLogDaemon {
    child: Child,
    stderr: ChildStderr,
}

impl UnreadLogDaemon {
    fn start(fixture: &Fixture) -> Self {
        let mut command = fixture.cluster.node.namespace().command(penstock_binary().unwrap());
        command.arg("run").arg("--config").arg(fixture.daemon.config()).env("NO_COLOR", "1");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        for pipe in [stdout.as_raw_fd(), stderr.as_raw_fd()] {
            // SAFETY: an open descriptor and a number; no memory is passed.
            let size = unsafe { libc::fcntl(pipe, libc::F_SETPIPE_SZ, 4096) };
            assert_eq!(size, 4096);
        }
        child.stdout = Some(stdout);
        Self { child, stderr }
    }

    fn wait(&mut self, limit: Duration) -> Option<i32> {
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for UnreadLogDaemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn an_unread_log_stops_neither_packets_nor_policy_nor_exit() {
    let mut fixture = Fixture::of(&pods(2), |_, _| {});
    fixture.kill();
    let mut unread = UnreadLogDaemon::start(&fixture);
    let deadline = Instant::now() + Duration::from_secs(20);
    while tcp(&fixture, 8080) != ProbeOutcome::Reached {
        assert!(Instant::now() < deadline, "it does not start");
    }
    // More lines than the pipe holds.
    for number in 0..100 {
        fixture.save("only.yaml", &only_port(1 + number));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_unaffected(&fixture);
    assert!(fixture.status().in_force);
    let process = Pid::from_raw(unread.child.id().cast_signed());
    kill(process, Signal::SIGUSR1).unwrap();
    assert_unaffected(&fixture);
    kill(process, Signal::SIGTERM).unwrap();
    assert_eq!(unread.wait(Duration::from_secs(30)), Some(0), "it ends in order");
    let mut first = vec![0; 64];
    unread.stderr.read_exact(&mut first).unwrap();
}

fn descriptors(process: Pid) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

#[test]
fn a_thousand_stuck_clients_stop_nothing() {
    const CLIENTS: usize = 1_000;
    let metrics: SocketAddr = "127.0.0.1:9469".parse().unwrap();
    let mut fixture = Fixture::of(&pods(2), |_, config| config.metrics = Some(metrics));
    let to = SocketAddr::new(fixture.site("test/pod-1").address(false).unwrap(), 7000);
    let sniffer = Sniffer::start(fixture.site("test/pod-1"), to);
    let stream = Stream::start(fixture.site("test/pod-0"), ALLOWED, to, Instant::now());
    let before = descriptors(fixture.daemon.id());
    let admin: Vec<UnixStream> = (0..CLIENTS).map(|_| ask_admin(fixture.admin())).collect();
    let scrapers: Vec<TcpStream> = fixture.cluster.node.namespace().run(|| (0..50).map(|_| scrape(metrics)).collect());
    assert_unaffected(&fixture);
    let late = pod("late", "10.244.1.77", "fd00:10:244:1::77");
    fixture.save("late.yaml", late.trim_start_matches("---\n"));
    let addresses = ["10.244.1.77".parse().unwrap(), "fd00:10:244:1::77".parse().unwrap()];
    let seen = fixture.daemon.log().len();
    fixture.cluster.node.add_pod("test/late", &addresses).unwrap();
    fixture.daemon.log().wait_for_after(seen, "attached pod=test/late", Duration::from_secs(10)).unwrap();
    println!("{} descriptors, {before} before", descriptors(fixture.daemon.id()));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", fixture.daemon.id())).unwrap();
    let limit: Vec<_> =
        limits.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(limit[3], limit[4], "as many as it may have, and not the usual 1,024");
    let numbers = stream.stop();
    assert_eq!(sniffer.stop()[&ALLOWED].len() as u64, numbers, "all arrive");
    drop((admin, scrapers));
    // Resources of gone clients are released; the late pod's port is open.
    let deadline = Instant::now() + Duration::from_secs(30);
    while descriptors(fixture.daemon.id()) > before + 20 {
        assert!(Instant::now() < deadline, "{} descriptors, {before} before", descriptors(fixture.daemon.id()));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(fixture.status().in_force, "and it answers");
}

/// A client of the admin API that sends a request and does not read.
fn ask_admin(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: node\r\n\r\n").unwrap();
    stream
}

/// A scraper that requests many pages and reads none.
fn scrape(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap();
    socket2::SockRef::from(&stream).set_recv_buffer_size(4096).unwrap();
    for _ in 0..20 {
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").unwrap();
    }
    stream
}
