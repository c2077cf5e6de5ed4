//! Connections across daemon restarts, floods of other pods, fragmentation, small links, and revocation by policy.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use penstock_bench::cluster::{Cluster, read_objects};
use penstock_bench::probe::{self, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{Daemon, DaemonConfig, Privileges, ScratchDir};

use crate::fixture::{Fixture, pods, policy};
use crate::forger::count_to;

/// Timeout for retransmissions after a pause of the daemon.
const TIMEOUT: Duration = Duration::from_secs(15);
const PORT: u16 = 7000;
/// `pod-1` admits only `pod-0`, on one port.
const FROM_POD_0: &str = "  ingress: [{from: [{podSelector: {matchLabels: {app: pod-0}}}], \
                          ports: [{port: 7000}, {port: 7000, protocol: UDP}, {port: 8080}]}]\n";

fn address(site: &Site, v6: bool) -> SocketAddr {
    SocketAddr::new(site.address(v6).unwrap(), PORT)
}

/// Both ends of a TCP connection.
fn connect(from: &Site, to: &Site, v6: bool) -> (TcpStream, TcpStream) {
    let there = address(to, v6);
    let listener = to.namespace.listen(there).unwrap();
    let client = from.namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT)).unwrap();
    let (server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(TIMEOUT)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (client, server)
}

/// Data over a connection, there and back.
fn exchange((client, server): &mut (TcpStream, TcpStream)) -> io::Result<()> {
    let mut bytes = [0; 5];
    client.write_all(b"there")?;
    server.read_exact(&mut bytes)?;
    assert_eq!(&bytes, b"there");
    server.write_all(b"again")?;
    client.read_exact(&mut bytes)?;
    assert_eq!(&bytes, b"again");
    Ok(())
}

/// A UDP socket of a site with this receive timeout.
fn socket(site: &Site, v6: bool, port: u16, wait: Duration) -> UdpSocket {
    let here = SocketAddr::new(site.address(v6).unwrap(), port);
    let socket = site.namespace.udp(here).unwrap();
    socket.set_read_timeout(Some(wait)).unwrap();
    socket
}

/// Replaces a manifest and waits until the workers have adopted it.
fn publish(scratch: &ScratchDir, manifests: &Path, daemon: &Daemon, yaml: &str) {
    let seen = daemon.log().len();
    scratch.save(&manifests.join("policy.yaml"), yaml.trim_start_matches("---\n")).unwrap();
    daemon.log().wait_for_after(seen, "published", Duration::from_secs(5)).unwrap();
    // With tcx it is in effect a grace period later, some milliseconds.
    std::thread::sleep(Duration::from_millis(200));
}

/// Settings of a small connection table in a file of the fixture's directory. Mid-stream pickup is off, so that
/// connections which continue after a restart were found in the file.
fn in_a_file(config: &DaemonConfig) -> String {
    let directory = config.manifests.parent().unwrap().display();
    format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\nmidstream_pickup = \"0s\"\n")
}

#[test]
fn connections_survive_a_daemon_restart_and_policy_is_in_force() {
    let mut logged = None;
    let fixture = Fixture::of(&pods(3), |_, config| {
        config.conntrack = in_a_file(config);
        logged = Some(config.clone());
    });
    let (config, there) = (logged.unwrap(), fixture.target("test/pod-1", false));
    let [pod_0, pod_1, pod_2] = ["test/pod-0", "test/pod-1", "test/pod-2"].map(|name| fixture.site(name).clone());
    let (namespace, mut daemon) = (fixture.cluster.node.namespace(), fixture.daemon);
    publish(&fixture.scratch, &fixture.manifests, &daemon, &policy("served", "pod-1", FROM_POD_0));
    let mut connections = [false, true].map(|v6| connect(&pod_0, &pod_1, v6));
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        connections.iter_mut().for_each(|connection| exchange(connection).unwrap());
        daemon.signal(signal).unwrap();
        daemon.wait(Duration::from_secs(30)).unwrap();
        daemon = Daemon::start(namespace, &config).unwrap();
        let line = daemon.log().wait_for_after(0, "connections found", Duration::from_secs(1)).unwrap();
        println!("after {signal}: {line}");
        assert!(line.contains("; removed 0 of pods that are gone"), "{line}");
        for connection in &mut connections {
            let outcome = exchange(connection);
            assert!(outcome.is_ok(), "after {signal}: {outcome:?}\n{}", daemon.log().lines().join("\n"));
        }
        for (from, expected) in [(&pod_2, ProbeOutcome::Silent), (&pod_0, ProbeOutcome::Reached)] {
            let outcome = probe::run_one(from, there, Protocol::Tcp(8080), RetryPolicy::default()).unwrap();
            assert_eq!(outcome, expected, "from {} after {signal}", from.name);
        }
    }
    // Connections that were found are evaluated against the current policy.
    publish(&fixture.scratch, &fixture.manifests, &daemon, &policy("served", "pod-1", "  ingress: []\n"));
    for mut connection in connections {
        connection.1.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        assert!(exchange(&mut connection).is_err(), "cut");
    }
}

#[test]
fn without_its_file_no_connection_survives() {
    let mut logged = None;
    // Between ends without policy no state is asked for.
    let yaml = pods(2) + &policy("served", "pod-1", FROM_POD_0);
    let fixture = Fixture::of(&yaml, |_, config| {
        config.conntrack = in_a_file(config);
        logged = Some(config.clone());
    });
    let (mut config, namespace) = (logged.unwrap(), fixture.cluster.node.namespace());
    let mut connection = connect(fixture.site("test/pod-0"), fixture.site("test/pod-1"), false);
    exchange(&mut connection).unwrap();
    fixture.daemon.signal(Signal::SIGKILL).unwrap();
    fixture.daemon.wait(Duration::from_secs(30)).unwrap();
    config.conntrack = "mapping = \"off\"\nmidstream_pickup = \"0s\"\n".into();
    let _daemon = Daemon::start(namespace, &config).unwrap();
    connection.1.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert!(exchange(&mut connection).is_err(), "it went on by other means than the table");
}

#[test]
fn a_second_daemon_on_the_same_connection_file_is_rejected() {
    let mut logged = None;
    let fixture = Fixture::of(&pods(1), |_, config| {
        config.conntrack = in_a_file(config);
        logged = Some(config.clone());
    });
    let config = DaemonConfig { admin: None, ..logged.unwrap() };
    let other = Cluster::build(&read_objects(&fixture.manifests).unwrap()).unwrap();
    let second = Daemon::launch(other.node.namespace(), &config.to_toml(), Privileges::All).unwrap();
    let (status, log) = second.wait(Duration::from_secs(20)).unwrap();
    assert_eq!(status.code(), Some(2), "{}", log.join("\n"));
    let line = log.iter().find(|line| line.contains("run/conntrack")).unwrap_or_else(|| panic!("{}", log.join("\n")));
    assert!(line.contains("is in use by another process: stop that one, or set another mapping"), "{line}");
    let there = fixture.target("test/pod-0", false);
    let outcome = probe::run_one(fixture.site("node"), there, Protocol::Icmp, RetryPolicy::default()).unwrap();
    assert_eq!(outcome, ProbeOutcome::Reached, "the first goes on");
}

/// Sends datagrams from this site to many ports of another: one connection each.
fn flood(from: &Site, to: &Site, connections: u16) {
    const AT_ONCE: u16 = 50;
    let (sockets, to) = ([40_000, 40_001].map(|port| socket(from, false, port, TIMEOUT)), to.address(false).unwrap());
    for first in (0..connections / 2).step_by(AT_ONCE.into()) {
        for port in first..first + AT_ONCE {
            // ICMP port unreachable is reported by the next call; ignore it.
            sockets.iter().for_each(|socket| drop(socket.send_to(b"flood", (to, 10_000 + port))));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

#[test]
fn a_flood_from_one_pod_does_not_evict_connections_of_others() {
    // With a quota, and without one: then a pod may use at most what is free.
    for quota in [512, 100_000] {
        let yaml = pods(3) + &policy("asks", "pod-0", "  ingress: []\n");
        let fixture = Fixture::of(&yaml, |_, config| {
            config.conntrack =
                format!("mapping = \"off\"\nentries = 4096\nmidstream_pickup = \"0s\"\nquota = {quota}\n");
        });
        let (pod_0, pod_1, pod_2) =
            (fixture.site("test/pod-0"), fixture.site("test/pod-1"), fixture.site("test/pod-2"));
        let mut connection = connect(pod_0, pod_1, false);
        let asking: Vec<UdpSocket> =
            (0..20).map(|n| socket(pod_0, false, 30_000 + n, Duration::from_millis(500))).collect();
        let answering = socket(pod_1, false, PORT, TIMEOUT);
        let mut bytes = [0; 64];
        let askers: Vec<SocketAddr> = (asking.iter())
            .map(|socket| {
                socket.send_to(b"question", answering.local_addr().unwrap()).unwrap();
                answering.recv_from(&mut bytes).unwrap().1
            })
            .collect();
        flood(pod_2, pod_1, 30_000);
        for asker in &askers {
            answering.send_to(b"answer", asker).unwrap();
        }
        let answered = asking.iter().filter(|socket| socket.recv(&mut bytes).is_ok()).count();
        assert_eq!(answered, asking.len(), "with a quota of {quota}");
        exchange(&mut connection).unwrap();
        let outcome =
            probe::run_one(pod_0, fixture.target("test/pod-1", false), Protocol::Tcp(8080), RetryPolicy::default());
        assert_eq!(outcome.unwrap(), ProbeOutcome::Reached, "a new connection of another pod");
    }
}

#[test]
fn fragments_of_8_kilobytes_pass_or_are_dropped_by_policy() {
    let fixture = Fixture::of(&(pods(3) + &policy("served", "pod-1", FROM_POD_0)), |_, _| {});
    let content: Vec<u8> = (0..8192u32).map(|n| (n % 251) as u8).collect();
    let mut arrived = vec![0; 10_000];
    for v6 in [false, true] {
        let there = address(fixture.site("test/pod-1"), v6);
        let server = socket(fixture.site("test/pod-1"), v6, PORT, TIMEOUT);
        let allowed = socket(fixture.site("test/pod-0"), v6, 0, TIMEOUT);
        allowed.send_to(&content, there).unwrap();
        let (length, from) = server.recv_from(&mut arrived).unwrap();
        assert!(arrived[..length] == content && from == allowed.local_addr().unwrap(), "{length} bytes from {from}");
        server.send_to(&content, from).unwrap();
        assert_eq!(allowed.recv(&mut arrived).unwrap(), content.len(), "the answer");

        server.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let denied = socket(fixture.site("test/pod-2"), v6, 0, TIMEOUT);
        denied.send_to(&content, there).unwrap();
        let error = server.recv_from(&mut arrived).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
    }
    // The first of each datagram's six fragments was denied, and the others waited in vain for one that passes.
    for (cause, packets) in [("ingress_denied", 2), ("fragment", 10)] {
        assert_eq!(count_to(&fixture, "test/pod-2", cause, packets), packets, "{cause}");
    }
}

/// Sends datagrams of this length until the sender learns that the path MTU is smaller, then one that must arrive.
fn assert_told_of_a_narrow_path(from: &Site, to: &Site, v6: bool, length: usize) {
    let receiver = socket(to, v6, PORT, TIMEOUT);
    let sender = socket(from, v6, 0, TIMEOUT);
    from.namespace.run(|| sender.connect(address(to, v6))).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let logged = loop {
        // The stack sets DF on what it believes to fit, and reports the error at a later call.
        match sender.send(&vec![1; length]) {
            Err(error) => break error,
            Ok(_) if Instant::now() > deadline => panic!("{} gets no error (IPv6: {v6})", from.name),
            Ok(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    assert_eq!(logged.raw_os_error(), Some(Errno::EMSGSIZE as i32), "{logged} (IPv6: {v6})");
    // Now it knows the path MTU and fragments.
    sender.send(&vec![2; length]).unwrap();
    let mut arrived = vec![0; 2 * length];
    assert_eq!(receiver.recv(&mut arrived).unwrap(), length, "IPv6: {v6}");
    assert_eq!(arrived[..length], vec![2; length]);
}

#[test]
fn packet_too_big_is_sent_when_the_next_link_is_smaller() {
    const NARROW: u32 = 1300;
    let mut outside = None;
    // Errors about its own connection are admitted, although nothing else is.
    let fixture = Fixture::of(&(pods(2) + &policy("asks", "pod-0", "  ingress: []\n")), |cluster, _| {
        let netlink = cluster.node.netlink();
        let narrow = cluster.node.pod("test/pod-1").unwrap();
        netlink.set_mtu(narrow.interface_index(), NARROW).unwrap();
        let machine = cluster.node.add_outside("outside").unwrap();
        let netlink = cluster.node.netlink();
        netlink.set_mtu(netlink.index(machine.interface()).unwrap(), NARROW).unwrap();
        outside = Some(machine);
    });
    let (pod_0, pod_1, outside) =
        (fixture.site("test/pod-0"), fixture.site("test/pod-1"), Site::from(&outside.unwrap()));
    for v6 in [false, true] {
        // From Penstock for another pod's link; from the node's stack for the link to another machine.
        assert_told_of_a_narrow_path(pod_0, pod_1, v6, 1400);
        assert_told_of_a_narrow_path(pod_0, &outside, v6, 1400);
    }
    let statistics = fixture.statistics();
    let line = statistics.iter().find(|line| line.contains("test/pod-0")).expect("a line of that pod");
    assert!(line.contains("too_big "), "{line}");
}

#[test]
fn a_revoked_connection_is_reset_at_both_ends_if_configured() {
    let fixture = Fixture::of(&pods(2), |_, config| config.conntrack += "on_revoke = \"reset\"\n");
    let (pod_0, pod_1) = (fixture.site("test/pod-0"), fixture.site("test/pod-1"));
    let mut connections = [false, true].map(|v6| connect(pod_0, pod_1, v6));
    connections.iter_mut().for_each(|connection| exchange(connection).unwrap());
    let datagrams = [false, true].map(|v6| {
        let (server, client) = (socket(pod_1, v6, PORT, TIMEOUT), socket(pod_0, v6, 0, TIMEOUT));
        pod_0.namespace.run(|| client.connect(address(pod_1, v6))).unwrap();
        client.send(b"question").unwrap();
        assert_eq!(server.recv(&mut [0; 64]).unwrap(), 8);
        (client, server)
    });
    publish(&fixture.scratch, &fixture.manifests, &fixture.daemon, &policy("closed", "pod-1", "  ingress: []\n"));
    for (client, server) in &mut connections {
        client.write_all(b"more").unwrap();
        for end in [client, server] {
            let error = end.read(&mut [0; 64]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        }
    }
    // The errno for "administratively prohibited" (`icmp_err_convert`, `tab_unreach` in net/ipv4 and net/ipv6).
    for ((client, _), logged) in datagrams.iter().zip([Errno::EHOSTUNREACH, Errno::EACCES]) {
        client.send(b"more").unwrap();
        assert_eq!(client.recv(&mut [0; 64]).unwrap_err().raw_os_error(), Some(logged as i32));
    }
}

/// Ingress of one pod, and egress of another.
#[test]
fn a_denied_client_fails_at_once_if_configured() {
    let closed = policy("closed", "pod-1", "  ingress: []\n")
        + &policy("mute", "pod-2", "  policyTypes: [Egress]\n  egress: []\n");
    let fixture = Fixture::of(&(pods(3) + &closed), |_, config| config.sections += "[deny]\nanswer = \"reject\"\n");
    for (from, to) in [("test/pod-0", "test/pod-1"), ("test/pod-2", "test/pod-0")] {
        let (from, to) = (fixture.site(from), fixture.site(to));
        // The errno for "administratively prohibited" (`icmp_err_convert`, `tab_unreach` in net/ipv4 and net/ipv6).
        for (v6, prohibited) in [(false, Errno::EHOSTUNREACH), (true, Errno::EACCES)] {
            let there = address(to, v6);
            let refused = from.namespace.run(|| TcpStream::connect_timeout(&there, Duration::from_secs(30)));
            assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused, "{there}");
            let client = socket(from, v6, 0, Duration::from_secs(30));
            from.namespace.run(|| client.connect(there)).unwrap();
            client.send(b"question").unwrap();
            assert_eq!(client.recv(&mut [0; 64]).unwrap_err().raw_os_error(), Some(prohibited as i32), "{there}");
        }
    }
}

/// Whatever the node's setting is; of two policies that differ, the one that says nothing.
#[test]
fn a_policy_says_whether_a_denied_client_is_told() {
    let noted = |name: &str, pod: &str, answer: &str| {
        let annotated = format!("name: {name}, annotations: {{policy.penstock.dev/deny-answer: {answer}}}");
        policy(name, pod, "  ingress: []\n").replace(&format!("name: {name}"), &annotated)
    };
    let denying = "---\napiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\n\
         metadata: {name: shut, annotations: {policy.penstock.dev/deny-answer: reject}}\n\
         spec:\n  tier: Admin\n  priority: 1\n  subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: pod-4}}}}\n\
         \x20 ingress: [{action: Deny, from: [{namespaces: {}}]}]\n";
    let yaml = pods(5)
        + &noted("tells", "pod-1", "reject")
        + &policy("plain", "pod-2", "  ingress: []\n")
        + &noted("tells-two", "pod-3", "reject")
        + &noted("mute", "pod-3", "none")
        + denying;
    for (section, told) in
        [("", [true, false, false, true]), ("[deny]\nanswer = \"reject\"\n", [true, true, false, true])]
    {
        let fixture = Fixture::of(&yaml, |_, config| config.sections += section);
        let from = fixture.site("test/pod-0");
        for (pod, is_told) in (1..).zip(told) {
            let there = address(fixture.site(&format!("test/pod-{pod}")), pod % 2 == 0);
            let limit = Duration::from_secs(if is_told { 30 } else { 2 });
            let error = from.namespace.run(|| TcpStream::connect_timeout(&there, limit)).unwrap_err();
            let expected = if is_told { io::ErrorKind::ConnectionRefused } else { io::ErrorKind::TimedOut };
            assert_eq!(error.kind(), expected, "pod-{pod}, {section}");
        }
    }
}
