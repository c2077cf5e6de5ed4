//! The daemon starts and ends, and the node is as before.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{Daemon, DaemonConfig, ScratchDir, network_state};

use crate::fixture::{Fixture, pods, policy};

/// Links, addresses, routes, rules, and the forwarding settings of all interfaces.
fn state_of(cluster: &Cluster) -> Vec<String> {
    let mut state = network_state(cluster.node.netlink()).unwrap();
    let namespace = cluster.node.namespace();
    for interface in cluster.node.netlink().interface_names().unwrap().into_iter().chain(["all".to_owned()]) {
        for key in
            ["forwarding", "rp_filter", "proxy_arp", "arp_ignore", "arp_filter", "accept_local", "send_redirects"]
        {
            let path = format!("net/ipv4/conf/{interface}/{key}");
            state.push(format!("{path} = {}", namespace.sysctl(&path).unwrap()));
        }
        for key in ["forwarding", "proxy_ndp", "accept_ra", "disable_ipv6"] {
            let path = format!("net/ipv6/conf/{interface}/{key}");
            state.push(format!("{path} = {}", namespace.sysctl(&path).unwrap()));
        }
    }
    state
}

/// Waits for asynchronous changes by the kernel, then compares.
fn assert_as_before(cluster: &Cluster, before: &[String]) {
    assert_same(before, || state_of(cluster));
}

fn assert_same(before: &[String], state: impl Fn() -> Vec<String>) {
    let deadline = Instant::now() + Duration::from_secs(3);
    while state() != before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = state();
    let more: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
    let less: Vec<_> = before.iter().filter(|line| !after.contains(line)).collect();
    assert!(more.is_empty() && less.is_empty(), "more than before: {more:#?}\ngone: {less:#?}");
}

fn start() -> (Cluster, Vec<String>, DaemonConfig, ScratchDir) {
    let scratch = ScratchDir::new().unwrap();
    let manifests = scratch.path().join("manifests");
    std::fs::create_dir(&manifests).unwrap();
    std::fs::write(manifests.join("all.yaml"), pods(3)).unwrap();
    let cluster = Cluster::build(&read_objects(&manifests).unwrap()).unwrap();
    let before = state_of(&cluster);
    let config = DaemonConfig::new(&cluster.name, &manifests);
    (cluster, before, config, scratch)
}

#[test]
fn sigterm_and_sigint_restore_links_routes_and_settings() {
    let (cluster, before, config, _scratch) = start();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let daemon = Daemon::start(cluster.node.namespace(), &config).unwrap();
        assert_ne!(state_of(&cluster), before, "a running daemon has its links and routes");
        daemon.signal(signal).unwrap();
        let (status, log) = daemon.wait(Duration::from_secs(30)).unwrap();
        assert_eq!(status.code(), Some(0), "{signal}: {}", log.join("\n"));
        assert_as_before(&cluster, &before);
        // Without the daemon the kernel forwards again.
        let sites = &cluster.sites;
        let there = (2, sites[2].address(false).unwrap());
        let outcome = probe::run_one(&sites[1], there, Protocol::Icmp, RetryPolicy::default()).unwrap();
        assert_eq!(outcome, ProbeOutcome::Reached);
    }
}

/// The same without what belongs to the links that the daemon has made.
fn state_without_own_links(cluster: &Cluster) -> Vec<String> {
    let netlink = cluster.node.netlink();
    let own = netlink.interface_names().unwrap().into_iter().filter(|name| name.starts_with("penstock"));
    let marks: Vec<String> = own
        .flat_map(|name| {
            let index = netlink.index(&name).unwrap();
            let of_link = [format!("link {index} {name} "), format!("/conf/{name}/")];
            [of_link, [format!("index: {index}, "), format!("Oif({index})")]].concat()
        })
        .collect();
    let mut state = state_of(cluster);
    state.retain(|line| !marks.iter().any(|mark| line.contains(mark)));
    state
}

#[test]
fn the_nodes_routes_rules_and_settings_stay() {
    let (cluster, before, config, _scratch) = start();
    let daemon = Daemon::start(cluster.node.namespace(), &config).unwrap();
    let (sites, patience) = (&cluster.sites, RetryPolicy::default());
    for v6 in [false, true] {
        // Nobody listens at the port, and the pod itself says so.
        for (protocol, answer) in
            [(Protocol::Tcp(8080), ProbeOutcome::Refused), (Protocol::Icmp, ProbeOutcome::Reached)]
        {
            let there = (2, sites[2].address(v6).unwrap());
            let outcome = probe::run_one(&sites[1], there, protocol, patience).unwrap();
            assert_eq!(outcome, answer, "{protocol}, v6: {v6}: the pods are served");
        }
    }
    assert_ne!(state_of(&cluster), before, "a running daemon has links of its own");
    assert_same(&before, || state_without_own_links(&cluster));
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
    assert_as_before(&cluster, &before);
}

#[test]
fn the_start_after_a_kill_works_and_removes_leftovers() {
    let (cluster, before, config, _scratch) = start();
    let killed = Daemon::start(cluster.node.namespace(), &config).unwrap();
    killed.signal(Signal::SIGKILL).unwrap();
    let (status, _) = killed.wait(Duration::from_secs(30)).unwrap();
    assert_eq!(status.code(), None, "{status}");
    let daemon = Daemon::start(cluster.node.namespace(), &config).unwrap();
    let sites = &cluster.sites;
    let there = (2, sites[2].address(true).unwrap());
    let outcome = probe::run_one(&sites[1], there, Protocol::Icmp, RetryPolicy::default()).unwrap();
    assert_eq!(outcome, ProbeOutcome::Reached);
    let (status, log) = daemon.stop().unwrap();
    assert_eq!(status.code(), Some(0), "{}", log.join("\n"));
    assert_as_before(&cluster, &before);
}

#[test]
fn statistics_on_a_signal_and_at_exit_count_drops_by_reason() {
    let fixture = Fixture::of(&(pods(2) + &policy("closed", "pod-1", "  ingress: []\n")), |_, _| {});
    let denied = probe::run_one(
        fixture.site("test/pod-0"),
        fixture.target("test/pod-1", false),
        Protocol::Icmp,
        RetryPolicy::default(),
    );
    assert_eq!(denied.unwrap(), ProbeOutcome::Silent);
    let statistics = fixture.statistics();
    let line = statistics.iter().find(|line| line.contains("test/pod-0")).expect("a line of that pod");
    assert!(line.contains("ingress_denied 3"), "{line}");
    let (_, log) = fixture.daemon.stop().unwrap();
    assert!(log.iter().filter(|line| line.contains("ingress_denied 3")).count() == 2, "{}", log.join("\n"));
}

#[test]
fn no_other_thread_runs_on_a_core_that_a_worker_has_by_setting() {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        eprintln!("SKIPPED: there is one core");
        return;
    }
    let core = core_affinity::get_core_ids().unwrap().last().unwrap().id;
    let fixture = Fixture::of(&pods(1), |_, config| config.sections += &format!("[workers]\ncores = [{core}]\n"));
    let (mut of_workers, mut of_others, mut others) = (0, 0, 0);
    for task in std::fs::read_dir(format!("/proc/{}/task", fixture.daemon.id())).unwrap().flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        let cores = u128::from_str_radix(&field("Cpus_allowed:").replace(',', ""), 16).unwrap();
        if field("Name:").starts_with("worker-") {
            of_workers |= cores;
        } else {
            of_others |= cores;
            others += 1;
        }
    }
    assert!(others > 1, "the thread that reads manifests is one of them");
    assert!(of_workers != 0 && of_workers & of_others == 0, "workers {of_workers:b}, others {of_others:b}");
}
