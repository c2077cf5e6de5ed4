//! Nobody passes for a pod of the node: neither who is outside, nor who sends through a tunnel, nor a process of the node.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use penstock_bench::load::Wire;
use penstock_bench::probe::{Outcome, Protocol};
use penstock_bench::testbed::Namespace;

use etherparse::PacketBuilder;
use socket2::{Domain, Socket, Type};

use crate::fixture;
use crate::service::{Backend, OWN, Scene, WEB, address, run, service};

/// A pod that the API names as this node's, with the label that `pod-1` lets in, and that has no interface.
const GHOST: [&str; 2] = ["10.244.1.99", "fd00:10:244:1::99"];
const TUNNEL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

/// An IP packet with a datagram in it, to `pod-1`.
fn packet(from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut packet = Vec::new();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => panic!("{from} and {to} are of two families"),
    }
    .udp(1234, OWN)
    .write(&mut packet, b"in another's name")
    .unwrap();
    packet
}

fn framed(to: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&to[..], &[2, 0, 0, 0, 0, 9], &kind, packet].concat()
}

/// VXLAN (RFC 7348) of network 9 from the machine outside to the node.
fn wrapped(scene: &Scene, to: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let inner = [&[8, 0, 0, 0, 0, 0, 9, 0][..], &framed(TUNNEL_MAC, packet)].concat();
    let [from, node] = [scene.outside.addresses()[0], address("198.51.100.1")];
    let (IpAddr::V4(from), IpAddr::V4(node)) = (from, node) else { panic!("IPv4 comes first") };
    let mut frame = Vec::new();
    let builder = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], to).ipv4(from.octets(), node.octets(), 64);
    builder.udp(5000, 4789).write(&mut frame, &inner).unwrap();
    frame
}

/// Sends an IP packet of its own making as a process of the node does.
fn send_from_a_process(node: &Namespace, to: IpAddr, packet: &[u8]) {
    let domain = if to.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
    node.run(|| {
        let socket = Socket::new(domain, Type::RAW, Some(socket2::Protocol::from(libc::IPPROTO_RAW))).unwrap();
        socket.send_to(packet, &SocketAddr::new(to, 0).into()).unwrap();
    });
}

/// How many were dropped for their source, by whichever program or worker.
fn spoofed(scene: &Scene) -> u64 {
    let count = |port: &penstock_admin::types::PortStatus| {
        [&port.drops, &port.xdp].into_iter().filter_map(|by| by.get("spoofed_source")).sum::<u64>()
    };
    scene.world.status().ports.iter().filter(|port| port.kind != "pod").map(count).sum()
}

fn scene(by_uplink: bool) -> Scene {
    Scene::with(Backend::Here, |cluster, config| {
        let ghost = fixture::pod("ghost", GHOST[0], GHOST[1]).replace("app: ghost", "app: pod-0");
        std::fs::write(config.manifests.join("ghost.yaml"), ghost.trim_start_matches("---\n")).unwrap();
        if by_uplink {
            config.keys += "uplinks = [\"eth1\"]\n";
        }
        let node = cluster.node.namespace();
        let add = "link add vxlan9 address 02:00:00:00:00:77 type vxlan id 9 dstport 4789 local 198.51.100.1 dev eth1 nolearning";
        run(node, "ip", &add.split(' ').collect::<Vec<_>>(), "");
        run(node, "ip", &["link", "set", "vxlan9", "up"], "");
    })
}

#[test]
fn a_packet_in_a_local_pods_name_that_did_not_come_from_the_workers_is_dropped_and_counted() {
    for by_uplink in [false, true] {
        let mut scene = scene(by_uplink);
        let node = scene.world.cluster.node.namespace().clone();
        let to_node = node.netlink().unwrap().mac("eth1").unwrap();
        let wire = Wire::open(scene.outside.namespace()).unwrap();
        for restarted in [false, true] {
            if restarted {
                scene.restart();
            }
            let before = spoofed(&scene);
            let mut sent = 0;
            let mut sockets = Vec::new();
            for v6 in [false, true] {
                let victim = scene.world.site("test/pod-1").address(v6).unwrap();
                let here = SocketAddr::new(victim, OWN);
                let socket = scene.backend.namespace.run(|| UdpSocket::bind(here)).unwrap();
                for name in [scene.world.site("test/pod-0").address(v6).unwrap(), address(GHOST[usize::from(v6)])] {
                    let packet = packet(name, victim);
                    wire.send(&framed(to_node, &packet)).unwrap();
                    wire.send(&wrapped(&scene, to_node, &packet)).unwrap();
                    send_from_a_process(&node, victim, &packet);
                    sent += 3;
                }
                sockets.push(socket);
            }
            let deadline = Instant::now() + Duration::from_secs(10);
            while spoofed(&scene) < before + sent && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let what = format!("by uplink: {by_uplink}, restarted: {restarted}");
            for socket in sockets {
                socket.set_nonblocking(true).unwrap();
                let mut bytes = [0; 64];
                let got = socket.recv_from(&mut bytes).map(|(_, from)| from);
                assert!(got.is_err(), "{what}: from {got:?}\n{}", scene.told());
            }
            assert_eq!(spoofed(&scene) - before, sent, "{what}\n{}", scene.told());
            for (v6, protocol) in [(false, Protocol::Tcp(WEB)), (true, Protocol::Udp(WEB))] {
                let outcome = scene.probe("test/pod-0", v6, protocol);
                assert_eq!(outcome, Outcome::Reached, "what the node translated passes, {what}\n{}", scene.told());
            }
        }
    }
}

#[test]
fn nobody_outside_answers_in_the_name_of_a_services_backend() {
    for by_uplink in [false, true] {
        let scene = scene(by_uplink);
        let to_node = scene.world.cluster.node.netlink().mac("eth1").unwrap();
        let wire = Wire::open(scene.outside.namespace()).unwrap();
        for v6 in [false, true] {
            let (client, backend) = (scene.world.site("test/pod-0"), scene.backend.address(v6).unwrap());
            let server = scene.backend.namespace.run(|| UdpSocket::bind(SocketAddr::new(backend, OWN))).unwrap();
            let own = SocketAddr::new(client.address(v6).unwrap(), 1234);
            let asking = client.namespace.run(|| UdpSocket::bind(own)).unwrap();
            for socket in [&server, &asking] {
                socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            }
            let mut bytes = [0; 64];
            let asked = (0..10).find_map(|_| {
                asking.send_to(b"question", SocketAddr::new(service(v6), OWN)).unwrap();
                server.recv_from(&mut bytes).ok()
            });
            let (_, from) = asked.unwrap_or_else(|| panic!("{}", scene.told()));
            let before = spoofed(&scene);
            let mut forged = packet(backend, own.ip());
            // The ports change places; IPv4 does without the checksum that covers them.
            let udp = if v6 { 40 } else { 20 };
            forged[udp..udp + 4].copy_from_slice(&[OWN.to_be_bytes(), 1234_u16.to_be_bytes()].concat());
            wire.send(&framed(to_node, &forged)).unwrap();
            let deadline = Instant::now() + Duration::from_secs(10);
            while spoofed(&scene) == before && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(spoofed(&scene) > before, "by uplink: {by_uplink}, v6: {v6}\n{}", scene.told());
            let answered = (0..10).find_map(|_| {
                server.send_to(b"answer", from).unwrap();
                asking.recv_from(&mut bytes).ok()
            });
            let (length, answers) = answered.unwrap_or_else(|| panic!("{}", scene.told()));
            assert_eq!((&bytes[..length], answers.ip()), (&b"answer"[..], service(v6)), "the backend itself");
        }
    }
}
