//! NodePorts as kube-proxy sets them up: the node translates the destination to a pod, and the source to an address of its own.
//! Policy is evaluated for who sent the packets; the node's own processes alone are exempt.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use penstock_bench::probe::{self, EchoConnection, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{KubeProxy, Namespace, Outside, ProxiedPort, ProxiedService, ProxyMode, ServiceProtocol};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::service;

/// Addresses of the node, by family.
const NODE: [&str; 2] = ["172.18.0.2", "fd00:172:18::2"];
/// NodePorts that lead to the echo servers of `pod-1`.
const TCP: u16 = 30_080;
const UDP: u16 = 30_053;
/// Time without an answer after which a connection counts as blocked; a daemon starts in less.
const SILENCE: Duration = Duration::from_secs(4);

/// A rule of `pod-1` for these peers.
fn admits(peers: &str) -> String {
    policy("served", "pod-1", &format!("  ingress: [{{from: [{peers}]}}]\n"))
}

fn pod_peer(name: &str) -> String {
    format!("{{podSelector: {{matchLabels: {{app: {name}}}}}}}")
}

fn address(v6: bool) -> IpAddr {
    NODE[usize::from(v6)].parse().unwrap()
}

/// The rules of kube-proxy for node ports with `externalTrafficPolicy: Cluster`.
fn open_node_ports(node: &Namespace, backend: &Site) {
    let port = |(protocol, number, target, node_port)| {
        let backends = [false, true].map(|v6| SocketAddr::new(backend.address(v6).unwrap(), target));
        ProxiedPort { protocol, number, node_port: Some(node_port), backends: backends.into() }
    };
    let ports = [(ServiceProtocol::Tcp, 80, 8080, TCP), (ServiceProtocol::Udp, 53, 53, UDP)].map(port);
    let service = ProxiedService {
        name: "test/api".to_owned(),
        addresses: [false, true].map(service).into(),
        ports: ports.into(),
    };
    let node_addresses = [false, true].map(address).into();
    let proxy = KubeProxy { mode: ProxyMode::Iptables, node: node_addresses, services: vec![service] };
    proxy.install(node).unwrap();
}

struct NodePorts {
    fixture: Fixture,
    outside: Outside,
}

impl NodePorts {
    fn new(peers: &str) -> Self {
        let mut outside = None;
        let fixture = Fixture::of(&(pods(3) + &admits(peers)), |cluster, _| {
            outside = Some(cluster.node.add_outside("outside").unwrap());
            let backend = cluster.site("test/pod-1").unwrap();
            open_node_ports(cluster.node.namespace(), &cluster.sites[backend]);
        });
        Self { fixture, outside: outside.unwrap() }
    }

    fn probe(&self, from: &Site, v6: bool, protocol: Protocol) -> ProbeOutcome {
        let identity = self.fixture.cluster.site("test/pod-1").unwrap() as u32;
        let patience = RetryPolicy { attempts: 4, ..RetryPolicy::default() };
        probe::run_one(from, (identity, address(v6)), protocol, patience).unwrap()
    }

    /// A TCP connection from outside through the NodePort, over which data flow.
    fn connect(&self, v6: bool) -> EchoConnection {
        let identity = self.fixture.cluster.site("test/pod-1").unwrap() as u32;
        let flow = EchoConnection::open(self.outside.namespace(), (identity, address(v6)), TCP, SILENCE).unwrap();
        flow.wait_for(20, Duration::from_secs(30)).unwrap();
        flow
    }

    /// A peer that is the machine outside.
    fn outside_peer(&self) -> String {
        let site = Site::from(&self.outside);
        [false, true].map(|v6| block(site.address(v6).unwrap())).join(", ")
    }

    fn publish(&self, peers: &str) {
        self.fixture.enforce(&(pods(3) + &admits(peers)));
    }
}

/// A peer that is this address.
fn block(address: IpAddr) -> String {
    let length = if address.is_ipv6() { 128 } else { 32 };
    format!("{{ipBlock: {{cidr: {address}/{length}}}}}")
}

/// Each NodePort by each family.
fn ways() -> impl Iterator<Item = (bool, Protocol)> {
    [false, true].into_iter().flat_map(|v6| [(v6, Protocol::Tcp(TCP)), (v6, Protocol::Udp(UDP))])
}

#[test]
fn a_masqueraded_node_port_is_judged_by_its_client() {
    let ports = NodePorts::new(&pod_peer("pod-0"));
    let outside = Site::from(&ports.outside);
    let cluster = &ports.fixture.cluster;
    for (v6, protocol) in ways() {
        for (from, expected) in [
            (ports.fixture.site("test/pod-0"), ProbeOutcome::Reached),
            (ports.fixture.site("test/pod-2"), ProbeOutcome::Silent),
            (&outside, ProbeOutcome::Silent),
            // A process of the node, by the same port, is exempt.
            (&cluster.sites[cluster.site("node").unwrap()], ProbeOutcome::Reached),
        ] {
            let log = ports.fixture.statistics().join("\n");
            assert_eq!(ports.probe(from, v6, protocol), expected, "{} by {protocol}, v6: {v6}\n{log}", from.name);
        }
    }
    ports.fixture.assert_as_expected(&ports.fixture.matrix());
}

#[test]
fn a_block_admits_masqueraded_clients_by_their_own_address() {
    let ports = NodePorts::new(&[false, true].map(|v6| block(address(v6))).join(", "));
    let outside = Site::from(&ports.outside);
    for (v6, protocol) in ways() {
        assert_eq!(ports.probe(&outside, v6, protocol), ProbeOutcome::Silent, "{protocol}, v6: {v6}");
    }
    ports.publish(&ports.outside_peer());
    for (v6, protocol) in ways() {
        let log = ports.fixture.statistics().join("\n");
        assert_eq!(ports.probe(&outside, v6, protocol), ProbeOutcome::Reached, "{protocol}, v6: {v6}\n{log}");
    }
}

#[test]
fn denying_a_masqueraded_client_ends_its_connections() {
    let mut ports = NodePorts::new(&pod_peer("pod-0"));
    ports.publish(&ports.outside_peer());
    let flows = [false, true].map(|v6| ports.connect(v6));
    // Evaluated again, for the same client.
    ports.publish(&format!("{}, {}", pod_peer("pod-2"), ports.outside_peer()));
    for flow in &flows {
        flow.wait_for(50, Duration::from_secs(30)).unwrap();
    }
    // The next daemon knows the client, too, whichever side sends first.
    ports.fixture.kill();
    ports.fixture.restart();
    for flow in &flows {
        flow.wait_for(50, Duration::from_secs(30)).unwrap();
    }
    ports.publish(&pod_peer("pod-2"));
    for flow in &flows {
        assert!(
            flow.wait_until_blocked(Duration::from_secs(30)).is_some(),
            "{}",
            ports.fixture.statistics().join("\n")
        );
    }
}
