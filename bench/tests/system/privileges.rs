//! Privileges of the daemon once it is ready, and that they suffice for everything it has to do afterwards.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use penstock_admin::client::Client;
use penstock_admin::types::{Flows, FlowsQuery};
use penstock_agent::privileges::{RUNTIME, STARTUP};
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, Privileges, ScratchDir, network_state};

use crate::fixture::{Fixture, pod, pods, policy};

/// Timeout until a change of the manifests is in effect.
const IN_FORCE: Duration = Duration::from_secs(10);

/// Capability sets of a thread as the kernel names them, and its no_new_privs flag.
#[derive(PartialEq, Eq, Debug)]
struct ThreadCapabilities {
    permitted: u64,
    effective: u64,
    inheritable: u64,
    ambient: u64,
    bounding: u64,
    no_new: bool,
}

impl ThreadCapabilities {
    fn of(process: Pid, thread: &str) -> Self {
        let status = fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
            line.trim().to_owned()
        };
        let set = |name| u64::from_str_radix(&field(name), 16).unwrap();
        Self {
            permitted: set("CapPrm:"),
            effective: set("CapEff:"),
            inheritable: set("CapInh:"),
            ambient: set("CapAmb:"),
            bounding: set("CapBnd:"),
            no_new: field("NoNewPrivs:") == "1",
        }
    }

    /// A thread with these in effect and no way to gain more.
    fn only(effective: u64, bounding: u64) -> Self {
        Self { permitted: effective, effective, inheritable: 0, ambient: 0, bounding, no_new: true }
    }
}

/// Number and name of each thread.
fn threads(process: Pid) -> Vec<(String, String)> {
    let entries = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let named = numbers.filter_map(|number| {
        // A thread that ended meanwhile has no name.
        let name = fs::read_to_string(format!("/proc/{process}/task/{number}/comm")).ok()?;
        Some((number, name.trim().to_owned()))
    });
    named.collect()
}

fn mask(capabilities: &[caps::Capability]) -> u64 {
    capabilities.iter().map(caps::Capability::bitmask).sum()
}

/// Fails unless the control thread has exactly the kept capabilities and every other thread none.
fn assert_only_what_is_kept(daemon: &Daemon, bounding: u64, expected: &[&str]) {
    let process = daemon.id();
    let deadline = Instant::now() + Duration::from_secs(30);
    let threads = threads(process);
    for (number, name) in &threads {
        let kept = if *number == process.to_string() { mask(&RUNTIME) } else { 0 };
        let (has, wanted) = (|| ThreadCapabilities::of(process, number), ThreadCapabilities::only(kept, bounding));
        // A thread that has just started drops them at once, if the machine lets it run.
        while has() != wanted && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(has(), wanted, "thread {name}");
    }
    for wanted in expected {
        assert!(threads.iter().any(|(_, name)| name.starts_with(wanted)), "no thread {wanted} among {threads:?}");
    }
}

#[test]
fn once_ready_only_the_control_thread_has_capabilities() {
    let files = ScratchDir::new().unwrap();
    let socket = files.path().join("admin.sock");
    let fixture = Fixture::of(&pods(2), |_, config| {
        config.sections.push_str("\n[verdict_log]\noutput = \"stdout\"\n");
        config.admin = Some(socket.clone());
    });
    // These requests start a helper thread.
    let _: Flows = Client::new(&socket).unwrap().get("/v1/flows", &FlowsQuery::default()).unwrap();
    let expected = ["penstock", "policy", "connections", "manifests", "verdict-log", "worker", "notify", "tokio"];
    assert_only_what_is_kept(&fixture.daemon, mask(&RUNTIME), &expected);
}

/// A daemon with only what the systemd unit and the DaemonSet grant.
fn listed(cluster: &Cluster, config: &DaemonConfig) -> Daemon {
    let privileges = Privileges::Bounded(mask(&STARTUP));
    Daemon::start_with(cluster.node.namespace(), config, privileges).unwrap()
}

#[test]
fn capabilities_of_unit_and_daemonset_suffice_to_the_end() {
    for mode in ["closed", "open"] {
        let scratch = ScratchDir::new().unwrap();
        let manifests = scratch.path().join("manifests");
        fs::create_dir(&manifests).unwrap();
        let all = manifests.join("all.yaml");
        fs::write(&all, pods(1)).unwrap();
        let mut cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
        let before = network_state(cluster.node.netlink()).unwrap();
        let mut config = DaemonConfig::new(&cluster.name, &manifests);
        config.sections = format!("[umem]\nmemory = \"64MiB\"\n[fail]\nmode = \"{mode}\"\n");
        let daemon = listed(&cluster, &config);
        assert_only_what_is_kept(&daemon, mask(&STARTUP), &["worker"]);

        // Loading, attaching, a socket, routes and settings of a new interface.
        let addresses = ["10.244.1.11".parse().unwrap(), "fd00:10:244:1::11".parse().unwrap()];
        let seen = daemon.log().len();
        cluster.node.add_pod("test/pod-1", &addresses).unwrap();
        cluster.node.settle().unwrap();
        let closed = policy("closed", "pod-1", "  ingress: []\n");
        let yaml = pods(1) + &pod("pod-1", "10.244.1.11", "fd00:10:244:1::11");
        scratch.save(&all, &(yaml.clone() + &closed)).unwrap();
        daemon.log().wait_for_after(seen, "pods=2", IN_FORCE).unwrap();
        let from = Site::from(cluster.node.pod("test/pod-0").unwrap());
        let probe = || probe::run_one(&from, (0, addresses[0]), Protocol::Icmp, RetryPolicy::default()).unwrap();
        assert_eq!(probe(), ProbeOutcome::Silent, "fail.mode = {mode}");
        let seen = daemon.log().len();
        scratch.save(&all, &yaml).unwrap();
        daemon.log().wait_for_after(seen, "published: ", IN_FORCE).unwrap();
        assert_eq!(probe(), ProbeOutcome::Reached, "fail.mode = {mode}");
        assert_only_what_is_kept(&daemon, mask(&STARTUP), &["worker"]);

        daemon.signal(Signal::SIGTERM).unwrap();
        let (status, log) = daemon.wait(Duration::from_secs(30)).unwrap();
        assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
        let refused = |line: &&String| line.contains("Operation not permitted") || line.contains("Permission denied");
        assert_eq!(log.iter().find(refused), None);
        cluster.node.remove_pod("test/pod-1").unwrap();
        // The kernel does some of it asynchronously.
        let state = || network_state(cluster.node.netlink()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(3);
        while state() != before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(state(), before, "fail.mode = {mode}");
    }
}

#[test]
fn only_the_owner_can_use_the_admin_socket() {
    // Below a directory that everybody may enter, so that the socket's own mode denies access.
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let socket = scratch.path().join("admin.sock");
    let fixture = Fixture::of(&pods(1), |_, config| config.admin = Some(socket.clone()));
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    UnixStream::connect(&socket).unwrap();
    let refused = std::thread::spawn(move || {
        const NOBODY: libc::c_long = 65534;
        // SAFETY: no memory is passed. The raw system call, unlike libc's function, only affects this thread.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
        assert_eq!(result, 0);
        UnixStream::connect(&socket).unwrap_err().kind()
    });
    assert_eq!(refused.join().unwrap(), std::io::ErrorKind::PermissionDenied);
    drop(fixture);
}
