//! Who a pod is does not follow from what a pod can set: its MAC address, ARP, neighbour discovery.

use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::Namespace;
use serde_json::json;

use crate::fixture::{Fixture, pods, policy};

const LIMIT: Duration = Duration::from_secs(30);
const PORT: u16 = 53;

/// `pod-1` takes in `pod-0` alone; `pod-2` may send nothing.
fn policies() -> String {
    let only_pod_0 = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}]}]\n";
    policy("served", "pod-1", only_pod_0) + &policy("evil", "pod-2", "  policyTypes: [Egress, Ingress]\n")
}

/// Runs the `ip` command in a namespace.
fn ip(namespace: &Namespace, arguments: &str) {
    let output = namespace.command("ip").args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether the other pod's server answers a datagram with this source.
fn is_answered(namespace: &Namespace, from: IpAddr, to: IpAddr) -> bool {
    let socket = namespace.udp(SocketAddr::new(from, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    (0..3).any(|_| {
        socket.send_to(b"x", SocketAddr::new(to, PORT)).unwrap();
        socket.recv(&mut [0; 99]).is_ok()
    })
}

fn reaches(fixture: &Fixture, from: &str) -> ProbeOutcome {
    let policy = RetryPolicy::default();
    probe::run_one(fixture.site(from), fixture.target("test/pod-1", false), Protocol::Udp(PORT), policy).unwrap()
}

#[test]
fn a_pod_with_its_neighbours_mac_and_address_stays_itself() {
    let fixture = Fixture::bridged(&(pods(3) + &policies()), |_, _| {});
    fixture.daemon.log().wait_for_after(0, "pods=3 ", LIMIT).unwrap();
    assert_eq!(reaches(&fixture, "test/pod-0"), ProbeOutcome::Reached);
    let (victim, evil) = (fixture.site("test/pod-0"), &fixture.site("test/pod-2").namespace);
    let mac = victim.namespace.netlink().unwrap().mac("eth0").unwrap();
    let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
    let seen = fixture.daemon.log().len();
    ip(evil, "link set eth0 down");
    ip(evil, &format!("link set eth0 address {mac}"));
    ip(evil, "link set eth0 up");
    let address = victim.address(false).unwrap();
    ip(evil, &format!("addr add {address}/24 dev eth0"));
    ip(evil, "route replace default via 10.244.1.1");
    // A neighbour that speaks keeps the kernel's entry, whatever the daemon makes of it.
    fixture.daemon.log().wait_for_after(seen, "of another pod on the same bridge", LIMIT).unwrap();
    let server = fixture.site("test/pod-1").address(false).unwrap();
    assert!(!is_answered(evil, address, server), "it sends as its neighbour");
    assert_eq!(reaches(&fixture, "test/pod-0"), ProbeOutcome::Reached, "the neighbour is cut off");
    let status = fixture.status();
    for (pod, of) in [("test/pod-0", "test/pod-0"), ("test/pod-2", "test/pod-2")] {
        let interface = status.pods.iter().find(|one| one.pod == pod).unwrap().interface.clone();
        assert_eq!(interface.as_deref(), Some(fixture.cluster.node.pod(of).unwrap().interface()));
    }
}

#[test]
fn a_plugins_result_names_a_pods_interface_before_any_neighbour() {
    let fixture = Fixture::bridged(&(pods(3) + &policies()), |cluster, config| {
        let results = config.admin.as_ref().unwrap().parent().unwrap().join("results");
        std::fs::create_dir(&results).unwrap();
        for number in 0..3 {
            let pod = cluster.node.pod(&format!("test/pod-{number}")).unwrap();
            let result = json!({
                "kind": "cniCacheV1", "containerId": format!("c{number}"), "ifName": "eth0", "networkName": "cbr0",
                "cniArgs": [["K8S_POD_NAMESPACE", "test"], ["K8S_POD_NAME", format!("pod-{number}")]],
                "result": {
                    "cniVersion": "1.0.0",
                    "interfaces": [{ "name": "cni0" }, { "name": pod.interface() }, { "name": "eth0", "sandbox": "/x" }],
                    "ips": pod.addresses().iter().map(|at| json!({ "address": format!("{at}/24") })).collect::<Vec<_>>(),
                },
            });
            let file = results.join(format!("cbr0-c{number}-eth0"));
            std::fs::write(&file, result.to_string()).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        config.keys = format!("cni_results = [\"{}\"]\n", results.display());
    });
    let lines = fixture.daemon.log().lines();
    assert!(lines.iter().any(|line| line.contains("ready: 3 pods")), "{}", lines.join("\n"));
    assert_eq!(reaches(&fixture, "test/pod-0"), ProbeOutcome::Reached);
    assert_eq!(reaches(&fixture, "test/pod-2"), ProbeOutcome::Silent);
}

#[test]
fn an_unknown_pod_cuts_nobody_off_by_arp() {
    let mut fixture = Fixture::bridged(&(pods(2) + &policies()), |_, _| {});
    fixture.daemon.log().wait_for_after(0, "pods=2 ", LIMIT).unwrap();
    let victim = fixture.site("test/pod-0").address(false).unwrap();
    // A bridge has the lowest MAC of its ports until it is given one: the new port must not change it.
    let shown = fixture.cluster.node.namespace().command("ip").args(["-o", "link", "show", "cni0"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap();
    ip(fixture.cluster.node.namespace(), &format!("link set cni0 address {mac}"));
    let seen = fixture.daemon.log().len();
    fixture.cluster.node.add_bridged_pod("test/new", &[victim], 1500).unwrap();
    fixture.daemon.log().wait_for_after(seen, "closed until its pod is known", LIMIT).unwrap();
    let new = fixture.cluster.node.pod("test/new").unwrap().namespace();
    // Announces the address that it has, which is the victim's.
    let deadline = Instant::now() + Duration::from_secs(3);
    while Instant::now() < deadline {
        let announced =
            new.command("arping").args(["-U", "-c", "3", "-w", "1", "-I", "eth0", &victim.to_string()]).output();
        if announced.is_err() {
            // Without that command: each new neighbour is asked for with the pod's own address.
            ip(new, "neigh flush dev eth0");
            let socket = new.udp(SocketAddr::new(victim, 0)).unwrap();
            socket.send_to(b"x", (IpAddr::from([10, 244, 1, 1]), 9)).unwrap();
        }
        assert_eq!(reaches(&fixture, "test/pod-0"), ProbeOutcome::Reached);
    }
    let node = fixture.cluster.node.namespace();
    let socket = node.udp("0.0.0.0:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    // The first datagram may be lost while the node resolves the address.
    let is_answered = (0..10)
        .any(|_| socket.send_to(b"x", SocketAddr::new(victim, PORT)).is_ok() && socket.recv(&mut [0; 99]).is_ok());
    assert!(is_answered, "the node does not reach the pod");
}
