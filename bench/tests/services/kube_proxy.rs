//! A node of a cluster: kube-proxy's rules in both of its modes beside Penstock, policy by every way to a pod.

use std::net::SocketAddr;
use std::time::Duration;

use penstock_bench::expectation::Expectation;
use penstock_bench::probe::{self, EchoConnection, EchoServers, EchoService, ProbeOutcome, Protocol, RetryPolicy};
use penstock_bench::testbed::{
    KubeProxy, Outside, ProxiedPort, ProxiedService, ProxyMode, RouteVia, SERVICE_NETWORKS, ServiceProtocol,
};

use crate::fixture::{Fixture, pods, policy};
use crate::services::service::{CLOSED, WEB, service};

/// Every site of the demo to every other, to a cluster address and to a node port.
fn every_cell_is_as_expected(mode: ProxyMode) {
    let fixture = Fixture::demo_beside(mode);
    let matrix = fixture.matrix();
    for name in ["Service/web", "NodePort/web"] {
        let at = fixture.cluster.frontends.iter().position(|frontend| frontend.name == name);
        let entries: Vec<_> = matrix.entries().iter().filter(|entry| entry.frontend == at).collect();
        let allowed = entries.iter().filter(|entry| entry.expected == Expectation::Allowed).count();
        assert!(at.is_some() && allowed > 10 && entries.len() - allowed > 10, "{name}: {allowed} of {}", entries.len());
    }
    fixture.assert_as_expected(&matrix);
}

#[test]
fn services_and_node_ports_beside_kube_proxy_by_iptables() {
    every_cell_is_as_expected(ProxyMode::Iptables);
}

/// A Service with two pods behind its ports, of which policy closes `pod-2`, and a port without a backend.
fn two_backends(mode: ProxyMode) -> (Fixture, Outside) {
    let mut outside = None;
    let closed = policy("closed", "pod-2", "  ingress: []\n");
    let fixture = Fixture::of(&(pods(3) + &closed), |cluster, _| {
        let backends = ["test/pod-1", "test/pod-2"].map(|pod| &cluster.sites[cluster.site(pod).unwrap()].addresses);
        let at = |port| backends.iter().copied().flatten().map(|ip| SocketAddr::new(*ip, port)).collect();
        let port = |protocol, number, backends| ProxiedPort { protocol, number, node_port: None, backends };
        let ports = vec![
            port(ServiceProtocol::Tcp, WEB, at(8080)),
            port(ServiceProtocol::Udp, WEB, at(53)),
            port(ServiceProtocol::Tcp, CLOSED, Vec::new()),
        ];
        let addresses = [false, true].map(service).into();
        let services = vec![ProxiedService { name: "test/api".to_owned(), addresses, ports }];
        let proxy = KubeProxy { mode, node: cluster.node.addresses().to_vec(), services };
        proxy.install(cluster.node.namespace()).unwrap();
        // Packets to a port without a backend are not translated: the node must have a route by which to refuse them.
        let machine = cluster.node.add_outside("outside").unwrap();
        let netlink = cluster.node.netlink();
        for (network, gateway) in SERVICE_NETWORKS.iter().zip(machine.addresses()) {
            let index = netlink.index(machine.interface()).unwrap();
            netlink.add_route(network.parse().unwrap(), index, RouteVia::Gateway(*gateway)).unwrap();
        }
        outside = Some(machine);
    });
    (fixture, outside.unwrap())
}

#[test]
fn policy_is_for_the_backend_that_kube_proxy_chose() {
    for mode in [ProxyMode::Iptables, ProxyMode::Nftables] {
        let (fixture, _outside) = two_backends(mode);
        let (identity, _) = fixture.target("test/pod-1", false);
        let probe = |v6, protocol, patience| {
            probe::run_one(fixture.site("test/pod-0"), (identity, service(v6)), protocol, patience).unwrap()
        };
        let once = RetryPolicy { timeout: Duration::from_millis(500), attempts: 1 };
        for (v6, protocol) in [(false, Protocol::Tcp(WEB)), (true, Protocol::Tcp(WEB)), (false, Protocol::Udp(WEB))] {
            let mut seen = Vec::new();
            while !(seen.contains(&ProbeOutcome::Reached) && seen.contains(&ProbeOutcome::Silent)) {
                let outcome = probe(v6, protocol, once);
                seen.push(outcome);
                assert!(seen.len() < 64 && outcome != ProbeOutcome::Wrong, "{mode:?}, {protocol}, IPv6 {v6}: {seen:?}");
            }
        }
        for v6 in [false, true] {
            let outcome = probe(v6, Protocol::Tcp(CLOSED), RetryPolicy::default());
            assert_eq!(outcome, ProbeOutcome::Refused, "{mode:?}, IPv6: {v6}: a port without a backend");
        }
        // The kernel counts them against the errors that a pod may get.
        let counters = fixture.cluster.node.namespace().run(|| std::fs::read_to_string("/proc/thread-self/net/snmp"));
        let counters = counters.unwrap();
        let of = |name: &str| counters.lines().any(|line| line.starts_with("IcmpMsg:") && line.contains(name));
        assert!(of("OutType3") && !of("OutType5"), "errors and no redirects: {counters}");
    }
}

#[test]
fn services_and_node_ports_beside_kube_proxy_by_nftables() {
    every_cell_is_as_expected(ProxyMode::Nftables);
}

/// Packets of both families that the node's stack has forwarded, as the kernel counts them (RFC 4293, ForwDatagrams).
fn forwarded_by_stack(fixture: &Fixture) -> u64 {
    let counters = fixture.cluster.node.namespace().run(|| {
        ["snmp", "snmp6"].map(|file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap())
    });
    let [v4, v6] = counters;
    let mut of_ip = v4.lines().filter_map(|line| line.strip_prefix("Ip: ")).map(str::split_whitespace);
    let [mut names, mut values] = [(); 2].map(|()| of_ip.next().unwrap());
    let v4 = values.nth(names.position(|name| name == "ForwDatagrams").unwrap()).unwrap();
    let v6 = v6.lines().find_map(|line| line.strip_prefix("Ip6OutForwDatagrams")).unwrap().trim();
    [v4, v6].iter().map(|count| count.parse::<u64>().unwrap()).sum()
}

/// For an answer.
const LIMIT: Duration = Duration::from_secs(20);
/// Where the second pod serves, and a port of its that the node's rules translate to it.
const SERVED: u16 = 7000;
const TRANSLATED: u16 = 80;

/// A node with connections from one pod to this port of another one, of both families, from before its daemon.
fn node_with_connections_to(port: u16) -> (Fixture, Vec<EchoConnection>, EchoServers) {
    const SERVER: u32 = 77;
    let (mut open, mut servers) = (Vec::new(), None);
    let fixture = Fixture::of(&pods(2), |cluster, _| {
        let [client, server] = ["test/pod-0", "test/pod-1"].map(|pod| &cluster.sites[cluster.site(pod).unwrap()]);
        let addresses = [false, true].map(|v6| server.address(v6).unwrap());
        let backends = addresses.map(|address| SocketAddr::new(address, SERVED)).into();
        let port_alone = ProxiedPort { protocol: ServiceProtocol::Tcp, number: TRANSLATED, node_port: None, backends };
        let service =
            ProxiedService { name: "test/port".to_owned(), addresses: addresses.into(), ports: vec![port_alone] };
        let node = cluster.node.addresses().to_vec();
        let proxy = KubeProxy { mode: ProxyMode::Iptables, node, services: vec![service] };
        proxy.install(cluster.node.namespace()).unwrap();
        servers = Some(EchoServers::start(server, SERVER, &[EchoService::Tcp(SERVED)]).unwrap());
        open.extend(
            addresses.map(|address| EchoConnection::open(&client.namespace, (SERVER, address), port, LIMIT).unwrap()),
        );
    });
    (fixture, open, servers.unwrap())
}

fn expect_answers(connections: &[EchoConnection]) {
    connections.iter().for_each(|connection| connection.wait_for(20, LIMIT).unwrap());
}

/// Whoever installs Penstock has such connections. Workers do not see whether the node translates them; its connection tracking tells.
#[test]
fn an_earlier_untranslated_connection_leaves_the_nodes_stack() {
    let (fixture, open, _servers) = node_with_connections_to(SERVED);
    expect_answers(&open);
    let before = forwarded_by_stack(&fixture);
    assert!(before > 0, "they passed the node's stack before");
    expect_answers(&open);
    assert_eq!(forwarded_by_stack(&fixture), before, "and do so no longer");
    // While it passes: its end waits for an answer.
    drop(open);
}

/// It has the addresses that it came with, and another port: outside of the stack its answers would come from the wrong one.
#[test]
fn an_earlier_connection_stays_if_its_port_is_translated() {
    let (fixture, open, _servers) = node_with_connections_to(TRANSLATED);
    expect_answers(&open);
    let before = forwarded_by_stack(&fixture);
    expect_answers(&open);
    assert!(forwarded_by_stack(&fixture) > before, "it passes the node's stack");
    drop(open);
}
