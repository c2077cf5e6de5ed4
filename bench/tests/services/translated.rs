//! Traffic of translated Services returns through the kernel: TCP and UDP, both families, with the backend on the same
//! node or not, with and without uplinks.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use penstock_bench::load::transfer;
use penstock_bench::probe::{Outcome, Protocol};
use penstock_bench::testbed::DaemonConfig;

use crate::service::{BACKENDS, Backend, CLOSED, OWN, Scene, WEB, service};

const PATIENCE: Duration = Duration::from_secs(20);

/// A socket of the backend on the Service's own port.
fn backend_udp(scene: &Scene, v6: bool) -> UdpSocket {
    let here = SocketAddr::new(scene.backend.address(v6).unwrap(), OWN);
    let socket = scene.backend.namespace.run(|| UdpSocket::bind(here)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// A pod's socket that only receives replies of the Service.
fn client_udp(scene: &Scene, pod: &str, v6: bool) -> UdpSocket {
    let site = scene.world.site(pod);
    let here = SocketAddr::new(site.address(v6).unwrap(), 0);
    let socket = site.namespace.run(|| UdpSocket::bind(here)).unwrap();
    socket.connect(SocketAddr::new(service(v6), OWN)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    socket
}

/// Both ends of a TCP connection from `pod-0` to the Service.
fn connect(scene: &Scene, v6: bool) -> (TcpStream, TcpStream) {
    let here = SocketAddr::new(scene.backend.address(v6).unwrap(), OWN);
    let listener = scene.backend.namespace.run(|| TcpListener::bind(here)).unwrap();
    let there = SocketAddr::new(service(v6), OWN);
    let client = scene.world.site("test/pod-0").namespace.run(|| TcpStream::connect_timeout(&there, PATIENCE));
    let client = client.unwrap_or_else(|error| panic!("{error}\n{}", scene.told()));
    let (server, from) = listener.accept().unwrap();
    assert_eq!(from.ip(), scene.world.site("test/pod-0").address(v6).unwrap(), "the server sees the pod");
    for end in [&client, &server] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
        end.set_nodelay(true).unwrap();
    }
    (client, server)
}

/// Transfers so many bytes from one end to the other.
fn carry(from: &mut TcpStream, to: &mut TcpStream, length: usize) {
    let sent: Vec<u8> = (0..length).map(|at| (at * 7 + at / 251) as u8).collect();
    let mut received = vec![0; length];
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| from.write_all(&sent));
        to.read_exact(&mut received).unwrap();
        writer.join().unwrap().unwrap();
    });
    assert!(sent == received, "{length} bytes arrive as they were sent");
}

#[test]
fn a_service_answers_and_policy_on_the_servers_side_sees_the_client() {
    for backend in BACKENDS {
        let scene = Scene::new(backend);
        for (v6, protocol) in
            [false, true].into_iter().flat_map(|v6| [(v6, Protocol::Tcp(WEB)), (v6, Protocol::Udp(WEB))])
        {
            let what = format!("{protocol}, v6: {v6}, backend {backend:?}");
            assert_eq!(scene.probe("test/pod-0", v6, protocol), Outcome::Reached, "{what}\n{}", scene.told());
            // Policy applies to the pod behind the Service. A pod of another node is not restricted by this one.
            let other = if let Backend::Here = backend { Outcome::Silent } else { Outcome::Reached };
            assert_eq!(scene.probe("test/pod-2", v6, protocol), other, "{what}\n{}", scene.told());
        }
        scene.world.assert_as_expected(&scene.world.matrix());
        if let Backend::ByUplink = backend {
            assert!(scene.told().contains(" translated "), "{}", scene.told());
        }
    }
}

#[test]
fn bulk_tcp_passes_a_service_both_ways() {
    for backend in BACKENDS {
        let scene = Scene::new(backend);
        for v6 in [false, true] {
            let (mut client, mut server) = connect(&scene, v6);
            carry(&mut client, &mut server, 8 << 20);
            carry(&mut server, &mut client, 8 << 20);
        }
    }
}

#[test]
fn datagrams_longer_than_the_mtu_pass_a_service_both_ways() {
    for backend in BACKENDS {
        let scene = Scene::new(backend);
        for v6 in [false, true] {
            let (server, client) = (backend_udp(&scene, v6), client_udp(&scene, "test/pod-0", v6));
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
                assert!(answered, "{length} bytes, v6: {v6}, backend {backend:?}\n{}", scene.told());
            }
        }
    }
}

#[test]
fn a_client_is_told_that_nobody_listens_behind_a_service() {
    for backend in BACKENDS {
        let scene = Scene::new(backend);
        for v6 in [false, true] {
            for protocol in [Protocol::Udp(CLOSED), Protocol::Tcp(CLOSED)] {
                let outcome = scene.probe("test/pod-0", v6, protocol);
                assert_eq!(outcome, Outcome::Refused, "{protocol}, v6: {v6}, backend {backend:?}\n{}", scene.told());
            }
        }
    }
}

#[test]
fn the_same_port_reaches_a_pod_by_its_own_address_and_by_the_services() {
    let scene = Scene::new(Backend::Here);
    for v6 in [false, true] {
        let (server, client) = (backend_udp(&scene, v6), client_udp(&scene, "test/pod-0", v6));
        // First to the pod itself: that connection does not cross the node's stack.
        let site = scene.world.site("test/pod-0");
        let own = SocketAddr::new(site.address(v6).unwrap(), client.local_addr().unwrap().port());
        drop(client);
        let client = site.namespace.run(|| UdpSocket::bind(own)).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        for to in [scene.backend.address(v6).unwrap(), service(v6)] {
            let to = SocketAddr::new(to, OWN);
            let mut bytes = [0; 16];
            let answered = (0..5).any(|_| {
                client.send_to(b"to", to).unwrap();
                let Ok((_, from)) = server.recv_from(&mut bytes) else { return false };
                server.send_to(b"back", from).unwrap();
                client.recv_from(&mut bytes).is_ok_and(|(_, from)| from == to)
            });
            assert!(answered, "{to}\n{}", scene.told());
        }
    }
}

#[test]
fn connections_to_a_service_go_on_after_the_daemon_was_killed_whoever_speaks_first() {
    let in_a_file = |config: &mut DaemonConfig| {
        let directory = config.manifests.parent().unwrap().display();
        config.conntrack = format!("mapping = \"{directory}/run/conntrack\"\nentries = 4096\npick_up = false\n");
    };
    // With a table that is found again, and without one, so that connections are picked up in mid-stream.
    for (backend, found) in [(Backend::Here, true), (Backend::Here, false), (Backend::ByUplink, true)] {
        let mut scene = Scene::with(backend, |_, config| {
            if found {
                in_a_file(config);
            }
        });
        let mut connections = [false, true].map(|v6| connect(&scene, v6));
        for server_first in [true, false] {
            scene.restart();
            for (client, server) in &mut connections {
                let (one, other) = if server_first { (server, client) } else { (client, server) };
                carry(one, other, 10_000);
                carry(other, one, 10_000);
            }
        }
        assert_eq!(scene.probe("test/pod-0", false, Protocol::Tcp(WEB)), Outcome::Reached);
    }
}

#[test]
fn bulk_tcp_between_two_pods_does_not_cross_the_nodes_stack() {
    let scene = Scene::new(Backend::Here);
    let (from, to) = (scene.world.site("test/pod-0"), &scene.backend);
    let sent = |scene: &Scene| {
        scene.world.status().ports.iter().find(|port| port.kind == "host").map(|port| port.total.tx_packets)
    };
    let before = sent(&scene).unwrap();
    transfer(&from.namespace, &to.namespace, to.address(false).unwrap(), 4_000_000).unwrap();
    assert!(sent(&scene).unwrap() - before < 100);
}
