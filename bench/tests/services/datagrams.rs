//! Datagrams in fragments, and SCTP, behind the node's connection tracking: it puts fragments together, translates the
//! datagram, and fragments it again. Policy holds for each of these packets as for any other.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use penstock_bench::probe::{self, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{KubeProxy, Outside, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{address, service};

/// The port of every server.
const SERVER: u16 = 7777;
/// The node ports to the server of `pod-1`, and to that outside; each for UDP and SCTP.
const TO_POD: u16 = 30_077;
const TO_OUTSIDE: u16 = 30_078;
/// Identity of the SCTP server outside.
const OUTSIDE: u32 = 77;
/// Bytes of a datagram: three fragments on an MTU of 1,500.
const LONG: usize = 4000;

/// `pod-1` admits `pod-0` and the machines of `from`, and may send to machines of `to`.
fn manifests(from: &[IpAddr], to: &[IpAddr]) -> String {
    let blocks = |addresses: &[IpAddr]| -> String {
        let block = |address: &IpAddr| {
            format!("{{ipBlock: {{cidr: '{address}/{}'}}}}, ", if address.is_ipv6() { 128 } else { 32 })
        };
        addresses.iter().map(block).collect()
    };
    let rules = format!(
        "  policyTypes: [Ingress, Egress]\n  ingress: [{{from: [{}{{podSelector: {{matchLabels: {{app: pod-0}}}}}}]}}]\n  \
         egress: [{{to: [{}{{podSelector: {{matchLabels: {{app: nobody}}}}}}]}}]\n",
        blocks(from),
        blocks(to),
    );
    pods(2) + &policy("some", "pod-1", &rules)
}

struct Datagrams {
    fixture: Fixture,
    outside: Outside,
}

impl Datagrams {
    /// A node with node ports to a pod and to a machine outside.
    fn new(mode: ProxyMode) -> Self {
        let mut outside = None;
        let fixture = Fixture::of(&manifests(&[], &[]), |cluster, _| {
            let machine = cluster.node.add_outside("outside").unwrap();
            let backend = &cluster.sites[cluster.site("test/pod-1").unwrap()];
            let to_pod: Vec<IpAddr> = [false, true].map(|v6| backend.address(v6).unwrap()).into();
            let both = [ServiceProtocol::Udp, ServiceProtocol::Sctp];
            let ports =
                [(TO_POD, to_pod), (TO_OUTSIDE, machine.addresses().to_vec())].into_iter().flat_map(|(number, to)| {
                    both.map(|protocol| {
                        let backends = to.iter().map(|&to| SocketAddr::new(to, SERVER)).collect();
                        ProxiedPort { protocol, number, node_port: Some(number), backends }
                    })
                });
            let addresses = [false, true].map(service).into();
            let services = vec![ProxiedService { name: "test/long".to_owned(), addresses, ports: ports.collect() }];
            let proxy = KubeProxy { mode, node: cluster.node.addresses().to_vec(), services };
            proxy.install(cluster.node.namespace()).unwrap();
            outside = Some(machine);
        });
        Self { fixture, outside: outside.unwrap() }
    }

    fn node(&self, v6: bool) -> IpAddr {
        self.fixture.cluster.node.addresses().iter().copied().find(|address| address.is_ipv6() == v6).unwrap()
    }

    /// Whether a long datagram arrives; of several that are sent.
    fn arrives(&self, from: &Site, to: SocketAddr, at: &UdpSocket) -> bool {
        let any: IpAddr = address(if to.is_ipv6() { "::" } else { "0.0.0.0" });
        let sender = from.namespace.udp((any, 0)).unwrap();
        let marker: [u8; 8] = rand::random();
        let datagram = [marker.as_slice(), &[7; LONG]].concat();
        let mut buffer = [0; 2 * LONG];
        (0..4).any(|_| {
            // A datagram before may have been refused.
            let _ = sender.send_to(&datagram, to);
            while let Ok(length) = at.recv(&mut buffer) {
                if buffer[..length] == datagram {
                    return true;
                }
            }
            false
        })
    }

    fn logs(&self) -> String {
        self.fixture.statistics().join("\n")
    }
}

/// Receives what comes to the server's port.
fn server(site: &Site, v6: bool) -> UdpSocket {
    let socket = site.namespace.udp((site.address(v6).unwrap(), SERVER)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    socket
}

#[test]
fn long_datagrams_to_a_pod_are_judged_by_their_sender() {
    let datagrams = Datagrams::new(ProxyMode::Iptables);
    let outside = Site::from(&datagrams.outside);
    let pod = datagrams.fixture.site("test/pod-1");
    let servers = [false, true].map(|v6| server(pod, v6));
    let check = |expected: bool| {
        for v6 in [false, true] {
            let ways = [(pod.address(v6).unwrap(), SERVER), (datagrams.node(v6), TO_POD)];
            for to in ways.map(SocketAddr::from) {
                let arrived = datagrams.arrives(&outside, to, &servers[usize::from(v6)]);
                assert_eq!(arrived, expected, "to {to}: {}", datagrams.logs());
            }
        }
    };
    check(false);
    datagrams.fixture.enforce(&manifests(&outside.addresses, &[]));
    check(true);
}

#[test]
fn long_datagrams_by_a_node_port_are_judged_for_the_machine() {
    for mode in [ProxyMode::Iptables, ProxyMode::Nftables] {
        let datagrams = Datagrams::new(mode);
        let outside = Site::from(&datagrams.outside);
        let servers = [false, true].map(|v6| server(&outside, v6));
        let check = |pod: &str, expected: bool| {
            for v6 in [false, true] {
                let to = SocketAddr::new(datagrams.node(v6), TO_OUTSIDE);
                let arrived = datagrams.arrives(datagrams.fixture.site(pod), to, &servers[usize::from(v6)]);
                assert_eq!(arrived, expected, "{pod} to {to}, {mode:?}: {}", datagrams.logs());
            }
        };
        check("test/pod-0", true);
        check("test/pod-1", false);
        datagrams.fixture.enforce(&manifests(&[], &outside.addresses));
        check("test/pod-1", true);
    }
}

#[test]
fn an_sctp_node_port_is_judged_for_both_its_ends() {
    let datagrams = Datagrams::new(ProxyMode::Iptables);
    let outside = Site::from(&datagrams.outside);
    let pod = datagrams.fixture.site("test/pod-1");
    let identity = datagrams.fixture.target("test/pod-1", false).0;
    let _servers = [(pod, identity), (&outside, OUTSIDE)]
        .map(|(site, identity)| EchoServers::start(site, identity, &[EchoService::Sctp(SERVER)]).unwrap());
    let check = |from: &Site, (port, identity): (u16, u32), expected: ProbeOutcome| {
        for v6 in [false, true] {
            let (to, protocol) = ((identity, datagrams.node(v6)), Protocol::Sctp(port));
            let outcome = probe::run_one(from, to, protocol, RetryPolicy::default()).unwrap();
            assert_eq!(outcome, expected, "{} to {protocol}, v6: {v6}: {}", from.name, datagrams.logs());
        }
    };
    check(&outside, (TO_POD, identity), ProbeOutcome::Silent);
    check(datagrams.fixture.site("test/pod-0"), (TO_OUTSIDE, OUTSIDE), ProbeOutcome::Reached);
    check(pod, (TO_OUTSIDE, OUTSIDE), ProbeOutcome::Silent);
    datagrams.fixture.enforce(&manifests(&outside.addresses, &outside.addresses));
    check(&outside, (TO_POD, identity), ProbeOutcome::Reached);
    check(pod, (TO_OUTSIDE, OUTSIDE), ProbeOutcome::Reached);
}
