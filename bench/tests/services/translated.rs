//! Traffic of translated Services returns through the kernel: TCP and UDP, both families, with the backend on the same
//! node or not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use penstock_bench::load::transfer;
use penstock_bench::probe::{ProbeOutcome, Protocol};
use penstock_bench::testbed::DaemonConfig;

use crate::services::service::{BACKENDS, BackendPath, CLOSED, OWN, ServiceFixture, WEB, service};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A socket of the backend on the Service's own port.
fn backend_udp(setup: &ServiceFixture, v6: bool) -> UdpSocket {
    let here = SocketAddr::new(setup.backend.address(v6).unwrap(), OWN);
    let socket = setup.backend.namespace.udp(here).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// A pod's socket that only receives replies of the Service.
fn client_udp(setup: &ServiceFixture, pod: &str, v6: bool) -> UdpSocket {
    let site = setup.fixture.site(pod);
    let here = SocketAddr::new(site.address(v6).unwrap(), 0);
    let socket = site.namespace.udp(here).unwrap();
    socket.connect(SocketAddr::new(service(v6), OWN)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    socket
}

/// Both ends of a TCP connection from `pod-0` to the Service.
fn connect(setup: &ServiceFixture, v6: bool) -> (TcpStream, TcpStream) {
    let here = SocketAddr::new(setup.backend.address(v6).unwrap(), OWN);
    let listener = setup.backend.namespace.listen(here).unwrap();
    let there = SocketAddr::new(service(v6), OWN);
    let client = setup.fixture.site("test/pod-0").namespace.run(|| TcpStream::connect_timeout(&there, TIMEOUT));
    let client = client.unwrap_or_else(|error| panic!("{error}\n{}", setup.logs()));
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), setup.fixture.site("test/pod-0").address(v6).unwrap(), "the server sees the pod");
    for end in [&client, &server] {
        end.set_read_timeout(Some(TIMEOUT)).unwrap();
        end.set_write_timeout(Some(TIMEOUT)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (client, server)
}

/// Transfers so many bytes from one end to the other.
fn carry(setup: &ServiceFixture, from: &mut TcpStream, to: &mut TcpStream, length: usize) {
    let sent: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
    let mut received = vec![0; length];
    let ends = format!("{:?} to {:?}", from.local_addr(), to.local_addr());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| from.write_all(&sent));
        let read = to.read_exact(&mut received);
        read.unwrap_or_else(|error| panic!("{ends}: {error}\n{}", setup.logs()));
        writer.join().unwrap().unwrap();
    });
    assert!(sent == received, "{length} bytes arrive as they were sent");
}

#[test]
fn by_a_service_ingress_policy_sees_the_client_address() {
    for backend in BACKENDS {
        let setup = ServiceFixture::new(backend);
        for (v6, protocol) in
            [false, true].into_iter().flat_map(|v6| [(v6, Protocol::Tcp(WEB)), (v6, Protocol::Udp(WEB))])
        {
            let what = format!("{protocol}, v6: {v6}, backend {backend:?}");
            assert_eq!(setup.probe("test/pod-0", v6, protocol), ProbeOutcome::Reached, "{what}\n{}", setup.logs());
            // Policy applies to the pod behind the Service. A pod of another node is not restricted by this one.
            let other = if let BackendPath::Here = backend { ProbeOutcome::Silent } else { ProbeOutcome::Reached };
            assert_eq!(setup.probe("test/pod-2", v6, protocol), other, "{what}\n{}", setup.logs());
        }
        setup.fixture.assert_as_expected(&setup.fixture.matrix());
    }
}

#[test]
fn bulk_tcp_passes_a_service_both_ways() {
    for backend in BACKENDS {
        let setup = ServiceFixture::new(backend);
        for v6 in [false, true] {
            let (mut client, mut server) = connect(&setup, v6);
            carry(&setup, &mut client, &mut server, 8 << 20);
            carry(&setup, &mut server, &mut client, 8 << 20);
        }
    }
}

#[test]
fn datagrams_longer_than_the_mtu_pass_a_service_both_ways() {
    for backend in BACKENDS {
        let setup = ServiceFixture::new(backend);
        for v6 in [false, true] {
            let (server, client) = (backend_udp(&setup, v6), client_udp(&setup, "test/pod-0", v6));
            let mut bytes = vec![0; 9000];
            for length in [100, 1472, 1600, 5000, 8000] {
                let sent: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
                // A datagram may be lost on a busy machine.
                let answered = (0..5).any(|_| {
                    client.send(&sent).unwrap();
                    let Ok((got, from)) = server.recv_from(&mut bytes) else { return false };
                    assert!(bytes[..got] == sent, "{got} of {length} bytes");
                    server.send_to(&sent, from).unwrap();
                    client.recv(&mut bytes).is_ok_and(|got| bytes[..got] == sent)
                });
                assert!(answered, "{length} bytes, v6: {v6}, backend {backend:?}\n{}", setup.logs());
            }
        }
    }
}

#[test]
fn a_closed_backend_port_is_reported_to_the_client_of_a_service() {
    for backend in BACKENDS {
        let setup = ServiceFixture::new(backend);
        for v6 in [false, true] {
            for protocol in [Protocol::Udp(CLOSED), Protocol::Tcp(CLOSED)] {
                let outcome = setup.probe("test/pod-0", v6, protocol);
                assert_eq!(
                    outcome,
                    ProbeOutcome::Refused,
                    "{protocol}, v6: {v6}, backend {backend:?}\n{}",
                    setup.logs()
                );
            }
        }
    }
}

#[test]
fn one_source_port_reaches_a_pod_directly_and_by_its_service() {
    let setup = ServiceFixture::new(BackendPath::Here);
    for v6 in [false, true] {
        let (server, client) = (backend_udp(&setup, v6), client_udp(&setup, "test/pod-0", v6));
        // First to the pod itself: that connection does not cross the node's stack.
        let site = setup.fixture.site("test/pod-0");
        let own = SocketAddr::new(site.address(v6).unwrap(), client.local_addr().unwrap().port());
        drop(client);
        let client = site.namespace.udp(own).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        for to in [setup.backend.address(v6).unwrap(), service(v6)] {
            let to = SocketAddr::new(to, OWN);
            let mut bytes = [0; 16];
            let answered = (0..5).any(|_| {
                client.send_to(b"to", to).unwrap();
                let Ok((_, from)) = server.recv_from(&mut bytes) else { return false };
                server.send_to(b"back", from).unwrap();
                client.recv_from(&mut bytes).is_ok_and(|(_, from)| from == to)
            });
            assert!(answered, "{to}\n{}", setup.logs());
        }
    }
}

#[test]
fn service_connections_survive_a_kill_of_the_daemon() {
    let in_a_file = |config: &mut DaemonConfig| {
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack =
            format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\nmidstream_pickup = \"0s\"\n");
    };
    // With a table that is found again, and without one, so that connections are picked up in mid-stream.
    for (backend, found) in [(BackendPath::Here, true), (BackendPath::Here, false), (BackendPath::Elsewhere, true)] {
        let mut setup = ServiceFixture::with(backend, |_, config| {
            if found {
                in_a_file(config);
            }
        });
        let mut connections = [false, true].map(|v6| connect(&setup, v6));
        for server_first in [true, false] {
            setup.restart();
            for (client, server) in &mut connections {
                let (one, other) = if server_first { (server, client) } else { (client, server) };
                carry(&setup, one, other, 10_000);
                carry(&setup, other, one, 10_000);
            }
        }
        assert_eq!(setup.probe("test/pod-0", false, Protocol::Tcp(WEB)), ProbeOutcome::Reached);
    }
}

#[test]
fn bulk_tcp_between_local_pods_bypasses_the_nodes_stack() {
    let setup = ServiceFixture::new(BackendPath::Here);
    let (from, to) = (setup.fixture.site("test/pod-0"), &setup.backend);
    let sent = |setup: &ServiceFixture| {
        setup.fixture.status().ports.iter().find(|port| port.kind == "host").map(|port| port.total.tx_packets)
    };
    let before = sent(&setup).unwrap();
    transfer(&from.namespace, &to.namespace, to.address(false).unwrap(), 4_000_000).unwrap();
    assert!(sent(&setup).unwrap() - before < 100);
}
