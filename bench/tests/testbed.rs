//! Tests of the testbed itself, on plain kernel forwarding.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use ipnet::IpNet;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use penstock_bench::load::{Generator, UdpFlow, UdpSink, transfer};
use penstock_bench::probe::{
    self, EchoConnection, EchoServers, EchoService, Probe, ProbeOutcome, Protocol, RetryPolicy, Site,
};
use penstock_bench::testbed::{DIRECTORY, Inventory, Namespace, Node, RouteVia, network_state};

fn addresses(v4: &str, v6: &str) -> [IpAddr; 2] {
    [v4.parse().unwrap(), v6.parse().unwrap()]
}

fn node_with_pods(label: &str, pods: u8) -> Node {
    let mut node = Node::new(label, &addresses("172.18.0.2", "fd00:172:18::2")).unwrap();
    for number in 0..pods {
        let v4 = format!("10.244.1.{}", 10 + number);
        let v6 = format!("fd00:10:244:1::{}", 10 + number);
        node.add_pod(&format!("test/pod-{number}"), &addresses(&v4, &v6)).unwrap();
    }
    node.settle().unwrap();
    node
}

const SERVICES: [EchoService; 3] = [EchoService::Tcp(80), EchoService::Udp(53), EchoService::Sctp(80)];

#[test]
fn kernel_forwarding_lets_every_site_reach_every_other() {
    let mut node = node_with_pods("all", 5);
    let outside = node.add_outside("outside").unwrap();
    let mut sites: Vec<Site> = vec![(&node).into(), (&outside).into()];
    sites.extend(node.pods().iter().map(Site::from));
    let _servers = EchoServers::start_all(&sites, &SERVICES).unwrap();
    let protocols = [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Sctp(80), Protocol::Icmp];
    let probes = probe::all_pairs(&sites, &protocols);
    assert_eq!(probes.len(), 7 * 6 * 2 * 4);
    let outcomes = probe::run(&sites, &probes, RetryPolicy::default()).unwrap();
    for (probe, outcome) in probes.iter().zip(&outcomes) {
        assert_eq!(*outcome, ProbeOutcome::Reached, "{probe:?}");
    }
}

#[test]
fn closed_ports_differ_from_silence() {
    let node = node_with_pods("closed", 2);
    let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
    let _server = EchoServers::start(&sites[1], 1, &SERVICES).unwrap();
    // The last address is unused and the node has no route to its network: it reports an error immediately.
    let silent: IpAddr = "10.244.1.77".parse().unwrap();
    node.namespace().set_sysctl("net/ipv4/icmp_ratemask", "8").unwrap();
    for (destination, protocol, expected) in [
        (sites[1].addresses[0], Protocol::Tcp(81), ProbeOutcome::Refused),
        (sites[1].addresses[1], Protocol::Tcp(81), ProbeOutcome::Refused),
        (sites[1].addresses[0], Protocol::Udp(54), ProbeOutcome::Refused),
        (sites[1].addresses[1], Protocol::Udp(54), ProbeOutcome::Refused),
        // Nothing answers for a port without a server where another port has one.
        (sites[1].addresses[0], Protocol::Sctp(81), ProbeOutcome::Silent),
        (sites[1].addresses[1], Protocol::Sctp(81), ProbeOutcome::Silent),
        (sites[1].addresses[0], Protocol::Tcp(80), ProbeOutcome::Reached),
        (silent, Protocol::Tcp(80), ProbeOutcome::Failed(libc::ENETUNREACH)),
    ] {
        let outcome = probe::run_one(&sites[0], (1, destination), protocol, RetryPolicy::default()).unwrap();
        assert_eq!(outcome, expected, "{protocol} to {destination}");
    }
    if !Path::new("/proc/net/sctp").exists() {
        // A kernel without SCTP says so, unless a raw socket takes the packet.
        for &destination in &sites[0].addresses {
            let outcome = probe::run_one(&sites[1], (0, destination), Protocol::Sctp(80), RetryPolicy::default());
            assert_eq!(outcome.unwrap(), ProbeOutcome::Refused, "SCTP to {destination}");
        }
    }
}

#[test]
fn a_probe_has_the_source_address_that_it_asks_for() {
    let mut node = Node::new("sources", &[]).unwrap();
    let two: Vec<IpAddr> = ["10.244.1.10", "fd00::10", "10.244.1.20", "fd00::20"].map(|it| it.parse().unwrap()).into();
    node.add_pod("test/client", &two).unwrap();
    node.add_pod("test/server", &addresses("10.244.1.11", "fd00::11")).unwrap();
    node.settle().unwrap();
    let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
    let _servers = EchoServers::start_all(&sites, &SERVICES).unwrap();
    // Answers to the second address of each family get lost.
    let server = sites[1].namespace.netlink().unwrap();
    let lo = server.index("lo").unwrap();
    two[2..].iter().for_each(|&lost| server.add_route(IpNet::from(lost), lo, RouteVia::Link).unwrap());
    let patience = RetryPolicy { timeout: Duration::from_millis(100), attempts: 3 };
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Sctp(80), Protocol::Icmp] {
        let probe = |&source: &IpAddr| {
            let destination = sites[1].address(source.is_ipv6()).unwrap();
            Probe { from: 0, to: 1, source: Some(source), destination, protocol }
        };
        let outcomes = probe::run(&sites, &two.iter().map(probe).collect::<Vec<_>>(), patience).unwrap();
        let arrived = outcomes.iter().map(|outcome| outcome.arrived()).collect::<Vec<_>>();
        assert_eq!(arrived, [true, true, false, false], "{protocol}: {outcomes:?}");
    }
}

#[test]
fn silence_and_a_wrong_server_are_detected() {
    let mut node = node_with_pods("silence", 2);
    let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
    let _server = EchoServers::start(&sites[1], 1, &SERVICES).unwrap();
    let destination = sites[1].addresses[0];
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Sctp(80)] {
        let outcome = probe::run_one(&sites[0], (2, destination), protocol, RetryPolicy::default()).unwrap();
        assert_eq!(outcome, ProbeOutcome::Wrong, "{protocol} of another identity");
    }
    let flow = EchoConnection::open(&sites[0].namespace, (1, destination), 80, Duration::from_millis(300)).unwrap();
    flow.wait_for(10, Duration::from_secs(2)).unwrap();
    let index = node.pods()[1].interface_index();
    node.netlink().set_down(index).unwrap();
    flow.wait_until_blocked(Duration::from_secs(30)).expect("a link that is down blocks");
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Sctp(80), Protocol::Icmp] {
        let quick = RetryPolicy { timeout: Duration::from_millis(50), attempts: 2 };
        let outcome = probe::run_one(&sites[0], (1, destination), protocol, quick).unwrap();
        assert!(!outcome.arrived(), "{protocol}: {outcome}");
    }
    node.remove_pod("test/pod-1").unwrap();
    assert_eq!(node.pods().len(), 1);
}

#[test]
fn the_inventory_reports_leftovers_of_this_process_alone() {
    let own = Namespace::new("pins").unwrap();
    let looked = own.clone();
    // On a separate thread: no other thread sees what it mounts.
    let looking = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        // Not `/`, which is no mount point in a chroot.
        mount(None::<&str>, "/sys", None::<&str>, private, None::<&str>).unwrap();
        let root = Path::new("/sys/fs/bpf");
        mount(Some("none"), root, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
        let before = Inventory::take().unwrap();
        // Other tests of this process come and go meanwhile.
        let differs = || {
            let mut lines = Inventory::take().unwrap().difference(&before);
            lines.retain(|line| line.contains("pinned"));
            lines
        };
        // Depending on its configuration, the kernel puts two objects of its own there.
        mount(Some("bpf"), root, Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
        fs::create_dir_all(root.join("penstock/1")).unwrap();
        assert_eq!(differs(), [""; 0]);
        let pins = root.join(format!("penstock/{}", looked.inode().unwrap()));
        fs::create_dir(&pins).unwrap();
        let left = format!("left behind: pinned {}", pins.display());
        assert_eq!(differs(), [left]);
        fs::remove_dir(&pins).unwrap();
        assert_eq!(differs(), [""; 0]);
    });
    looking.join().unwrap();
    drop(own);
}

#[test]
fn namespaces_are_removed_on_drop_and_on_panic() {
    let name = {
        let namespace = Namespace::new("dropped").unwrap();
        assert!(namespace.path().exists());
        namespace.name().to_owned()
    };
    assert!(!std::path::Path::new(DIRECTORY).join(name).exists());

    let (sender, receiver) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let namespace = Namespace::new("panicked").unwrap();
        sender.send(namespace.path()).unwrap();
        panic!("on purpose");
    });
    let path = receiver.recv().unwrap();
    assert!(panicked.join().is_err());
    assert!(!path.exists());
}

#[test]
fn leftovers_of_a_dead_process_are_removed() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let left = std::path::Path::new(DIRECTORY).join(format!("pen-{}-0-left", child.id()));
    std::fs::create_dir_all(DIRECTORY).unwrap();
    std::fs::write(&left, "").unwrap();
    // The sweep runs at a process' first namespace, which may already exist here: so another process does it.
    let test = std::env::current_exe().unwrap();
    let name = "testbed::namespaces_are_removed_on_drop_and_on_panic";
    let output = std::process::Command::new(test).args(["--exact", name]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    assert!(!left.exists());
}

#[test]
fn adding_and_removing_pods_leaves_the_node_unchanged() {
    let mut node = node_with_pods("addremove", 1);
    let before = network_state(node.netlink()).unwrap();
    node.add_pod("test/more", &addresses("10.244.1.90", "fd00:10:244:1::90")).unwrap();
    node.settle().unwrap();
    assert_ne!(network_state(node.netlink()).unwrap(), before);
    node.remove_pod("test/more").unwrap();
    assert_eq!(network_state(node.netlink()).unwrap(), before);
}

#[test]
fn bulk_transfers_are_counted_and_generated_frames_arrive() {
    let node = node_with_pods("load", 2);
    let (from, to) = (&node.pods()[0], &node.pods()[1]);
    for v6 in [false, true] {
        let address = to.address(v6).unwrap();
        let report = transfer(from.namespace(), to.namespace(), address, 20_000_000).unwrap();
        assert!(report.bytes >= 20_000_000 && report.segments > 300, "{report:?}");
        assert!(report.gigabits_per_second() > 0.1, "{report:?}");
    }
    let destination = SocketAddr::new(to.address(false).unwrap(), 7000);
    let sink = UdpSink::open(to.namespace(), destination).unwrap();
    let flow = UdpFlow {
        source_mac: from.namespace().netlink().unwrap().mac("eth0").unwrap(),
        gateway_mac: node.netlink().mac(from.interface()).unwrap(),
        source: SocketAddr::new(from.address(false).unwrap(), 40_000),
        destination,
    };
    let generator = from.namespace().run(|| Generator::open("eth0")).unwrap();
    let before = sink.arrived().unwrap();
    let sent = generator.run_for(&flow.frame(64).unwrap(), Duration::from_millis(50)).unwrap();
    let datagrams = sink.drain(Duration::from_millis(500)).unwrap();
    assert!(datagrams.iter().all(|(from, content)| *from == flow.source && content.len() == 64 - 42));
    let arrived = sink.arrived().unwrap() - before;
    assert!(arrived > 100 && arrived <= sent, "{arrived} of {sent}");
    assert_eq!(sink.wrong_checksums().unwrap(), 0);
}
