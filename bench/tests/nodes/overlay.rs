//! A cluster as flannel and kube-proxy make it: a VXLAN overlay between two nodes, rules for Services and masquerade on both,
//! and Penstock beside them.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use penstock_bench::cluster::read_objects;
use penstock_bench::expectation::PolicyOracle;
use penstock_bench::matrix::{Matrix, MatrixEntry};
use penstock_bench::probe::{self, EchoServers, Frontend, ProbeOutcome, Protocol, RetryPolicy, Site};
use penstock_bench::testbed::{InterNodeLink, ProxyMode};

use crate::nodes::fixture::{Fixture, PROTOCOLS, SERVICES, Wiring};

const CLUSTER: &str = include_str!("two-nodes.yaml");
/// A port of Service `monitor` at which no echo server listens.
const BULK: u16 = 5201;
/// How far its node port is from that of TCP 8080.
const BULK_NODE_PORTS: u16 = 1000;
/// Identity of the server outside.
const OUTSIDE: u32 = 77;

/// Services with a backend on one of the two nodes: namespace, name, last part of their addresses, node port for TCP 8080 of the
/// pod, and the pod's addresses.
const BACKENDS: [(&str, &str, u8, u16, [&str; 2]); 3] = [
    ("shop", "db", 11, 30_011, ["10.244.2.11", "fd00:10:244:2::11"]),
    ("shop", "web", 10, 30_010, ["10.244.2.10", "fd00:10:244:2::10"]),
    ("ops", "monitor", 12, 30_012, ["10.244.1.12", "fd00:10:244:1::12"]),
];

fn services() -> String {
    let ports = |number: &dyn Fn(u16) -> String| -> String {
        let port = |(name, protocol, target): &(&str, &str, u16)| {
            format!("- {{name: {name}, protocol: {protocol}, {}}}\n", number(*target))
        };
        [("http", "TCP", 8080), ("sql", "TCP", 9090), ("dns", "UDP", 53), ("bulk", "TCP", BULK)]
            .iter()
            .map(port)
            .collect()
    };
    let mut yaml = String::new();
    for (namespace, name, last, node_port, addresses) in BACKENDS {
        let of_service = ports(&|target| match target {
            8080 => format!("port: 80, nodePort: {node_port}"),
            BULK => format!("port: {BULK}, nodePort: {}", node_port + BULK_NODE_PORTS),
            _ => format!("port: {target}"),
        });
        yaml += &format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{namespace: {namespace}, name: {name}}}\n\
             spec:\n  clusterIPs: [10.96.0.{last}, \"fd00:10:96::{last}\"]\n  ports:\n  {}\n",
            of_service.trim_end().replace('\n', "\n  ")
        );
        for (family, address) in ["IPv4", "IPv6"].into_iter().zip(addresses) {
            yaml += &format!(
                "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
                 metadata: {{namespace: {namespace}, name: {name}-{}, labels: {{kubernetes.io/service-name: {name}}}}}\n\
                 addressType: {family}\nendpoints: [{{addresses: ['{address}']}}]\nports:\n{}",
                family.to_lowercase(),
                ports(&|target| format!("port: {target}"))
            );
        }
    }
    yaml + DATABASES_SEND_TO_MONITORS
}

/// And names anywhere.
const DATABASES_SEND_TO_MONITORS: &str = "---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {namespace: shop, name: db-egress}
spec:
  podSelector: {matchLabels: {app: db}}
  policyTypes: [Egress]
  egress:
    - ports: [{port: 53, protocol: UDP}]
    - to: [{namespaceSelector: {matchLabels: {team: ops}}, podSelector: {matchLabels: {app: monitor}}}]
      ports: [{port: 8080}]
";

struct Overlay {
    fixture: Fixture,
    /// Services at their cluster addresses.
    services: Vec<Frontend>,
    beyond: Site,
    _server: EchoServers,
}

impl Overlay {
    fn start(mode: ProxyMode) -> Self {
        let wiring = Wiring::tunnelled();
        let fixture = Fixture::start_with(&(CLUSTER.to_owned() + &services()), wiring, &SERVICES, |_| {});
        let services = fixture.nodes.proxy_services(&fixture.manifests, mode);
        let mut services = services.unwrap().remove(0);
        services.retain(|frontend| frontend.name.starts_with("Service/"));
        // The probes' servers know nothing of this port.
        services.iter_mut().for_each(|service| service.ports.retain(|(sent, _)| *sent != Protocol::Tcp(BULK)));
        let beyond = Site::from(&fixture.beyond);
        let server = EchoServers::start(&beyond, OUTSIDE, &SERVICES).unwrap();
        Self { fixture, services, beyond, _server: server }
    }

    /// Expectations of pods, at each other and at Services. Nodes send to Services with the overlay's address, as flannel has it,
    /// and is left out.
    fn assert_pods_find_what_policy_says(&self, what: &str) {
        let oracle = PolicyOracle::new(&read_objects(&self.fixture.manifests).unwrap());
        let matrix = Matrix::between(&self.fixture.sites, &self.services, &oracle, &PROTOCOLS).unwrap();
        let is_node = |site: usize| !self.fixture.sites[site].name.contains('/');
        let counts = |entry: &&MatrixEntry| entry.frontend.is_none() || !is_node(entry.probe.from);
        let wrong: Vec<_> = matrix.entries().iter().filter(counts).filter(|entry| !entry.agrees()).collect();
        assert!(wrong.is_empty(), "{what}: {wrong:#?}\n{}", self.fixture.logs());
        let apart = |entry: &&MatrixEntry| {
            entry.frontend.is_some() && self.fixture.node_of(entry.probe.from) != self.fixture.node_of(entry.probe.to)
        };
        let reached = |outcome| {
            matrix.entries().iter().filter(counts).filter(apart).filter(|entry| entry.outcome == outcome).count()
        };
        let (allowed, denied) = (reached(ProbeOutcome::Reached), reached(ProbeOutcome::Silent));
        assert!(allowed > 10 && denied > 10, "{what}: by a Service to the other node {allowed} and {denied}");
    }

    fn probe(&self, from: &Site, to: (u32, IpAddr), protocol: Protocol) -> ProbeOutcome {
        probe::run_one(from, to, protocol, RetryPolicy { attempts: 4, ..RetryPolicy::default() }).unwrap()
    }

    /// Node ports from outside. By the pod's own node policy is for the client; by the other one it is for that one's address on
    /// the overlay, which no policy here names, and which is in the blocks of `web`.
    fn assert_node_ports_are_judged(&self, what: &str) {
        use ProbeOutcome::{Reached, Silent};
        for (pod, port, node, expected) in [
            ("shop/web-b", 30_010, "node-b", [Reached, Silent]),
            ("shop/web-b", 30_010, "node-a", [Reached, Reached]),
            ("shop/db-b", 30_011, "node-b", [Silent, Silent]),
            ("shop/db-b", 30_011, "node-a", [Silent, Silent]),
            ("ops/monitor-a", 30_012, "node-a", [Reached, Reached]),
            ("ops/monitor-a", 30_012, "node-b", [Reached, Reached]),
        ] {
            for v6 in [false, true] {
                let to = (self.fixture.target(pod, v6).0, self.fixture.site(node).address(v6).unwrap());
                let outcome = self.probe(&self.beyond, to, Protocol::Tcp(port));
                let logs = self.fixture.logs();
                assert_eq!(outcome, expected[usize::from(v6)], "{what}: {pod} by {node}, IPv6: {v6}\n{logs}");
            }
        }
    }

    /// Node ports of a pod's own node, which lead to a pod of the other one: a pod may reach its node, and egress policy is for the
    /// pod that the node sends it on to.
    fn assert_node_ports_of_the_own_node_are_judged(&self, what: &str) {
        for (pod, node, server, port, expected) in [
            ("shop/web-a", "node-a", "shop/web-b", 30_010, ProbeOutcome::Reached),
            ("ops/monitor-a", "node-a", "shop/web-b", 30_010, ProbeOutcome::Silent),
            ("shop/db-a", "node-a", "shop/web-b", 30_010, ProbeOutcome::Silent),
            ("shop/db-b", "node-b", "ops/monitor-a", 30_012, ProbeOutcome::Reached),
            ("shop/web-b", "node-b", "ops/monitor-a", 30_012, ProbeOutcome::Reached),
            ("ops/lab-b", "node-b", "ops/monitor-a", 30_012, ProbeOutcome::Silent),
        ] {
            for v6 in [false, true] {
                let to = (self.fixture.target(server, v6).0, self.fixture.site(node).address(v6).unwrap());
                let outcome = self.probe(self.fixture.site(pod), to, Protocol::Tcp(port));
                let logs = self.fixture.logs();
                assert_eq!(outcome, expected, "{what}: {pod} by {node} to {server}, IPv6: {v6}\n{logs}");
            }
        }
    }

    /// The machine outside has no route to pods: an answer proves that the node gave its own address.
    fn assert_pods_reach_outside_masqueraded(&self, what: &str) {
        for (pod, protocol, expected) in [
            ("shop/web-a", Protocol::Tcp(8080), ProbeOutcome::Reached),
            ("ops/monitor-a", Protocol::Udp(53), ProbeOutcome::Reached),
            ("ops/monitor-a", Protocol::Tcp(8080), ProbeOutcome::Silent),
            ("shop/db-b", Protocol::Udp(53), ProbeOutcome::Reached),
        ] {
            for v6 in [false, true] {
                let outcome = self.probe(self.fixture.site(pod), (OUTSIDE, self.beyond.address(v6).unwrap()), protocol);
                assert_eq!(outcome, expected, "{what}: {pod}, {protocol}, IPv6: {v6}\n{}", self.fixture.logs());
            }
        }
    }

    /// Whole segments of the overlay's MTU, in both directions, from a pod of the other node: by a Service, and by a port of the pod's
    /// own node, where each packet of the client goes to a worker once more on its way out.
    fn assert_bulk_arrives(&self, what: &str) {
        let (client, server) = (self.fixture.site("shop/web-b"), self.fixture.site("ops/monitor-a"));
        let service = self.services.iter().find(|service| service.name == "Service/monitor").unwrap();
        let node = self.fixture.site("node-b");
        for (v6, by_node_port) in [(false, false), (true, false), (false, true), (true, true)] {
            let here = SocketAddr::new(server.address(v6).unwrap(), BULK);
            let listener = server.namespace.listen(here).unwrap();
            let there = match by_node_port {
                false => SocketAddr::new(*service.addresses.iter().find(|at| at.is_ipv6() == v6).unwrap(), BULK),
                true => SocketAddr::new(node.address(v6).unwrap(), 30_012 + BULK_NODE_PORTS),
            };
            let one = client.namespace.run(|| TcpStream::connect_timeout(&there, Duration::from_secs(20)));
            let one = one.unwrap_or_else(|error| panic!("{what}, {there}: {error}\n{}", self.fixture.logs()));
            let (other, from) = listener.accept().unwrap();
            if !by_node_port {
                assert_eq!(from.ip(), client.address(v6).unwrap(), "{what}: the server sees the pod");
            }
            for (from, to) in [(&one, &other), (&other, &one)] {
                carry(from, to);
            }
        }
    }
}

/// Sends 4 MB from one end to the other.
fn carry(mut from: &TcpStream, mut to: &TcpStream) {
    to.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let sent: Vec<u8> = (0..4_000_000).map(|at: usize| (at * 7 + at / 251) as u8).collect();
    let mut received = vec![0; sent.len()];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| from.write_all(&sent));
        to.read_exact(&mut received).unwrap();
        writer.join().unwrap().unwrap();
    });
    assert!(sent == received, "{} bytes arrive as they were sent", sent.len());
}

fn everything_holds(mode: ProxyMode) {
    let overlay = Overlay::start(mode);
    for (name, node) in &overlay.fixture.nodes.nodes {
        for pod in node.pods() {
            let mtu = pod.namespace().netlink().unwrap().mtu("eth0").unwrap();
            assert_eq!(mtu, InterNodeLink::Vxlan.mtu(), "{} on {name}", pod.name());
        }
    }
    let what = format!("kube-proxy {mode:?}");
    overlay.assert_pods_find_what_policy_says(&what);
    overlay.assert_node_ports_are_judged(&what);
    overlay.assert_node_ports_of_the_own_node_are_judged(&what);
    overlay.assert_pods_reach_outside_masqueraded(&what);
    overlay.assert_bulk_arrives(&what);
}

#[test]
fn services_over_an_overlay_beside_kube_proxy_by_iptables() {
    everything_holds(ProxyMode::Iptables);
}

#[test]
fn services_over_an_overlay_beside_kube_proxy_by_nftables() {
    everything_holds(ProxyMode::Nftables);
}
