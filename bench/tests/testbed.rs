//! Tests of the testbed itself, on plain kernel forwarding.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use penstock_bench::load::{Generator, Sink, UdpFlow, transfer};
use penstock_bench::probe::{self, Flow, Outcome, Patience, Protocol, Servers, Service, Site};
use penstock_bench::testbed::{DIRECTORY, Inventory, Namespace, Node, network_state};

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
    // The last address is unused and the node has no route to its network: it reports an error immediately.
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
    flow.wait_until_blocked(Duration::from_secs(30)).expect("a link that is down blocks");
    for protocol in [Protocol::Tcp(80), Protocol::Udp(53), Protocol::Icmp] {
        let quick = Patience { timeout: Duration::from_millis(50), attempts: 2 };
        let outcome = probe::run_one(&sites[0], (1, destination), protocol, quick).unwrap();
        assert!(!outcome.arrived(), "{protocol}: {outcome}");
    }
    node.remove_pod("test/pod-1").unwrap();
    assert_eq!(node.pods().len(), 1);
}

#[test]
fn what_others_mount_or_pin_meanwhile_is_not_taken_for_left_behind_and_what_is_ones_own_is() {
    let own = Namespace::new("pins").unwrap();
    let looked = own.clone();
    // On a separate thread: no other thread sees what it mounts.
    let looking = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).unwrap();
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
    // The sweep runs at a process' first namespace, which may already exist here: so another process does it.
    let test = std::env::current_exe().unwrap();
    let name = "namespaces_go_when_they_are_dropped_and_when_their_holder_panics";
    let status = std::process::Command::new(test).args(["--exact", name]).output().unwrap().status;
    assert!(status.success());
    assert!(!left.exists());
}

#[test]
fn pods_added_and_removed_leave_the_node_as_it_was() {
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
        let receipt = transfer(from.namespace(), to.namespace(), address, 20_000_000).unwrap();
        assert!(receipt.octets >= 20_000_000 && receipt.segments > 300, "{receipt:?}");
        assert!(receipt.gigabits_per_second() > 0.1, "{receipt:?}");
    }
    let destination = SocketAddr::new(to.address(false).unwrap(), 7000);
    let sink = Sink::open(to.namespace(), destination).unwrap();
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
