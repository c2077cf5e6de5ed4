//! A node with a kubelet's default number of pods, and two workers. In a test program of its own, since it measures
//! kernel memory, which is not per process.

use std::fmt::Write;
use std::time::{Duration, Instant};

use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::expectation::{Expectation, PolicyOracle};
use penstock_bench::probe::{self, EchoServers, EchoService, Probe, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{Daemon, DaemonConfig, Privileges, ScratchDir};
use penstock_dataplane::worker::available_cores;

/// The kubelet's default.
const PODS: usize = 110;
/// Pods are labelled by their index modulo this.
const GROUPS: usize = 5;
/// Limit for the process' resident memory, UMEM included and its executable not, and the kernel's memory for its sockets, in bytes.
const MAX_MEMORY: u64 = 150_000_000;
/// Sources that send at the same time: each probe uses a socket or two.
const AT_ONCE: usize = 10;
/// How often the daemon is started once more if the rest of the machine seems to have taken memory meanwhile.
const AGAIN: usize = 3;

/// Group 0 admits only group 1, group 2 sends only to group 3, group 4 admits only TCP.
fn manifests() -> String {
    let mut yaml = String::from(
        "{apiVersion: v1, kind: Namespace, metadata: {name: test}}\n---\n\
         apiVersion: v1\nkind: Node\nmetadata: {name: node}\n\
         status: {addresses: [{type: InternalIP, address: 172.18.0.2}, {type: InternalIP, address: \"fd00:172:18::2\"}]}\n",
    );
    for number in 0..PODS {
        writeln!(
            yaml,
            "---\napiVersion: v1\nkind: Pod\n\
             metadata: {{namespace: test, name: pod-{number}, labels: {{group: g{}}}}}\n\
             spec: {{nodeName: node, containers: [{{name: main, image: example.invalid/test}}]}}\n\
             status: {{phase: Running, podIPs: [{{ip: 10.244.1.{}}}, {{ip: \"fd00:10:244:1::{}\"}}]}}",
            number % GROUPS,
            10 + number,
            10 + number
        )
        .unwrap();
    }
    for (group, rules) in [
        (0, "ingress: [{from: [{podSelector: {matchLabels: {group: g1}}}]}]"),
        (2, "policyTypes: [Egress], egress: [{to: [{podSelector: {matchLabels: {group: g3}}}]}]"),
        (4, "ingress: [{ports: [{port: 8080}]}]"),
    ] {
        writeln!(
            yaml,
            "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{namespace: test, name: g{group}}}\n\
             spec: {{podSelector: {{matchLabels: {{group: g{group}}}}}, {rules}}}"
        )
        .unwrap();
    }
    yaml
}

/// Memory of a process in bytes: a field of `/proc/PID/status`.
fn memory(daemon: &Daemon, field: &str) -> u64 {
    bytes(&format!("/proc/{}/status", daemon.id()), field)
}

/// Bytes of a process' own executable in memory, which the unoptimised one of the tests has several times as many of.
fn of_executable(daemon: &Daemon) -> u64 {
    let executable = std::fs::read_link(format!("/proc/{}/exe", daemon.id())).unwrap();
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", daemon.id())).unwrap();
    let mut is_of_it = false;
    let rss = maps.lines().filter_map(|line| {
        if line.split_whitespace().next().is_some_and(|range| range.contains('-')) {
            is_of_it = line.ends_with(executable.to_str().unwrap());
        }
        line.strip_prefix("Rss:").filter(|_| is_of_it)
    });
    rss.map(|size| size.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10).sum()
}

/// The kernel's own memory, once it stands still: it frees much of it some time later. It includes a descriptor of every UMEM
/// frame for every port.
fn kernels_own() -> u64 {
    const STILL: u64 = 500_000;
    let read = || bytes("/proc/meminfo", "VmallocUsed") + bytes("/proc/meminfo", "SUnreclaim");
    let (deadline, mut last, mut still) = (Instant::now() + Duration::from_secs(10), read(), 0);
    while still < 5 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
        let now = read();
        still = if now.abs_diff(last) < STILL { still + 1 } else { 0 };
        last = now;
    }
    last
}

fn bytes(file: &str, field: &str) -> u64 {
    let status = std::fs::read_to_string(file).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect("the field is there");
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() << 10
}

fn start(cluster: &Cluster, scratch: &ScratchDir) -> (Daemon, Duration) {
    let mut config = DaemonConfig::new("node", &scratch.path().join("manifests"));
    // Everything else is at its default, as on a real node.
    let cores: Vec<usize> = available_cores().iter().take(2).map(|core| core.0).collect();
    config.sections = format!("[workers]\ncores = {cores:?}\n");
    config.conntrack = format!("mapping = \"{}/run/conntrack\"\n", scratch.path().display());
    let began = Instant::now();
    let daemon = Daemon::launch(cluster.node.namespace(), &config.to_toml(), Privileges::All).unwrap();
    let ready = daemon.log().wait_for_after(0, "ready: ", Duration::from_secs(120));
    assert!(ready.is_ok(), "not ready:\n{}", daemon.log().lines().join("\n"));
    (daemon, began.elapsed())
}

/// Memory that the kernel takes when the daemon starts, or gives back when it ends, in bytes: the smaller of both.
fn kernels_for_another_start(cluster: &Cluster, scratch: &ScratchDir) -> u64 {
    let before = kernels_own();
    let (daemon, _) = start(cluster, scratch);
    let running = kernels_own();
    daemon.stop().unwrap();
    running.saturating_sub(before).min(running.saturating_sub(kernels_own()))
}

/// The probe of a pair: families and protocols rotate.
fn probe_of(cluster: &Cluster, from: usize, to: usize) -> Probe {
    let protocol = [Protocol::Tcp(8080), Protocol::Udp(53), Protocol::Icmp][(from + 2 * to) % 3];
    let destination = cluster.sites[to].address((from + to) % 2 == 1).unwrap();
    Probe { from, to, source: None, destination, protocol }
}

/// Sends one probe for each pair; returns the differences and how many were allowed and denied.
fn all_pairs(cluster: &Cluster, oracle: &PolicyOracle) -> (Vec<String>, [usize; 2]) {
    let (mut differences, mut counts) = (Vec::new(), [0, 0]);
    let places: Vec<usize> = (0..cluster.sites.len()).collect();
    for sources in places.chunks(AT_ONCE) {
        let pairs = sources.iter().flat_map(|&from| places.iter().map(move |&to| (from, to)));
        let probes: Vec<Probe> =
            pairs.filter(|(from, to)| from != to).map(|(from, to)| probe_of(cluster, from, to)).collect();
        let expected: Vec<Expectation> = (probes.iter())
            .map(|probe| {
                let source = cluster.sites[probe.from].address(probe.destination.is_ipv6()).unwrap();
                oracle.expect(source, probe)
            })
            .collect();
        let quick = RetryPolicy { timeout: Duration::from_millis(200), attempts: 2 };
        let mut outcomes = probe::run(&cluster.sites, &probes, quick).unwrap();
        // On a busy machine a reply may take longer, which is not a denial.
        let is_late = |&at: &usize| expected[at] == Expectation::Allowed && outcomes[at] == ProbeOutcome::Silent;
        let late: Vec<usize> = (0..probes.len()).filter(is_late).collect();
        let again: Vec<Probe> = late.iter().map(|&at| probes[at]).collect();
        let patience = RetryPolicy { timeout: Duration::from_secs(1), attempts: 3 };
        for (at, outcome) in late.into_iter().zip(probe::run(&cluster.sites, &again, patience).unwrap()) {
            outcomes[at] = outcome;
        }
        for ((probe, expected), outcome) in probes.iter().zip(expected).zip(outcomes) {
            let allowed = expected == Expectation::Allowed;
            counts[usize::from(!allowed)] += 1;
            if outcome != if allowed { ProbeOutcome::Reached } else { ProbeOutcome::Silent } {
                let (from, to) = (&cluster.sites[probe.from].name, &cluster.sites[probe.to].name);
                differences
                    .push(format!("{from} to {to} ({}): expected {expected}; observed {outcome}", probe.protocol));
            }
        }
    }
    (differences, counts)
}

#[test]
fn a_node_serves_110_pods_within_its_memory() {
    let scratch = ScratchDir::new().unwrap();
    let directory = scratch.path().join("manifests");
    std::fs::create_dir(&directory).unwrap();
    std::fs::write(directory.join("all.yaml"), manifests()).unwrap();
    let objects = read_objects(&directory).unwrap();
    let cluster = Cluster::build(&objects).unwrap();
    let _servers = EchoServers::start_all(&cluster.sites, &[EchoService::Tcp(8080), EchoService::Udp(53)]).unwrap();
    let before = kernels_own();
    let (daemon, took) = start(&cluster, &scratch);
    let taken = kernels_own().saturating_sub(before);
    let (differences, [allowed, denied]) = all_pairs(&cluster, &PolicyOracle::new(&objects));
    let peak = memory(&daemon, "VmHWM") - of_executable(&daemon);
    let before = kernels_own();
    let (status, log) = daemon.stop().unwrap();
    // Other processes allocate and free memory too: the smallest difference contains the least of it.
    let mut taken = taken.min(before.saturating_sub(kernels_own()));
    for _ in 0..AGAIN {
        if peak + taken > MAX_MEMORY {
            taken = taken.min(kernels_for_another_start(&cluster, &scratch));
        }
    }
    println!(
        "{PODS} pods, two workers: ready after {took:.2?}; {} MB in memory at most, and {} MB of the kernel's own for its \
         sockets; {allowed} pairs allowed, {denied} denied",
        peak / 1_000_000,
        taken / 1_000_000
    );
    assert!(
        differences.is_empty(),
        "{} differ:\n{}",
        differences.len(),
        differences[..differences.len().min(40)].join("\n")
    );
    assert!(allowed > 3000 && denied > 3000, "{allowed} allowed, {denied} denied");
    assert!(peak + taken <= MAX_MEMORY, "{peak} bytes in memory, and {taken} of the kernel's");
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
}
