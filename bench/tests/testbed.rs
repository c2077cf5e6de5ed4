//! The testbed itself, on plain kernel forwarding.

use std::net::IpAddr;
use std::time::Duration;

use penstock_bench::probe::{self, Flow, Outcome, Patience, Protocol, Servers, Service, Site};
use penstock_bench::testbed::{DIRECTORY, Namespace, Node, network_state};

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
    node
}

const SERVICES: [Service; 2] = [Service::Tcp(80), Service::Udp(53)];

#[test]
fn kernel_forwarding_lets_every_site_reach_every_other_over_both_families() {
    let mut node = node_with_pods("all", 5);
    let outside = node.add_outside("outside").unwrap();
    let mut sites: Vec<Site> = vec![(&node).into(), (&outside).into()];
    sites.extend(node.pods().iter().map(Site::from));
    let _servers = Servers::start_all(&sites, &SERVICES).unwrap();
    let probes = probe::all_pairs(&sites, &[Protocol::Tcp(80), Protocol::Udp(53), Protocol::Icmp]);
    assert_eq!(probes.len(), 7 * 6 * 2 * 3);
    let outcomes = probe::run(&sites, &probes, Patience::default()).unwrap();
    for (probe, outcome) in probes.iter().zip(&outcomes) {
        assert_eq!(*outcome, Outcome::Reached, "{probe:?}");
    }
}

#[test]
fn closed_ports_are_told_from_silence() {
    let node = node_with_pods("closed", 2);
    let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
    let _server = Servers::start(&sites[1], 1, &SERVICES).unwrap();
    // Nobody has the last address: the node's route to its pods' network does not exist, and says so at once.
    let silent: IpAddr = "10.244.1.77".parse().unwrap();
    node.namespace().set_sysctl("net/ipv4/icmp_ratemask", "8").unwrap();
    for (destination, protocol, expected) in [
        (sites[1].addresses[0], Protocol::Tcp(81), Outcome::Refused),
        (sites[1].addresses[1], Protocol::Tcp(81), Outcome::Refused),
        (sites[1].addresses[0], Protocol::Udp(54), Outcome::Refused),
        (sites[1].addresses[1], Protocol::Udp(54), Outcome::Refused),
        (sites[1].addresses[0], Protocol::Tcp(80), Outcome::Reached),
        (silent, Protocol::Tcp(80), Outcome::Failed(libc::ENETUNREACH)),
    ] {
        let outcome = probe::run_one(&sites[0], (1, destination), protocol, Patience::default()).unwrap();
        assert_eq!(outcome, expected, "{protocol} to {destination}");
    }
}

#[test]
fn silence_and_the_wrong_server_are_seen() {
    let mut node = node_with_pods("silence", 2);
    let sites: Vec<Site> = node.pods().iter().map(Site::from).collect();
    let _server = Servers::start(&sites[1], 1, &SERVICES).unwrap();
    let destination = sites[1].addresses[0];
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53)] {
        let outcome = probe::run_one(&sites[0], (2, destination), protocol, Patience::default()).unwrap();
        assert_eq!(outcome, Outcome::Wrong, "{protocol} of another identity");
    }
    let flow = Flow::open(&sites[0].namespace, (1, destination), 80, Duration::from_millis(300)).unwrap();
    flow.wait_for(10, Duration::from_secs(2)).unwrap();
    let index = node.pods()[1].interface_index();
    node.netlink().set_down(index).unwrap();
    let down = std::time::Instant::now();
    let blocked = flow.wait_until_blocked(Duration::from_secs(2)).expect("a link that is down blocks");
    assert!(blocked.saturating_duration_since(down) < Duration::from_millis(200));
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Icmp] {
        let quick = Patience { timeout: Duration::from_millis(50), attempts: 2 };
        let outcome = probe::run_one(&sites[0], (1, destination), protocol, quick).unwrap();
        assert!(!outcome.arrived(), "{protocol}: {outcome}");
    }
    node.remove_pod("test/pod-1").unwrap();
    assert_eq!(node.pods().len(), 1);
}

#[test]
fn namespaces_go_when_they_are_dropped_and_when_their_holder_panics() {
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
fn what_a_dead_process_left_is_swept() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let left = std::path::Path::new(DIRECTORY).join(format!("pen-{}-0-left", child.id()));
    std::fs::create_dir_all(DIRECTORY).unwrap();
    std::fs::write(&left, "").unwrap();
    // The sweep is at a process's first namespace, and this process may have made it: another one does it.
    let test = std::env::current_exe().unwrap();
    let name = "namespaces_go_when_they_are_dropped_and_when_their_holder_panics";
    let status = std::process::Command::new(test).args(["--exact", name]).output().unwrap().status;
    assert!(status.success());
    assert!(!left.exists());
}

#[test]
fn pods_added_and_removed_leave_the_node_as_it_was() {
    let mut node = node_with_pods("addremove", 1);
    node.settle().unwrap();
    let before = network_state(node.netlink()).unwrap();
    node.add_pod("test/more", &addresses("10.244.1.90", "fd00:10:244:1::90")).unwrap();
    node.settle().unwrap();
    assert_ne!(network_state(node.netlink()).unwrap(), before);
    node.remove_pod("test/more").unwrap();
    assert_eq!(network_state(node.netlink()).unwrap(), before);
}
